"""All that moves and updates the items of one run: memory, disk, threads and the executor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ..facts.tier import Tier
from ..facts.trace import Trace
from ..io_engine.committed import OwnedStore
from ..io_engine.file_ranges import held_bytes, threads_for
from ..optim.kernels import set_threads, threads, threads_beside
from ..planning.blueprint import Blueprint
from ..planning.budgets import Untaken
from ..planning.sources import describe_sources
from ..schedule.ledger import Ledger
from ..schedule.messages import Freed
from .accelerators.base import Accelerator
from .direct import DirectAccess
from .executor import Executor
from .memory import Memory
from .pools import MemoryWatch
from .sleeping import Sleeping
from .store import Store
from .updates import Updater


class Runtime:
    """Allocates memory and disk space and starts the threads; ``close`` ends and frees all.

    Attributes:
        found: the store of exactly the same layout that the run continues in, if any.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        accelerator: Accelerator,
        trace: Trace,
        before_asking: Callable[[], Iterable[Freed]],
        owner: list[Runtime],
        found: OwnedStore | None = None,
    ) -> None:
        """
        Args:
            before_asking: called by every thread that makes a request; returns what was freed
                meanwhile.
            owner: receives this object before it allocates anything; the caller then closes it.

        Raises:
            BudgetError: a tier has no room.
        """
        self.blueprint, self.accelerator, self.trace, self.found = (
            blueprint, accelerator, trace, found
        )  # fmt: skip
        self.config, self.parts = blueprint.config, blueprint.parts
        self.layout = blueprint.layout
        self.ledger = Ledger(
            len(self.parts.parameters), len(self.parts.units), measures=blueprint.judges,
            on_trial=blueprint.update == "backward",
        )  # fmt: skip
        self.closed = False
        self._readers = threads_for(blueprint.budgets.host)
        self._hide: list[Callable[[], Sequence[MemoryWatch]]] = []
        owner.append(self)
        self._start(before_asking)

    def _start(self, before_asking: Callable[[], Iterable[Freed]]) -> None:
        config, layout = self.config, self.layout
        self.memory = Memory(
            self.blueprint.budgets, layout, self.accelerator, self.blueprint.shared_memory
        )
        self.store = self._open_store()
        self.trace.tiers = self.memory.for_trace()
        count = config.threads or threads_beside(self.accelerator.device)
        if count != threads():
            set_threads(count)
        arenas = self.memory.arenas
        self.updater = Updater(layout, arenas, self.blueprint.rules, self.ledger, config.accumulate)
        self.store.begin(self._facts, self.trace)
        self.executor = Executor(
            layout, arenas, self.accelerator, self.store.disk, self.store.extents, self.trace,
            self.updater.work_on, self.updater.visit, self.ledger, before_asking,
            check=os.environ.get("OVERSPILL_VALIDATE") == "1",
            commits=self.store.writer, saved_changed=self.memory.count_saved,
        )  # fmt: skip
        self.sleeping = Sleeping(
            self.memory, self.executor, self.accelerator, self.store.io, config.nvme or (),
            checksum=config.checksum,
        )  # fmt: skip
        self.direct = DirectAccess(
            layout, self.executor, self.store.io, self.store.disks, self.store.extents,
            self.sleeping.wake,
        )  # fmt: skip

    def _open_store(self) -> Store:
        disk_bytes = self.blueprint.plan.disk_bytes
        if disk_bytes and self.config.nvme is not None:
            self.memory.reserve_disk(disk_bytes)
        if self.layout.in_place:
            self.memory.reserve_reader(held_bytes(self._readers))
        return Store(
            self.config, self.layout, disk_bytes, self.found, self.memory.lease,
            self.accelerator.limits, self.blueprint.sources, self._readers,
        )  # fmt: skip

    def _facts(self) -> Mapping[str, Any]:
        config = self.config
        return {
            "optimizer": self.blueprint.rules[0].name,
            "precision": config.precision, "master": config.master, "moments": config.moments,
            "frozen": config.frozen,
            "names": None if config.units is None else list(config.units),
            "sources": describe_sources(self.blueprint.sources, self.layout.in_place),
        }  # fmt: skip

    def untaken(self) -> Untaken:
        """Return what the run may still allocate on this machine within its budgets."""
        memory, io = self.memory.untaken(), self.store.io
        device, disk = dict[torch.device, int](), dict[int, int]()
        if self.accelerator.device.type != "cpu":
            device[self.accelerator.device] = memory.get(Tier.DEVICE, 0)
        if io is not None and self.config.nvme is not None:
            need = self.blueprint.plan.disk_bytes + self.layout.saved.disk - io.disk_bytes
            for folder in filter(Path.is_dir, self.config.nvme):
                number = folder.stat().st_dev
                disk[number] = disk.get(number, 0) + max(0, need) // len(self.config.nvme)
        return Untaken(memory[Tier.HOST], device, disk)

    def when_still(self, hide: Callable[[], Sequence[MemoryWatch]]) -> None:
        """Call ``hide`` in ``close``, once nothing moves any more.

        It returns watches of the memory that may still be viewed; that memory is freed later.
        """
        self._hide.append(hide)

    def close(self) -> None:
        """End and free everything; an error in one part does not keep the others from closing."""
        self.closed = True
        watches: list[MemoryWatch] = []

        def hide() -> None:
            for each in self._hide:
                watches.extend(each())

        parts = [
            getattr(self, n)
            for n in ("store", "sleeping", "executor", "direct")
            if hasattr(self, n)
        ]
        with ExitStack() as stack:  # runs the callbacks from the last to the first
            if hasattr(self, "memory"):
                stack.callback(lambda: self.memory.close(watches))
            stack.callback(self.accelerator.close)
            stack.callback(hide)
            for part in parts:
                stack.callback(part.close)
