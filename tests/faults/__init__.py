"""Disks that make mistakes, by a seed: for tests of everything that stands on the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from overspill.io_engine.backend import Backend, BackendFactory, NativeBackend, Tuning

from .build import build


@dataclass(frozen=True)
class Faults:
    """How often a transfer goes wrong, and how: probabilities from 0 to 1.

    ``delay`` (up to ``longest_delay_us``), ``short_transfer``, ``again`` (EAGAIN or EINTR),
    ``io_error`` (EIO), ``no_space`` (ENOSPC); and what the disk keeps silent about: ``bit_flip`` on
    reads, ``torn_write``, ``lost_write``, ``misdirected`` writes.  The seed, the place and the
    attempt decide, so a seed gives the same faults under any timing.
    """

    seed: int
    delay: float = 0.0
    short_transfer: float = 0.0
    again: float = 0.0
    io_error: float = 0.0
    no_space: float = 0.0
    bit_flip: float = 0.0
    torn_write: float = 0.0
    lost_write: float = 0.0
    misdirected: float = 0.0
    longest_delay_us: int = 200


def faulty_disk(faults: Faults, *, queue_depth: int = 8) -> BackendFactory:
    """A backend for ``IoEngine(backend=...)``: the real files, with ``faults``, out of order.

    Raises:
        RuntimeError: on opening, if it cannot be built.
    """

    def start(fds: Sequence[int], tuning: Tuning) -> Backend:
        native = build()
        wanted = native.Faults()
        for name, value in asdict(faults).items():
            setattr(wanted, name, value)
        core = native.Core(list(fds), wanted, tuning.block_bytes, queue_depth)
        return NativeBackend("faulty", core)

    return start
