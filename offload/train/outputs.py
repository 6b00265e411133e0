"""The files of a run: their folder, the disk space they need, and the order they are written in.

What cannot be recreated is written first: the model, then the figures, then pictures.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import OffloadError, StoreError, format_bytes
from ..facts.trace import Trace
from ..io_engine.atomic_files import free_bytes_at, replacing_folder
from ..observe import pictures
from ..observe.memory_picture import draw_memory
from ..observe.page import PLANNED, TRACE
from ..observe.trace_files import load_trace, save_trace
from ..optimizer import OffloadedOptimizer
from ..planning.replay import replay
from ..state.weight_files import SINGLE
from .save import save_weights
from .shapes import ModelSource

LOSS, TIMELINE, MEMORY = "loss.png", "timeline.png", "memory.png"
SMALL_BYTES = 16 << 20  # for all but the weights
_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}


def require_folder(out: Path) -> None:
    """Check that a run can write to its folder; create nothing.

    Raises:
        ValueError: it is a file, is inside a file, or is not writable.
    """
    place = out.absolute()
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        raise ValueError(f"out: {place} is not a folder; name another folder for the run's files")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(
            f"out: {place} cannot be written to; give this user permission, or name another folder"
        )


def require_room(out: Path, model: nn.Module, precision: str | None, *, masters: bool) -> None:
    """Check that a run's files fit on the disk of its folder.

    Args:
        precision: dtype the weights will have, if not the model's present one.
        masters: whether exact initial values are stored as well, for a comparison.

    Raises:
        ValueError: they do not; need and have are named.
    """
    sizes = [(p.numel(), _SIZES.get(precision or "", p.itemsize)) for p in model.parameters()]
    need = SMALL_BYTES + sum(count * size for count, size in sizes)
    need += sum(4 * count for count, _ in sizes) if masters else 0
    free = free_bytes_at(out)
    if need > free:
        raise ValueError(
            f"out: the files of the run need {format_bytes(need)} in {out}; {format_bytes(free)} "
            "are free there; free space, or name another folder"
        )


def write_model(
    model: nn.Module, source: ModelSource, tokenizer: Any, out: Path, stores: Sequence[Path]
) -> None:
    """Write the weights, and what makes the folder one that ``--model`` takes.

    Args:
        stores: directories of the durable store that has the same weights, if there is one.

    Raises:
        OffloadError: a file cannot be written; a store that has the weights is named.
    """
    try:
        with replacing_folder(out, is_entry=lambda name: name == SINGLE) as draft:
            save_weights(model, draft / SINGLE)
            source.config.save_pretrained(draft)
            if tokenizer is not None:
                tokenizer.save_pretrained(draft)
    except OffloadError as error:
        if not stores:
            raise
        raise StoreError(
            f"{error}; the trained weights are in the store: once this is fixed, run the same "
            f"command with --resume {' --resume '.join(map(str, stores))} instead of --nvme, or "
            f"write them with `overspill export {stores[0]} FOLDER`"
        ) from error


def write_traces(optimizer: OffloadedOptimizer, out: Path) -> tuple[float | None, Trace]:
    """Write the trace of a run and that of its plan.

    Returns:
        The seconds that the plan has for a step, ``None`` if it has none; and the run's trace.
    """
    optimizer.trace(out / TRACE)
    trace = load_trace(out / TRACE)
    again = replay(optimizer.plan, trace)
    (out / PLANNED).unlink(missing_ok=True)  # from an earlier run
    if again is None:
        return None, trace
    save_trace(again.trace, out / PLANNED)
    return again.stats.step_s, trace


def draw_pictures(out: Path, curves: Mapping[str, Sequence[float]]) -> None:
    """Draw loss, lanes and memory of a run whose traces are in ``out``; without matplotlib, remove
    those of a run before."""
    if pictures.missing() is not None:
        for name in (LOSS, TIMELINE, MEMORY):
            (out / name).unlink(missing_ok=True)
        return
    trace = load_trace(out / TRACE)
    planned = load_trace(out / PLANNED) if (out / PLANNED).exists() else None
    pictures.draw_loss(curves, out / LOSS)
    pictures.draw_timeline(trace, out / TIMELINE, planned)
    draw_memory(trace, out / MEMORY, planned)


def stores_of(
    optimizer: OffloadedOptimizer, nvme: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
) -> tuple[Path, ...]:
    """The directories of a run's store, if it is one that stays."""
    layout = optimizer.plan.detail.layout
    listed = [nvme] if isinstance(nvme, (str, os.PathLike)) else nvme
    return tuple(map(Path, listed)) if layout is not None and layout.durable else ()
