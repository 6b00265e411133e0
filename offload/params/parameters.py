"""Classes of managed parameters: the user's own objects, which know where their weights are.

While its weights are in place, a parameter is an ordinary one, except that its ``.data`` is
watched. A change in place while compute may be using the weights would be lost or half saved, so it
is detected.

While they are elsewhere, the class of the object is ``OffloadedParam``. Any operation on it, or on
its ``.data``, reads the current weights, and writes back what it changed. With gradients enabled,
the weights read are connected to the parameter in the graph, so its gradient arrives as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from ..errors import OffloadError, WeightError
from ..private import torch_private
from ..private.reentrancy import callers
from ..schedule.units import ParamSpec
from .operations import (
    ABOUT,
    CASTS,
    LAYOUT,
    LIKE,
    Operation,
    address,
    cast_to_itself,
    grad,
    is_view,
    sets_grad,
)
from .param_handle import ParamHandle, PlaceholderParam, WeightAccess, known, managed
from .pickling import on_meta, spawning

_get_data = torch.Tensor.data.__get__  # type: ignore[attr-defined]


def manage(p: nn.Parameter, spec: ParamSpec, access: WeightAccess) -> ParamHandle:
    """Make a parameter a managed one if it is not yet; it may be shown or hidden."""
    found = managed(p) or ParamHandle(p, spec, access, OnloadedParam, OffloadedParam)
    found.given = False
    return found


class _Fixed:
    """A mixin that refuses ``set_`` and ``resize_``, for which torch calls no override."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        mine = known(self)
        raise WeightError(
            f"set_ and resize_ would give parameter {mine.access.name(mine.index)!r} other "
            "memory; use copy_, or overspill.unwrap(model) first"
        )

    set_ = resize_ = resize_as_ = _refuse


class OnloadedParam(_Fixed):
    """A mixin of the class of a parameter whose weights are in place."""

    @property
    def data(self) -> torch.Tensor:
        # Detached, it shares the parameter's version: graphs, and the engine, see its edits.
        plain: torch.Tensor = self.detach()  # type: ignore[attr-defined]
        return plain

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        mine = known(self)
        if not torch_private.same_memory(_get_data(self), value):
            raise WeightError(
                f"the data of parameter {mine.access.name(mine.index)!r} was replaced while it "
                "is in use (in forward); replace it outside of forward, in the same shape and dtype"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return _plain_copy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduced(self, super().__reduce_ex__, protocol)


class OffloadedParam(PlaceholderParam, _Fixed):
    """A mixin of the class of a parameter whose weights are elsewhere."""

    @property
    def data(self) -> torch.Tensor:
        mine = known(self)
        copy = mine.access.borrow(mine.index)
        mine.access.lend(mine.index, copy)
        return copy

    @data.setter
    def data(self, value: Any) -> None:
        mine = known(self)
        with torch_private.without_overrides():
            stub = _get_data(self)
            if value is self or torch_private.same_memory(stub, value):
                return
            like = (stub.shape, stub.dtype, stub.device)
        if (value.shape, value.dtype, value.device) != like:
            raise WeightError(
                f"the data of parameter {mine.access.name(mine.index)!r} was replaced by another "
                f"shape, dtype or device ({tuple(value.shape)}, {value.dtype}, {value.device}); it "
                f"has {tuple(like[0])}, {like[1]}, {like[2]}: assign a tensor of these, pass "
                "precision= to wrap for another dtype, or call overspill.unwrap(model) first"
            )
        mine.access.replace(mine.index, value.detach())

    # Faster than through ``__torch_function__``, which handles ``p.grad`` in the same way.

    @property
    def grad(self) -> torch.Tensor | None:
        return torch_private.grad_of(self)  # type: ignore[arg-type]

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        known(self).access.require_gradients_unused()
        torch_private.set_grad(self, value)  # type: ignore[arg-type]

    @grad.deleter
    def grad(self) -> None:
        known(self).access.require_gradients_unused()
        torch_private.set_grad(self, None)  # type: ignore[arg-type]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return _plain_copy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduced(self, super().__reduce_ex__, protocol)

    def __repr__(self) -> str:
        mine = known(self)
        try:
            weights = mine.access.read(mine.index)
        except OffloadError as error:
            return f"Parameter of shape {tuple(self.shape)}: {error}"  # type: ignore[attr-defined]
        return f"Parameter containing:\n{weights.requires_grad_(self.requires_grad)!r}"  # type: ignore[attr-defined]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if (name in LAYOUT or name in LIKE) and args and isinstance(args[0], OffloadedParam):
            p: Any = args[0]  # its placeholder has the strides of a scalar
            if name in LIKE and kwargs.get("device") is None:
                kwargs = {**kwargs, "device": p.device}
            return func(known(p).empty(p.dtype), *args[1:], **kwargs)
        if name == "data_ptr":
            return address(args[0])
        if name in ("detach", "share_memory_"):
            _refuse_other_uses(name, args[0])
        if sets_grad(func):
            known(args[0]).access.require_gradients_unused()
        if func is torch.autograd.grad:
            return grad(*args, **kwargs)
        if name in ABOUT or (name in ("__get__", "__set__", "__delete__") and not is_view(func)):
            with torch_private.without_overrides():
                return func(*args, **kwargs)
        if name in CASTS and (same := cast_to_itself(func, args, kwargs)) is not None:
            return same
        if name == "copy_" and args[0] is args[1]:
            return args[0]
        if getattr(func, "__module__", "") == "torch.nn.init":  # on leaves, outside of any graph
            return torch_private.without_grad(Operation().run)(func, args, kwargs)
        return Operation().run(func, args, kwargs)


def _refuse_other_uses(name: str, p: Any) -> None:
    """Raise if a parameter is shared with other processes, or passed to ``nn.Parameter``.

    ``nn.Parameter`` would take the class of the parameter for a tensor class of the user's.
    """
    mine = known(p)
    if name == "share_memory_":
        raise WeightError(
            f"parameter {mine.access.name(mine.index)!r} cannot be shared with other processes, "
            "because its weights move; share copies (overspill.named_weights(model)), or call "
            "overspill.unwrap(model) first"
        )
    if any(frame.f_code is nn.Parameter.__new__.__code__ for frame in callers()[:5]):
        raise WeightError(
            f"nn.Parameter(p) of the wrapped parameter {mine.access.name(mine.index)!r} is not "
            "supported; pass p.data or p.detach() instead of p"
        )


def _reduced(p: Any, plainly: Callable[[Any], Any], protocol: Any) -> Any:
    """Return the ``__reduce_ex__`` value of a parameter: ordinary, with weights, or on ``meta``."""
    return on_meta(p) if spawning() else plainly(protocol)


def _plain_copy(p: Any, memo: dict[int, Any]) -> nn.Parameter:
    if id(p) not in memo:
        mine = known(p)
        values = mine.access.read(mine.index)
        memo[id(p)] = mine.plain(values, requires_grad=p.requires_grad)
    copied: nn.Parameter = memo[id(p)]
    return copied
