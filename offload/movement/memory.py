"""The memory of one engine: budgets per tier, and what is allocated within them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..errors import HostMemoryError, format_bytes
from ..facts.stats import MemoryStats
from ..facts.tier import Tier
from ..facts.trace import TierBytes
from ..io_engine import Lease, allocate_host
from ..io_engine.shared_memory import SharedMemory
from ..planning.budgets import free_pages
from ..planning.plan import Budgets
from ..planning.working_memory import DIRECTIONS, packing_bytes
from ..schedule.layout import Layout
from .accelerators.base import Accelerator
from .pools import Annex, Arenas, Budget, HeldMemory, MemoryWatch, Reservation


class Memory:
    """Both arenas, allocated at construction.

    ``free_tier`` and ``reallocate_tier`` free them for a while, and ``close`` for good.

    Attributes:
        lease: the host arena, as disk transfers use it.
        pageable_bytes: host memory of the device's transfers that is not page-locked.
    """

    def __init__(
        self, budgets: Budgets, layout: Layout, accelerator: Accelerator,
        shared: SharedMemory | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            shared: the memory of the part of the host arena that ranks share.

        Raises:
            BudgetError: a tier has no room; nothing stays taken.
        """
        self._layout, self._shared = layout, shared
        regions, self._room, self._saved_here = layout.regions, layout.saved, 0
        self._accelerator = accelerator
        # Weights that are read in place fill memory when they are first read, not earlier.
        self._at_once = accelerator.has_device_memory or not layout.in_place
        self._before = accelerator.allocated_bytes()
        self._budgets = {
            Tier.DEVICE: Budget(Tier.DEVICE, budgets.device or 0),
            Tier.HOST: Budget(Tier.HOST, budgets.host),
            Tier.NVME: Budget(Tier.NVME, budgets.nvme or 0),
        }
        self.lease: Lease | None = None
        self.pageable_bytes = 0
        self._annexed: Lease | None = None
        self._unpacked: Lease | None = None
        self._freed: set[Tier] = set()
        self._device_bytes = regions.device_bytes
        packing = packing_bytes(layout.saved.itemsize)
        self._staging_bytes = packing // DIRECTIONS
        self._held = HeldMemory()
        try:
            self._held.take_host(
                self._budgets[Tier.HOST], regions.counted_host_bytes, self._allocate, self._free
            )
            if accelerator.has_device_memory:
                self._held.take_device(
                    self._budgets[Tier.DEVICE], regions.device_bytes + packing,
                    self._allocate_device, self._free_device,
                )  # fmt: skip
            elif regions.device_bytes:
                self._held.take_unpacked(
                    self._budgets[Tier.HOST], regions.device_bytes, self._allocate_unpacked,
                    self._free_unpacked,
                )  # fmt: skip
            if layout.saved.host:
                # Only address space is allocated here, so that ulimit -v fails in wrap, not later.
                self._held.take_annex(
                    lambda: self._annex(regions.host_bytes, layout.saved.host), self._free_annex
                )
        except BaseException:
            self.close()
            raise

    def _annex(self, base: int, nbytes: int) -> Annex:
        self._annexed = allocate_host(nbytes, populate=False)
        return Annex(base, torch.from_numpy(self._annexed.array), self._lock)

    def _lock(self, address: int, nbytes: int) -> None:
        if not self._accelerator.page_lock(address, nbytes):
            self.pageable_bytes += nbytes

    def _free_annex(self) -> None:
        if self._annexed is not None:
            self._annexed.release()
            self._annexed = None

    def _allocate(self) -> torch.Tensor:
        nbytes, shared = self._layout.regions.host_bytes, self._layout.regions.host_shared
        self.lease = lease = allocate_host(nbytes, populate=self._at_once and not shared)
        if shared:
            assert self._shared is not None
            self._shared.map_over(lease, shared, str(self._layout.shared_places))
            if self._at_once:
                lease.populate()
            self._lock(lease.address, shared)
        if lease.nbytes > shared:
            self._lock(lease.address + shared, lease.nbytes - shared)
        return torch.from_numpy(lease.array)[:nbytes]

    def _free(self) -> None:
        if self.lease is not None:
            self.lease.release()
            self.lease = None

    def _allocate_unpacked(self, nbytes: int) -> torch.Tensor:
        self._unpacked = allocate_host(nbytes, populate=self._at_once)
        return torch.from_numpy(self._unpacked.array)[:nbytes]

    def _free_unpacked(self) -> None:
        if self._unpacked is not None:
            self._unpacked.release()
            self._unpacked = None

    def _allocate_device(self) -> None:
        self._accelerator.stage(self._staging_bytes)
        self.arenas.device = self._accelerator.allocate(self._device_bytes)

    def _free_device(self) -> None:
        arena, self.arenas.device = self.arenas.device, None
        if arena is not None:
            self._accelerator.free(arena)
        self._accelerator.stage(0)

    @property
    def arenas(self) -> Arenas:
        """Both arenas."""
        return self._held.arenas

    def reserve_disk(self, nbytes: int) -> None:
        """Reserve disk space for the store.

        Raises:
            BudgetError: the budget has less.
        """
        self._budgets[Tier.NVME].reserve(nbytes, "the store", "raise nvme_memory")

    def reserve_reader(self, nbytes: int) -> None:
        """Reserve host memory for the buffers of weights that are read in place.

        Raises:
            BudgetError: the budget has less.
        """
        remedy = "raise host_memory"
        self._budgets[Tier.HOST].reserve(nbytes, "the reader of weight files", remedy)

    def reserve_copy(self, tier: Tier, nbytes: int) -> Reservation:
        """Reserve memory, or disk space, for a copy of memory that is about to be freed.

        Raises:
            BudgetError: the budget has less.
        """
        remedy = {
            Tier.HOST: "raise host_memory, or pass nvme= to wrap, so that the copy can be on disk",
            Tier.NVME: "raise nvme_memory",
        }[tier]
        return self._budgets[tier].reserve(nbytes, "a copy of what sleep() frees", remedy)

    # -- sleep ----------------------------------------------------------------------------------

    def has(self, tier: Tier) -> bool:
        """Return whether there is memory of a tier that ``free_tier`` would free."""
        if tier is Tier.DEVICE:
            return self._accelerator.has_device_memory and self.arenas.device is not None
        return bool(self._leases)

    @property
    def _leases(self) -> list[Lease]:
        leases = self.lease, self._unpacked, self._annexed
        return [lease for lease in leases if lease is not None]

    def free_tier(self, tier: Tier) -> None:
        """Free the memory of a tier.  Host memory keeps its addresses; contents are lost."""
        self._freed.add(tier)
        if tier is Tier.DEVICE:
            self._free_device()
            self._accelerator.empty_cache()
        else:
            for lease in self._leases:
                self._accelerator.page_unlock(lease.address, lease.nbytes)
                lease.discard()
            self.pageable_bytes = 0
            if self.arenas.annex is not None:
                self.arenas.annex.taken_bytes = 0
            self._count_saved()
        self._held.release(self._budgets[tier])

    def reallocate_tier(self, tier: Tier) -> None:
        """Allocate what ``free_tier`` has freed.

        Raises:
            OffloadError, RuntimeError: there is not that much memory now; nothing stays allocated.
        """
        if tier is Tier.DEVICE:
            self._allocate_device()
        else:
            leases = [each for each in (self.lease if self._at_once else None, self._unpacked)
                      if each is not None]  # fmt: skip
            require_free(sum(lease.nbytes for lease in leases))
            try:
                for lease in leases:
                    lease.populate()
                if self.lease is not None:
                    self._lock(self.lease.address, self.lease.nbytes)
            except BaseException:
                self.free_tier(tier)
                raise
        self._held.renew(self._budgets[tier])
        self._freed.discard(tier)

    # -- figures --------------------------------------------------------------------------------

    def count_saved(self, nbytes: int, disk: int) -> None:
        """Account for saved tensors: ``nbytes`` where compute has them, ``disk`` bytes on disk.

        The former count regardless of which code allocated them.
        """
        self._budgets[Tier.NVME].count(disk)
        self._saved_here = nbytes
        self._count_saved()

    def _count_saved(self) -> None:
        annex, here = self.arenas.annex, self._saved_here
        taken = 0 if annex is None else annex.taken_bytes
        if self._accelerator.has_device_memory:
            self._budgets[Tier.DEVICE].count(here)
            self._budgets[Tier.HOST].count(taken)
        else:
            self._budgets[Tier.HOST].count(here + taken)

    def untaken(self) -> dict[Tier, int]:
        """Return the bytes by tier that may still be used within the budgets.

        These are pages not touched yet, and the room for activations.
        """
        host = 0
        if Tier.HOST not in self._freed:
            host = sum(each.nbytes - min(each.nbytes, each.resident_bytes())
                       for each in self._leases if each is not self._unpacked)  # fmt: skip
        saved = max(0, self._room.compute - self._saved_here)
        if self._accelerator.has_device_memory:
            return {Tier.HOST: host, Tier.DEVICE: saved}
        return {Tier.HOST: host + saved}

    def stats(self) -> dict[Tier, MemoryStats]:
        """Return budget, held and peak bytes of every tier."""
        found = {
            tier: MemoryStats(b.budget_bytes, b.held_bytes, b.peak_bytes)
            for tier, b in self._budgets.items()
        }
        device = found[Tier.DEVICE]
        engine = min(device.peak_bytes, device.budget_bytes)
        found[Tier.DEVICE] = replace(device, workspace_bytes=self._workspace(engine))
        return found

    def _workspace(self, engine_bytes: int) -> int | None:
        """Return the device memory that the process used at its peak besides the engine's.

        This is the peak less what was allocated before, and less the engine's peak within its
        budget. ``None`` if unknown, or if the peak did not grow.
        """
        counted = self._accelerator.allocated_bytes()
        if counted is None or self._before is None or counted[1] <= self._before[1]:
            return None
        return max(0, counted[1] - self._before[0] - engine_bytes)

    def for_trace(self) -> dict[str, TierBytes]:
        """Return the tiers that hold anything, by name."""
        return {
            tier.value: TierBytes(each.budget_bytes, each.held_bytes)
            for tier, each in self.stats().items()
            if each.held_bytes
        }

    def close(self, watches: Sequence[MemoryWatch] = ()) -> None:
        """Free everything; memory that ``watches`` report as still viewed is freed later."""
        self._held.close(watches)


def require_free(nbytes: int) -> None:
    """Raise unless this many bytes of pages are free: taking more could end the process.

    Raises:
        OffloadError: fewer are free.
    """
    limit, free = min(free_pages().items(), key=lambda each: each[1])
    if free < nbytes:
        raise HostMemoryError(
            f"{format_bytes(nbytes)} of host memory is needed, and {limit} has "
            f"{format_bytes(free)} free"
        )
