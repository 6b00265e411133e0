"""Modules that a module runs although they are not its children in the module tree.

Adapters like those of kohya's scripts replace ``linear.forward`` by a method of their own module,
which is elsewhere in the model; others use hooks.  The weights of both are needed at the same time,
so a plan has to count both.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

DEPTH = 6  # nesting depth of partials, closures and containers to follow
MOST = 64  # elements of a container to follow


def reached_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield modules that a replaced ``forward``, or a forward hook, in ``module`` refers to.

    A function refers to the object that it is bound to, to its defaults and to its closure.  It
    probably calls such modules, but this is not certain.
    """
    seen: set[int] = set()
    for each in module.modules():
        own = vars(each)
        replaced = [own["forward"]] if "forward" in own else []
        hooks = [
            *own.get("_forward_pre_hooks", {}).values(),
            *own.get("_forward_hooks", {}).values(),
        ]
        for function in (*replaced, *hooks):
            yield from _referred(function, DEPTH, seen)


def _referred(value: Any, depth: int, seen: set[int]) -> Iterator[nn.Module]:
    if depth == 0 or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield value
        return
    parts: list[Any] = []
    if isinstance(value, types.MethodType):
        parts = [value.__self__, value.__func__]
    elif isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        parts = [*map(_content, cells), *(value.__defaults__ or ())]
        parts += [*(value.__kwdefaults__ or {}).values(), vars(value).get("__wrapped__")]
    elif isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, (list, tuple)):
        parts = list(value[:MOST])
    elif isinstance(value, dict):
        parts = list(value.values())[:MOST]
    for part in parts:
        yield from _referred(part, depth - 1, seen)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is still empty
        return None
