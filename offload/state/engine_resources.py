"""The resources for a model's weights and state, allocated before its hooks are installed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..facts.trace import Trace
from ..io_engine.committed import OwnedStore
from ..movement.accelerators.base import Accelerator
from ..movement.runtime import Runtime
from ..params.profiler_ranges import ProfilerRanges
from ..params.slot_refs import SlotRefTracker
from ..params.stubs import Stubs
from ..planning.blueprint import Blueprint
from ..private.trainer import Trainer
from ..schedule.messages import Freed
from .contents import Contents


@dataclass(frozen=True)
class EngineResources:
    """Memory and disk space, the runtime that moves data, and the placeholders of parameters."""

    runtime: Runtime
    contents: Contents
    stubs: Stubs
    trainer: Trainer
    slot_refs: SlotRefTracker

    @classmethod
    def open(
        cls, blueprint: Blueprint, accelerator: Accelerator, owner: list[Runtime],
        found: OwnedStore | None = None,
    ) -> EngineResources:  # fmt: skip
        """Allocate memory and disk space.

        Args:
            owner: receives the runtime, which has to be closed, before anything is allocated.
            found: a store of exactly the same layout to continue with.

        Raises:
            BudgetError: a tier has too little room.
        """
        trainer, slot_refs = Trainer(), SlotRefTracker()

        def before_asking() -> Iterator[Freed]:
            trainer.require()
            return slot_refs.freed()

        stubs = Stubs(blueprint.parts.units, accelerator.device)
        trace = Trace(ranges=ProfilerRanges(), instant=accelerator.instant)
        runtime = Runtime(blueprint, accelerator, trace, before_asking, owner, found)
        shared = blueprint.shared_memory
        contents = Contents(
            runtime.layout, runtime.memory.arenas, runtime.direct,
            fills_shared=shared is None or shared.first,
        )  # fmt: skip
        runtime.sleeping.add_user(contents)
        return cls(runtime, contents, stubs, trainer, slot_refs)
