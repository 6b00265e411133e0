"""What each choice costs: when updates run, whether steps are committed, the format of moments, by
tokens a step and host budget, each beside torch with all in memory.

``over plan's bound`` is the time over that of the plan, with compute as torch has just needed it:
forward and backward alone, without its own optimizer's step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from .arms import GIB, Plan, Worker, parameters
from .model import Shape
from .results import Column, Comparison, Outcome, chosen_of, number, outcome
from .runner import Row, Sample, run_interleaved
from .step import GPT_311M, GPT_311M_X4, SMALL
from .step import columns as step_columns

MODES = ("next_forward", "backward", "step")
MOMENTS = ("fp32", "int8")
BUDGETS = (GIB, GIB // 2, 2 * GIB)  # the one that goals are set for first
QUICK_BUDGETS = (48 << 20,)
ROUNDS, QUICK_ROUNDS = 5, 2
OF_BOUND = 1.10  # the default, under every budget
OF_TORCH: Mapping[int, float] = {512: 1.25, 2048: 1.0}  # by tokens, the default in 1 GiB


class _Torch(Worker):
    """``compute_s``: of its last sample, without its optimizer's step."""

    compute_s = 0.0

    def sample(self) -> Sample:
        sample = super().sample()
        self.compute_s = sample.seconds - sample.seen["optimizer_s"]
        return sample


class _Bounded(Worker):
    """Tells the bound of its plan as well."""

    def __init__(self, beside: _Torch, name: str, plan: Plan, options: Mapping[str, Any]) -> None:
        super().__init__(name, plan, "cpu", options)
        self._beside = beside

    def sample(self) -> Sample:
        sample = super().sample()
        return replace(sample, seen={**sample.seen, **self.bound(self._beside.compute_s)})


@dataclass(frozen=True)
class Case:
    """One table: all ways to update, beside torch."""

    shape: Shape
    host: int
    moments: str
    durable: bool

    @property
    def title(self) -> str:
        committed = "every step committed" if self.durable else "nothing committed"
        return (
            f"Training step, {parameters(self.shape) / 1e6:.0f} M parameters, bf16, "
            f"{self.shape.tokens_per_step} tokens a step, {self.host / GIB:.3g} GiB of host "
            f"memory, {self.moments} moments, {committed}"
        )


def cases(quick: bool) -> list[Case]:
    """Every table, the ones that goals are set for first."""
    shapes = (SMALL,) if quick else (GPT_311M, GPT_311M_X4)
    budgets = QUICK_BUDGETS if quick else BUDGETS
    order = product((True, False), MOMENTS, budgets, shapes)
    return [Case(shape, host, moments, durable) for durable, moments, host, shape in order]


def compare(case: Case, rounds: int, folder: Path) -> Comparison:
    """Runs a table; its stores live in ``folder`` meanwhile."""
    plan = Plan(case.shape, "bf16", rounds, steps=1, warmup=2, budget_s=1e6)
    torch = _Torch("torch, all in memory", plan, "cpu", None)
    with tempfile.TemporaryDirectory(dir=folder.resolve(), prefix="store-") as store:
        made: list[Worker] = [torch]
        for mode in MODES:
            place = Path(store, mode)
            place.mkdir()
            options = {
                "nvme": str(place), "durable": case.durable, "host_memory": case.host,
                "moments": case.moments, "update": mode,
            }  # fmt: skip
            made.append(_Bounded(torch, mode, plan, options))
        rows = run_interleaved(made, rounds)
    return Comparison(case.title, {**asdict(plan), **asdict(case)}, rows, columns(case, plan))


def columns(case: Case, plan: Plan) -> list[Column]:
    """As those of the step suite, with the bound of the plan and what the default should reach."""
    kept = ("step", "over torch", "tokens/s", "loss", "CPU", "peak RSS", "others")
    usual = {name: cell for name, cell in step_columns(plan) if name in kept}

    def goal(row: Row) -> str:
        over = over_bound(row)
        if row.name != "next_forward" or over is None or row.ratio is None:
            return "-"
        told = [_held("its bound", over, OF_BOUND)]
        most = OF_TORCH.get(case.shape.tokens_per_step)
        if most is not None and case.host == GIB and case.moments == "fp32" and case.durable:
            told.append(_held("torch", row.ratio, most))
        return "; ".join(told)

    return [
        *((name, usual[name]) for name in kept[:4]),
        ("over plan's bound", lambda row: number(over_bound(row))),
        *((name, usual[name]) for name in kept[4:]),
        ("goal", goal),
    ]


def over_bound(row: Row) -> float | None:
    """Time over the bound, the median of the rounds."""
    ratios = sorted(
        s.seconds / s.seen["plan_bound_s"] for s in row.samples if s.seen.get("plan_bound_s")
    )
    return ratios[len(ratios) // 2] if ratios else None


def _held(what: str, ratio: float, most: float) -> str:
    return f"at most {most} of {what}: {'holds' if ratio <= most else 'MISSED'}"


def run(*, quick: bool, folder: Path, only: Sequence[int] = ()) -> Outcome:
    """Runs the suite; results are written after every table.  ``only``: tables by their number,
    into a file of their own.

    Raises:
        ValueError: there is no such table.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made: list[Comparison] = []
    suite, chosen = chosen_of("modes", cases(quick), only)
    for case in chosen:
        made.append(compare(case, QUICK_ROUNDS if quick else ROUNDS, folder))
        outcome(suite, made, folder).save(folder)
        print(made[-1].table(), flush=True)
    return outcome(suite, made, folder)
