"""``optimizer.state`` of a wrapped model, which reads the state of a parameter on demand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

import torch

from ..errors import OptimizerStateError
from .torch_state import OptimizerState


class ParameterState(dict[str, Any]):
    """The state of one parameter, as in torch's optimizers; empty before its first step.

    Tensors are copies.  In-place changes to them are written back when the engine is used next;
    values that are set with ``state[p][name] = ...`` are written at once.
    """

    def __init__(self, state: OptimizerState, index: int, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._state, self._index = state, index

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def update(self, *given: Any, **more: Any) -> None:
        """Set several values; see ``dict.update``."""
        values = dict(*given, **more)
        if values:
            self._state.write({self._index: values})
            super().update(self._state.adopt(self._index, values))

    def __ior__(self, given: Any) -> ParameterState:  # type: ignore[override,misc]
        self.update(given)
        return self

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Return a value, after setting it if it is missing."""
        if name not in self:
            self[name] = default
        return self[name]

    def clear(self) -> None:
        """Reset the parameter to the state before its first step."""
        self._state.reset([self._index])
        super().clear()

    def _refuse(self, *_: Any) -> NoReturn:
        raise OptimizerStateError(
            "one entry of a parameter's state cannot be removed, because the optimizer needs all "
            "of them; set it (state[p][name] = ...), or reset the parameter (state[p].clear())"
        )

    __delitem__ = pop = popitem = _refuse  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {name: _cloned(value) for name, value in self.items()}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


class LazyState(MutableMapping[torch.Tensor, dict[str, Any]]):
    """A mapping like torch's ``optimizer.state``, of all parameters that have taken a step."""

    def __init__(self, state: OptimizerState) -> None:
        self._state = state

    def __getitem__(self, p: torch.Tensor) -> dict[str, Any]:
        index = self._state.index_of(p)
        values = self._state.lend(index) if self._state.has(p) else {}
        return ParameterState(self._state, index, values)

    def __setitem__(self, p: torch.Tensor, values: Mapping[str, Any]) -> None:
        index = self._state.index_of(p)
        if not values:
            self._state.reset([index])
        else:
            self._state.write({index: values}, whole=True)

    def __delitem__(self, p: torch.Tensor) -> None:
        if not self._state.has(p):
            raise KeyError(p)
        self._state.reset([self._state.index_of(p)])

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._state.those_that_have())

    def __len__(self) -> int:
        return len(self._state.those_that_have())

    def __contains__(self, p: object) -> bool:
        return self._state.has(p)

    def pop(self, p: torch.Tensor, *default: Any) -> Any:
        """Reset a parameter and return the state that it had."""
        if not self._state.has(p):
            if default:
                return default[0]
            raise KeyError(p)
        found = {name: _cloned(value) for name, value in self[p].items()}
        del self[p]
        return found

    def clear(self) -> None:
        """Reset all parameters to the state before their first step."""
        self._state.reset([self._state.index_of(p) for p in self._state.those_that_have()])


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
