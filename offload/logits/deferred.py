"""A tensor of logits that are computed when they are used; see Note [Logits in chunks]."""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from ..errors import ModelError
from ..params.operations import changes_in_place
from ..private import compile_private, torch_private
from ..private.reentrancy import called_by
from .rows import (
    Function,
    Source,
    autocast_dtype,
    joined,
    ordinary,
    per_token,
    total,
    under_autocast,
    without_gradients,
)

Derive = Callable[[torch.Tensor], torch.Tensor]  # makes logits from other logits
_NO = NotImplemented
# Functions that need no values of their argument.
_ABOUT = frozenset({
    "__hash__", "__len__", "dim", "element_size", "get_device", "is_complex", "is_floating_point",
    "ndimension", "nelement", "numel", "size",
})  # fmt: skip
_PROPERTIES = frozenset({
    "device", "dtype", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_nested",
    "is_quantized", "is_sparse", "itemsize", "layout", "names", "nbytes", "ndim", "requires_grad",
    "shape",
})  # fmt: skip
# Functions that only rearrange or select tokens, if the last dimension stays.
_MOVES = frozenset({
    "__getitem__", "__iter__", "chunk", "contiguous", "detach", "flatten", "narrow", "permute",
    "reshape", "select", "split", "squeeze", "swapaxes", "transpose", "unbind", "unflatten",
    "unsqueeze", "view",
})  # fmt: skip
# Functions of single elements, and of a token's logits to as many numbers.
_STEPS = frozenset({
    "__add__", "__mul__", "__neg__", "__radd__", "__rmul__", "__rsub__", "__rtruediv__", "__sub__",
    "__truediv__", "add", "bfloat16", "clone", "div", "divide", "double", "exp", "float", "half",
    "log_softmax", "mul", "multiply", "neg", "rsub", "softmax", "sub", "subtract", "tanh", "to",
    "true_divide",
})  # fmt: skip
_REDUCTIONS = frozenset({
    "amax", "amin", "argmax", "argmin", "gather", "logsumexp", "mean", "sum", "take_along_dim",
})  # fmt: skip
_LOSSES = frozenset({"cross_entropy", "nll_loss"})
_MEMORY = frozenset({"__dlpack__", "data_ptr", "numpy", "storage", "untyped_storage"})
# Functions that give out gradients of logits; of properties, ``grad``.
_WATCHES = frozenset({"grad", "register_hook", "retain_grad"})
_SIZES = 7, 11  # of a last dimension, to see what a function does to it


class _Family:
    """Logits and what was derived from them without computing them.

    Attributes:
        members: those that are still in use.
        ordinary: ordinary logits exist, and every member is computed from them.
        used: something with a graph was computed in chunks, so its gradient reaches no logits.
    """

    def __init__(self) -> None:
        self.members = weakref.WeakSet[DeferredLogits]()
        self.ordinary = self.used = False


class DeferredLogits(torch.Tensor):
    """Logits ``(..., V)`` that are not computed as a whole.

    Functions of single tokens run chunk by chunk. For any other use, ordinary logits are computed
    once, and everything uses them from then on.
    """

    source: Source
    family: _Family
    _derived: tuple[DeferredLogits, Derive] | None
    _ordinary: torch.Tensor | None
    _has_graph: bool
    _node: Any  # its own place in the graph

    @staticmethod
    def make(
        source: Source, derived: tuple[DeferredLogits, Derive] | None = None
    ) -> DeferredLogits:
        """Return the logits of a source.

        Args:
            derived: other logits, and how these result from them.
        """
        if not torch.is_grad_enabled():
            source = without_gradients(source)
        hidden, projection = source.hidden, source.projection
        shape = (*hidden.shape[:-1], projection.head.out_features)
        wrapper = partial(
            torch_private.make_wrapper, DeferredLogits, hidden, projection.dtype, shape
        )
        made = joined(source, wrapper)
        assert isinstance(made, DeferredLogits)
        made.source, made._derived, made._ordinary = source, derived, None
        made._has_graph = torch.is_grad_enabled()
        with torch_private.without_overrides():
            made._node = made.grad_fn
        made.family = _Family() if derived is None else derived[0].family
        made.family.members.add(made)
        return made

    def values(self, *, keep: bool = True) -> torch.Tensor:
        """Return ordinary logits; ``keep``: everything uses them from now on."""
        if self._ordinary is not None:
            return self._ordinary
        if not (keep or self.family.ordinary):
            return ordinary(self.source)
        with torch.set_grad_enabled(self._has_graph):
            if self._derived is None:
                self._ordinary = ordinary(self.source)
            else:
                logits, derive = self._derived
                self._ordinary = derive(logits.values())
        self.family.ordinary = True
        return self._ordinary

    @property
    def is_own(self) -> bool:
        """Whether these are the logits of the source, and no ``Function`` has returned them."""
        with torch_private.without_overrides():
            return self.grad_fn is self._node

    def __repr__(self) -> str:  # type: ignore[override]
        """Describe the logits without computing them."""
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Run a function in chunks if it treats tokens one by one, else on ordinary logits."""
        return _run(func, args, dict(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Run an operation of torch's own code, which sees no graph, on the values."""
        changed = torch_private.mutated_arguments(func, args, kwargs or {})
        if any(isinstance(each, DeferredLogits) for each in changed):
            raise ModelError(
                "logits that loss='chunked' has not computed cannot be changed in place after a "
                "torch.autograd.Function has returned them; change a clone(), or leave loss out"
            )
        args, kwargs = torch_private.tree_map(
            lambda leaf: leaf.values(keep=False).detach()
            if isinstance(leaf, DeferredLogits) else leaf,
            (tuple(args), dict(kwargs or {})),
        )  # fmt: skip
        return func(*args, **kwargs)


@compile_private.not_compiled
def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a function with deferred logits among its arguments."""
    if not args and "input" in kwargs:
        args = (kwargs.pop("input"),)
    if not all(each.is_own for each in _deferred_in((tuple(args), kwargs))):
        # The gradient must go through the function that returned them, so autograd sees all.
        with torch_private.without_overrides():
            return func(*args, **kwargs)
    logits, name = args[0] if args else None, getattr(func, "__name__", "")
    of_property = torch_private.property_name(func) if name == "__get__" else ""
    watches = name in _WATCHES or of_property in _WATCHES
    watched = _deferred_in((tuple(args), kwargs)) if watches else []
    if any(each.family.used for each in watched):
        # FSDP2 hooks all outputs to know when backward begins; it begins with the loss.
        if name == "register_hook" and called_by("torch.distributed.fsdp"):
            return RemovableHandle(OrderedDict())
        raise ModelError(
            "loss='chunked' has computed the loss without these logits, so they get no gradient; "
            "leave loss out to watch it"
        )
    if isinstance(logits, DeferredLogits) and not logits.family.ordinary:
        if name in _ABOUT or of_property in (*_PROPERTIES, "grad"):
            with torch_private.without_overrides():
                return func(*args, **kwargs)
        # What a backward computes with saved logits must become an ordinary gradient.
        gradient = torch_private.in_backward() and not torch.is_grad_enabled()
        if not gradient and not _deferred_in((tuple(args[1:]), kwargs)):
            found = _deferred(func, name, logits, tuple(args[1:]), dict(kwargs))
            if found is not _NO:
                return found
    return _on_values(func, name, args, kwargs)


def _deferred_in(values: Any) -> list[DeferredLogits]:
    leaves = torch_private.tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, DeferredLogits)]


def _on_values(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a function on ordinary logits."""
    changed = kwargs.get("out") if "out" in kwargs else args[0] if changes_in_place(func) else None
    if isinstance(changed, DeferredLogits):
        # What was made of them before must not see the change, and views of them must.
        for member in list(changed.family.members):
            member.values()
    # Memory whose address is taken must live as long as the logits.
    keep = torch.is_grad_enabled() or name in _MEMORY or name == "__get__"
    if torch_private.in_checkpoint():
        keep = False  # it counts what is saved, in forward and in the recomputation alike
    given: dict[int, DeferredLogits] = {}

    def plain(leaf: Any) -> Any:
        if not isinstance(leaf, DeferredLogits):
            return leaf
        values = leaf.values(keep=keep)
        given[id(values)] = leaf
        return values

    args, kwargs = torch_private.tree_map(plain, (tuple(args), dict(kwargs)))
    made = func(*args, **kwargs)
    return made if changed is None else given.get(id(made), made)


def _deferred(
    func: Any, name: str, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a function without all logits at once, or return ``NotImplemented``."""
    if name in _MOVES:
        return _moved(func, name, logits, args, kwargs)
    if name in _STEPS:
        return _stepped(func, logits, args, kwargs)
    if name in _REDUCTIONS:
        return _reduced(func, logits, args, kwargs)
    if name in _LOSSES:
        return _loss(func, logits, *args, **kwargs)
    return _NO


def _moved(
    func: Any, name: str, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return logits of hidden states that are moved in the same way."""
    source, vocabulary = logits.source, logits.shape[-1]
    source.require_unchanged()
    if name == "__iter__":
        func = torch.unbind
    sizes = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args

    def at(size: int, t: torch.Tensor) -> Any:
        """Run the function on a tensor with another size of the last dimension."""
        if name not in ("view", "reshape"):
            return func(t, *args, **kwargs)
        last = size if sizes[-1] == vocabulary else sizes[-1]
        return t.reshape(*sizes[:-1], last)

    if name in ("view", "reshape") and (kwargs or not _are_sizes(sizes)):
        return _NO
    if name == "__getitem__" and not _selects_tokens(args[0], logits):
        return _NO
    if name == "split":
        dim = args[1] if args[1:] else kwargs.get("dim", 0)
        if dim % logits.dim() == logits.dim() - 1:
            return _NO
    if name not in ("__getitem__", "split"):
        one = source.hidden.new_zeros(())
        try:
            few, more = (at(n, one.expand(*logits.shape[:-1], n)) for n in _SIZES)
        except (RuntimeError, IndexError):
            return _NO  # the logits themselves may be able to do it, or raise a better error
        if not _keeps_last(few, more):
            return _NO
    numbers, given = itertools.count(), _copied((args, kwargs))

    def made(hidden: torch.Tensor) -> DeferredLogits:
        moved = replace(source, hidden=hidden, hidden_version=torch_private.version_of(hidden))
        if name == "detach":
            moved = without_gradients(moved)
        return DeferredLogits.make(moved, (logits, partial(derive, next(numbers))))

    def derive(number: int, values: torch.Tensor) -> torch.Tensor:
        mine, more = given
        found: torch.Tensor = torch_private.tree_leaves(func(values, *mine, **more))[number]
        return found

    found = torch_private.tree_map(made, at(source.hidden.shape[-1], source.hidden))
    return iter(found) if name == "__iter__" else found


def _keeps_last(few: Any, more: Any) -> bool:
    """Return whether results of tensors whose last dimensions are ``_SIZES`` differ in it alone."""
    one, other = _SIZES
    return all(
        a.shape[:-1] == b.shape[:-1] and (a.shape[-1:], b.shape[-1:]) == ((one,), (other,))
        for a, b in zip(
            torch_private.tree_leaves(few), torch_private.tree_leaves(more), strict=False
        )
    )


def _selects_tokens(index: Any, logits: DeferredLogits) -> bool:
    """Return whether an index leaves the last dimension as it is, and last."""
    items = index if isinstance(index, tuple) else (index,)
    kinds = int, slice, type(None), type(Ellipsis), torch.Tensor
    if any(isinstance(item, bool) or not isinstance(item, kinds) for item in items):
        return False

    def used(item: Any) -> int:
        if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
            return item.dim()
        return int(item is not None and item is not Ellipsis)

    ellipsis = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    if not items[ellipsis + 1 :] and sum(map(used, items)) < logits.dim():
        return True  # it does not reach the last dimension
    last = items[-1]
    return isinstance(last, slice) and last.indices(logits.shape[-1]) == (0, logits.shape[-1], 1)


def _are_sizes(sizes: Sequence[Any]) -> bool:
    return bool(sizes) and all(isinstance(n, int) for n in sizes)


def _stepped(
    func: Any, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return logits after a function that treats tokens one by one."""
    source, called = logits.source, (args, dict(kwargs))
    dim = kwargs.pop("dim", None)
    if func in (torch.softmax, torch.log_softmax) or func.__name__ in ("softmax", "log_softmax"):
        if args and dim is None:
            dim, args = args[0], args[1:]
        if dim not in (-1, logits.dim() - 1):
            return _NO
        kwargs["dim"] = -1
    elif dim is not None:
        return _NO
    leaves = [leaf for leaf in torch_private.tree_leaves((args, kwargs))
              if isinstance(leaf, torch.Tensor)]  # fmt: skip
    if any(t.requires_grad or not _is_constant(t, logits) for t in leaves):
        return _NO
    args, kwargs = torch_private.tree_map(
        lambda leaf: leaf.reshape(-1)
        if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf, _copied((args, kwargs))
    )  # fmt: skip
    kind = logits.device.type
    step = _call(func, args, kwargs, kind)
    try:
        probe = step(source.hidden.new_zeros(1, logits.shape[-1]).to(logits.dtype))
    except (RuntimeError, TypeError, ValueError):
        return _NO
    if probe.shape != (1, logits.shape[-1]) or probe.device != logits.device:
        return _NO
    before = source.projection
    after = replace(before, steps=(*before.steps, step), dtype=probe.dtype)
    mine, more = _copied(called)
    derived = logits, _call(func, mine, more, kind)
    return DeferredLogits.make(replace(source, projection=after), derived)


def _copied(values: Any) -> Any:
    """Return arguments with copies of tensors, which may change before they are used."""
    return torch_private.tree_map(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, values
    )


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: str) -> Derive:
    """Return a call of ``func`` under the autocast of now, on devices of that kind."""
    dtype = autocast_dtype(kind)

    def call(t: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = under_autocast(kind, dtype, lambda: func(t, *args, **kwargs))
        return made

    return call


def _is_constant(t: torch.Tensor, logits: torch.Tensor) -> bool:
    """Return whether a tensor is the same for all tokens."""
    last = t.shape[-1] if t.dim() else 1
    return t.dim() <= logits.dim() and t.numel() == last and last in (1, logits.shape[-1])


def _reduced(
    func: Any, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return a function of each token's logits."""
    tokens = logits.shape[:-1]
    dim = kwargs.pop("dim") if "dim" in kwargs else None
    indices = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    plain = [a for a in args if not isinstance(a, torch.Tensor)]
    kwargs = {key: value for key, value in kwargs.items() if not isinstance(value, torch.Tensor)}
    if dim is None and plain:
        # take_along_dim has its dimension after the indices, the others before.
        dim, plain = plain[0], plain[1:]
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    if dim not in (-1, logits.dim() - 1) or isinstance(dim, bool) or len(indices) > 1:
        return _NO
    if any(i.shape[:-1] != tokens or i.dim() != logits.dim() for i in indices):
        return _NO
    if kwargs.get("out") is not None or kwargs.pop("sparse_grad", False) or len(plain) > 1:
        return _NO
    named = func.__name__

    def reduce(t: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor
        if named == "gather":
            found = torch.gather(t, -1, rows[0])
        elif named == "take_along_dim":
            found = torch.take_along_dim(t, rows[0], -1)
        else:
            found = func(t, -1, *plain, **kwargs)
        return found

    rows = [i.reshape(tokens.numel(), i.shape[-1]) for i in indices]
    found = per_token(logits.source, _under_autocast_of_now(reduce, logits), rows)
    logits.family.used |= found.requires_grad
    return found.reshape((*tokens, *found.shape[1:]))


def _under_autocast_of_now(function: Function, logits: DeferredLogits) -> Function:
    kind = logits.device.type
    dtype = autocast_dtype(kind)
    return lambda *given: under_autocast(kind, dtype, lambda: function(*given))


def _loss(
    func: Any, logits: DeferredLogits, target: Any, weight: Any = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """Return a loss over classes, of logits ``(N, V)`` and a target ``(N,)``."""
    if not isinstance(target, torch.Tensor) or target.dtype not in (torch.int64, torch.uint8):
        return _NO
    if logits.dim() != 2 or target.shape != logits.shape[:1] or target.device != logits.device:
        return _NO
    if weight is not None or (size_average, reduce) != (None, None):
        return _NO
    if reduction not in ("none", "sum", "mean"):
        return _NO
    more = {"label_smoothing": label_smoothing} if func is functional.cross_entropy else {}

    def function(t: torch.Tensor, few: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = func(t, few, ignore_index=ignore_index, reduction="none", **more)
        return found

    loss = _under_autocast_of_now(function, logits)
    if reduction == "none":
        found = per_token(logits.source, loss, [target])
    else:
        count = (target != ignore_index).sum() if reduction == "mean" else None
        found = total(logits.source, loss, [target], count)
    logits.family.used |= found.requires_grad
    return found
