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
