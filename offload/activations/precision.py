"""Which activations may lose precision when they are offloaded.  See Note [Packed activations]."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from ..optim.activation_blocks import ActivationBlocks
from ..optim.kernels import FLOAT_TYPES
from ..private import torch_private

# Note [Packed activations]
# With ``activations_format``, a storage is packed on its way out (``ActivationBlocks``) if all
# tensors over it are of a float type, require gradients, and were saved by operators inside of
# units. Masks, random numbers, and most statistics do not require gradients. Exact are also:
#
# - What a recomputation begins with, so that it computes what the forward did (``exact``).
# - What attention and logarithms save. Their backward computes exponentials, which turn absolute
#   errors into relative ones: in a model of 6 layers, the relative error (L2) of all gradients was
#   0.06, and 0.003 without the rounding of what attention saves. Attention is known by its third
#   tensor: other operators do not save three, except for statistics. While an operator saves its
#   tensors, torch's sequence number does not change, and its outputs have the previous one.
# - Statistics: expanded tensors, and those with a dimension of size 1 after the first.
# - What losses save, since they run outside of units.
#
# The size of a storage on lower tiers is fixed when it is reported to the residency machine, which
# happens between operators. A tensor that must be exact gets a storage of its own after that, over
# the same memory.

MOST_SAVED = 2  # tensors that an operator saves at most, unless it is attention
LOGARITHMS = ("LogSoftmaxBackward0", "LogsumexpBackward0", "LogcumsumexpBackward0")


class _Exact(threading.local):
    """A context in which the current thread saves tensors that must not lose precision."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


exact = _Exact()
H = TypeVar("H")  # what autograd keeps of a tensor


class _Operator(threading.local, Generic[H]):
    """The operator that saves tensors on the current thread.

    Attributes:
        computing: whether the forward of a unit runs.
        clock: torch's sequence number for the next node.
        saved: the number of tensors that it has saved.
        exact: whether all of them are exact.
        packed: its other tensors so far, with their handles.
    """

    computing = False
    clock = -1
    saved = 0
    exact = False

    def __init__(self) -> None:
        self.packed: list[tuple[H, torch.Tensor]] = []


class Precision(Generic[H]):
    """Decides which tensors may be packed.  See Note [Packed activations]."""

    def __init__(self, make_exact: Callable[[H, torch.Tensor], None]) -> None:
        """Set up; ``make_exact``: gives a handle of a packed tensor an exact storage."""
        self._make_exact, self._operator = make_exact, _Operator[H]()

    def computes(self, *, unit: bool) -> None:
        """Record whether the forward of a unit runs on this thread from now on."""
        self._operator.computing = unit
        self._operator.packed.clear()

    def saves(self, t: torch.Tensor) -> bool:
        """Record that an operator saves ``t``; return whether the last tensor was of another."""
        operator, clock = self._operator, torch_private.graph_clock()
        if new := clock != operator.clock:
            operator.clock, operator.saved, operator.exact = clock, 0, False
            operator.packed.clear()
        if t.dtype in FLOAT_TYPES and t.shape[-1:] != (1,):
            operator.saved += t.dim() > (1 if t.requires_grad else 2)
        if not operator.exact and (operator.saved > MOST_SAVED or self._is_logarithm(t)):
            operator.exact = True
            while operator.packed:
                self._make_exact(*operator.packed.pop())
        return new

    def _is_logarithm(self, t: torch.Tensor) -> bool:
        """Return whether ``t`` is a result of the operator that saves it, and a logarithm."""
        if t.grad_fn is None or t.grad_fn.name() not in LOGARITHMS:
            return False
        return torch_private.made_since(t, self._operator.clock - 1)

    def blocks_for(self, t: torch.Tensor, nbytes: int) -> ActivationBlocks | None:
        """Return how ``t``, over a storage of ``nbytes``, may be packed; ``None``: not at all."""
        operator = self._operator
        if not operator.computing or operator.exact or exact.depth:
            return None
        if not t.requires_grad or t.dtype not in FLOAT_TYPES or nbytes % t.dtype.itemsize:
            return None
        if t.dim() < 2 or 1 in t.shape[1:] or t.nbytes > nbytes:
            return None
        if t.grad_fn is not None and t.grad_fn.name() in LOGARITHMS:
            return None
        return ActivationBlocks(t.dtype)

    def packs(self, handle: H, t: torch.Tensor) -> None:
        """Record that a tensor of the current operator may be packed."""
        self._operator.packed.append((handle, t))
