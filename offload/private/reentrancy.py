"""Inspection of the frames of threads, to detect calls from inside the engine's own work."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import time
from collections.abc import Iterable
from itertools import takewhile
from operator import attrgetter
from types import FrameType

from ..errors import LifecycleError

PATIENCE_S = 10.0  # to wait for threads that run engine code, before closing


def callers() -> list[FrameType]:
    """Return the frames that led to the calling function, without its own, innermost first."""
    found: list[FrameType] = []
    frame = inspect.currentframe()
    for _ in range(2):
        frame = None if frame is None else frame.f_back
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def wait_for_others() -> None:
    """Wait until no other thread runs code of the engine, except threads that are closing it too.

    Calls that begin now are refused already. A thread that stays in the engine is waited for at
    most ``PATIENCE_S`` seconds.
    """
    ends_s = time.monotonic() + PATIENCE_S
    while _others_amid() and time.monotonic() < ends_s:
        time.sleep(0.001)


def _others_amid() -> bool:
    me = threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, innermost in _innermost_frames().items():
        if ident == me or "overspill" in names.get(ident, ""):
            continue
        frames = _stack(innermost)
        if frames is None:
            return True  # the thread has gone on; look again
        closes = any(f.f_globals.get("__name__") == _CLOSEABLE for f in frames)
        if is_engine(frames) and not closes:
            return True
    return False


def _stack(innermost: FrameType) -> list[FrameType] | None:
    """Return the frames of another thread, or ``None`` if they changed meanwhile.

    Up to Python 3.11, ``f_back`` of a generator's frame that has yielded since may be any object.
    Built-in functions walk the stack, so that no other thread runs in between.
    """
    frames = [innermost]
    try:
        frames.extend(takewhile(bool, map(attrgetter("f_back"), frames)))
    except AttributeError:
        return None
    return frames if all(isinstance(each, FrameType) for each in frames) else None


def _innermost_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread.

    Disables garbage collection: before Python 3.12, a collection inside ``sys._current_frames`` can
    switch threads, and the other thread then deadlocks on a lock that the call holds (cpython issue
    106883).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if enabled:
            gc.enable()


def refuse_reentry() -> None:
    """Raise if a signal handler calls the engine after interrupting the engine's own work.

    That work holds locks, and has reported only a part of what it does.
    """
    if is_engine(callers()[1:]):
        raise LifecycleError(
            "the optimizer was used in a signal handler or callback that interrupted the engine; "
            "set a flag there, and check it between steps"
        )


def is_engine(frames: Iterable[FrameType]) -> bool:
    """Return whether one of the frames runs code of the engine."""
    return any(f"{f.f_globals.get('__name__')}.".startswith(_AMID) for f in frames)


def called_by(package: str) -> bool:
    """Return whether a tensor's method is called by code in ``package``."""
    names = (str(frame.f_globals.get("__name__")) for frame in callers())
    inside = f"{_PACKAGE}.", "torch._", "torch.overrides"  # which run the method
    outside = (name for name in names if not name.startswith(inside))
    return next(outside, "").startswith(f"{package}.")


_PACKAGE = __name__.rpartition(".")[0].rpartition(".")[0]
_CLOSEABLE = f"{_PACKAGE}.closeable"
_AMID = tuple(
    f"{_PACKAGE}.{name}."
    for name in (
        "engine",
        "loop",
        "movement",
        "step",
        "grads",
        "activations",
        "params",
        "private",
        "state",
        "durable.commits",
        "durable.meta",
    )
)
