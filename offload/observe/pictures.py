"""Pictures of a run: the loss, the lanes of a step, and memory against its budgets.

matplotlib is imported when something is drawn; without it, an error names the extra to install.
One colour belongs to each lane and to each tier, in every picture.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ReportError, format_bytes
from ..io_engine.atomic_files import write_bytes

if TYPE_CHECKING:
    from ..facts.trace import Span, StepMark, Trace

LANE_COLOURS: Mapping[str, str] = {
    "compute": "#4477aa",
    "copy_in": "#66ccee",
    "copy_out": "#228833",
    "read": "#ee6677",
    "write": "#aa3377",
    "update": "#ccbb44",
}
LANE_WORDS: Mapping[str, str] = {
    "compute": "compute",
    "copy_in": "copy to device",
    "copy_out": "copy to host",
    "read": "disk read",
    "write": "disk write",
    "update": "update",
}
TIER_COLOURS: Mapping[str, str] = {"device": "#4477aa", "host": "#228833", "nvme": "#aa3377"}
FAINT = "#bbbbbb"
PIXELS_PER_INCH = 100
STEPS_DRAWN = 2


def missing() -> str | None:
    """Say what pictures lack here, and how to get it; ``None``: nothing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        return f'pictures need matplotlib ({error}); pip install "overspill[plot]"'
    return None


def blank_figure(
    width_px: int, height_px: int, *, rows: int = 1, columns: int = 1
) -> tuple[Any, Any]:
    """A figure and its axes (an array of them if there are several), drawn to memory: no display.

    Raises:
        OffloadError: matplotlib is missing.
    """
    if (lacking := missing()) is not None:
        raise ReportError(lacking)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(width_px / PIXELS_PER_INCH, height_px / PIXELS_PER_INCH), layout="constrained"
    )
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure in the format that the file's suffix names.

    Raises:
        IoError: the file cannot be written.
        OffloadError: matplotlib knows no such format.
    """
    known = figure.canvas.get_supported_filetypes()
    kind = path.suffix.removeprefix(".").lower() or "png"
    if kind not in known:
        raise ReportError(
            f"{path}: matplotlib cannot write .{kind} files; name a file that ends in .png, .svg "
            "or .pdf"
        )
    data = io.BytesIO()
    figure.savefig(data, dpi=PIXELS_PER_INCH, format=kind)
    write_bytes(path, data.getvalue())


def draw_loss(curves: Mapping[str, Sequence[float]], path: Path) -> None:
    """Loss by step, one curve per name; the second and later ones are dashed, so both show."""
    figure, axes = blank_figure(1000, 560)
    styles = [("#4477aa", "-", 2.6), ("#ee6677", (0, (3, 3)), 1.8), ("#228833", ":", 1.8)]
    for number, (name, losses) in enumerate(curves.items()):
        colour, line, width = styles[number % len(styles)]
        steps = range(1, len(losses) + 1)
        marker = "o" if len(losses) == 1 else None
        axes.plot(
            steps, losses, color=colour, linestyle=line, linewidth=width, label=name, marker=marker
        )
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.grid(color=FAINT, linewidth=0.4, alpha=0.6)
    if curves:
        axes.legend(frameon=False)
    save_figure(figure, path)


def draw_timeline(trace: Trace, path: Path, planned: Trace | None = None) -> None:
    """Draw the lanes of the last steps in rows, and below them what compute waited for.

    With ``planned``, a simulated trace, its last steps are drawn above, on the same time axis.

    Raises:
        OffloadError: no step was recorded, or matplotlib is missing.
    """
    panels = {"measured": trace} if planned is None else {"planned": planned, "measured": trace}
    steps = {title: last_steps(each) for title, each in panels.items()}
    longest = max(each[-1].finished_ns - each[0].started_ns for each in steps.values())
    scale, unit = (1e9, "s") if longest > 5e9 else (1e6, "ms")
    figure, axes = blank_figure(1200, 480 * len(panels), rows=len(panels))
    for number, (title, each) in enumerate(panels.items()):
        panel = axes[number] if len(panels) > 1 else axes
        _lanes(panel, each, steps[title], scale, unit)
        panel.set_xlim(0, longest / scale)
        if len(panels) > 1:
            panel.set_title(title, loc="left", fontsize=11)
    below = axes[-1] if len(panels) > 1 else axes
    below.set_xlabel(f"time, {unit}   (a wait has the colour of the lane that was waited for)")
    save_figure(figure, path)


def last_steps(trace: Trace) -> Sequence[StepMark]:
    """The steps that are drawn: the last ones.

    Raises:
        OffloadError: no step was recorded.
    """
    steps = trace.steps[-STEPS_DRAWN:]
    if not steps:
        raise ReportError("the trace holds no finished step yet; train at least one step first")
    # The first step also covers what happened before it, such as filling the tiers.
    return steps[1:] if len(steps) > 1 and steps[0].index <= 1 else steps


def _lanes(axes: Any, trace: Trace, steps: Sequence[StepMark], scale: float, unit: str) -> None:
    start, end = steps[0].started_ns, steps[-1].finished_ns
    spans = trace.spans(start, end)
    for row, (lane, colour) in enumerate(LANE_COLOURS.items()):
        mine = [s for s in spans if s.lane == lane]
        _bars(axes, row, mine, start, scale, colour, colour)
        _note(axes, row, mine)
    stalls = trace.stalls(start, end)
    for span in stalls:
        colour = LANE_COLOURS[span.lane]
        _bars(axes, len(LANE_COLOURS), [span], start, scale, colour, colour)
    waited = sum(s.finished_ns - s.started_ns for s in stalls) / scale
    rows = [*LANE_WORDS.values(), "stalls"]
    axes.text(1.01, len(rows) - 1, f"{waited:,.3g} {unit}", **_beside(axes))
    _ends_of_steps(axes, steps, start, scale)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -1.0)
    axes.tick_params(axis="y", length=0)


def _bars(
    axes: Any, row: int, spans: Sequence[Span], origin_ns: int, scale: float, face: str, edge: str
) -> None:
    bars = [
        ((s.started_ns - origin_ns) / scale, (s.finished_ns - s.started_ns) / scale) for s in spans
    ]
    axes.broken_barh(bars, (row - 0.36, 0.72), facecolor=face, edgecolor=edge, linewidth=0.3)


def _beside(axes: Any) -> dict[str, Any]:
    """Style of a figure at the right border, in the height of its row."""
    return {"transform": axes.get_yaxis_transform(), "va": "center", "ha": "left", "fontsize": 9}


def _note(axes: Any, row: int, spans: Sequence[Span]) -> None:
    from ..facts.trace import length, union

    moved = sum(s.nbytes for s in spans)
    busy_s = length(union((s.started_ns, s.finished_ns) for s in spans)) / 1e9
    text = f"busy {busy_s:.3g} s"
    if moved:
        rate = f", {moved / busy_s / 1e9:.2g} GB/s" if busy_s else ", at once"
        text = format_bytes(moved) + rate
    axes.text(1.01, row, text if spans else "idle", **_beside(axes))


def _ends_of_steps(axes: Any, steps: Sequence[StepMark], origin_ns: int, scale: float) -> None:
    for mark in steps:
        begin, finish = (
            (mark.started_ns - origin_ns) / scale,
            (mark.finished_ns - origin_ns) / scale,
        )
        axes.axvline(finish, color=FAINT, linewidth=1, zorder=0)
        axes.text((begin + finish) / 2, -0.7, f"step {mark.index}", ha="center", va="center")
