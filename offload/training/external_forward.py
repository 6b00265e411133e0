"""For who runs a model otherwise than through its modules: tells the engine what their hooks
would."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import torch

from ..schedule.ledger import Ledger
from .gradients import GradientCollector
from .handles import Removable
from .hooks import ModuleHooks
from .onloaded_units import OnloadedUnits

Values = Mapping[int, Callable[[], torch.Tensor]]  # by parameter index


class Loads(Protocol):
    """Who writes weights."""

    def load_all(self, values: Values) -> None: ...

    def look_outside(self, look: Callable[[], None]) -> None: ...


class Usable(Protocol):
    """Who knows whether the engine can be used, and brings units up to date."""

    def require(self) -> None: ...

    def require_usable(self) -> None: ...

    def catch_up(self, unit: int) -> None: ...


class ExternalForwardAdapter:
    """One engine's, whose weights all stay; units and parameters are by their index."""

    def __init__(
        self, ledger: Ledger, hooks: ModuleHooks, loop: Usable, onloaded_units: OnloadedUnits,
        collector: GradientCollector, loads: Loads, while_open: list[Removable],
    ) -> None:  # fmt: skip
        """``loads`` writes weights; ``while_open``: what ends with the engine, before its machinery
        does."""
        self._ledger, self._hooks, self._loop = ledger, hooks, loop
        self._onloaded_units, self._collector, self._loads = onloaded_units, collector, loads
        self._executor, self._while_open = onloaded_units.executor, while_open
        self.parts, self.accelerator = onloaded_units.parts, onloaded_units.accelerator
        self.device = self.accelerator.device

    def before_forward(self) -> None:
        """A forward of the whole model begins."""
        self._hooks.before_root()

    def after_forward(self, output: Any) -> None:
        """It has ended; ``None``: it has raised."""
        self._hooks.after_root(output)

    def catch_up(self, unit: int) -> None:
        """Weights of a unit are about to be read: their update is over first."""
        self._loop.require()
        self._loop.catch_up(unit)

    def version(self, unit: int) -> int:
        """How often a unit's weights have changed."""
        return self._ledger.versions[unit]

    def weight(self, index: int) -> torch.Tensor:
        """Where a weight lies for good."""
        return self._onloaded_units.weight(index)

    def copied(self, units: Collection[int], copy: Callable[[], None]) -> None:
        """Has ``copy`` read the weights of units once the last step has updated them and they have
        come to the device; the next updates come after that.  Any thread may call it."""
        places = []
        for unit in units:
            self._executor.engine_port.await_update(unit)
            places.append(self._onloaded_units.place(unit))
        if not self.accelerator.has_device_memory:
            copy()
            return
        for place in places:
            self._executor.compute.follow(place)
            self.accelerator.used(self._executor.arenas.bytes_of(place))
        copy()
        for place in places:
            self._executor.compute.mark(place)

    def until_closed(self, what: Removable) -> None:
        """``what`` ends with the engine."""
        self._while_open.append(what)

    def appeared(self, index: int) -> None:
        """A gradient was put, or added, into a parameter's ``grad``."""
        self._collector.appeared(index, self.parts.parameters[index])

    def replace(self, values: Mapping[int, torch.Tensor]) -> None:
        """Weights become these."""
        self._loop.require_usable()
        self._loads.load_all({index: value.clone for index, value in values.items()})

    def look_outside(self, look: weakref.WeakMethod[Callable[[], None]]) -> None:
        """``look`` is called when weights are to be whole, as long as there is who has it: it gives
        ``replace`` what was changed in them unseen."""

        def called() -> None:
            if (mine := look()) is not None:
                mine()

        self._loads.look_outside(called)

    @property
    def at_once(self) -> bool:
        """Whether a step's updates are over when it returns."""
        return not self._executor.protocol.updates_pending

    def landed(self) -> None:
        """Returns when the last step's updates are over."""
        self._loop.require_usable()
        if self._executor.protocol.updates_pending:
            self._executor.protocol.finish_updates()

    @property
    def returns(self) -> int:
        """How often weights became those of a commit."""
        return self._ledger.returns

    @property
    def spoiled(self) -> bool:
        """Whether updates have given values that are not finite, here."""
        return bool(self._ledger.spoiled or self._ledger.nonfinite)

    def spread(self, norm: Callable[[float], float]) -> None:
        """Gradients are spread over ranks: ``norm`` gives that of all from one's sum of squares."""
        self._ledger.over_ranks = norm
