"""Replicated parameters whose updated weights are on their way: their first use waits for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..params.operations import ABOUT, LAYOUT, LIKE, is_view
from ..params.param_handle import ParamHandle, PlaceholderParam, known
from ..params.parameters import OnloadedParam
from ..private import torch_private
from ..schedule.units import ParamSpec

_ANY_TIME = (ABOUT | LAYOUT | LIKE) - {"__reduce_ex__"}  # operations that read no values


class PendingParam(PlaceholderParam):
    """Mixed into the class of a parameter whose weights may not be current."""

    @property
    def data(self) -> torch.Tensor:
        arrive(self)
        return self.data

    @data.setter
    def data(self, value: Any) -> None:
        arrive(self)
        self.data = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        arrive(self)
        return self.__deepcopy__(memo)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        attribute = name in ("__get__", "__set__", "__delete__") and not is_view(func)
        if attribute or name in _ANY_TIME:
            with torch_private.without_overrides():
                return func(*args, **kwargs)
        for each in torch_private.tree_leaves((args, kwargs)):
            if isinstance(each, PendingParam):
                arrive(each)
        return func(*args, **kwargs)


def arrive(p: Any) -> None:
    """Wait until the weights are current; the parameter then is an ``OnloadedParam``."""
    mine = known(p)
    access: Any = mine.access
    access.arrive(mine.index)


def manage_replica(p: nn.Parameter, number: int, name: str, access: Any) -> ParamHandle:
    """Manage a parameter so that it can be awaited; its weights are current for now."""
    spec = ParamSpec(number, name, tuple(p.shape), tuple(p.stride()), p.numel(), 0)
    made = ParamHandle(p, spec, access, OnloadedParam, PendingParam)
    made.show(p, p.data)
    return made
