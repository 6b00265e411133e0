"""One run of an engine over a disk that makes mistakes; everything follows from the seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from overspill.io_engine import Extent, IoEngine, IoError, Lease, OffloadError, Ticket
from tests.faults import Faults, faulty_disk

BLOCK_BYTES = 4096
MOST_BYTES = 6 * BLOCK_BYTES
CAPACITY_BYTES = 40 * BLOCK_BYTES
OPERATIONS = 16
ARENA_BYTES = OPERATIONS * (MOST_BYTES + BLOCK_BYTES)
WAIT_S = 300.0

KINDS = (
    "short_transfer", "again", "io_error", "no_space", "bit_flip", "torn_write", "lost_write",
    "misdirected",
)  # fmt: skip


def faults_of(seed: int) -> Faults:
    """Up to three kinds of mistake at a time, from rare to frequent; sometimes none at all."""
    rng = random.Random(seed)
    chosen = rng.sample(KINDS, rng.randrange(4))
    rates = {kind: rng.choice([0.02, 0.1, 0.5]) for kind in chosen}
    delay = rng.choice([0.0, 0.0, 0.3])
    return Faults(seed=seed, delay=delay, longest_delay_us=100, **rates)


@dataclass
class Outcome:
    """What a scenario saw."""

    right: int = 0  # reads that gave the bytes written
    errors: dict[str, int] = field(default_factory=dict)

    def note(self, error: OffloadError) -> None:
        name = type(error).__name__
        self.errors[name] = self.errors.get(name, 0) + 1


@dataclass
class _Read:
    ticket: Ticket
    buffer: np.ndarray
    want: np.ndarray | None  # what the last write before it gave; None: no write, or it failed
    writer: Ticket | None


class Scenario:
    """Random reads, writes, cancellations and reallocations, against a model of what must hold."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.rng = random.Random(~seed)
        self.used = 0
        self.outcome = Outcome()
        self.latest: dict[Extent, tuple[Ticket, np.ndarray]] = {}
        self.extents: list[Extent] = []
        self.reads: list[_Read] = []
        self.called: list[Ticket] = []
        self.engine = IoEngine(
            directory,
            CAPACITY_BYTES,
            buffer_bytes=ARENA_BYTES,
            backend=faulty_disk(faults_of(seed), queue_depth=self.rng.choice([1, 4, 16])),
            block_bytes=BLOCK_BYTES,
            ephemeral=True,
        )
        self.arena: Lease | None = self.engine.buffer(ARENA_BYTES)

    def run(self) -> Outcome:
        """Raises AssertionError where the engine lies, and TimeoutError where it hangs."""
        try:
            self.extents = [self.engine.allocate(self._length()) for _ in range(4)]
            for _ in range(OPERATIONS):
                self._act()
            self._judge()
        finally:
            self.engine.close()
        stats = self.engine.stats
        assert stats.engine_port == len(self.called), "a ticket never ended, or ended twice"
        assert all(lane.in_flight == lane.queued == 0 for lane in stats.lanes)
        self._require_buffers_back()
        return self.outcome

    def _require_buffers_back(self) -> None:
        """All but the engine let go of the memory: if it still is taken, the engine leaks it."""
        self.reads.clear()
        self.latest.clear()
        self.arena = None
        try:
            self.engine.buffer(ARENA_BYTES).release()
        except OffloadError as error:
            raise AssertionError("the engine keeps a buffer whose ticket has ended") from error

    def _length(self) -> int:
        return self.rng.randrange(1, MOST_BYTES + 1)

    def _buffer(self, nbytes: int) -> np.ndarray:
        assert self.arena is not None
        start = self.used
        self.used += -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        return self.arena.array[start : start + nbytes]

    def _act(self) -> None:
        extent = self.rng.choice(self.extents)
        urgent = self.rng.random() < 0.2
        dice = self.rng.random()
        if dice < 0.45:
            self._write(extent, urgent)
        elif dice < 0.9:
            self._read(extent, urgent)
        else:
            self._replace(extent)

    def _write(self, extent: Extent, urgent: bool) -> None:
        buffer = self._buffer(extent.nbytes)
        buffer[:] = np.frombuffer(self.rng.randbytes(extent.nbytes), np.uint8)
        ticket = self.engine.write(extent, buffer, urgent=urgent, on_done=self.called.append)
        cancelled = self.rng.random() < 0.1 and ticket.cancel()
        if not cancelled:
            self.latest[extent] = ticket, buffer

    def _read(self, extent: Extent, urgent: bool) -> None:
        buffer = self._buffer(extent.nbytes)
        buffer[:] = 0xA5
        writer, want = self.latest.get(extent, (None, None))
        ticket = self.engine.read(extent, buffer, urgent=urgent, on_done=self.called.append)
        if self.rng.random() < 0.05:
            ticket.cancel()
        self.reads.append(_Read(ticket, buffer, want, writer))

    def _replace(self, extent: Extent) -> None:
        """Gives an extent back once it is quiet, and takes another in its place."""
        self.engine.wait_all()
        self.engine.free(extent)
        self.latest.pop(extent, None)
        self.extents[self.extents.index(extent)] = self.engine.allocate(self._length())

    def _judge(self) -> None:
        for read in self.reads:
            error = self._error_of(read.ticket)
            if error is not None:
                self.outcome.note(error)
                if isinstance(error, IoError) and error.path:
                    assert error.offset >= 0 and error.nbytes > 0
                continue
            assert read.writer is not None and read.want is not None, "read what nobody wrote"
            assert read.writer.error is None, "read what a failed write left"
            assert np.array_equal(read.buffer, read.want), "WRONG BYTES WITHOUT AN ERROR"
            self.outcome.right += 1
        for ticket, _ in self.latest.values():
            error = self._error_of(ticket)
            if error is not None:
                self.outcome.note(error)

    def _error_of(self, ticket: Ticket) -> OffloadError | None:
        try:
            ticket.wait(WAIT_S)
        except OffloadError as error:
            return error.with_traceback(None)  # it would keep the buffers of our own frames
        return None
