"""Counting of forwards of whole models, which replace steps if nothing is trained."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from ..planning.models import entries
from ..private import compile_private
from ..private.handles import remove_all
from ..schedule.protocol import Protocol
from .modelled_compute import token_count

_INPUTS = ("input_ids", "inputs_embeds")  # transformers may pass caches and masks before these


class Forwards:
    """A counter of forwards, which reports each one to the residency machine and to ``over``."""

    def __init__(
        self, model: nn.Module, protocol: Protocol, over: Callable[[int, int], None],
        running: Callable[[], int],
    ) -> None:  # fmt: skip
        """Install hooks.

        Args:
            over: called with each forward's number and its input tokens.
            running: returns how many entries run: one may run inside another, as a part of it.
        """
        self.count = self._tokens = 0
        self._protocol, self._over, self._running = protocol, over, running
        me = weakref.ref(self)

        @compile_private.not_compiled
        def before(_model: nn.Module, args: Any, kwargs: Any) -> None:
            if (forwards := me()) is not None and forwards._running() <= 1:
                forwards._begins(args, kwargs)

        @compile_private.not_compiled
        def after(_model: nn.Module, _args: Any, _output: Any) -> None:
            if (forwards := me()) is not None and forwards._running() == 0:
                forwards._ends()

        self._handles: list[Any] = []
        for entry in entries(model).values():
            self._handles.append(entry.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(entry.register_forward_hook(after))

    def _begins(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        named = [kwargs[name] for name in _INPUTS if kwargs.get(name) is not None]
        self._tokens = token_count(named or (*args, *kwargs.values()))
        if self.count:
            self._protocol.forward_again()

    def _ends(self) -> None:
        self.count += 1
        self._over(self.count, self._tokens)

    def remove(self) -> None:
        """Remove the hooks."""
        remove_all(self._handles)
