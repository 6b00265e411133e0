"""``optimizer.state`` of a wrapped model: the state of each parameter, read when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from ..engine import Engine
from ..errors import OffloadError


class LazyState(Mapping[torch.Tensor, dict[str, Any]]):
    """By parameter, as torch's; those that have taken a step have one.  What it gives are copies:
    ``load_state_dict`` puts other values into the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._index = {id(p): i for i, p in enumerate(engine.parts.parameters)}

    def __getitem__(self, p: torch.Tensor) -> dict[str, Any]:
        index = self._index.get(id(p))
        if index is None or not self._engine.ledger.steps[index]:
            raise KeyError(p)
        self._engine.settle()
        for spec, values in self._engine.contents.state(self._engine.parts.unit_of[index]):
            if spec.index == index:
                return {
                    "step": torch.tensor(float(self._engine.ledger.steps[index]), device="cpu"),
                    **values,
                }
        return {}

    def __iter__(self) -> Iterator[torch.Tensor]:
        steps, parameters = self._engine.ledger.steps, self._engine.parts.parameters
        return (p for p, count in zip(parameters, steps, strict=True) if count)

    def __len__(self) -> int:
        return sum(count > 0 for count in self._engine.ledger.steps)

    def __contains__(self, p: object) -> bool:
        index = self._index.get(id(p))
        return index is not None and self._engine.ledger.steps[index] > 0

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise OffloadError(
            "optimizer.state cannot be changed: the engine holds it; use optimizer.load_state_dict"
        )

    __setitem__: Callable[..., None] = _refuse
    __delitem__: Callable[..., None] = _refuse
    clear: Callable[..., None] = _refuse
