"""Averages of the weights: read them, or exchange them with the weights for a while."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn

from ..errors import WeightError, clean_up
from ..movement.runtime import Runtime
from ..optim.averaged import AVERAGE
from ..params.onloaded_units import OnloadedUnits
from ..params.resident_param_guard import ResidentParamGuard
from ..planning.blueprint import Blueprint
from ..private.reentrancy import callers
from ..schedule.units import Unit
from .contents import Contents, Values
from .edits import Edits
from .param_access import ParamAccess

# Note [Exchange of weights and averages]
# ``optimizer.averaged()`` evaluates a model with its averages.  Both are exchanged in place, unit
# by unit: the average becomes the weight and its master, and the old master is stored as the
# average.  So only one unit's values are needed in memory in addition.  Meanwhile nothing is
# trained or committed, and edits of weights edit the averages.
#
# An exception may interrupt the exchange anywhere.  ``_amid`` holds both values of the present unit
# until they are written, and ``_swapped`` the units that are done, so the exchange can be
# continued.  If the block ends by an exception that cuts off its exit, or by garbage collection,
# then ``OnloadedUnits.returning`` is set, and the next use of the weights exchanges them back.


class AroundExchange(Protocol):
    """Connects the model with its engine around an exchange of weights and averages."""

    def before_exchange(self) -> None:
        """Prepare for the exchange."""

    def after_exchange(self) -> None:
        """Handle the end of the exchange, also where an exception ended it."""


class Averages:
    """Implements ``OffloadedOptimizer.averaged``.  See Note [Exchange of weights and averages]."""

    def __init__(
        self, runtime: Runtime, contents: Contents, weights: ParamAccess,
        onloaded_units: OnloadedUnits, resident_guard: ResidentParamGuard, edits: Edits,
    ) -> None:  # fmt: skip
        self._parts, self._steps = runtime.parts, runtime.ledger.steps
        self._runtime, self._contents = runtime, contents
        self._weights, self._resident_guard, self._edits = weights, resident_guard, edits
        self._onloaded_units = onloaded_units
        self._chunks = [
            (unit.index, number)
            for unit in self._parts.units
            for number, chunk in enumerate(unit.chunks)
            if chunk.group is not None and AVERAGE in runtime.blueprint.rules[chunk.group].moments
        ]
        self._chunk_of = {
            spec.index: (unit, number)
            for unit, number in self._chunks
            for spec in self._parts.units[unit].chunks[number].params
        }
        # The averages that were read last, and their chunk and version.
        self._last: tuple[object, Mapping[int, torch.Tensor]] = None, {}
        self._swapped: set[int] = set()  # units whose weights are the averages now
        # The unit being exchanged: its new values, and whether these are the averages.
        self._amid: tuple[int, Mapping[int, Values], bool] | None = None
        self._block: object | None = None  # the block that has begun and has not ended
        self._around: AroundExchange | None = None

    def require_kept(self) -> None:
        """Raise unless averages are kept.

        Raises:
            OffloadError: no rule keeps an average.
        """
        if not self._chunks:
            raise WeightError(
                "there is no average: give the optimizer to overspill.ema(optimizer, decay) before "
                "wrap"
            )

    def require_ended(self) -> None:
        """Raise if averages have replaced the weights.

        Raises:
            OffloadError: they have.
        """
        if self._block is not None:
            raise WeightError(
                "the model has its averages instead of its weights: it can be evaluated under "
                "torch.no_grad(); leave the `with optimizer.averaged()` block for all else"
            )

    # -- reading --------------------------------------------------------------------------------

    def read(self, index: int) -> torch.Tensor | None:
        """Return the fp32 average of a parameter, or ``None`` if it has none or has taken no step.

        Nothing may move now, or have moved since the last call for the same chunk.
        """
        chunk = self._chunk_of.get(index)
        if chunk is None:
            return None
        state = (*chunk, self._runtime.ledger.versions[chunk[0]])
        if self._last[0] != state:
            self._last = state, {}
            self._last = state, self._of(*chunk)
        return self._last[1].get(index)

    def forget(self) -> None:
        """Discard the averages that were read last, because they may be outdated."""
        self._last = None, {}

    def _of(self, unit: int, number: int) -> dict[int, torch.Tensor]:
        stored = self._contents.stored(unit, number)
        return {index: own[AVERAGE] for index, own in stored.items() if self._steps[index]}

    # -- in the place of weights ----------------------------------------------------------------

    def begin(self, block: object, around: AroundExchange | None) -> None:
        """Exchange weights and averages, for a ``block``.

        Args:
            around: called before and after this exchange and the one back.
        """
        self._weights.require_writable({unit for unit, _ in self._chunks})
        self._block, self._around = block, around
        try:
            self._exchange(to_averages=True)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Exchange them back, unless the engine is closed or has failed."""
        if self._block is None:
            return
        self.abandon(self._block)
        if not (self._runtime.closed or self._runtime.executor.health.failed):
            self._exchange(to_averages=False)
        self._block, self._around, self._onloaded_units.returning = None, None, None

    def abandon(self, block: object) -> None:
        """Let the next use of the weights exchange them back, unless the ``block`` has ended."""
        if self._block is block:
            self._onloaded_units.returning = self._end_late

    def _end_late(self) -> None:
        if not any(frame.f_code is Averages._exchange.__code__ for frame in callers()):
            self.end()

    def _exchange(self, *, to_averages: bool) -> None:
        parts = {unit: [spec.index for _, spec in self._parts.units[unit].params]
                 for unit, _ in self._chunks}  # fmt: skip
        around = self._around
        if around is not None:
            around.before_exchange()
        try:
            self._weights.reconcile()
            self._weights.require_writable(parts)
            with self._edits.of(parts):
                self._finish()
                for unit in parts:
                    if (unit in self._swapped) != to_averages:
                        self._amid = unit, self._both(unit), to_averages
                        self._finish()
            self.forget()
            self._weights.renew()
        finally:
            if around is not None:
                around.after_exchange()

    def _both(self, unit: int) -> dict[int, Values]:
        """Return the exchanged values of a unit, by parameter."""
        masters = {spec.index: value for spec, value in self._contents.masters(unit)}
        return {
            index: {"weight": average, AVERAGE: masters[index]}
            for of, number in self._chunks if of == unit
            for index, average in self._of(unit, number).items()
        }  # fmt: skip

    def _finish(self) -> None:
        """Write the values of the unit being exchanged; writing them twice is harmless."""
        if self._amid is None:
            return
        unit, values, to_averages = self._amid
        if values:
            with torch.no_grad():
                self._contents.load(unit, lambda spec: values.get(spec.index), first=False)
            self._resident_guard.changed(unit, values)
        (self._swapped.add if to_averages else self._swapped.discard)(unit)
        self._amid = None


class Averaged:
    """A block in which the model computes with its averages.

    Not a generator: its ``finally`` could run late, during garbage collection.
    """

    _block: object | None = None  # since before it begins; an exception may interrupt any line

    def __init__(
        self, averages: Averages, require: Callable[[], None], model: nn.Module,
        around: AroundExchange | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            require: raises if the model cannot be used.
            around: called before and after each exchange.
        """
        self._averages, self._require, self._model = averages, require, model
        self._around = around

    def __enter__(self) -> nn.Module:
        self._averages.require_kept()
        self._require()
        self._block = object()
        self._averages.begin(self._block, self._around)
        return self._model

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        clean_up(self._averages.end, "the end of averaged()", error)

    def __del__(self) -> None:
        if self._block is not None:
            self._averages.abandon(self._block)


def first_averages(
    blueprint: Blueprint, contents: Contents, unit: Unit,
    given_of: Callable[[int], Mapping[str, Any]],
) -> Mapping[int, torch.Tensor]:  # fmt: skip
    """Return the weights of parameters whose loaded state lacks an average that the rule keeps.

    Their averages start from these weights.

    Args:
        given_of: returns the loaded state of a parameter.
    """
    lack = set()
    for _, spec in unit.params:
        given, rule = given_of(spec.index), blueprint.rule_of(spec.index)
        if rule and AVERAGE in rule.moments and given and given.get(AVERAGE) is None:
            lack.add(spec.index)
    if not lack:
        return {}
    return {spec.index: value for spec, value in contents.masters(unit.index) if spec.index in lack}
