"""The averages that rules keep of the weights: read, and in their place for a while."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType

import torch
from torch import nn

from ..errors import OffloadError, clean_up
from ..movement.runtime import Runtime
from ..optim.averaged import AVERAGE
from ..training.onloaded_units import OnloadedUnits
from ..training.reentrancy import callers
from ..training.resident_param_guard import ResidentParamGuard
from .contents import Contents, Values
from .edits import Edits
from .param_access import ParamAccess


class Averages:
    """See ``OffloadedOptimizer.averaged``.

    Weights and averages change places, unit by unit, so that memory for one unit is all it takes.
    Nothing is trained or committed meanwhile; edits are edits of the averages.  What an exception
    cuts off is ended by the next use.
    """

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
        # What was read last, and its chunk and version.
        self._last: tuple[object, Mapping[int, torch.Tensor]] = None, {}
        self._swapped: set[int] = set()  # units that have their averages
        # One whose places are being exchanged: what they get, and whether these are the averages.
        self._amid: tuple[int, Mapping[int, Values], bool] | None = None
        self.active = False

    def require_kept(self) -> None:
        """
        Raises:
            OffloadError: no rule keeps an average.
        """
        if not self._chunks:
            raise OffloadError(
                "there is no average: give the optimizer to overspill.ema(optimizer, decay) before "
                "wrap"
            )

    def require_ended(self) -> None:
        """
        Raises:
            OffloadError: the weights are away.
        """
        if self.active:
            raise OffloadError(
                "the model has its averages instead of its weights: it can be evaluated under "
                "torch.no_grad(); leave the `with optimizer.averaged()` block for all else"
            )

    # -- reading --------------------------------------------------------------------------------

    def read(self, index: int) -> torch.Tensor | None:
        """The fp32 average of a parameter; ``None`` of one that has taken no step, or is not
        averaged.  Nothing may move, or have moved since the last call for the same chunk."""
        chunk = self._chunk_of.get(index)
        if chunk is None:
            return None
        state = (*chunk, self._runtime.ledger.versions[chunk[0]])
        if self._last[0] != state:
            self._last = state, {}
            self._last = state, self._of(*chunk)
        return self._last[1].get(index)

    def forget(self) -> None:
        """What was read last may not be so any more."""
        self._last = None, {}

    def _of(self, unit: int, number: int) -> dict[int, torch.Tensor]:
        stored = self._contents.stored(unit, number)
        return {index: own[AVERAGE] for index, own in stored.items() if self._steps[index]}

    # -- in the place of weights ----------------------------------------------------------------

    def begin(self) -> None:
        """Weights and averages change places."""
        self._weights.require_writable({unit for unit, _ in self._chunks})
        self.active = True
        try:
            self._exchange(to_averages=True)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """They change back; after the engine's end nothing does."""
        if not self.active:
            return
        self.abandon()
        if not (self._runtime.closed or self._runtime.executor.health.failed):
            self._exchange(to_averages=False)
        self.active, self._onloaded_units.returning = False, None

    def abandon(self) -> None:
        """The block is over: whoever looks at weights next ends it, if nobody has."""
        if self.active:
            self._onloaded_units.returning = self._end_late

    def _end_late(self) -> None:
        if not any(frame.f_code is Averages._exchange.__code__ for frame in callers()):
            self.end()

    def _exchange(self, *, to_averages: bool) -> None:
        self._weights.reconcile()
        parts = {unit: [spec.index for _, spec in self._parts.units[unit].params]
                 for unit, _ in self._chunks}  # fmt: skip
        self._weights.require_writable(parts)
        with self._edits.of(parts):
            self._finish()
            for unit in parts:
                if (unit in self._swapped) != to_averages:
                    self._amid = unit, self._both(unit), to_averages
                    self._finish()
        self.forget()
        self._weights.renew()

    def _both(self, unit: int) -> dict[int, Values]:
        """By parameter, what its places get."""
        masters = {spec.index: value for spec, value in self._contents.masters(unit)}
        return {
            index: {"weight": average, AVERAGE: masters[index]}
            for of, number in self._chunks if of == unit
            for index, average in self._of(unit, number).items()
        }  # fmt: skip

    def _finish(self) -> None:
        """Both are in memory: to write them again does no harm."""
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
    """A block inside which a model computes with its averages.  No generator: the collector would
    end that late."""

    def __init__(self, averages: Averages, require: Callable[[], None], model: nn.Module) -> None:
        """``require`` raises where the model cannot be used."""
        self._averages, self._require, self._model = averages, require, model
        self._open = False

    def __enter__(self) -> nn.Module:
        self._averages.require_kept()
        self._require()
        self._averages.begin()
        self._open = True
        return self._model

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        clean_up(self._averages.end, "the end of averaged()", error)
        self._open = False

    def __del__(self) -> None:
        if self._open:
            self._averages.abandon()
