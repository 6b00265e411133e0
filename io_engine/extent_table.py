"""Which extents there are, where they lie, and what each holds."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import CorruptionError, IoError, LifecycleError, OffloadError
from .manifest import Generation, StoreLayout
from .space import Space, file_shares
from .store_file import StoreFile
from .transfer import block_count
from .types import Extent, round_up


class Fill(enum.Enum):
    """State of an extent's contents."""

    EMPTY = "never written"
    WHOLE = "written"
    BROKEN = "partly written"


@dataclass(eq=False)
class ExtentContents:
    """The facts about one extent that are kept in memory, apart from its bytes.

    ``checksums``: CRC-32 of each block, uint32, or ``None`` if checking is off.
    """

    extent: Extent
    checksums: NDArray[np.uint32] | None
    fill: Fill = Fill.EMPTY
    broken_by: str = ""

    def unreadable(self) -> OffloadError | None:
        """Why a read cannot give what was written; ``None`` if it can."""
        if self.fill is Fill.WHOLE:
            return None
        if self.fill is Fill.EMPTY:
            return LifecycleError(
                f"{self.extent} has never been written, so there is nothing to read; write it first"
            )
        return CorruptionError(
            f"{self.extent} is incomplete, because a write of it failed ({self.broken_by}); write "
            "it again",
            nbytes=self.extent.nbytes,
        )


class ExtentTable:
    """The extents of one engine.  For any thread.

    Args:
        where: the directories, as errors name them.
    """

    def __init__(self, space: Space, block_bytes: int, where: str, *, checksum: bool) -> None:
        self._space, self._block_bytes = space, block_bytes
        self._where, self._checksum = where, checksum
        self._contents: dict[Extent, ExtentContents] = {}
        self._next = 0
        self._lock = threading.Lock()  # of all these

    @property
    def free_bytes(self) -> int:
        """Room for further extents."""
        with self._lock:
            return self._space.free_bytes

    def allocate(self, nbytes: int) -> Extent:
        """See ``IoEngine.allocate``."""
        padded = round_up(nbytes)
        with self._lock:
            pieces = self._space.take(padded)
            if pieces is None:
                free, total = self._space.free_bytes, self._space.total_bytes
                raise IoError(
                    f"the store in {self._where} needs {padded} bytes for an extent; {free} of "
                    f"{total} are free; free extents, or open it with a larger capacity",
                    path=self._where,
                    nbytes=padded,
                )
            extent = Extent(self._next, nbytes, pieces)
            self._next += 1
            count = block_count(extent, self._block_bytes)
            sums = np.zeros(count, np.uint32) if self._checksum else None
            self._contents[extent] = ExtentContents(extent, sums)
        return extent

    def adopt(self, layout: StoreLayout, generation: Generation) -> None:
        """Takes the extents of a store over, each with what a commit says about it, before anybody
        else has the table.

        Raises:
            CorruptionError: they overlap.
        """
        for item, role, sums in zip(
            layout.items, generation.roles, generation.checksums, strict=True
        ):
            for number, extent in enumerate(item.extents):
                if not self._space.claim(extent.pieces):
                    raise CorruptionError(
                        f"{self._where}: the extents of {item.key!r} overlap others; the "
                        "manifest is not that of this store", path=self._where,
                    )  # fmt: skip
                count = layout.sums_of(extent)
                kept = sums if number == role else None
                whole = np.zeros(count, np.uint32) if kept is None else kept
                fill = Fill.WHOLE if number == role else Fill.EMPTY
                self._contents[extent] = ExtentContents(
                    extent, whole if self._checksum else None, fill
                )
                self._next = max(self._next, extent.id + 1)

    def grow(self, nbytes: int, files: Sequence[StoreFile]) -> None:
        """Makes room for ``nbytes`` more, in all files together.

        Raises:
            IoError: a directory has not that much room.
        """
        with self._lock:
            shares = file_shares(nbytes, self._space.rates, self._block_bytes)
            for number, (file, more) in enumerate(zip(files, shares, strict=True)):
                self._space.add(number, file.grow(more), more)

    def free(self, extent: Extent, busy_with: Callable[[Extent], bool]) -> None:
        """Gives an extent's place back.

        Args:
            busy_with: whether transfers use it; called under the lock.

        Raises:
            OffloadError: they do.
            ValueError: it is not an extent of this engine, or has been freed.
        """
        with self._lock:
            self._known(extent)
            if busy_with(extent):
                raise LifecycleError(f"{extent} has transfers in flight; wait for them first")
            del self._contents[extent]
            self._space.give(extent.pieces)

    def contents(self, extent: Extent) -> ExtentContents:
        """What an extent holds.

        Raises:
            ValueError: it is not an extent of this engine, or has been freed.
        """
        with self._lock:
            return self._known(extent)

    def _known(self, extent: Extent) -> ExtentContents:
        contents = self._contents.get(extent)
        if contents is None or contents.extent is not extent:
            raise ValueError(f"{extent} is not an extent of this engine, or has been freed")
        return contents
