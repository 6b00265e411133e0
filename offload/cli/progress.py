"""What the user sees while a run goes on: a live panel on a terminal, else plain lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from ..errors import format_bytes
from ..facts.stats import MemoryStats
from ..train.job import Watch
from ..train.report import Report
from ..train.training_loop import StepRecord

PLAIN_LINES = 50  # at most about so many lines of steps without a terminal
FILES = (
    "report.html", "loss.png", "timeline.png", "memory.png", "trace.json", "model.safetensors",
    "run.json",
)  # fmt: skip


class Display(Watch, Protocol):
    """A watch that also shows the result."""

    def result(self, report: Report) -> None:
        """Print the final table and the files written."""


def make_watch(console: Console | None = None) -> Display:
    """The display that suits where the output goes."""
    console = console or Console()
    return LiveWatch(console) if console.is_terminal else PlainWatch(console)


def waits(record: StepRecord) -> str:
    """For which lanes compute waited in a step, the longest first."""
    if record.stats is None:
        return ""
    stalls = {lane: stats.stall_s for lane, stats in record.stats.lanes.items()}
    named = sorted(((s, lane) for lane, s in stalls.items() if s >= 0.001), reverse=True)
    return ", ".join(f"{lane} {s:.2f} s" for s, lane in named) or "none"


class PlainWatch:
    """One line per step; with many steps, every n-th."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps, self._every = 0, 1

    def note(self, text: str) -> None:
        """Print a message."""
        self._line(text)

    def begin(self, title: str, steps: int) -> None:
        """Training starts."""
        self._steps, self._every = steps, max(1, steps // PLAIN_LINES)
        self._line(f"training, {title}: {steps} steps")

    def step(self, record: StepRecord, memory: Mapping[str, MemoryStats]) -> None:
        """Print a finished step."""
        if record.step % self._every and record.step not in (1, self._steps):
            return
        tiers = "  ".join(f"{tier} {format_bytes(m.held_bytes)}" for tier, m in memory.items())
        waited = waits(record)
        self._line(
            f"step {record.step}/{self._steps}  loss {record.loss:.4f}  "
            f"{record.tokens_s:,.0f} tokens/s"
            + (f"  {tiers}" if tiers else "")
            + (f"  stalls: {waited}" if waited else "")
        )

    def end(self) -> None:
        """Training is over."""

    def result(self, report: Report) -> None:
        """Print the final table and the files written."""
        self._console.print(report.table())
        for name in FILES:
            if (report.out / name).exists():  # pictures need a package that may be missing
                self._line(f"wrote {report.out / name}")

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class LiveWatch(PlainWatch):
    """A panel that is redrawn in place while training runs."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live: Live | None = None
        self._title = ""

    def begin(self, title: str, steps: int) -> None:
        """Training starts."""
        super().begin(title, steps)
        self._title = title
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._live.start()

    def step(self, record: StepRecord, memory: Mapping[str, MemoryStats]) -> None:
        """Show a finished step."""
        if self._live is not None:
            self._live.update(self._panel(record, memory))

    def end(self) -> None:
        """Training is over."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _panel(self, record: StepRecord, memory: Mapping[str, MemoryStats]) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_row(
            f"step {record.step}/{self._steps}",
            ProgressBar(total=self._steps, completed=record.step, width=40),
        )
        table.add_row("loss", f"{record.loss:.4f}")
        table.add_row("speed", f"{record.tokens_s:,.0f} tokens/s, {record.wall_s:.2f} s a step")
        for tier, m in memory.items():
            text = f"{format_bytes(m.held_bytes)} of {format_bytes(m.budget_bytes)}"
            share = m.held_bytes / m.budget_bytes if m.budget_bytes else 0.0
            bar = Table.grid(padding=(0, 1))
            bar.add_row(ProgressBar(total=1.0, completed=share, width=40), text)
            table.add_row(tier, bar)
        if record.stats is not None:
            table.add_row("stalls", waits(record))
            over = record.stats.over_bound
            table.add_row("step time", "-" if over is None else f"{over:.2f} times the lower bound")
        return table
