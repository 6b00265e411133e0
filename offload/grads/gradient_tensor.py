"""The tensor in ``p.grad`` between backward and step, whose values the engine holds."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, cast

import torch

from ..errors import GradientError, LifecycleError
from ..planning.partition import Partition
from ..planning.plan import host_grad_dtype
from ..private import torch_private

_Whose = tuple[int, int]


class GradientAccess(Protocol):
    """The interface by which wrappers reach their gradients, by parameter index."""

    def add(self, number: int, grad: torch.Tensor) -> None: ...
    def read(self, number: int) -> torch.Tensor: ...
    def borrow(self, number: int) -> torch.Tensor: ...
    def lend(self, number: int, copy: torch.Tensor) -> None: ...
    def write(self, number: int, value: torch.Tensor) -> None: ...
    def zero(self, number: int) -> None: ...
    def norms(self, numbers: Sequence[int]) -> list[float]: ...
    def scale(self, numbers: Sequence[int], factor: float) -> None: ...


class OffloadedGradient(torch.Tensor):
    """A tensor without memory that stands for the gradient of parameter ``number``.

    Autograd's accumulation, L2 norms and multiplication by a number go to the engine, so
    ``clip_grad_norm_`` and ``GradScaler`` move no gradient. Any other operation reads the gradient,
    runs on the plain tensor, and writes back what it changed, one gradient at a time. A view of the
    gradient is a view of a copy; what is written there is written to the gradient.

    Attributes:
        gone: another backward has replaced this gradient by its own.
    """

    number: int
    gone: bool
    access: Callable[[], GradientAccess]  # raises once the engine is closed

    @staticmethod
    def __new__(
        cls: type[OffloadedGradient],
        like: torch.Tensor,
        dtype: torch.dtype,
        index: int,
        access: Callable[[], GradientAccess],
    ) -> OffloadedGradient:
        made = cast(OffloadedGradient, torch_private.make_wrapper(cls, like, dtype))
        made.number, made.access, made.gone = index, access, False
        return made

    @property
    def whose(self) -> _Whose:
        """The engine, by the id of its ``access``, and the parameter's index there."""
        return id(self.access), self.number

    def _plain(self) -> torch.Tensor:
        _refuse_gone(self)
        return self.access().read(self.number)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _refuse_gone(self)
        if value is not self:
            self.copy_(value)

    def numpy(self, *, force: bool = False) -> Any:
        """Return an array over a copy; on the CPU, writes to it change the gradient."""
        _refuse_gone(self)
        plain = self.access().borrow(self.number)
        array = plain.numpy(force=force)
        if plain.device.type == "cpu":  # else the array is another copy, as in PyTorch
            self.access().lend(self.number, plain)
        return array

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return a storage over a copy; writes to it change the gradient.

        While ``torch.compile`` describes a parameter, and with it the gradient, it is one without
        memory.
        """
        _refuse_gone(self)
        if torch_private.in_tracing():
            return torch.UntypedStorage(self.numel() * self.element_size(), device="meta")
        plain = self.access().borrow(self.number)
        self.access().lend(self.number, plain)
        memory = torch_private.bytes_of(plain.untyped_storage())
        return torch_private.storage_over(memory, keep=True)  # so that the copy counts as used

    def storage(self) -> torch.TypedStorage:  # type: ignore[override]
        """Return a typed storage over a copy; writes to it change the gradient."""
        return torch.TypedStorage(
            wrap_storage=self.untyped_storage(), dtype=self.dtype, _internal=True
        )

    def data_ptr(self) -> int:
        """Raise ``OffloadError``, because the gradient may be in any memory."""
        raise GradientError(
            "p.grad has no address, because the engine keeps it; take p.grad.clone(), or "
            "p.grad.untyped_storage() for a copy whose changes count"
        )

    def tolist(self) -> Any:
        """Return the elements as a list."""
        return self._plain().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._plain()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"OffloadedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for leaf in torch_private.tree_leaves((args, kwargs)):
            if isinstance(leaf, OffloadedGradient):
                _refuse_gone(leaf)
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.add_.Tensor and _is_plain_sum(args, kwargs):
            args[0].access().add(args[0].number, args[1])
            return args[0]
        known = _KNOWN.get(torch_private.operation_name(func))
        if known is not None:
            done, result = known(args, kwargs)
            if done:
                return result
        if func.namespace == "aten" and torch_private.operation_name(func).startswith(
            "aten::_foreach"
        ):
            return _one_by_one(func, args, kwargs)
        return _on_plain(func, args, kwargs)


def _refuse_gone(wrapper: OffloadedGradient) -> None:
    if wrapper.gone:
        raise GradientError(
            "this gradient was dropped from p.grad, and a later backward has overwritten it; keep "
            "p.grad.clone()"
        )


def _is_plain_sum(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    wrapped, other = args[0], args[1]
    return (
        isinstance(wrapped, OffloadedGradient)
        and isinstance(other, torch.Tensor)
        and not isinstance(other, OffloadedGradient)
        and other.shape == wrapped.shape
        and kwargs.get("alpha", 1) == 1
    )


Answer = tuple[bool, Any]
_NOT_DONE: Answer = (False, None)


def _wrappers(value: Any) -> list[OffloadedGradient] | None:
    """Return the wrappers in a list, or the only one; ``None`` if there is anything else."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values if values and all(isinstance(v, OffloadedGradient) for v in values) else None


def _by_engine(
    grads: Sequence[OffloadedGradient],
) -> list[tuple[GradientAccess, list[int]]]:
    """Return the engines of these gradients, each with their positions in the list."""
    places: dict[int, list[int]] = {}
    for place, grad in enumerate(grads):
        places.setdefault(id(grad.access), []).append(place)
    return [(grads[mine[0]].access(), mine) for mine in places.values()]


def _norms(grads: Sequence[OffloadedGradient]) -> list[float]:
    found = [0.0] * len(grads)
    for access, places in _by_engine(grads):
        norms = access.norms([grads[place].number for place in places])
        for place, norm in zip(places, norms, strict=True):
            found[place] = norm
    return found


def _scale(grads: Sequence[OffloadedGradient], factor: float) -> None:
    for access, places in _by_engine(grads):
        access.scale([grads[place].number for place in places], factor)


def _norm(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Answer:
    """Return L2 norms, in fp32 for narrower gradients."""
    grads = _wrappers(args[0])
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    if grads is None or order not in (2, 2.0) or len(args) > 2 or kwargs.get("dim") is not None:
        return _NOT_DONE
    if kwargs.get("keepdim") or kwargs.get("dtype") not in (None, torch.float32):
        return _NOT_DONE
    found = [
        torch.tensor(norm, dtype=torch.promote_types(grad.dtype, torch.float32), device=grad.device)
        for norm, grad in zip(_norms(grads), grads, strict=True)
    ]
    return True, found if isinstance(args[0], (list, tuple)) else found[0]


def _multiply(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Answer:
    """Multiply in place, by a number or a zero-dimensional tensor."""
    grads, factor = _wrappers(args[0]), args[1]
    if isinstance(factor, torch.Tensor) and factor.dim() == 0:
        factor = factor.item()
    if grads is None or isinstance(factor, bool) or not isinstance(factor, (int, float)):
        return _NOT_DONE
    _scale(grads, float(factor))
    return True, args[0] if isinstance(args[0], OffloadedGradient) else None


def _unscale(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Answer:
    """Unscale for ``GradScaler``: report whether any gradient is not finite, and multiply all."""
    grads, found, factor = _wrappers(args[0]), args[1], args[2]
    if grads is None:
        return _NOT_DONE
    if not all(map(math.isfinite, _norms(grads))):
        found.fill_(1.0)
    _scale(grads, float(factor))
    return True, None


def _zero(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Answer:
    grads = _wrappers(args[0])
    if grads is None:
        return _NOT_DONE
    for grad in grads:
        grad.access().zero(grad.number)
    return True, args[0] if isinstance(args[0], OffloadedGradient) else None


_KNOWN: Mapping[str, Callable[[Sequence[Any], Mapping[str, Any]], Answer]] = MappingProxyType(
    {
        "aten::_foreach_norm": _norm,
        "aten::linalg_vector_norm": _norm,
        "aten::_foreach_mul_": _multiply,
        "aten::mul_": _multiply,
        "aten::zero_": _zero,
        "aten::_foreach_zero_": _zero,
        "aten::_amp_foreach_non_finite_check_and_unscale_": _unscale,
    }
)


def _on_plain(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``func`` on the plain gradients, and write back the mutated ones."""
    plain: dict[_Whose, torch.Tensor] = {}

    def load(value: Any) -> Any:
        if not isinstance(value, OffloadedGradient):
            return value
        if value.whose not in plain:
            plain[value.whose] = value.access().borrow(value.number)
        return plain[value.whose]

    result = func(*torch_private.tree_map(load, args), **torch_private.tree_map(load, dict(kwargs)))
    written: dict[_Whose, OffloadedGradient] = {}
    for value in torch_private.mutated_arguments(func, args, kwargs):
        for leaf in torch_private.tree_leaves(value):
            if isinstance(leaf, OffloadedGradient):
                written[leaf.whose] = leaf
    for whose, wrapper in written.items():
        wrapper.access().write(wrapper.number, plain[whose])
    _lend(_wrappers_in((args, kwargs)), plain, result)
    back = {id(plain[whose]): wrapper for whose, wrapper in written.items()}
    return torch_private.tree_map(lambda r: back.get(id(r), r), result)


def _wrappers_in(values: Any) -> dict[_Whose, OffloadedGradient]:
    leaves = torch_private.tree_leaves(values)
    return {leaf.whose: leaf for leaf in leaves if isinstance(leaf, OffloadedGradient)}


def _lend(
    wrappers: Mapping[_Whose, OffloadedGradient], plain: Mapping[_Whose, torch.Tensor], result: Any
) -> None:
    """Lend the copies that a result has views of: they may be written to later."""
    owners = {torch_private.storage_key(copy): whose for whose, copy in plain.items()}
    for leaf in torch_private.tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, OffloadedGradient):
            whose = owners.get(torch_private.storage_key(leaf))
            if whose is not None and leaf is not plain[whose]:
                wrappers[whose].access().lend(whose[1], plain[whose])


def _one_by_one(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a list operation on one-element lists, so that one gradient is in memory at a time."""
    count = len(args[0])
    results: list[Any] = []
    for i in range(count):
        single = [[a[i]] if isinstance(a, (list, tuple)) and len(a) == count else a for a in args]
        result = _on_plain(func, single, kwargs)
        if isinstance(result, (list, tuple)):
            results.extend(result)
    return results or None


class GradientDoor:
    """A weak reference to the engine's gradients, shared by all ``p.grad``.

    A strong one would form a reference cycle that torch never frees.
    """

    def __init__(self) -> None:
        self._behind: weakref.ref[GradientAccess] | None = None

    def open(self, behind: GradientAccess) -> None:
        """Read and change gradients through ``behind`` from now on."""
        self._behind = weakref.ref(behind)

    def close(self) -> None:
        """Refuse access from now on: the engine is closed."""
        self._behind = None

    def __call__(self) -> GradientAccess:
        """Return the engine's gradients.

        Raises:
            OffloadError: the engine is closed.
        """
        behind = None if self._behind is None else self._behind()
        if behind is None:
            raise LifecycleError("the engine of this gradient is closed")
        return behind


def gradients_by(
    door: GradientDoor, parts: Partition, accumulate: int
) -> Callable[[int], OffloadedGradient]:
    """Return a function that makes a parameter's ``p.grad``, by its index."""

    def make(index: int) -> OffloadedGradient:
        p = parts.parameters[index]
        dtype = p.dtype if p.is_complex() else host_grad_dtype(p.dtype, accumulate)
        if dtype != p.dtype:
            p.grad_dtype = None  # type: ignore[assignment]
        return OffloadedGradient(p, dtype, index, door)

    return make
