"""Which activations may lose precision when they are offloaded.  See Note [Packed activations]."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

import torch

from ..optim.activation_blocks import ActivationBlocks
from ..optim.kernels import FLOAT_TYPES
from ..private import torch_private

# Note [Packed activations]
# With ``activations_format``, storages are packed on their way out (``ActivationBlocks``): those of
# float tensors that operators inside of units have saved, and that require gradients. Masks,
# numbers drawn for dropout, and most statistics do not. The following stays exact.
#
# - What a recomputation begins with, so that it computes what the forward did (``exact``).
# - What attention saves. Its backward computes exponentials of products of queries and keys, which
#   turn absolute errors into relative ones: in a model of 6 layers, the error of all gradients was
#   0.06, and 0.003 without the rounding of these. Other operators do not save three activations or
#   more. An operator saves its tensors while torch has one sequence number for the next node.
# - Logarithms, which go into exponentials too, and tensors with a last dimension of 1, such as the
#   statistics of norms.
# - What losses save, since they run outside of units.
#
# A storage is packed only if all tensors over it may be. Its size on lower tiers is fixed when it
# is reported to the residency machine, which happens between operators. A tensor that must be exact
# gets a storage of its own after that, over the same memory.

MOST_SAVED = 2  # activations that an operator saves at most, unless it is attention
LOGARITHMS = ("LogSoftmaxBackward0", "LogsumexpBackward0")


class Packable(Protocol):
    """A storage that may be packed on its way out.

    Attributes:
        blocks: how; ``None``: it stays exact.
        reported: whether that can no longer change.
    """

    blocks: ActivationBlocks | None
    reported: bool


class _Exact(threading.local):
    """A context in which the current thread saves tensors that must not lose precision."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


exact = _Exact()


class _Operator(threading.local):
    """The operator that saves tensors on the current thread.

    Attributes:
        clock: torch's sequence number for the next node.
        saved: the number of activations that it has saved.
        storages: those of them that may be packed.
    """

    clock = -1
    saved = 0

    def __init__(self) -> None:
        self.storages: list[weakref.ref[Any]] = []


class Precision:
    """Decides which storages are packed.  See Note [Packed activations].

    Attributes:
        computing: whether the forward of a unit runs.
    """

    def __init__(self) -> None:
        self.computing = False
        self._operator = _Operator()

    def saves(self, t: torch.Tensor) -> bool:
        """Record that an operator saves ``t``, and return whether it is another one than before."""
        operator, clock = self._operator, torch_private.graph_clock()
        if new := clock != operator.clock:
            operator.clock, operator.saved = clock, 0
            operator.storages.clear()
        if t.requires_grad and t.dtype in FLOAT_TYPES and t.dim() > 1:
            operator.saved += 1
            if operator.saved > MOST_SAVED:
                self._keep_exact(operator)
        return new

    def _keep_exact(self, operator: _Operator) -> None:
        for each in operator.storages:
            storage: Packable | None = each()
            if storage is not None and not storage.reported:
                storage.blocks = None
        operator.storages.clear()

    def blocks_for(self, t: torch.Tensor, nbytes: int) -> ActivationBlocks | None:
        """Return how ``t``, over a storage of ``nbytes``, may be packed; ``None``: not at all."""
        if not self.computing or exact.depth or self._operator.saved > MOST_SAVED:
            return None
        if not t.requires_grad or t.dtype not in FLOAT_TYPES:
            return None
        if t.dim() < 2 or t.shape[-1] == 1 or nbytes % t.dtype.itemsize:
            return None
        if t.grad_fn is not None and t.grad_fn.name() in LOGARITHMS:
            return None
        return ActivationBlocks(t.dtype)

    def takes(self, storage: Packable) -> None:
        """Record the storage of the tensor that the operator has saved last."""
        if storage.blocks is not None:
            self._operator.storages.append(weakref.ref(storage))
