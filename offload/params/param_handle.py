"""Handles of managed parameters, and how these reach their weights."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import LifecycleError
from ..private import torch_private
from ..schedule.units import ParamSpec

T = TypeVar("T")


class PlaceholderParam:
    """A mixin of a parameter's class while its weights are elsewhere."""

    requires_grad: bool


class WeightAccess(Protocol):
    """The interface by which parameters reach their weights, by parameter index."""

    def read(self, index: int) -> torch.Tensor:
        """Return a copy of the current weight."""
        ...

    def borrow(self, index: int) -> torch.Tensor:
        """Return a copy of the current weight that may be lent.

        If tensors over a lent copy exist, that copy is returned, so that there is only one.
        """
        ...

    def compute(self, indices: Collection[int], run: Callable[[], T]) -> T:
        """Return what ``run`` computes with parameters of one unit, which are shown meanwhile.

        The result is differentiated; what autograd saves is found again in backward. Returns
        ``NotImplemented`` if that is impossible here.
        """
        ...

    def address(self, index: int) -> int:
        """Return the device address of the current weight, valid until another unit is needed."""
        ...

    def together(self, indices: Collection[int]) -> bool:
        """Return whether the parameters belong to one unit."""
        ...

    def write(self, index: int, value: torch.Tensor) -> None:
        """Replace the current weight by ``value``."""
        ...

    def replace(self, index: int, value: torch.Tensor) -> None:
        """Replace the current weight by ``value``, and lend ``value`` itself from now on.

        A copy that was lent before belongs to its reader alone.
        """
        ...

    def lend(self, index: int, copy: torch.Tensor) -> None:
        """Record that a tensor over ``copy`` is kept; changes to it are written to the weight."""
        ...

    def require_gradients_unused(self) -> None:
        """Raise if gradients are dropped or replaced that backward has already applied."""
        ...

    def name(self, index: int) -> str: ...


class ParamHandle:
    """The engine's data about a managed parameter.

    It is looked up by the parameter's identity. The parameter holds nothing itself, so its copies
    and pickles are ordinary parameters.
    """

    __slots__ = ("_access", "_at", "_hidden", "_shown", "_spec", "given", "plain")

    def __init__(
        self, p: nn.Parameter, spec: ParamSpec, access: WeightAccess, shown: type, hidden: type
    ) -> None:
        """Make the parameter a managed one, without changing its data.

        Args:
            shown: mixed into its class while its weights are in place.
            hidden: mixed into its class while they are not.
        """
        self._spec, self.plain = spec, type(p)
        self._shown, self._hidden = _mixed(self.plain, shown), _mixed(self.plain, hidden)
        self._access = weakref.ref(access)
        self.given = False  # the parameter was given away, or is about to be
        self._at: torch.Tensor | None = None  # what it points at, if that is known
        _MANAGED[p] = self

    @property
    def index(self) -> int:
        return self._spec.index

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor without memory, with the parameter's shape and strides."""
        _, _, shape, stride = self._spec.as_parameter(torch.float32)
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    @property
    def access(self) -> WeightAccess:
        access = self._access()
        if access is None:
            raise LifecycleError(
                "the engine of this parameter is gone, and its weights with it; call "
                "overspill.unwrap(model) before close()"
            )
        return access

    # An exception may come between any two lines of these. A shown parameter over a placeholder
    # would give wrong values; a hidden one over its weights gives the right ones.

    def show(self, p: nn.Parameter, weights: torch.Tensor) -> None:
        """Point the parameter at its weights, which are in place."""
        if self.given:
            return
        if self._at is not weights:
            self._point(p, weights)
        p.__class__ = self._shown

    def hide(self, p: nn.Parameter, stub: torch.Tensor) -> None:
        """Point the parameter at a placeholder of its shape: its weights are elsewhere."""
        if self.given:
            return
        p.__class__ = self._hidden
        if self._at is not stub:  # resident ones have the same data, shown and hidden
            self._point(p, stub)

    def _point(self, p: nn.Parameter, memory: torch.Tensor) -> None:
        self._at = None
        with torch_private.without_overrides():  # else the data of a hidden one cannot be set
            _set_data(p, memory)
        self._at = memory

    def release(self, p: nn.Parameter, weights: torch.Tensor) -> None:
        """Make the parameter an ordinary one again; a second call does nothing."""
        self.given, self._at = True, None
        if managed(p) is self:
            p.__class__ = self.plain
            _set_data(p, weights)
            del _MANAGED[p]


_MANAGED = WeakTensorKeyDictionary()
_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def managed(p: Any) -> ParamHandle | None:
    """Return the handle of a parameter that an engine manages, also after the engine was closed."""
    found: ParamHandle | None = _MANAGED.get(p)
    return found


def known(p: Any) -> ParamHandle:
    found = managed(p)
    assert found is not None, "a class that only managed parameters have"
    return found


@functools.cache
def _mixed(kind: type, what: type) -> type:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind)(kind.__name__, (what, kind), names)
