"""What a managed parameter is for Python code: the user's own object, which knows where its weights
are.

While its weights are in place it is an ordinary parameter, but that its ``.data`` is watched: what
is changed in place while compute may be using it would be lost, or half saved, and is found out.
While they are elsewhere the class of the object is ``Hidden``: any operation on it, or on its
``.data``, reads the current weights, and writes back what it changed.  With gradients on, what is
read is joined to the parameter in the graph, so that its gradient arrives as always.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import OffloadError
from ..schedule.units import ParamSpec
from . import torch_private


class WeightAccess(Protocol):
    """How parameters reach their weights; all by parameter index."""

    def read(self, index: int) -> torch.Tensor:
        """A copy of the current weight."""
        ...

    def borrow(self, index: int) -> torch.Tensor:
        """As ``read``, to be lent on: there is one copy at a time that others have tensors over."""
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

    def name(self, index: int) -> str: ...


class Managed:
    """What is known of a managed parameter; found by its identity, as the parameter itself may hold
    nothing: copies and pickles of it are ordinary parameters."""

    __slots__ = ("_access", "_hidden", "_shown", "_spec", "given", "plain")

    def __init__(self, p: nn.Parameter, spec: ParamSpec, access: WeightAccess) -> None:
        """Makes the parameter a managed one; what it shows stays as it is."""
        self._spec, self.plain = spec, type(p)
        self._shown, self._hidden = _mixed(self.plain, Shown), _mixed(self.plain, Hidden)
        self._access = weakref.ref(access)
        self.given = False  # the parameter is given away, or is about to be
        _MANAGED[p] = self

    @property
    def index(self) -> int:
        return self._spec.index

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """Without memory, of the parameter's shape and strides."""
        return torch.empty_strided(self._spec.shape, self._spec.stride, dtype=dtype, device="meta")

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
_get_data = torch.Tensor.data.__get__  # type: ignore[attr-defined]


def managed(p: Any) -> Managed | None:
    """What is known of a parameter that an engine manages, or has until it was closed."""
    found: Managed | None = _MANAGED.get(p)
    return found


def _known(p: Any) -> Managed:
    found = managed(p)
    assert found is not None, "a class that only managed parameters have"
    return found


@functools.cache
def _mixed(kind: type, what: type) -> type:
    return type(kind)(kind.__name__, (what, kind), {})


# -- the classes ---------------------------------------------------------------------------------


class _Fixed:
    """What no managed parameter does; torch asks nobody before it does these."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        known = _known(self)
        raise OffloadError(
            f"set_ and resize_ would give parameter {known.access.name(known.index)!r} other "
            "memory; use copy_, or overspill.unwrap(model) first"
        )

    set_ = resize_ = resize_as_ = _refuse


class Shown(_Fixed):
    """Mixed into the class of a parameter whose weights are in place."""

    @property
    def data(self) -> torch.Tensor:
        # Detached, it shares the parameter's version: graphs, and the engine, see its edits.
        plain: torch.Tensor = self.detach()  # type: ignore[attr-defined]
        return plain

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        known = _known(self)
        if not torch_private.same_memory(_get_data(self), value):
            raise OffloadError(
                f"the data of parameter {known.access.name(known.index)!r} was replaced while it "
                "is in use (in forward); replace it outside of forward, in the same shape and dtype"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return _plain_copy(self, memo)


class Hidden(_Fixed):
    """Mixed into the class of a parameter whose weights are elsewhere."""

    @property
    def data(self) -> torch.Tensor:
        known = _known(self)
        copy = known.access.borrow(known.index)
        known.access.lend(known.index, copy)
        return copy

    @data.setter
    def data(self, value: Any) -> None:
        known = _known(self)
        with torch_private.without_overrides():
            stub = _get_data(self)
            if value is self or torch_private.same_memory(stub, value):
                return
            like = (stub.shape, stub.dtype, stub.device)
        if (value.shape, value.dtype, value.device) != like:
            raise OffloadError(
                f"the data of parameter {known.access.name(known.index)!r} was replaced by another "
                f"shape, dtype or device ({tuple(value.shape)}, {value.dtype}, {value.device}), as "
                "model.to, half and the like do; overspill.unwrap(model) first, or pass precision= "
                "to wrap"
            )
        known.access.replace(known.index, value.detach())

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return _plain_copy(self, memo)

    def __repr__(self) -> str:
        known = _known(self)
        try:
            weights = known.access.read(known.index)
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
        if (name in _LAYOUT or name in _LIKE) and args and isinstance(args[0], Hidden):
            p: Any = args[0]  # its stub has the strides of a single number
            if name in _LIKE and kwargs.get("device") is None:
                kwargs = {**kwargs, "device": p.device}
            return func(_known(p).empty(p.dtype), *args[1:], **kwargs)
        if name in _ABOUT or (name in ("__get__", "__set__", "__delete__") and not _is_view(func)):
            with torch_private.without_overrides():
                return func(*args, **kwargs)
        if name in _CASTS and (same := _cast_to_itself(func, args, kwargs)) is not None:
            return same
        if name == "copy_" and args[0] is args[1]:
            return args[0]
        if getattr(func, "__module__", "") == "torch.nn.init":  # of leaves, outside of any graph
            return torch_private.without_grad(_Operation().run)(func, args, kwargs)
        return _Operation().run(func, args, kwargs)


def _plain_copy(p: Any, memo: dict[int, Any]) -> nn.Parameter:
    if id(p) not in memo:
        known = _known(p)
        values = known.access.read(known.index)
        memo[id(p)] = known.plain(values, requires_grad=p.requires_grad)
    copied: nn.Parameter = memo[id(p)]
    return copied


# -- operations on hidden parameters -------------------------------------------------------------

# What says something about a tensor and touches no element of it.
_ABOUT = frozenset({
    "__format__", "__hash__", "__len__", "__reduce_ex__", "__setstate__", "_make_subclass",
    "backward", "can_cast", "data_ptr", "dim", "element_size", "get_device", "grad", "has_names",
    "is_coalesced", "is_complex", "is_conj", "is_distributed", "is_floating_point", "is_inference",
    "is_neg", "is_pinned", "is_same_size", "is_set_to", "is_shared", "is_signed", "ndimension",
    "nelement", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "numel",
    "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "result_type",
    "retain_grad", "size", "storage_offset", "storage_type",
})  # fmt: skip
_LAYOUT = frozenset({"dim_order", "is_contiguous", "is_non_overlapping_and_dense", "stride"})
_LIKE = frozenset({
    "empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like",
})  # fmt: skip
_VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})  # attributes that are tensors
_CASTS = frozenset({
    "bfloat16", "cpu", "cuda", "double", "float", "half", "ipu", "to", "type", "type_as", "xpu",
})  # fmt: skip


def _is_view(func: Any) -> bool:
    return getattr(getattr(func, "__self__", None), "__name__", "") in _VIEWS


def _cast_to_itself(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a cast gives that changes nothing (``type()`` its text); ``None`` if it does change."""
    p = args[0]
    if not isinstance(p, Hidden):
        return None
    with torch_private.without_overrides():
        probe = torch.empty((0,) * p.dim(), dtype=p.dtype, device=p.device)  # type: ignore[attr-defined]
        made = func(probe, *args[1:], **kwargs)
    if made is probe:
        return p
    return made if isinstance(made, str) else None


class _Joined(torch.autograd.Function):
    """A copy of a parameter's weight, as what stands in a graph for the parameter."""

    @staticmethod
    def forward(ctx: Any, p: torch.Tensor, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        return read()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


class _Operation:
    """One operation with hidden parameters among its arguments, run on copies of their weights."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Any, Managed, torch.Tensor, int]] = {}

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        args, kwargs = torch_private.tree_map(self._copy_of, (tuple(args), dict(kwargs)))
        result = func(*args, **kwargs)
        # torch's fused optimizers change parameters, and count no version.
        fused = getattr(func, "__name__", "").startswith("_fused_")
        for _, known, copy, version in self._copies.values():
            if fused or torch_private.version_of(copy) != version:
                if copy.requires_grad:
                    raise RuntimeError(
                        f"parameter {known.access.name(known.index)!r} requires grad, so it can be "
                        "changed in place under torch.no_grad() alone"
                    )
                known.access.write(known.index, copy)
            self._lend(known, copy, result)
        back = {id(copy): p for p, _, copy, _ in self._copies.values()}
        return torch_private.tree_map(lambda leaf: back.get(id(leaf), leaf), result)

    def _copy_of(self, value: Any) -> Any:
        if not isinstance(value, Hidden):
            return value
        if id(value) not in self._copies:
            known = _known(value)
            copy = self._read(value, known)
            self._copies[id(value)] = (value, known, copy, torch_private.version_of(copy))
        return self._copies[id(value)][2]

    @staticmethod
    def _read(p: Any, known: Managed) -> torch.Tensor:
        if torch.is_grad_enabled() and p.requires_grad:
            joined: torch.Tensor = _Joined.apply(p, lambda: known.access.borrow(known.index))
            return joined
        return known.access.borrow(known.index)

    @staticmethod
    def _lend(known: Managed, copy: torch.Tensor, result: Any) -> None:
        """A result over the copy's memory may be written to later, itself or by its ``.data``."""
        key = torch_private.storage_key(copy)
        for leaf in torch_private.tree_leaves(result):
            if not isinstance(leaf, torch.Tensor) or leaf is copy:
                continue
            if leaf.layout is torch.strided and torch_private.storage_key(leaf) == key:
                known.access.lend(known.index, copy.detach())
                return
