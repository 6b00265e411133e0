"""This rank's parts of activations that are ``DTensor``s, as tensor parallelism makes them.

``torch.distributed.tensor`` is imported only where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..private import torch_private


def local_part(
    t: torch.Tensor,
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]] | None:
    """Return this rank's part of a ``DTensor``, and what makes the same one of an equal part.

    ``None``: it is another kind of tensor, such as a subclass.
    """
    if not torch_private.is_wrapper(t):
        return None
    from torch.distributed.tensor import DTensor

    if type(t) is not DTensor:
        return None
    with torch.no_grad():
        local: Any = t.to_local()
    if torch_private.is_wrapper(local):  # the result of a collective that may still run
        local = local.wait()
    mesh, placements, shape, stride = t.device_mesh, t.placements, t.shape, t.stride()

    def again(part: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(
            part, mesh, placements, run_check=False, shape=shape, stride=stride
        )

    return local, again
