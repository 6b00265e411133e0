"""What autograd saves: a step whose activations stay, beside one whose activations move or are
computed again; and the longest sequence of each in so much memory.

Arms train in processes of their own.  Peaks are of a whole step and after forward: what is saved by
the end of forward is not saved where backward needs most.
"""

from __future__ import annotations

import tempfile
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from . import drawn_attention
from .arms import GIB, Plan, Worker, parameters
from .drawn_activations import compared
from .model import Shape
from .results import Column, Comparison, Outcome, number, others, outcome, spread
from .runner import Row, run_in_turn, run_interleaved

SMALL = Shape(layers=8, width=256, heads=4, vocabulary=2048, batch=4, tokens=512)
GPT_311M = Shape(layers=24, width=1024, heads=16, vocabulary=8192, batch=8, tokens=1024)
SHORT = replace(GPT_311M, batch=1, tokens=512)
LIMIT_S = 1200.0
SEEDS = 20  # of drawn machines


@dataclass(frozen=True)
class Sizes:
    """``kept`` is the budget where activations stay beside it, ``all_in`` where they count.

    ``resident``: bytes of a process, for the longest sequence; of those the engine gets ``beside``
    where activations stay beside it, ``engine`` where they count.  Sequences of ``lengths`` are
    tried.
    """

    shape: Shape
    short: Shape
    rounds: int
    kept: int
    all_in: int
    resident: int
    beside: int
    engine: int
    lengths: tuple[int, ...]


QUICK = Sizes(SMALL, replace(SMALL, batch=1), 2, 64 << 20, 160 << 20, 800 << 20, 64 << 20,
              160 << 20, (512, 1024, 2048))  # fmt: skip
FULL = Sizes(GPT_311M, SHORT, 2, 2 * GIB, 6 * GIB, 4 * GIB, GIB, 2 * GIB,
             (1024, 1280, 1536, 2048, 3072, 4096, 6144, 8192, 10240))  # fmt: skip


def _columns() -> list[Column]:
    def gib(row: Row, key: str) -> str:
        found = [sample.seen[key] for sample in row.samples]
        return number(max(found) / GIB if found else None, " GiB")

    return [
        ("step", lambda row: number(row.median_s, " s")),
        ("over the first", spread),
        ("peak RSS", lambda row: gib(row, "peak_rss_bytes")),
        ("after forward", lambda row: gib(row, "after_forward_bytes")),
        ("written a step", lambda row: gib(row, "written_bytes")),
        ("loss", lambda r: number(r.samples[-1].seen["loss"] if r.samples else None, "", 6)),
        ("others", others),
    ]


def _worker(name: str, plan: Plan, store: Path, host: int, options: Mapping[str, Any]) -> Worker:
    folder = store / name.replace(" ", "-").replace(",", "")
    folder.mkdir()
    disk = {"nvme": str(folder), "durable": False, "host_memory": host}
    return Worker(name, plan, "cpu", {**disk, **options})


def _step(sizes: Sizes, store: Path) -> Comparison:
    """Activations that stay beside the budget, and those that have to be in a larger one."""
    plan = Plan(sizes.shape, "fp32", sizes.rounds, 1, 1, lead_in=0, limit_s=LIMIT_S)
    arms = [
        _worker("keep", plan, store, sizes.kept, {"activations": "keep"}),
        _worker("auto", plan, store, sizes.all_in, {"activations": "auto"}),
    ]
    title = (
        f"One step, {parameters(sizes.shape) / 1e6:.0f} M parameters, fp32, "
        f"{sizes.shape.tokens_per_step} tokens, NVMe; host memory {sizes.kept / GIB:.3g} GiB, "
        f"{sizes.all_in / GIB:.3g} GiB for those whose activations count"
    )
    return Comparison(title, asdict(plan), run_in_turn(arms, plan.rounds), _columns())


def _nothing_to_move(sizes: Sizes, store: Path) -> Comparison:
    """Where all has room, ``auto`` costs what it takes to look."""
    plan = Plan(sizes.short, "fp32", 21, 2, 3, lead_in=0)  # steps differ by a tenth
    arms = [
        _worker(f"{policy}, all in memory", plan, store, 16 * GIB, {"activations": policy})
        for policy in ("keep", "auto")
    ]
    title = f"Where nothing has to move, {sizes.short.tokens_per_step} tokens a step"
    return Comparison(title, asdict(plan), run_interleaved(arms, plan.rounds), _columns())


def _longest(sizes: Sizes, store: Path) -> Comparison:
    """One sequence a step, ever longer ones, until a process takes more than it may."""
    ways: dict[str, tuple[str, dict[str, bool], int]] = {  # and where to begin
        "keep": ("keep", {}, 1024),
        "keep, save_on_cpu": ("keep", {"on_cpu": True}, 1024),
        "keep, checkpointing": ("keep", {"recompute": True}, 3072),
        "keep, both": ("keep", {"on_cpu": True, "recompute": True}, 3072),
        "auto": ("auto", {}, 10240),
        "auto, checkpointing": ("auto", {"recompute": True}, 10240),
    }
    rows = []
    for name, (policy, more, first) in ways.items():
        host = sizes.engine if policy == "auto" else sizes.beside

        def tried(
            tokens: int, name: str = name, policy: str = policy, more: dict[str, bool] = more,
            host: int = host,
        ) -> Row | None:  # fmt: skip
            shape = replace(sizes.shape, batch=1, tokens=tokens, chunked=True, **more)
            plan = Plan(shape, "fp32", 1, 1, 1, lead_in=0, limit_s=LIMIT_S)
            arm = _worker(f"{name} {tokens}", plan, store, host, {"activations": policy})
            (row,) = run_interleaved([arm], 1)
            peak = row.samples[-1].seen["peak_rss_bytes"] if row.samples else None
            if peak is None or peak > sizes.resident:
                return None
            return replace(row, name=name, facts={**row.facts, "tokens": tokens}, ratio=None)

        rows.append(
            _last(tried, sizes.lengths, min(first, sizes.lengths[-1]))
            or Row(name, {"tokens": 0}, ())
        )
    columns: list[Column] = [
        ("longest", lambda row: str(row.facts["tokens"])),
        ("tokens/s", lambda r: number(r.median_s and r.facts["tokens"] / r.median_s)),
        *_columns()[2:],
    ]
    title = (
        f"The longest sequence in {sizes.resident / GIB:.3g} GiB of resident memory, of "
        f"{sizes.lengths[0]} to {sizes.lengths[-1]}"
    )
    return Comparison(title, asdict(sizes), rows, columns)


def _last(tried: Callable[[int], Row | None], lengths: Sequence[int], first: int) -> Row | None:
    """The row of the longest that is found: from ``first`` up to one that fails, or down to one
    that does not."""
    best, at = None, bisect_left(lengths, first)
    while at < len(lengths) and (row := tried(lengths[at])) is not None:
        best, at = row, at + 1
    at = bisect_left(lengths, first)
    while best is None and at > 0:
        at -= 1
        best = tried(lengths[at])
    return best


def run(*, quick: bool, folder: Path) -> Outcome:
    """Runs the suite; its stores live in ``folder`` as long as it runs."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = QUICK if quick else FULL
    with tempfile.TemporaryDirectory(dir=folder.resolve(), prefix="store-") as made:
        store = Path(made)
        found = [
            _step(sizes, store), _nothing_to_move(sizes, store), _longest(sizes, store),
            compared(2 if quick else SEEDS),
        ]  # fmt: skip
        if not quick:
            found += [drawn_attention.compared(SEEDS), drawn_attention.planned(SEEDS)]
    return outcome("activations", found, folder)
