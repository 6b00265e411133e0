"""Private parts of torch.compile: keeping hooks out of compiled code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")


def not_a_graph(function: F) -> F:
    """Keep ``torch.compile`` from making a graph of ``function`` itself.

    The functions that it calls may become graphs, and it may become part of a caller's graph.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, skip)  # type: ignore[attr-defined]
    return function


def not_compiled(function: F) -> F:
    """Make ``torch.compile`` run ``function``, and all that it calls, without tracing."""
    set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame  # what torch.compiler.disable uses

    @functools.wraps(function)
    def as_it_is(*args: Any, **more: Any) -> Any:
        before = set_eval_frame(None)
        try:
            return function(*args, **more)
        finally:
            set_eval_frame(before)

    # If torch's own code calls it, it is a frame of its own; if compiled code does, it is a call.
    not_a_graph(as_it_is)
    as_it_is._torchdynamo_disable = True  # type: ignore[attr-defined]
    # The end of the message that ``fullgraph=True`` then raises.
    as_it_is._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "overspill moves weights where modules begin and end, so no graph of several is whole; "
        "leave fullgraph=True out, or give it to single blocks (block.compile(fullgraph=True))"
    )
    return as_it_is  # type: ignore[return-value]


def not_in_graphs(hook: Callable[P, None]) -> Callable[P, None]:
    """Make a hook of modules inside of a unit do nothing in compiled code.

    Elsewhere it runs without tracing, as with ``not_compiled``.

    Code that is compiled together with such a module begins with the unit, whose weights are there
    by then, and runs on the unit's stream. The hook would only break the graph. If such a module is
    compiled alone, its parameters still read their weights if they are resident.
    """
    set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame

    @not_a_graph
    def outside(*args: P.args, **kwargs: P.kwargs) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        before = set_eval_frame(None)
        try:
            hook(*args, **kwargs)
        finally:
            set_eval_frame(before)

    return outside
