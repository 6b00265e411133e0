"""The blueprint of a run: every decision that precedes allocation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..config import OffloadConfig
from ..io_engine.shared_memory import SharedMemory
from ..optim import Rule
from ..schedule.layout import Layout
from .partition import Partition
from .plan import Budgets, Needs, Plan
from .sources import NO_SOURCES, Sources


@dataclass(frozen=True)
class Blueprint:
    """Everything that is decided before memory is allocated."""

    config: OffloadConfig
    parts: Partition
    plan: Plan
    budgets: Budgets
    rules: tuple[Rule, ...]  # by param group
    needs: Needs
    sources: Sources = NO_SOURCES
    heads: tuple[nn.Linear, ...] = ()  # which compute their logits in chunks
    tiled: tuple[nn.Module, ...] = ()  # the layers that run in tiles
    shared_memory: SharedMemory | None = None  # see ``StandInModel``

    @property
    def update(self) -> str:
        """When the update runs: ``"step"``, ``"backward"`` or ``"next_forward"``."""
        return self.needs.update

    @property
    def layout(self) -> Layout:
        """The homes and regions of everything that moves."""
        assert self.plan.detail.layout is not None
        return self.plan.detail.layout

    @property
    def head_units(self) -> frozenset[int]:
        """The units of the heads that compute their logits in chunks."""
        return self.parts.units_of(self.heads)

    @property
    def judges(self) -> bool:
        """Whether a step checks the norms of all gradients before it changes anything."""
        if self.update == "next_forward" or self.config.max_grad_norm is not None:
            return True
        return self.config.on_nonfinite != "raise" and self.update != "backward"

    def rule_of(self, index: int) -> Rule | None:
        """Return the update rule of a parameter; ``None`` if it is not trained."""
        group = self.parts.groups[index]
        return None if group is None else self.rules[group]
