"""The resources of a model's weights and state, before the model is hooked up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..facts.trace import Trace
from ..io_engine.committed import OwnedStore
from ..movement.accelerators.base import Accelerator
from ..movement.runtime import Runtime
from ..planning.blueprint import Blueprint
from ..schedule.messages import Freed
from ..training.ranges import ProfilerRanges
from ..training.slot_refs import SlotRefTracker
from ..training.stubs import Stubs
from ..training.trainer import Trainer
from .contents import Contents


@dataclass(frozen=True)
class EngineResources:
    """Room for all, who moves it, and what the parameters show once their weights are there."""

    runtime: Runtime
    contents: Contents
    stubs: Stubs
    trainer: Trainer
    held_slots: SlotRefTracker

    @classmethod
    def open(
        cls, blueprint: Blueprint, accelerator: Accelerator, owner: list[Runtime],
        found: OwnedStore | None = None,
    ) -> EngineResources:  # fmt: skip
        """Takes memory and disk; ``found``: a store of the very same layout, to go on in.

        ``owner``: gets what is to be closed, before it takes anything.

        Raises:
            BudgetError: a tier has no room.
        """
        trainer, held_slots = Trainer(), SlotRefTracker()

        def before_asking() -> Iterator[Freed]:
            trainer.require()
            return held_slots.freed()

        stubs = Stubs(blueprint.parts.units, accelerator.device)
        trace = Trace(ranges=ProfilerRanges(), instant=accelerator.instant)
        runtime = Runtime(blueprint, accelerator, trace, before_asking, owner, found)
        contents = Contents(runtime.layout, runtime.memory.arenas, runtime.direct)
        return cls(runtime, contents, stubs, trainer, held_slots)
