"""Operations on parameters whose weights are elsewhere.

They run on the weights where these are, or on copies, which are written back if the operation has
changed them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import WeightError
from ..private import torch_private
from .param_handle import ParamHandle, PlaceholderParam, known

# Functions that do not touch any element of a tensor.
ABOUT = frozenset({
    "__format__", "__hash__", "__len__", "__reduce_ex__", "__setstate__", "_make_subclass",
    "backward", "can_cast", "dim", "element_size", "get_device", "grad", "has_names",
    "is_coalesced", "is_complex", "is_conj", "is_distributed", "is_floating_point", "is_inference",
    "is_neg", "is_pinned", "is_same_size", "is_set_to", "is_shared", "is_signed", "ndimension",
    "nelement", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "numel",
    "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "result_type",
    "retain_grad", "size", "storage_offset", "storage_type",
})  # fmt: skip
LAYOUT = frozenset({"dim_order", "is_contiguous", "is_non_overlapping_and_dense", "stride"})
LIKE = frozenset({
    "empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like",
})  # fmt: skip
_CHANGES = frozenset({
    "__iadd__", "__iand__", "__idiv__", "__ifloordiv__", "__ilshift__", "__imod__", "__imul__",
    "__ior__", "__ipow__", "__irshift__", "__isub__", "__itruediv__", "__ixor__", "__setitem__",
})  # fmt: skip
_PURE = frozenset({
    "__matmul__", "__rmatmul__", "addmm", "baddbmm", "bmm", "einsum", "linear", "matmul", "mm",
})  # fmt: skip
_SIMPLE = (bool, complex, float, int, str, torch.device, torch.dtype, type(None))
_VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})  # attributes that are tensors
CASTS = frozenset({
    "bfloat16", "cpu", "cuda", "double", "float", "half", "ipu", "to", "type", "type_as", "xpu",
})  # fmt: skip


def changes_in_place(func: Any) -> bool:
    """Return whether ``func`` changes its first argument in place."""
    name = getattr(func, "__name__", "")
    if name == "requires_grad_":
        return False
    return (name.endswith("_") and not name.endswith("__")) or name in _CHANGES


def is_view(func: Any) -> bool:
    return getattr(getattr(func, "__self__", None), "__name__", "") in _VIEWS


def sets_grad(func: Any) -> bool:
    """Return whether ``func`` is ``p.grad = ...`` or ``del p.grad``."""
    return (
        getattr(func, "__name__", "") in ("__set__", "__delete__")
        and getattr(getattr(func, "__self__", None), "__name__", "") == "grad"
    )


def cast_to_itself(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of a cast that changes nothing (``type()``: a string), else ``None``."""
    p = args[0]
    if not isinstance(p, PlaceholderParam):
        return None
    with torch_private.without_overrides():
        probe = torch.empty((0,) * p.dim(), dtype=p.dtype, device=p.device)  # type: ignore[attr-defined]
        made = func(probe, *args[1:], **kwargs)
    if made is probe:
        return p
    return made if isinstance(made, str) else None


def grad(
    outputs: Any, inputs: Any, *args: Any, materialize_grads: bool = False, **more: Any
) -> Any:
    """Call ``torch.autograd.grad`` with hidden parameters among its arguments.

    Overrides cannot just be disabled around the call: a checkpoint recomputed in it would read
    placeholders. So inputs that are parameters are replaced by graph edges, which have no
    overrides.
    """
    wanted = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    if any(isinstance(leaf, PlaceholderParam) for leaf in torch_private.tree_leaves(outputs)):
        with torch_private.without_overrides():  # of itself: nothing is computed
            more["materialize_grads"] = materialize_grads
            return torch.autograd.grad(outputs, inputs, *args, **more)
    edge: Any = torch.autograd.graph.get_gradient_edge
    with torch_private.without_overrides():
        edges = [edge(p) if isinstance(p, PlaceholderParam) else p for p in wanted]
    if materialize_grads:  # not accepted with edges
        more["allow_unused"] = True
    found = torch.autograd.grad(outputs, edges, *args, **more)
    if not materialize_grads:
        return found
    pairs = zip(found, wanted, strict=True)
    return tuple(torch.zeros_like(p) if grad is None else grad for grad, p in pairs)


def address(p: Any) -> int:
    """Return the address of the weights, for a kernel that uses them now.

    Raises:
        OffloadError: no computation runs, so the weights may move before the address is used.
    """
    mine = known(p)
    if not torch_private.in_computation():
        raise WeightError(
            f"parameter {mine.access.name(mine.index)!r} has no address between its uses; take "
            "p.data, model.state_dict() or overspill.named_weights(model), and tell parameters "
            "apart by id(p)"
        )
    return mine.access.address(mine.index)


class _Joined(torch.autograd.Function):
    """A Function that returns a copy of a weight, and passes its gradient on to the parameter."""

    @staticmethod
    def forward(ctx: Any, p: torch.Tensor, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        return read()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


def _computed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a differentiated operation on the weights where they are, so the graph holds no copy.

    Returns:
        The result, or ``NotImplemented`` if the operation may change the weights or return a view
            of them, or if they lie in several units, which may not fit at once.
    """
    name = getattr(func, "__name__", "")
    if not torch.is_grad_enabled() or kwargs.get("out") is not None:
        return NotImplemented
    if changes_in_place(func) or is_view(func):
        return NotImplemented
    leaves = torch_private.tree_leaves((tuple(args), dict(kwargs)))
    found = {id(leaf): leaf for leaf in leaves if isinstance(leaf, PlaceholderParam)}
    if name.startswith("embedding") and (len(args) > 3 or kwargs.get("max_norm") is not None):
        return NotImplemented  # it may scale rows in place
    if name not in _PURE and not all(p.requires_grad for p in found.values()):
        # Torch refuses to change parameters that require grad in place, but not others.
        return NotImplemented
    indices = {known(p).index for p in found.values()}
    accesses = {id(access): access for access in (known(p).access for p in found.values())}
    if len(accesses) != 1 or not (access := next(iter(accesses.values()))).together(indices):
        return NotImplemented

    def run() -> Any:
        result = func(*args, **kwargs)
        return result if all(map(own, torch_private.tree_leaves(result))) else NotImplemented

    def own(leaf: Any) -> bool:
        if not isinstance(leaf, torch.Tensor):
            return isinstance(leaf, _SIMPLE)  # and no array over the same memory
        if id(leaf) in found:
            return True
        key = torch_private.storage_key(leaf) if torch_private.has_memory(leaf) else None
        return all(torch_private.storage_key(p) != key for p in found.values())  # type: ignore[arg-type]

    return access.compute(indices, run)


_STORAGES = (torch.UntypedStorage, torch.TypedStorage)


class _StorageOfCopy(torch.UntypedStorage):
    """A storage over the memory of a copy of a weight; its address is the weight's, or is refused.

    The address of the copy would be taken for the weight's: copies that are made one after the
    other may even have the same one.
    """

    _p: Any

    def data_ptr(self) -> int:
        """Return the address of the weights; see ``address``."""
        return address(self._p)


def _storage_of(copy: torch.Tensor, p: Any, like: Any) -> Any:
    """Return a storage of the class of ``like`` over a copy, which counts as used meanwhile."""
    memory = torch_private.bytes_of(copy.untyped_storage())
    made: Any = torch_private.storage_over(memory, keep=True)
    made.__class__, made._p = _StorageOfCopy, p
    if isinstance(like, torch.UntypedStorage):
        return made
    return torch.TypedStorage(wrap_storage=made, dtype=copy.dtype, _internal=True)


class Operation:
    """One operation with hidden parameters among its arguments."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Any, ParamHandle, torch.Tensor, int]] = {}

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operation of any kind."""
        result = _computed(func, args, kwargs)
        return self._on_copies(func, args, kwargs) if result is NotImplemented else result

    def _on_copies(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        args, kwargs = torch_private.tree_map(self._copy_of, (tuple(args), dict(kwargs)))
        result = func(*args, **kwargs)
        # torch's fused optimizers change parameters without increasing their versions.
        fused = getattr(func, "__name__", "").startswith("_fused_")
        for _, mine, copy, version in self._copies.values():
            if fused or torch_private.version_of(copy) != version:
                if copy.requires_grad:
                    raise RuntimeError(
                        f"parameter {mine.access.name(mine.index)!r} requires grad, so it can be "
                        "changed in place under torch.no_grad() alone"
                    )
                mine.access.write(mine.index, copy)
            self._lend(mine, copy, result)
        back = {id(copy): p for p, _, copy, _ in self._copies.values()}

        def given(leaf: Any) -> Any:
            if isinstance(leaf, _STORAGES):  # of the only tensor among the arguments
                ((p, _, copy, _),) = self._copies.values()
                return _storage_of(copy.detach(), p, leaf)
            return back.get(id(leaf), leaf)

        return torch_private.tree_map(given, result)

    def _copy_of(self, value: Any) -> Any:
        if not isinstance(value, PlaceholderParam):
            return value
        if id(value) not in self._copies:
            mine = known(value)
            copy = self._read(value, mine)
            self._copies[id(value)] = (value, mine, copy, torch_private.version_of(copy))
        return self._copies[id(value)][2]

    @staticmethod
    def _read(p: Any, mine: ParamHandle) -> torch.Tensor:
        if torch.is_grad_enabled() and p.requires_grad:
            joined: torch.Tensor = _Joined.apply(p, lambda: mine.access.borrow(mine.index))
            return joined
        return mine.access.borrow(mine.index)

    @staticmethod
    def _lend(mine: ParamHandle, copy: torch.Tensor, result: Any) -> None:
        """Lend the copy if the result has a view of it, which may be written to later."""
        key = torch_private.storage_key(copy)
        for leaf in torch_private.tree_leaves(result):
            if isinstance(leaf, _STORAGES):
                mine.access.lend(mine.index, copy.detach())
                return
            if not isinstance(leaf, torch.Tensor) or leaf is copy:
                continue
            if torch_private.has_memory(leaf) and torch_private.storage_key(leaf) == key:
                mine.access.lend(mine.index, copy.detach())
                return
