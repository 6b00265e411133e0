"""All that is decided before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import OffloadConfig
from ..optim import Rule
from ..schedule.layout import Layout
from .partition import Partition
from .plan import Budgets, Needs, Plan
from .sources import NO_SOURCES, Sources


@dataclass(frozen=True)
class Blueprint:
    """All that is decided before anything is allocated."""

    config: OffloadConfig
    parts: Partition
    plan: Plan
    budgets: Budgets
    rules: tuple[Rule, ...]  # by param group
    needs: Needs
    sources: Sources = NO_SOURCES

    @property
    def update(self) -> str:
        """``"step"``, ``"backward"`` or ``"next_forward"``."""
        return self.needs.update

    @property
    def layout(self) -> Layout:
        """Where all that moves has its room."""
        assert self.plan.detail.layout is not None
        return self.plan.detail.layout

    @property
    def judges(self) -> bool:
        """Whether a step looks at the norms of all gradients before anything changes."""
        if self.update == "next_forward" or self.config.max_grad_norm is not None:
            return True
        return self.config.on_nonfinite != "raise" and self.update != "backward"

    def rule_of(self, index: int) -> Rule | None:
        """The rule of a parameter; ``None`` if it is not trained."""
        group = self.parts.groups[index]
        return None if group is None else self.rules[group]
