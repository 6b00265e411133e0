"""Access from ``p.grad`` to the gradients that the engine holds, until the engine is closed."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from ..errors import LifecycleError
from ..planning.partition import Partition
from ..planning.plan import host_grad_dtype
from .gradient_tensor import GradientAccess, OffloadedGradient


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
