"""The picture of memory: what each tier holds in the course of a few steps, against its budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ReportError, format_bytes
from ..facts.trace import Level, StepMark, TierBytes, Trace
from .pictures import FAINT, TIER_COLOURS, blank_figure, last_steps, save_figure

MIB, GIB = 2**20, 2**30
FAR = 1.6  # times what is held: a budget beyond that is written, not drawn
PLANNED, BUDGET, SAVED = "#222222", "#cc3311", "#ddaa33"


def draw_memory(trace: Trace, path: Path, planned: Trace | None = None) -> None:
    """Bytes in use of device and host memory over the last steps, with what is held and the budget.

    What autograd saved is shown where compute has it.  The disk holds the same all the time, so it
    is written, not drawn.  With ``planned``, a simulated trace, its last step is laid over each
    measured one, stretched to its length.

    Raises:
        OffloadError: nothing was recorded, or matplotlib is missing.
    """
    steps = last_steps(trace)
    start, end = steps[0].started_ns, steps[-1].finished_ns
    levels = trace.levels(start, end)
    tiers = [name for name in ("device", "host") if any(_used(level, name) for level in levels)]
    if not tiers:
        raise ReportError("the trace has no memory figures; write one with optimizer.trace()")
    scale, unit = (1e9, "s") if end - start > 5e9 else (1e6, "ms")
    figure, panels = blank_figure(1200, 330 * len(tiers) + 60, rows=len(tiers))
    for number, name in enumerate(tiers):
        axes = panels[number] if len(tiers) > 1 else panels
        top = max(_used(level, name) for level in levels)
        size, word = (GIB, "GiB") if top > 2 * GIB else (MIB, "MiB")
        times = [(level.at_ns - start) / scale for level in levels] + [(end - start) / scale]
        used = [_used(level, name) / size for level in levels]
        axes.fill_between(
            times, [*used, used[-1]], step="post", color=TIER_COLOURS[name], alpha=0.75,
            linewidth=0, label="in use, measured",
        )  # fmt: skip
        if name == tiers[0] and any(level.saved_bytes for level in levels):
            saved = [level.saved_bytes / size for level in levels]
            axes.fill_between(
                times, [*saved, saved[-1]], step="post", color=SAVED, alpha=0.6, linewidth=0,
                label="of that, activations",
            )  # fmt: skip
        if planned is not None:
            _overlay(axes, planned, steps, name, (start, scale, size))
        _limits(axes, trace.tiers.get(name), top, size)
        for mark in steps[:-1]:
            axes.axvline((mark.finished_ns - start) / scale, color=FAINT, linewidth=1)
        axes.set_xlim(0, (end - start) / scale)
        axes.set_ylabel(f"{name} memory, {word}")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    below = panels[-1] if len(tiers) > 1 else panels
    disk = trace.tiers.get("nvme")
    told = "" if disk is None else (
        f"   (on disk all the time: {format_bytes(disk.held_bytes)} of "
        f"{format_bytes(disk.budget_bytes)})"
    )  # fmt: skip
    below.set_xlabel(f"time, {unit}{told}")
    save_figure(figure, path)


def _used(level: Level, tier: str) -> int:
    return level.device_bytes if tier == "device" else level.host_bytes


def _limits(axes: Any, tier: TierBytes | None, top: int, size: int) -> None:
    if tier is None:
        axes.set_ylim(0, 1.1 * top / size)
        return
    held, budget = tier.held_bytes, tier.budget_bytes
    axes.axhline(held / size, color="#888888", linewidth=1.2, label=f"held, {format_bytes(held)}")
    near = budget <= FAR * max(held, top)
    words = f"budget, {format_bytes(budget)}" + ("" if near else " (not drawn)")
    axes.axhline(
        budget / size if near else -1, color=BUDGET, linewidth=1.4, linestyle="--", label=words
    )
    axes.set_ylim(0, 1.08 * max(held, top, budget if near else 0) / size)


def _overlay(
    axes: Any, planned: Trace, steps: Sequence[StepMark], name: str,
    scales: tuple[int, float, int],
) -> None:  # fmt: skip
    """Draw the planned step once over each measured one."""
    start, scale, size = scales
    whole = last_steps(planned)[-1]
    levels = planned.levels(whole.started_ns, whole.finished_ns)
    length = max(1, whole.finished_ns - whole.started_ns)
    label: str | None = "in use, planned"
    for mark in steps:
        stretch = (mark.finished_ns - mark.started_ns) / length
        times = [
            (mark.started_ns - start + (level.at_ns - whole.started_ns) * stretch) / scale
            for level in levels
        ]
        used = [_used(level, name) / size for level in levels]
        axes.step(times, used, where="post", color=PLANNED, linewidth=1, linestyle=":", label=label)
        label = None
