"""The work of an update that is not one of our kernels, counted by operator."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from .averaged import is_own_code
from .formats import Master, Moments
from .rule import WholeRule
from .streamed import Answers, Quiet, StreamedRule

# Note [Cost of an update]
# The time per parameter of our own kernels is measured.  The step of another optimizer is a series
# of operators.  Its time is about that of the bytes that they read and write at the memory's rate,
# and of the FLOPs of their matrix products at the processors' rate.  ``Counter`` counts both, and
# the memory of temporaries, while the step runs on ``meta`` tensors of the parameter's shape, which
# takes no memory.  A step that cannot run there runs on a small tensor on the CPU, and the counts
# are scaled: bytes with the number of elements, FLOPs with its power 3/2.
#
# User-defined rules run only on the CPU, since they may read memory by its address.
#
# Some steps do more work than others (a projection is refreshed), so the mean of several is used.
# This takes long if there are many shapes.  Of further ones a single step is counted, and at least
# as much work and memory is assumed as the most similar of the other shapes has for its size.

# FLOPs of factorizations of an m x n matrix, m >= n (Golub and Van Loan, Matrix Computations).
_FACTORIZATIONS: dict[str, Callable[[int, int], float]] = {
    "aten._linalg_eigh": lambda m, n: 9 * n**3,
    "aten._linalg_svd": lambda m, n: 6 * m * n**2 + 20 * n**3,
    "aten.linalg_qr": lambda m, n: 4 * m * n**2 - 4 * n**3 / 3,
    "aten.linalg_inv_ex": lambda m, n: 2 * n**3,
    "aten.linalg_cholesky_ex": lambda m, n: n**3 / 3,
}

_STEPS = 10
_MANY_SHAPES = 8  # of a rule with the same number of dimensions
_LEAST_BYTES = 12  # per element: gradient and weight are read, the weight is written
_SMALL = 2**14  # elements of a parameter whose step runs on the CPU


DEVICES = ("meta", "cpu")  # where a step is counted: on the first where it runs


class UpdateCost(NamedTuple):
    """The work of one update of one parameter.

    Attributes:
        flops: of its matrix products.
        moved_bytes: read and written by its operators.
        temporary_bytes: the most memory that its temporaries take at the same time.
        dtype: of the products.
    """

    flops: int = 0
    moved_bytes: int = 0
    temporary_bytes: int = 0
    dtype: torch.dtype | None = None


# By rule, the costs of an optimizer's own step by shape.
_COUNTED: weakref.WeakKeyDictionary[StreamedRule, dict[tuple[int, ...], UpdateCost]] = (
    weakref.WeakKeyDictionary()
)


class Counter(TorchDispatchMode):
    """Counts the work of the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.moved_bytes = self.temporary_bytes = 0
        self.dtype: torch.dtype | None = None
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def cost(self) -> UpdateCost:
        return UpdateCost(self.flops, self.moved_bytes, self.temporary_bytes, self.dtype)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        given, made = _tensors((args, kwargs)), _tensors(found)
        if func.is_view:
            return found
        packet = func.overloadpacket
        if (count := flop_registry.get(packet)) is not None:
            self.flops += count(*args, **kwargs, out_val=found)
            self.dtype = given[0].dtype
        elif (factorized := _FACTORIZATIONS.get(str(packet))) is not None:
            n, m = sorted(args[0].shape[-2:])
            self.flops += int(factorized(m, n) * args[0].shape[:-2].numel())
            self.dtype = given[0].dtype
        self.moved_bytes += sum(map(_nbytes, given)) + sum(map(_nbytes, made))
        self._note(made, given)
        return found

    def _note(self, made: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        """Count the memory of new tensors for as long as they live."""
        known = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in given}
        for tensor in made:
            storage = tensor.untyped_storage()
            ref = StorageWeakRef(storage)
            if ref.cdata not in known and ref.cdata not in self._live:
                self._live[ref.cdata] = ref, storage.nbytes()
        for key in [key for key, (ref, _) in self._live.items() if ref.expired()]:
            del self._live[key]
        live = sum(nbytes for _, nbytes in self._live.values())
        self.temporary_bytes = max(self.temporary_bytes, live)


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return []
    return [tensor for each in values for tensor in _tensors(each)]


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes of memory that a tensor has; expanded dimensions count once."""
    return int(min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes()))


def update_cost(
    rule: WholeRule, group: Mapping[str, Any], shape: tuple[int, ...], weights: torch.dtype,
    master: Master = None, moments: Moments = "fp32",
) -> UpdateCost:  # fmt: skip
    """Return the work of one update by a rule for whole parameters.

    See Note [Cost of an update].

    Args:
        group: hyper-parameters.
        weights: the dtype of weights and gradients.
    """
    if isinstance(rule, StreamedRule):
        costs = _COUNTED.setdefault(rule, {})
        if shape not in costs:
            costs[shape] = _of_own_step(rule, shape, costs)
        return costs[shape]

    def run(device: str, size: tuple[int, ...]) -> UpdateCost:
        apart = copy.deepcopy(rule)  # it may keep tensors from one update to the next
        fields = apart.state_fields(weights, master, moments, size)
        state = {
            f.name: torch.zeros(
                size if f.block == 1 else f.elements(math.prod(size)), dtype=f.dtype, device=device
            )
            for f in fields
        }
        weight, grad = (torch.ones(size, dtype=weights, device=device) for _ in range(2))
        scalars = apart.scalars(group, 1, 0.5)  # so that the gradient is scaled
        counter = Counter()
        with Answers(), counter, torch.no_grad():
            apart.update(grad, weight, state, scalars)
        return counter.cost

    return _estimated(shape, run, DEVICES if is_own_code(rule) else DEVICES[1:])


def _of_own_step(
    rule: StreamedRule, shape: tuple[int, ...], known: Mapping[tuple[int, ...], UpdateCost]
) -> UpdateCost:
    """Return the work of an optimizer's own step; see Note [Cost of an update]."""
    counted = [other for other in known if len(other) == len(shape)][:_MANY_SHAPES]
    many = len(counted) == _MANY_SHAPES and math.prod(shape) > 0
    cost = _estimated(shape, partial(_cost_of_steps, rule, 1 if many else _STEPS), DEVICES)
    if not many:
        return cost

    def unlike(other: tuple[int, ...]) -> float:
        return sum(abs(math.log(max(1, a) / b)) for a, b in zip(other, shape, strict=True))

    similar = min(counted, key=unlike)
    like = _scaled(known[similar], math.prod(shape) / max(1, math.prod(similar)))
    return UpdateCost(
        max(cost.flops, like.flops), max(cost.moved_bytes, like.moved_bytes),
        max(cost.temporary_bytes, like.temporary_bytes), cost.dtype or like.dtype,
    )  # fmt: skip


def _cost_of_steps(
    rule: StreamedRule, steps: int, device: str, shape: tuple[int, ...]
) -> UpdateCost:
    """Return the mean cost of some of an optimizer's own steps, after its first one."""
    counters: list[Counter] = []

    def counting() -> Counter:
        counters.append(Counter())
        return counters[-1]

    for _ in rule.steps_on(device, shape, 1 + steps, counting):
        pass
    costs = [counter.cost for counter in counters[1:]]
    return UpdateCost(
        sum(cost.flops for cost in costs) // steps,
        sum(cost.moved_bytes for cost in costs) // steps,
        max(cost.temporary_bytes for cost in costs),
        next((cost.dtype for cost in costs if cost.dtype is not None), None),
    )


def _estimated(
    shape: tuple[int, ...], run: Callable[[str, tuple[int, ...]], UpdateCost],
    devices: Sequence[str],
) -> UpdateCost:  # fmt: skip
    """Return what ``run`` counts on ``meta``, else on a small tensor on the CPU, else a guess."""
    numel = math.prod(shape)
    if not numel:
        return UpdateCost()
    small = _shrunk(shape)
    with Quiet():
        for device in devices:
            size = shape if device == "meta" else small
            with suppress(Exception):  # on meta, an operator may need values
                cost = _scaled(run(device, size), numel / math.prod(size))
                return cost._replace(moved_bytes=max(cost.moved_bytes, _LEAST_BYTES * numel))
    return UpdateCost(moved_bytes=_LEAST_BYTES * numel, temporary_bytes=4 * numel)


def _scaled(cost: UpdateCost, more: float) -> UpdateCost:
    """Return the cost for so many times the elements."""
    return UpdateCost(
        int(cost.flops * more**1.5), int(cost.moved_bytes * more),
        int(cost.temporary_bytes * more), cost.dtype,
    )  # fmt: skip


def _shrunk(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape of about the same proportions with about ``_SMALL`` elements at most."""
    small, room, numel = list(shape), float(_SMALL), math.prod(shape)
    ascending = sorted(range(len(shape)), key=shape.__getitem__)
    for done, at in enumerate(ascending):  # what a short dimension cannot save, a long one must
        share = min(1.0, (room / numel) ** (1 / (len(shape) - done)))
        numel //= shape[at]
        small[at] = max(1, round(shape[at] * share))
        room /= small[at]
    return tuple(small)
