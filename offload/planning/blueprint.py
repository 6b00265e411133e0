"""All that is decided before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import OffloadConfig
from ..optim import Rule
from .partition import Partition
from .plan import Budgets, Plan


@dataclass(frozen=True)
class Blueprint:
    """All that is decided before anything is allocated."""

    config: OffloadConfig
    parts: Partition
    plan: Plan
    budgets: Budgets
    rules: tuple[Rule, ...]  # by param group
    update: str  # "step", "backward" or "next_forward"

    def rule_of(self, index: int) -> Rule | None:
        """The rule of a parameter; ``None`` if it is not trained."""
        group = self.parts.groups[index]
        return None if group is None else self.rules[group]
