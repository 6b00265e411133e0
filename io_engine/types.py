"""What the engine and its users hand each other: extents, tickets, statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from .errors import OffloadError
from .one_shot_event import OneShotEvent

SECTOR_BYTES = 4096

Direction = Literal["read", "write"]


def round_up(nbytes: int, granule: int = SECTOR_BYTES) -> int:
    """The least multiple of ``granule`` that is not below ``nbytes``."""
    return -(-nbytes // granule) * granule


@dataclass(frozen=True)
class Piece:
    """A run of one store file; offset and length are multiples of 4096."""

    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Extent:
    """A fixed place on disk for ``nbytes`` bytes, in one piece per directory it is striped over.

    Two extents are equal if they are the same one: ``id`` is never used twice by an engine.
    """

    id: int
    nbytes: int
    pieces: tuple[Piece, ...] = field(repr=False, compare=False)

    @property
    def padded_bytes(self) -> int:
        """What it takes on disk: ``nbytes`` in whole sectors of 4096 bytes."""
        return round_up(self.nbytes)


@dataclass(frozen=True)
class IoLaneStats:
    """What one store file has seen; see ``IoStats``."""

    path: str
    bytes_read: int
    bytes_written: int
    blocks_read: int
    blocks_written: int
    retries: int
    busy_s: float
    in_flight: int
    queued: int


@dataclass(frozen=True)
class IoStats:
    """Totals since the engine was opened.

    ``bytes_read`` and ``bytes_written`` count what was moved to and from the files, repeated and
    failed transfers included; ``busy_s`` adds up, over the directories, the time with a transfer in
    flight; ``retries`` counts transfers that were repeated or resumed.
    """

    bytes_read: int
    bytes_written: int
    engine_port: int
    failures: int
    retries: int
    busy_s: float
    lanes: tuple[IoLaneStats, ...]


class Ticket:
    """A submitted transfer.  Ends exactly once, with or without an error.

    ``started_ns`` and ``finished_ns`` are readings of ``time.perf_counter_ns``; both are 0 until
    it has ended, and ``started_ns`` stays 0 if it never started.
    """

    __slots__ = (
        "_cancel", "_ended", "_hurry", "_on_done", "_on_own_thread", "error", "extent",
        "finished_ns", "has_listener", "kind", "nbytes", "seen", "started_ns",
    )  # fmt: skip

    def __init__(
        self,
        extent: Extent,
        kind: Direction,
        on_own_thread: Callable[[], bool],
        cancel: Callable[[Ticket], bool],
        hurry: Callable[[Ticket], None],
        on_done: Callable[[Ticket], None] | None,
    ) -> None:
        self.extent, self.kind, self.nbytes = extent, kind, extent.nbytes
        self.error: OffloadError | None = None
        self.started_ns = self.finished_ns = 0
        self._ended = OneShotEvent()
        self._on_own_thread, self._cancel, self._hurry = on_own_thread, cancel, hurry
        self._on_done = on_done
        self.has_listener = on_done is not None
        self.seen = False  # whether its error was reported

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Returns once it has ended well.

        Raises:
            TimeoutError: it has not ended within ``timeout`` seconds; it goes on.
            IoError: it failed; path, offset, length and errno are attached.
            CorruptionError: it read bytes that are not those written.
        """
        if not self._ended.is_set():
            if self._on_own_thread():
                raise RuntimeError("wait() inside on_done would wait for itself for ever")
            if not self._ended.wait(timeout):
                raise TimeoutError(
                    f"the {self.kind} of {self.nbytes} bytes has not ended within {timeout} s"
                )
        self.seen = True
        if self.error is not None:
            raise self.error

    def cancel(self) -> bool:
        """Takes it back if nothing of it has started; it then ends with an ``IoError``.

        Returns:
            Whether it was taken back.  False: it has started, and goes on, or has ended.
        """
        return not self.done() and self._cancel(self)

    def hurry(self) -> None:
        """Moves what has not started ahead of all that is not urgent."""
        if not self.done():
            self._hurry(self)

    def finish(self, error: OffloadError | None, started_ns: int, finished_ns: int) -> None:
        """End the ticket, wake its waiters, and call ``on_done``; only for the engine."""
        self.error, self.started_ns, self.finished_ns = error, started_ns, finished_ns
        self._ended.set()
        on_done, self._on_done = self._on_done, None
        if on_done is not None:
            on_done(self)
