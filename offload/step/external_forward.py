"""An adapter for code that runs a model without calling its modules, in place of their hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from typing import Any, Protocol

import torch

from ..grads.gradients import GradientCollector
from ..params.onloaded_units import OnloadedUnits
from ..private.handles import Removable
from ..schedule.ledger import Ledger
from ..schedule.messages import Until
from .forward_stack import Inputs
from .hooks import ModuleHooks

Values = Mapping[int, Callable[[], torch.Tensor]]  # by parameter index


class Loads(Protocol):
    """The interface for writing weights."""

    def load_all(self, values: Values, *, lost: Container[int] = ()) -> None: ...

    def look_outside(self, look: Callable[[], None]) -> None: ...


class Usable(Protocol):
    """The interface of the checks before use, and of the updates of units."""

    def require(self) -> None: ...

    def require_usable(self) -> None: ...

    def require_editable(self) -> None: ...

    def require_managed(self) -> None: ...

    def catch_up(self, unit: int) -> None: ...


class ExternalForwardAdapter:
    """The interface of an engine whose modules are not called; units and parameters by index."""

    def __init__(
        self, ledger: Ledger, hooks: ModuleHooks, loop: Usable, onloaded_units: OnloadedUnits,
        collector: GradientCollector, loads: Loads, while_open: list[Removable],
    ) -> None:  # fmt: skip
        """
        Args:
            loads: writes weights.
            while_open: objects to remove when the engine closes, before its machinery stops.
        """
        self._ledger, self._hooks, self._loop = ledger, hooks, loop
        self._onloaded_units, self._collector, self._loads = onloaded_units, collector, loads
        self._executor, self._while_open = onloaded_units.executor, while_open
        self.parts, self.accelerator = onloaded_units.parts, onloaded_units.accelerator
        self.device = self.accelerator.device

    def before_forward(self, inputs: Inputs | None = None) -> None:
        """Begin a forward of the whole model; ``inputs``: its arguments."""
        self._hooks.before_root(inputs=inputs)

    def after_forward(self, output: Any) -> None:
        """End a forward of the whole model; ``output`` is ``None`` if it raised."""
        self._hooks.after_root(output)

    def never_offload(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave these tensors where they are when autograd saves them: they are weights."""
        self._hooks.never_offload(tensors)

    def catch_up(self, unit: int) -> None:
        """Wait for the update of a unit whose weights are about to be read."""
        self._loop.require()
        self._loop.catch_up(unit)

    def require_managed(self) -> None:
        """Raise while the model is materialized."""
        self._loop.require_managed()

    def wait_for_commit(self) -> None:
        """Wait until no commit saves memory that users may be about to change in place."""
        executor = self._executor
        shared = executor.layout.durable and not self.accelerator.has_device_memory
        if shared and not executor.protocol.open:  # else an edit ends the snapshot
            executor.protocol.wait(Until.DURABLE)

    def version(self, unit: int) -> int:
        """Return how often a unit's weights have changed."""
        return self._ledger.versions[unit]

    def resident(self, unit: int) -> bool:
        """Return whether a unit's weights stay where compute finds them."""
        return self._onloaded_units.fixed[unit]

    def onload(self, unit: int) -> None:
        """Bring a unit's weights to compute, until ``offload``; nothing if they are resident."""
        self._onloaded_units.enter(unit, visible=False)

    def offload(self, unit: int) -> None:
        """End the use of a unit's weights that ``onload`` began."""
        self._onloaded_units.leave(unit, visible=False)

    def weight(self, index: int) -> torch.Tensor:
        """Return the weights of a parameter, which are resident or onloaded."""
        return self._onloaded_units.weight(index)

    def copied(self, units: Collection[int], copy: Callable[[], None]) -> None:
        """Call ``copy`` to read weights of units, between the last step's update and the next.

        By then the update is finished, and its weights have come to the device. Any thread may call
        this.
        """
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
        """Remove ``what`` when the engine closes."""
        self._while_open.append(what)

    def appeared(self, index: int) -> None:
        """Take a gradient that was assigned or added to a parameter's ``grad``."""
        self._collector.appeared(index, self.parts.parameters[index])

    def replace(self, values: Mapping[int, torch.Tensor], *, lost: Container[int] = ()) -> None:
        """Replace weights by these values, or what has their place in ``averaged``.

        Args:
            lost: those whose memory was overwritten already.
        """
        self._loop.require_editable()
        self._loads.load_all({index: value.clone for index, value in values.items()}, lost=lost)

    def look_outside(self, look: weakref.WeakMethod[Callable[[], None]]) -> None:
        """Call ``look`` whenever weights must be complete, as long as its object lives.

        It passes weights that were changed without the engine's knowledge to ``replace``.
        """

        def called() -> None:
            if (mine := look()) is not None:
                mine()

        self._loads.look_outside(called)

    @property
    def at_once(self) -> bool:
        """Whether a step's updates are finished when it returns."""
        return not self._executor.protocol.updates_pending

    def landed(self) -> None:
        """Wait until the last step's updates are finished."""
        self._loop.require_usable()
        if self._executor.protocol.updates_pending:
            self._executor.protocol.finish_updates()

    @property
    def returns(self) -> int:
        """How often the weights were set back to those of a commit."""
        return self._ledger.returns

    @property
    def spoiled(self) -> bool:
        """Whether updates have produced non-finite values on this rank."""
        return bool(self._ledger.spoiled or self._ledger.nonfinite)

    def spread(self, norm: Callable[[float], float], copies: Mapping[int, int]) -> None:
        """Combine gradient norms over ranks.

        Args:
            norm: returns the norm over all ranks, given one rank's sum of squares.
            copies: by parameter, how many ranks have the same elements, if more than one has.
        """
        self._ledger.over_ranks, self._ledger.copies = norm, copies
