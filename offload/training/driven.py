"""For who runs a model otherwise than through its modules: tells the engine what their hooks
would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from ..schedule.ledger import Ledger
from .gradients import GradientCollector
from .hooks import ModuleHooks
from .residences import Residences

Values = Mapping[int, Callable[[], torch.Tensor]]  # by parameter index


class Usable(Protocol):
    """Who knows whether the engine can be used, and brings units up to date."""

    def require_usable(self) -> None: ...

    def catch_up(self, unit: int) -> None: ...


class Driven:
    """One engine's, whose weights all stay; units and parameters are by their index."""

    def __init__(
        self, ledger: Ledger, hooks: ModuleHooks, loop: Usable, residences: Residences,
        collector: GradientCollector, load: Callable[[Values], None],
    ) -> None:  # fmt: skip
        """``load`` writes weights."""
        self._ledger, self._hooks, self._loop = ledger, hooks, loop
        self._residences, self._collector, self._load = residences, collector, load
        self.parts, self.device = residences.parts, residences.accelerator.device

    def before_forward(self) -> None:
        """A forward of the whole model begins."""
        self._hooks.before_root()

    def after_forward(self, output: Any) -> None:
        """It has ended; ``None``: it has raised."""
        self._hooks.after_root(output)

    def catch_up(self, unit: int) -> None:
        """Weights of a unit are about to be read: their update is over first."""
        self._loop.catch_up(unit)

    def version(self, unit: int) -> int:
        """How often a unit's weights have changed."""
        return self._ledger.versions[unit]

    def weight(self, index: int) -> torch.Tensor:
        """Where a weight lies for good."""
        return self._residences.weight(index)

    def appeared(self, index: int) -> None:
        """A gradient was put, or added, into a parameter's ``grad``."""
        self._collector.appeared(index, self.parts.parameters[index])

    def replace(self, values: Mapping[int, torch.Tensor]) -> None:
        """Weights become these."""
        self._loop.require_usable()
        self._load({index: value.clone for index, value in values.items()})

    def spread(self, norm: Callable[[float], float]) -> None:
        """Gradients are spread over ranks: ``norm`` gives that of all from one's sum of squares."""
        self._ledger.over_ranks = norm
