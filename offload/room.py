"""Running code again that ran out of memory, with fewer activations on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")
MOST_TRIES = 4


def with_room(optimizer: Any, run: Callable[[], T]) -> T:
    """Return what ``run`` computes: the forward and backward of a micro-batch.

    If it raises ``torch.OutOfMemoryError``, call ``optimizer.make_room()`` and run it again, a few
    times.  Another optimizer than one that ``wrap`` returned is left alone.

    Raises:
        torch.OutOfMemoryError: there is still too little memory.
    """
    if not hasattr(optimizer, "make_room"):
        return run()
    for _ in range(MOST_TRIES - 1):
        try:
            return run()
        except torch.OutOfMemoryError as error:
            message = str(error)
        # Outside of the block above, where the error's frames would keep the graph.
        try:
            made = optimizer.make_room()
        except Exception as error:
            raise error from torch.OutOfMemoryError(message)
        if not made:
            raise torch.OutOfMemoryError(message)
    return run()
