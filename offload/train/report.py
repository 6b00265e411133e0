"""What a run came to: the table at its end and ``run.json``."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import format_bytes
from ..facts.stats import FIGURES, MemoryStats
from ..facts.trace import LANES
from ..io_engine.atomic_files import write_text
from ..planning.plan import Plan
from .compare import Comparison
from .training_loop import StepRecord

if TYPE_CHECKING:
    from rich.table import Table

LINKS: Mapping[str, str] = {
    "read": "disk to host",
    "write": "host to disk",
    "copy_in": "host to device",
    "copy_out": "device to host",
}


LEAST_STALL_S = 0.001  # of a lane, to be shown


def _name(key: str) -> str:
    return FIGURES[key].name


def steady(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """The steps that figures are taken from: the first one warms up, so it is left out."""
    return records[1:] if len(records) > 1 else records


def link_bytes(records: Sequence[StepRecord]) -> dict[str, int]:
    """Bytes per step over each link, median of the steady steps."""
    stats = [r.stats for r in steady(records) if r.stats is not None]
    return {
        lane: int(statistics.median(s.lanes[lane].bytes for s in stats)) if stats else 0
        for lane in LINKS
    }


@dataclass(frozen=True)
class Report:
    """All figures of a run.  Times in seconds, sizes in bytes, losses in nats per token."""

    model: str
    start: str
    data: str
    parameters: int
    device: str
    lr: float
    seed: int
    position: int
    plan: Plan = field(repr=False)
    memory: Mapping[str, MemoryStats] = field(repr=False)
    links: Mapping[str, int]
    records: tuple[StepRecord, ...] = field(repr=False)
    rss_before_bytes: int
    peak_rss_bytes: int
    planned_s: float | None  # of a step, by the plan with the compute as measured
    others: Mapping[str, Any] = field(repr=False)  # what other choices would take
    comparison: Comparison | None
    out: Path
    ranks: int = 1  # memory and links are those of the first

    @property
    def step_s(self) -> float:
        """Median time of a step."""
        return statistics.median(r.wall_s for r in steady(self.records))

    @property
    def cpu_s(self) -> float:
        """Median of what a step takes of processors, all threads together."""
        return statistics.median(r.cpu_s for r in steady(self.records))

    @property
    def tokens_s(self) -> float:
        """Tokens per second at the median step."""
        return self.records[-1].tokens / self.step_s

    @property
    def bound_s(self) -> float:
        """Median lower bound of a step: its busiest lane."""
        return statistics.median(
            r.stats.bound_s for r in steady(self.records) if r.stats is not None
        )

    @property
    def training_bytes(self) -> int:
        """Weights, gradients, masters and moments together: what would have to fit without
        offloading."""
        layout = self.plan.detail.layout
        assert layout is not None
        state = sum(s.nbytes for group in layout.subgroups for s in group)
        return sum(u.weight_bytes for u in layout.units) + sum(layout.grad_bytes) + state

    # -- run.json -------------------------------------------------------------------------------

    def write(self, path: Path) -> None:
        """Write all figures as JSON.

        Raises:
            IoError: the file cannot be written.
        """
        write_text(path, json.dumps(self.as_json(), indent=2) + "\n")

    def as_json(self) -> dict[str, Any]:
        """All figures as plain values."""
        return {
            "model": self.model,
            "start": self.start,
            "data": self.data,
            "parameters": self.parameters,
            "device": self.device,
            "ranks": self.ranks,
            "lr": self.lr,
            "seed": self.seed,
            "batches_taken": self.position,
            "training_bytes": self.training_bytes,
            "loss_first": self.records[0].loss,
            "loss_last": self.records[-1].loss,
            "step_s": self.step_s,
            "cpu_s": self.cpu_s,
            "bound_s": self.bound_s,
            "step_over_bound": self.step_s / self.bound_s if self.bound_s else None,
            "tokens_s": self.tokens_s,
            "rss_before_bytes": self.rss_before_bytes,
            "peak_rss_bytes": self.peak_rss_bytes,
            "memory": {tier: asdict(stats) for tier, stats in self.memory.items()},
            "link_bytes_per_step": dict(self.links),
            "plan": {
                "tier_bytes": {t.value: n for t, n in self.plan.tier_bytes.items()},
                "link_bytes": dict(self.plan.link_bytes),
                "disk_bytes": self.plan.disk_bytes,
                "bound_s": self.plan.bound_s,
                "bottleneck": self.plan.bottleneck,
                "step_s": self.planned_s,
            },
            "next": dict(self.others),
            "steps": [_step_json(record) for record in self.records],
            "comparison": self._comparison_json(),
        }

    def _comparison_json(self) -> dict[str, Any] | None:
        if self.comparison is None:
            return None
        return {
            "loss_difference": self.comparison.loss_difference,
            "weight_difference": self.comparison.weight_difference,
            "step_s": self.in_memory_s,
            "cpu_s": self.in_memory_cpu_s,
            "steps": [_step_json(record) for record in self.comparison.records],
        }

    @property
    def in_memory_s(self) -> float | None:
        """Median time of a step in memory, or ``None`` without comparison."""
        if self.comparison is None:
            return None
        return statistics.median(r.wall_s for r in steady(self.comparison.records))

    @property
    def in_memory_cpu_s(self) -> float | None:
        """What a step in memory takes of processors, or ``None`` without comparison."""
        if self.comparison is None:
            return None
        return statistics.median(r.cpu_s for r in steady(self.comparison.records))

    # -- the table ------------------------------------------------------------------------------

    def rows(self) -> list[tuple[str, str]]:
        """The table's rows: what, and its figure."""
        first, last = self.records[0].loss, self.records[-1].loss
        each = ", a rank" if self.ranks > 1 else ""
        size = f"{self.parameters / 1e6:,.1f} M parameters"
        rows = [
            ("model", f"{self.model}, {size}, {self.start}"),
            (f"{_name('training')}{each}", format_bytes(self.training_bytes)),
            (_name("loss"), f"{first:.4f} -> {last:.4f} in {len(self.records)} steps"),
            (_name("tokens"), f"{self.tokens_s:,.0f} ({self.records[-1].tokens:,} a step)"),
        ]
        if self.ranks > 1:
            rows.append(("ranks", f"{self.ranks}; figures of memory and links are the first one's"))
        for tier, stats in self.memory.items():
            peak, budget = format_bytes(stats.peak_bytes), format_bytes(stats.budget_bytes)
            rows.append((f"{_name('peak')}, {tier}", f"{peak} of {budget}"))
        moved = [f"{LINKS[k]} {format_bytes(n)}" for k, n in self.links.items() if n]
        rows.append((_name("links"), ", ".join(moved) or "nothing"))
        if self.bound_s:
            ratio = (
                f"{self.step_s / self.bound_s:.2f} times the lower bound of {self.bound_s:.3g} s"
            )
            rows.append((_name("step"), f"{self.step_s:.3g} s, {ratio}"))
        rows.append((_name("cpu"), self._processors()))
        if self.planned_s:
            rows.append((_name("planned"), f"{self.planned_s:.3g} s"))
        last_stats = self.records[-1].stats
        if last_stats is not None:
            rows.append(("last step", last_stats.explain()))
        rows.append((_name("stalls"), self._stalls()))
        before, peak = format_bytes(self.rss_before_bytes), format_bytes(self.peak_rss_bytes)
        rows.append((_name("process"), f"{peak} ({before} before the model was built)"))
        if self.comparison is not None and self.in_memory_s:
            other = self.comparison
            share = self.step_s / self.in_memory_s
            rows += [
                (
                    _name("in_memory"),
                    f"{self.in_memory_s:.3g} s a step (offloaded: {share:.2f} times)",
                ),
                (_name("loss_difference"), f"{other.loss_difference:.2g} at most"),
                (_name("weight_difference"), f"{other.weight_difference:.2g} of the weights (RMS)"),
            ]
        return rows

    def _processors(self) -> str:
        used = f"{self.cpu_s:.3g} core-seconds"
        beside = self.in_memory_cpu_s
        return used if beside is None else f"{used} (in plain PyTorch: {beside:.3g})"

    def _stalls(self) -> str:
        stats = [r.stats for r in steady(self.records) if r.stats is not None]
        if not stats:
            return "unknown"
        waits = {lane: statistics.median(s.lanes[lane].stall_s for s in stats) for lane in LANES}
        named = [f"{lane} {s:.2g} s" for lane, s in waits.items() if s >= LEAST_STALL_S]
        return ", ".join(named) or "none"

    def table(self) -> Table:
        """The rows as a table for the terminal, with the meaning of the figures below."""
        from rich.table import Table

        rows = self.rows()
        shown = [each for each in FIGURES.values() if any(n.startswith(each.name) for n, _ in rows)]
        shown.append(FIGURES["bound"])
        table = Table(
            show_header=False, title="overspill: result", title_justify="left",
            caption="\n".join(f"{each.name}: {each.meaning}" for each in shown),
            caption_justify="left",
        )  # fmt: skip
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, figure in rows:
            table.add_row(name, figure)
        return table


def _step_json(record: StepRecord) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "step": record.step,
        "loss": record.loss,
        "tokens": record.tokens,
        "wall_s": record.wall_s,
        "cpu_s": record.cpu_s,
    }
    if record.stats is not None:
        entry["bound_s"] = record.stats.bound_s
        entry["lanes"] = {lane: asdict(stats) for lane, stats in record.stats.lanes.items()}
    return entry
