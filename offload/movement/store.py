"""The disk of one run: a new or reopened store with its commits, and files read in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..config import OffloadConfig
from ..facts.rates import Rates
from ..facts.trace import Trace
from ..io_engine import Extent, IoEngine, Lease
from ..io_engine.committed import OwnedStore
from ..io_engine.file_ranges import FileRanges, RangeReader
from ..io_engine.manifest import Manifest
from ..planning.sources import Sources
from ..schedule.describe import describe_units, item_of, key_of
from ..schedule.layout import Layout
from ..schedule.messages import Key, Kind
from ..schedule.units import PAGE
from .commit_writer import CommitWriter
from .disk import Disk, Disks, PacedDisk
from .extents import Extents


class Store:
    """Owner of the I/O engine and, if the store is durable, of its manifest and the commit thread.

    Attributes:
        disk: moves extents for the executor, at simulated rates if there are any; ``None`` if
            nothing lives on disk.
        disks: the same at full speed.
        files: reads weights in place; ``None`` if there are none.
        writer: writes commits; ``None`` unless the store is durable and ``begin`` was called.
    """

    def __init__(
        self,
        config: OffloadConfig,
        layout: Layout,
        disk_bytes: int,
        found: OwnedStore | None,
        memory: Lease | None,
        limits: Rates,
        sources: Sources,
        readers: int,
    ) -> None:
        """
        Args:
            found: a store of exactly the same layout, to continue in.
            memory: the host memory that transfers use.
            readers: the number of threads that read weights in place.
        """
        self._layout, self.found, self._sources = layout, found, sources
        self.io: IoEngine | None = None
        self.files: RangeReader | None = None
        self.disk: Disk | None = None
        self.writer: CommitWriter | None = None
        self._manifest: Manifest | None = None
        self._paced: PacedDisk | None = None
        try:
            if (disk_bytes or layout.saved.disk) and config.nvme is not None:
                # The store grows later, when saved tensors are written.
                self._open(config, max(disk_bytes, PAGE), memory)
            if layout.in_place:
                self.files = RangeReader(
                    sources.files, was=sources.states, checksum=config.checksum, threads=readers,
                    direct=layout.regions.sharers == 1,
                )  # fmt: skip
            self.disks = Disks(self.io, self.files)
            if self.io is not None or self.files is not None:
                self.disk = self._paced_to(limits)
            self.extents = Extents(layout, self.io, self._kept(), self._in_place())
        except BaseException:
            self.close()
            raise

    def _open(self, config: OffloadConfig, disk_bytes: int, memory: Lease | None) -> None:
        if self.found is not None:
            items = self.found.layout.items
            kept = sum(extent.padded_bytes for item in items for extent in item.extents)
            extra = max(0, disk_bytes + self._layout.spare_bytes - kept)
            self.io = IoEngine.reopen(self.found, self.found.last(), extra_bytes=extra)
            self._reserve(self.found, self.io)
        else:
            assert config.nvme is not None
            self.io = IoEngine(
                list(config.nvme), disk_bytes + self._layout.spare_bytes, checksum=config.checksum,
                ephemeral=not self._layout.durable, sparse_bytes=self._layout.spare_bytes,
            )  # fmt: skip
        if memory is not None:
            self.io.register(memory)

    def _paced_to(self, limits: Rates) -> Disk:
        """Return the disks, limited to the rates of a simulated machine if there is one."""
        read, write = limits.disk_read_bytes_s, limits.disk_write_bytes_s
        if read is None and write is None:
            return self.disks
        self._paced = PacedDisk(self.disks, read, write)
        return self._paced

    def _in_place(self) -> dict[int, FileRanges]:
        return {unit: self._sources.ranges[unit] for unit in self._layout.in_place}

    def _reserve(self, found: OwnedStore, io: IoEngine) -> None:
        """Reserve disk space in a reopened store for all that every step writes.

        A copy of a store may be sparse in places where the original was not.
        """
        units = self._layout.units
        for item, role in zip(found.layout.items, found.last().roles, strict=True):
            key = item_of(item.key)
            clean = key.kind is Kind.WEIGHTS and not units[key.number].trainable
            for number, extent in enumerate(item.extents):
                if not clean or number in (0, role):
                    io.reserve(extent)

    def _kept(self) -> dict[tuple[Key, int], Extent]:
        """Return the extents of a reopened store."""
        if self.found is None:
            return {}
        return {
            (item_of(item.key), role): extent
            for item in self.found.layout.items
            for role, extent in enumerate(item.extents)
        }

    def digests(self) -> dict[int, int]:
        """Return a checksum of what was read, by unit that is read in place.

        Units that were not read are left out.
        """
        if self.files is None:
            return {}
        found = {unit: self.files.digest(ranges) for unit, ranges in self._in_place().items()}
        return {unit: digest for unit, digest in found.items() if digest is not None}

    def expect(self, digests: Mapping[int, int]) -> None:
        """Require that the files still match ``digests`` of an earlier run.

        The first read of each checks it.
        """
        for unit, ranges in self._in_place().items():
            if self.files is not None and unit in digests:
                self.files.expect(ranges, digests[unit])

    def begin(self, facts: Callable[[], Mapping[str, Any]], trace: Trace) -> None:
        """Create the manifest of a durable store, or continue in that of a reopened one.

        Args:
            facts: returns the facts about the run for a later ``resume``, as JSON.
        """
        if not self._layout.durable or self.io is None:
            return
        if self.found is not None:
            self._manifest = Manifest.reopen(self.found.manifests)
        else:
            named = [
                (key_of(item), [self.extents.of(item, 0), self.extents.of(item, 1)])
                for item in self._layout.stored
            ]
            description = {**facts(), "units": describe_units(self._layout)}
            self._manifest = self.io.make_durable(named, description)
        self.writer = CommitWriter(self.io, self._manifest, self.extents, trace)

    def close(self) -> None:
        """End the threads, and remove a store without a commit: it holds no trained weights."""
        if self.writer is not None:
            self.writer.close()
        if self.io is not None and self._manifest is not None and self._manifest.last == 0:
            self.io.make_ephemeral(self._manifest)
        if self._paced is not None:
            self._paced.close()
        if self.files is not None:
            self.files.close()
        if self.io is not None:
            self.io.close()
