"""Machines that are not here: a model trained on ``sim`` at rates chosen lane by lane."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import overspill
from overspill.facts.trace import Span
from overspill.planning.bounds import step_bound, step_flops, trained_params
from overspill.planning.costs import Costs
from overspill.planning.steady import Simulated, simulate

from .model import Gpt, Shape, batch_of

LANES = ("compute", "copy_in", "copy_out", "read", "write", "update")
HIDDEN = ("copy_in", "copy_out", "read", "write", "update")


def slowest(lane: str, seconds: float, share: float = 0.5) -> dict[str, float]:
    """Seconds a step by lane: ``lane`` needs ``seconds``, all others ``share`` of that."""
    return {name: seconds * (1.0 if name == lane else share) for name in LANES}


@dataclass(frozen=True)
class SimMachine:
    """A model and the seconds that each lane needs for a step of it.

    ``options`` are those of ``wrap``; ``None``: everything on disk, and a third of the weights in
    device memory.
    """

    shape: Shape
    update: str
    seconds: Mapping[str, float]
    options: Mapping[str, Any] | None = None

    def wrap_options(self) -> dict[str, Any]:
        """Options of ``wrap`` and ``plan``, without directory and rates."""
        options = self.options
        if options is None:
            params = sum(p.numel() for p in meta_model(self.shape).parameters())
            options = {"device_memory": params * 2 // 3, "host_memory": params * 3}
        return {"durable": False, "device": "sim", "update": self.update, **options}

    def rates(self, store: str) -> overspill.Rates:
        """The rates at which every lane needs its seconds, under the placement of the plan.

        Raises:
            overspill.BudgetError: the model does not fit the budgets.
        """
        model, tokens = meta_model(self.shape), self.shape.tokens_per_step
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-4)
        plan = overspill.plan(
            model, adamw, nvme=store, rates=overspill.Rates(), **self.wrap_options()
        )
        layout = plan.detail.layout
        if not plan.fits or layout is None:
            short = plan.shortfalls[0]
            raise overspill.BudgetError(
                short.what, short.tier.value, short.need_bytes, short.have_bytes,
                short.have_bytes, short.remedy,
            )  # fmt: skip

        def rate(lane: str, amount: float) -> float | None:
            return amount / self.seconds[lane] if amount else None

        return overspill.Rates(
            h2d_bytes_s=rate("copy_in", plan.link_bytes["copy_in"]),
            d2h_bytes_s=rate("copy_out", plan.link_bytes["copy_out"]),
            disk_read_bytes_s=rate("read", plan.link_bytes["read"]),
            disk_write_bytes_s=rate("write", plan.link_bytes["write"]),
            update_params_s=rate("update", trained_params(layout)),
            device_flops_s=rate("compute", step_flops(layout.units, tokens)),
        )


@dataclass(frozen=True)
class Measured:
    """What was measured on a machine, and what the simulator says of it.

    ``covered``: share of moves and updates under compute.  ``stalls``: seconds a step by lane.
    ``links``: bytes a step by lane.  ``held``: the most bytes in use by tier.
    """

    all_s: tuple[float, ...]
    bound_s: float
    covered: float
    stalls: Mapping[str, float]
    links: Mapping[str, float]
    held: Mapping[str, int]
    planned: Mapping[str, int]
    used: Mapping[str, int]
    simulated: Simulated = field(repr=False)

    @property
    def step_s(self) -> float:
        return statistics.median(self.all_s)

    @property
    def ratio(self) -> float:
        """Step time over its bound."""
        return self.step_s / self.bound_s

    @property
    def same_peaks(self) -> bool:
        """Whether pools held what was planned, and memory in use came to the simulated peaks."""
        simulated = {tier.value: nbytes for tier, nbytes in self.simulated.peak_bytes.items()}
        held = all(self.held[tier] == nbytes for tier, nbytes in self.planned.items())
        return held and all(simulated[tier] == nbytes for tier, nbytes in self.used.items())

    @property
    def error(self) -> float:
        """Of the simulated step time, as a share of the measured one."""
        return abs(self.simulated.stats.step_s / self.step_s - 1)


def meta_model(shape: Shape) -> Gpt:
    """The model without memory, in bf16."""
    with torch.device("meta"):
        return Gpt(shape).to(torch.bfloat16)


def measure(machine: SimMachine, *, steps: int = 3, warmup: int = 3) -> Measured:
    """Trains on the machine, and simulates the same."""
    shape = machine.shape
    with tempfile.TemporaryDirectory() as store:
        rates = machine.rates(store)
        torch.manual_seed(0)
        model = Gpt(shape).to(torch.bfloat16)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-4)
        with overspill.wrap(
            model, adamw, rates=rates, nvme=store, **machine.wrap_options()
        ) as optimizer:
            for step in range(warmup + steps):
                model(batch_of(shape, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            return _seen(machine, model, optimizer, rates, steps)


def _moved(spans: Iterable[Span], steps: int) -> dict[str, float]:
    """Bytes a step that each link has moved."""
    moved = dict.fromkeys(HIDDEN[:-1], 0.0)
    for span in spans:
        if span.lane in moved:
            moved[span.lane] += span.nbytes / steps
    return moved


def _seen(
    machine: SimMachine, model: Gpt, optimizer: Any, rates: overspill.Rates, steps: int
) -> Measured:
    plan, trace = optimizer.plan, model.__dict__["_overspill_engine"].runtime.trace
    tokens, marks = machine.shape.tokens_per_step, trace.steps[-steps:]
    bound = step_bound(
        plan.detail.layout, plan.link_bytes, rates, update=machine.update, tokens=tokens
    )
    window = marks[0].started_ns, marks[-1].finished_ns
    stalls = dict.fromkeys(LANES, 0.0)
    for stall in trace.stalls(*window):
        stalls[stall.lane] += (stall.finished_ns - stall.started_ns) / 1e9 / steps
    return Measured(
        tuple((m.finished_ns - m.started_ns) / 1e9 for m in marks),
        bound.seconds,
        trace.covered_share(HIDDEN, *window),
        stalls,
        _moved(trace.spans(*window), steps),
        {tier.value: memory.peak_bytes for tier, memory in optimizer.memory.items()},
        {tier.value: nbytes for tier, nbytes in plan.tier_bytes.items()},
        {
            "device": max(level.device_bytes for level in trace.levels(*window)),
            "host": max(level.host_bytes for level in trace.levels(*window)),
        },
        simulate(
            plan.detail.layout, Costs.from_flops(plan.detail.layout, rates, tokens), micro_steps=1,
            update=machine.update,
        ),
    )  # fmt: skip
