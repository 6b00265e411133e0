"""Who calls: the frames of this thread, for what must know amid of what it runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import FrameType

from ..errors import OffloadError


def callers() -> list[FrameType]:
    """The frames that led to the function that asks, itself left out, innermost first."""
    found: list[FrameType] = []
    frame = inspect.currentframe()
    for _ in range(2):
        frame = None if frame is None else frame.f_back
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def refuse_reentry() -> None:
    """Raises if a signal handler is the caller, and has interrupted the engine amid its own work:
    that holds locks, and has told only a part of what it does."""
    if is_engine(callers()[1:]):
        raise OffloadError(
            "a signal handler, or a callback, uses the optimizer amid the engine's own work; "
            "set a flag there, and look at it between steps"
        )


def is_engine(frames: Iterable[FrameType]) -> bool:
    """Whether one of these runs code of the engine."""
    return any(frame.f_globals.get("__name__", "").startswith(_AMID) for frame in frames)


_PACKAGE = __name__.rpartition(".")[0].rpartition(".")[0]
_AMID = tuple(
    f"{_PACKAGE}.{name}"
    for name in (
        "engine",
        "loop",
        "movement",
        "training",
        "state",
        "durable.commits",
        "durable.meta",
    )
)
