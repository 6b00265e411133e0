"""Search for the variable that keeps an object alive, for messages to users."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from types import FrameType, TracebackType
from typing import Any

MOST_STEPS = 6  # references followed from the object to a variable
MOST_OBJECTS = 200  # examined per step
_INTERNAL = (__name__.partition(".")[0], "torch")
UNKNOWN = (
    "something that the garbage collector cannot see, such as a local variable of a running "
    "function, or the autograd graph of a loss"
)


def holder_of(objects: Iterable[object]) -> str:
    """Describe what keeps one of ``objects`` alive: a variable, if one is found.

    Walks breadth first from the objects to their referrers, up to a variable of a module or a local
    variable in a frame that a traceback keeps.
    """
    frontier: Sequence[object] = list(objects)
    seen = {id(each) for each in frontier}
    mine = {id(seen), id(frontier)}
    for _ in range(MOST_STEPS):
        found = [each for each in gc.get_referrers(*frontier) if id(each) not in seen | mine]
        for each in found:
            if (name := _variable(each, frontier)) is not None:
                return name
        found = [each for each in found if not _is_internal(each)][:MOST_OBJECTS]
        seen.update(map(id, found))
        frontier = found
        mine.add(id(frontier))
        if not frontier:
            break
    return UNKNOWN


def _variable(referrer: object, held: Sequence[object]) -> str | None:
    """Return the variable that holds one of ``held``, if ``referrer`` has variables."""
    if isinstance(referrer, dict):
        module = referrer.get("__name__")
        if not isinstance(module, str) or _of_ours(module) or module not in sys.modules:
            return None
        is_module = vars(sys.modules[module]) is referrer
        return f"the variable {_key(referrer, held)!r} of {module}" if is_module else None
    if isinstance(referrer, FrameType) and not _of_ours(referrer.f_globals.get("__name__", "")):
        where = f"{referrer.f_code.co_filename}:{referrer.f_lineno}"
        names: dict[str, Any] = referrer.f_locals
        name = f"the local variable {_key(names, held)!r} of "
        name += f"{referrer.f_code.co_name}() ({where})"
        if referrer in _last_frames():
            return f"{name} in the traceback of the last exception (sys.last_value)"
        return f"{name}, in a frame that something keeps alive, such as a traceback"
    return None


def _key(names: dict[str, Any], held: Sequence[object]) -> str:
    """Return a variable name of one of ``held``, preferring a user's name to a shell's ``_``."""
    ids = {id(each) for each in held}
    fitting = [name for name, value in names.items() if id(value) in ids]
    return min(fitting, key=lambda name: (name.startswith("_"), name), default="?")


def _last_frames() -> list[FrameType]:
    """Return the frames of the exception that a shell reported last."""
    last: TracebackType | None = getattr(sys, "last_traceback", None)
    found = []
    while last is not None:
        found.append(last.tb_frame)
        last = last.tb_next
    return found


def _is_internal(referrer: object) -> bool:
    """Return whether an object is overspill's or torch's, which refer to thousands of others."""
    return _of_ours(type(referrer).__module__) or isinstance(referrer, FrameType)


def _of_ours(module: str) -> bool:
    return module.partition(".")[0] in _INTERNAL
