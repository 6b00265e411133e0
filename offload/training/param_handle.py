"""What is known of parameters whose weights an engine holds, and how they reach them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import OffloadError
from ..schedule.units import ParamSpec
from . import torch_private

T = TypeVar("T")


class PlaceholderParam:
    """Of a parameter's class while its weights are elsewhere."""

    requires_grad: bool


class WeightAccess(Protocol):
    """How parameters reach their weights; all by parameter index."""

    def read(self, index: int) -> torch.Tensor:
        """A copy of the current weight."""
        ...

    def borrow(self, index: int) -> torch.Tensor:
        """As ``read``, to be lent on: there is one copy at a time that others have tensors over."""
        ...

    def compute(self, indices: Collection[int], run: Callable[[], T]) -> T:
        """What ``run`` gives, which uses parameters of one unit, that show meanwhile, and whose
        result is differentiated.  What it saves for that is found again in backward.
        ``NotImplemented``: it cannot be here."""
        ...

    def address(self, index: int) -> int:
        """Where the current weight is in the device's memory; good until another unit is needed."""
        ...

    def together(self, indices: Collection[int]) -> bool:
        """Whether the parameters are of one unit."""
        ...

    def write(self, index: int, value: torch.Tensor) -> None:
        """Another weight takes the place of the current one."""
        ...

    def replace(self, index: int, value: torch.Tensor) -> None:
        """As ``write``; ``value`` itself is lent from then on, what was lent is the reader's."""
        ...

    def lend(self, index: int, copy: torch.Tensor) -> None:
        """The reader keeps a tensor over this copy, and may change it: then it is written."""
        ...

    def require_gradients_unused(self) -> None:
        """Raise if gradients are dropped or replaced which backward has applied already."""
        ...

    def name(self, index: int) -> str: ...


class ParamHandle:
    """What is known of a managed parameter; found by its identity, as the parameter itself may hold
    nothing: copies and pickles of it are ordinary parameters."""

    __slots__ = ("_access", "_hidden", "_shown", "_spec", "given", "plain")

    def __init__(
        self, p: nn.Parameter, spec: ParamSpec, access: WeightAccess, shown: type, hidden: type
    ) -> None:
        """Makes the parameter a managed one; what it shows stays as it is.  ``shown``, ``hidden``:
        mixed into its class while its weights are in place, and while they are not."""
        self._spec, self.plain = spec, type(p)
        self._shown, self._hidden = _mixed(self.plain, shown), _mixed(self.plain, hidden)
        self._access = weakref.ref(access)
        self.given = False  # the parameter is given away, or is about to be
        _MANAGED[p] = self

    @property
    def index(self) -> int:
        return self._spec.index

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """Without memory, of the parameter's shape and strides."""
        _, _, shape, stride = self._spec.as_parameter(torch.float32)
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    @property
    def access(self) -> WeightAccess:
        access = self._access()
        if access is None:
            raise OffloadError(
                "the engine of this parameter is gone, and its weights with it; call "
                "overspill.unwrap(model) before close()"
            )
        return access

    # Between two lines of these an exception may come up.  A parameter that shows a stub would give
    # wrong values; one that is hidden over its weights gives right ones.

    def show(self, p: nn.Parameter, weights: torch.Tensor) -> None:
        """The parameter's weights are in place."""
        if self.given:
            return
        with torch_private.without_overrides():  # else the data of a hidden one cannot be set
            _set_data(p, weights)
        p.__class__ = self._shown

    def hide(self, p: nn.Parameter, stub: torch.Tensor) -> None:
        """The parameter's weights are elsewhere; ``stub`` has its shape."""
        if self.given:
            return
        p.__class__ = self._hidden
        with torch_private.without_overrides():
            _set_data(p, stub)

    def release(self, p: nn.Parameter, weights: torch.Tensor) -> None:
        """The parameter is an ordinary one again.  A second time does nothing."""
        self.given = True
        if managed(p) is self:
            p.__class__ = self.plain
            _set_data(p, weights)
            del _MANAGED[p]


_MANAGED = WeakTensorKeyDictionary()
_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def managed(p: Any) -> ParamHandle | None:
    """What is known of a parameter that an engine manages, or has until it was closed."""
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
