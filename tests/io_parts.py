"""What the tests of the I/O engine share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from overspill.io_engine import IoEngine, Lease

MIB = 1 << 20

Open = Callable[..., IoEngine]


def fill(lease: Lease, seed: int) -> np.ndarray:
    lease.array[:] = np.random.default_rng(seed).integers(0, 256, lease.nbytes, dtype=np.uint8)
    return lease.array.copy()
