"""A tensor of logits that are computed when they are used; see Note [Logits in chunks]."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from ..errors import ModelError
from ..private import torch_private
from .rows import Source, joined, ordinary, per_token, total

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
_IN_PLACE = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"})
_MEMORY = frozenset({"__dlpack__", "data_ptr", "numpy", "storage", "untyped_storage"})
_WATCHES = frozenset({"register_hook", "retain_grad"})
_ROWS = 7, 11  # two sizes of a last dimension, to see what a function does to it


class _Family:
    """Logits and what was derived from them without computing them.

    Attributes:
        members: those that are still in use.
        ordinary: ordinary logits exist, and every member is computed from them.
        used: gradients have been computed in chunks, which reach no logits.
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
            source = replace(source, hidden=source.hidden.detach(), trains=False)
        like, shape = source.hidden, (*source.hidden.shape[:-1], source.head.out_features)
        made = joined(
            source,
            partial(torch_private.make_wrapper, DeferredLogits, like, source.dtype, shape),
        )
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

    def require_own_graph(self) -> None:
        """Raise ``ModelError`` if a ``torch.autograd.Function`` has returned these logits."""
        with torch_private.without_overrides():
            if self.grad_fn is not self._node and self._ordinary is None:
                raise ModelError(
                    "a torch.autograd.Function has returned logits that loss='chunked' has not "
                    "computed, so its backward would be left out; leave loss out"
                )

    def __repr__(self) -> str:  # type: ignore[override]
        """Describe the logits without computing them."""
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Run a function in chunks if it treats tokens one by one, else on ordinary logits."""
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        logits = args[0] if args else None
        if isinstance(logits, DeferredLogits):
            logits.require_own_graph()
        if isinstance(logits, DeferredLogits) and not logits.family.ordinary:
            about = name == "__get__" and torch_private.property_name(func) in _PROPERTIES
            if about or name in _ABOUT:
                with torch_private.without_overrides():
                    return func(*args, **kwargs)
            # What a backward computes with saved logits must become an ordinary gradient.
            gradient = torch_private.in_backward() and not torch.is_grad_enabled()
            if not gradient and not _has_deferred((tuple(args[1:]), kwargs)):
                found = _deferred(func, name, logits, tuple(args[1:]), dict(kwargs))
                if found is not _NO:
                    return found
        return _on_values(func, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Run an operation of torch's own code on the values."""
        if torch_private.mutated_arguments(func, args, kwargs or {}):
            raise ModelError(_CHANGED)
        args, kwargs = torch_private.tree_map(
            lambda leaf: leaf.values(keep=False).detach()
            if isinstance(leaf, DeferredLogits) else leaf,
            (tuple(args), dict(kwargs or {})),
        )  # fmt: skip
        return func(*args, **kwargs)


_CHANGED = (
    "logits that loss='chunked' has not computed yet cannot be changed in place while other "
    "tensors that were made from them are in use; change a clone(), or leave loss out"
)


def _has_deferred(values: Any) -> bool:
    return any(isinstance(leaf, DeferredLogits) for leaf in torch_private.tree_leaves(values))


def _on_values(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a function on ordinary logits."""
    changes = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    out = kwargs.get("out")
    logits = out if isinstance(out, DeferredLogits) else args[0] if args else None
    changes = changes or logits is out is not None
    # Memory whose address is taken must live as long as the logits.
    keep = changes or torch.is_grad_enabled() or name in _MEMORY or name == "__get__"
    if isinstance(logits, DeferredLogits):
        others = [each for each in logits.family.members if each is not logits]
        if changes and any(each._ordinary is None for each in others):
            raise ModelError(_CHANGED)
        if not logits.family.ordinary and name in _WATCHES and logits.family.used:
            raise ModelError(
                f"{name}: loss='chunked' has computed the loss without these logits, so they get "
                "no gradient; leave loss out to watch it"
            )
    given: dict[int, DeferredLogits] = {}

    def plain(leaf: Any) -> Any:
        if not isinstance(leaf, DeferredLogits):
            return leaf
        values = leaf.values(keep=keep)
        given[id(values)] = leaf
        return values

    args, kwargs = torch_private.tree_map(plain, (tuple(args), dict(kwargs)))
    made = func(*args, **kwargs)
    return given.get(id(made), made) if changes else made


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
    one = source.hidden.new_zeros(())
    try:
        few, more = (at(n, one.expand(*logits.shape[:-1], n)) for n in _ROWS)
    except (RuntimeError, IndexError):
        return _NO  # the logits themselves may be able to do it, or raise a better error
    pairs = list(zip(torch_private.tree_leaves(few), torch_private.tree_leaves(more), strict=False))
    kept = all(a.shape[:-1] == b.shape[:-1] and (a.shape[-1:], b.shape[-1:]) == _LAST
               for a, b in pairs)  # fmt: skip
    if not kept:
        return _NO
    if not _keeps_vocabulary(func, name, logits, args, kwargs):
        return _NO
    trains = source.trains and name != "detach"
    numbers = itertools.count()
    given = _copied((args, kwargs))

    def made(hidden: torch.Tensor) -> DeferredLogits:
        versions = (source.versions[0], torch_private.version_of(hidden))
        moved = replace(source, hidden=hidden, versions=versions, trains=trains)
        return DeferredLogits.make(moved, (logits, partial(derive, next(numbers))))

    def derive(number: int, values: torch.Tensor) -> torch.Tensor:
        mine, more = given
        found: torch.Tensor = torch_private.tree_leaves(func(values, *mine, **more))[number]
        return found

    found = torch_private.tree_map(made, at(source.hidden.shape[-1], source.hidden))
    return iter(found) if name == "__iter__" else found


def _keeps_vocabulary(
    func: Any, name: str, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Return whether a selection leaves out no part of the vocabulary, such as ``[..., :500]``."""
    if name not in ("__getitem__", "chunk", "narrow", "select", "split"):
        return True
    index = args[0] if args else None
    items = index if isinstance(index, tuple) else (index,)
    if name == "__getitem__" and any(isinstance(i, (torch.Tensor, list)) for i in items):
        masks = torch.bool, torch.uint8
        used = sum(
            i.dim() if isinstance(i, torch.Tensor) and i.dtype in masks else i is not None
            for i in items
        )
        if any(isinstance(i, list) for i in items) or isinstance(items[-1], slice):
            return False
        return Ellipsis not in [i for i in items if not isinstance(i, torch.Tensor)] and (
            used < logits.dim()
        )
    shape = logits.shape
    found = func(logits.source.hidden.new_zeros(()).expand(*shape), *args, **kwargs)
    return all(t.shape[-1:] == shape[-1:] for t in torch_private.tree_leaves(found))


_LAST = ((_ROWS[0],), (_ROWS[1],))


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
    step = _call(func, args, kwargs)
    try:
        probe = step(source.hidden.new_zeros(1, logits.shape[-1]).to(logits.dtype))
    except (RuntimeError, TypeError, ValueError):
        return _NO
    if probe.shape != (1, logits.shape[-1]) or probe.device != logits.device:
        return _NO
    after = replace(source, steps=(*source.steps, step), dtype=probe.dtype)
    return DeferredLogits.make(after, (logits, _call(func, *_copied(called))))


def _copied(values: Any) -> Any:
    """Return arguments with copies of tensors, which may change before they are used."""
    return torch_private.tree_map(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, values
    )


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Derive:
    def call(t: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = func(t, *args, **kwargs)
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

    def function(t: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
        given = {**kwargs, "dim": -1}
        found: torch.Tensor
        if named == "gather":
            found = torch.gather(t, -1, rows[0])
        elif named == "take_along_dim":
            found = torch.take_along_dim(t, rows[0], -1)
        else:
            found = func(t, *((-1, *plain) if plain else ()), **({} if plain else given))
        return found

    rows = [i.reshape(-1, i.shape[-1]) for i in indices]
    found = per_token(logits.source, function, rows)
    logits.family.used = True
    return found.reshape((*tokens, *found.shape[1:]))


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

    logits.family.used = True
    if reduction == "none":
        return per_token(logits.source, function, [target])
    count = (target != ignore_index).sum() if reduction == "mean" else None
    return total(logits.source, function, [target], count)
