"""``optimizer.state`` of a wrapped model: the state of each parameter, read when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from ..errors import OffloadError
from .torch_state import OptimizerState


class LazyState(Mapping[torch.Tensor, dict[str, Any]]):
    """By parameter, as torch's; those that have taken a step have one.  What it gives are copies:
    ``load_state_dict`` puts other values into the engine."""

    def __init__(self, state: OptimizerState) -> None:
        self._state = state

    def __getitem__(self, p: torch.Tensor) -> dict[str, Any]:
        if not self._state.has(p):
            raise KeyError(p)
        return self._state.of(p)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._state.those_that_have())

    def __len__(self) -> int:
        return len(self._state.those_that_have())

    def __contains__(self, p: object) -> bool:
        return self._state.has(p)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise OffloadError(
            "optimizer.state cannot be changed: the engine holds it; use optimizer.load_state_dict"
        )

    __setitem__: Callable[..., None] = _refuse
    __delitem__: Callable[..., None] = _refuse
    clear: Callable[..., None] = _refuse
