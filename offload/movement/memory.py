"""The memory of one engine: budgets by tier, and what is taken of them until its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ..facts.stats import MemoryStats
from ..facts.tier import Tier
from ..facts.trace import TierBytes
from ..io_engine import Lease, allocate_host
from ..planning.plan import Budgets
from ..schedule.layout import Layout
from .accelerators.base import Accelerator
from .pools import Annex, Arenas, Budget, HeldMemory, MemoryWatch


class Memory:
    """Takes both arenas at once; ``close`` gives all back."""

    def __init__(self, budgets: Budgets, layout: Layout, accelerator: Accelerator) -> None:
        """
        Raises:
            BudgetError: a tier has no room; nothing stays taken.
        """
        regions, self._room, self._saved_here = layout.regions, layout.saved, 0
        self._accelerator = accelerator
        # What is read in place is there when it is first read, and so is the memory for it.
        self._at_once = accelerator.has_device_memory or not layout.in_place
        self._before = accelerator.allocated_bytes()
        self._budgets = {
            Tier.DEVICE: Budget(Tier.DEVICE, budgets.device or 0),
            Tier.HOST: Budget(Tier.HOST, budgets.host),
            Tier.NVME: Budget(Tier.NVME, budgets.nvme or 0),
        }
        self.lease: Lease | None = None  # the host arena, as the disk's transfers use it
        self.pageable_bytes = 0  # host memory of the device's transfers that is not page-locked
        self._annexed: Lease | None = None
        self._held = HeldMemory()
        try:
            self._held.take_host(
                self._budgets[Tier.HOST], regions.host_bytes, self._allocate, self._free
            )
            if accelerator.has_device_memory:
                self._held.take_device(
                    self._budgets[Tier.DEVICE], regions.device_bytes, accelerator.allocate,
                    accelerator.free,
                )  # fmt: skip
            elif regions.device_bytes:
                self._held.take_unpacked(
                    self._budgets[Tier.HOST], regions.device_bytes, self._allocate_unpacked
                )
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

    def _allocate(self, nbytes: int) -> torch.Tensor:
        self.lease = allocate_host(nbytes, populate=self._at_once)
        self._lock(self.lease.address, self.lease.nbytes)
        return torch.from_numpy(self.lease.array)[:nbytes]

    def _allocate_unpacked(self, nbytes: int) -> tuple[torch.Tensor, Callable[[], None]]:
        lease = allocate_host(nbytes)
        return torch.from_numpy(lease.array)[:nbytes], lease.release

    def _free(self) -> None:
        if self.lease is not None:
            self.lease.release()
            self.lease = None

    @property
    def arenas(self) -> Arenas:
        """Both arenas."""
        return self._held.arenas

    def reserve_disk(self, nbytes: int) -> None:
        """Takes room for the store.

        Raises:
            BudgetError: there is less.
        """
        self._budgets[Tier.NVME].reserve(nbytes, "the store", "raise nvme_memory")

    def reserve_reader(self, nbytes: int) -> None:
        """Takes room for what weights that are read in place come through.

        Raises:
            BudgetError: there is less.
        """
        remedy = "raise host_memory"
        self._budgets[Tier.HOST].reserve(nbytes, "the reader of weight files", remedy)

    def count_saved(self, nbytes: int, disk: int) -> None:
        """So much of what autograd saved is where compute has it, whoever has allocated it, and on
        disk."""
        self._budgets[Tier.NVME].count(disk)
        self._saved_here = nbytes
        annex = self.arenas.annex
        taken = 0 if annex is None else annex.taken_bytes
        if self._accelerator.has_device_memory:
            self._budgets[Tier.DEVICE].count(nbytes)
            self._budgets[Tier.HOST].count(taken)
        else:
            self._budgets[Tier.HOST].count(nbytes + taken)

    def untaken(self) -> dict[Tier, int]:
        """Bytes that may still be taken within the budgets, by tier: pages not yet touched, and
        room for activations."""
        leases = [lease for lease in (self.lease, self._annexed) if lease is not None]
        host = sum(lease.nbytes - min(lease.nbytes, lease.resident_bytes()) for lease in leases)
        saved = max(0, self._room.compute - self._saved_here)
        if self._accelerator.has_device_memory:
            return {Tier.HOST: host, Tier.DEVICE: saved}
        return {Tier.HOST: host + saved}

    def stats(self) -> dict[Tier, MemoryStats]:
        """Budget, held and peak bytes of every tier."""
        found = {
            tier: MemoryStats(b.budget_bytes, b.held_bytes, b.peak_bytes)
            for tier, b in self._budgets.items()
        }
        device = found[Tier.DEVICE]
        engine = min(device.peak_bytes, device.budget_bytes)
        found[Tier.DEVICE] = replace(device, workspace_bytes=self._workspace(engine))
        return found

    def _workspace(self, engine_bytes: int) -> int | None:
        """What the process had on the device at most, beside what was there before and what the
        engine had within its budget at most."""
        counted = self._accelerator.allocated_bytes()
        if counted is None or self._before is None or counted[1] <= self._before[1]:
            return None
        return max(0, counted[1] - self._before[0] - engine_bytes)

    def for_trace(self) -> dict[str, TierBytes]:
        """The tiers of which something is held, by name."""
        return {
            tier.value: TierBytes(each.budget_bytes, each.held_bytes)
            for tier, each in self.stats().items()
            if each.held_bytes
        }

    def close(self, watches: Sequence[MemoryWatch] = ()) -> None:
        """Frees everything; what ``watches`` say is looked at yet, later."""
        self._held.close(watches)
