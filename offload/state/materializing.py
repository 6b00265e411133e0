"""All weights at once, as an ordinary model has them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import TracebackType

import torch
from torch import nn

from ..errors import OffloadError, clean_up
from ..movement.runtime import Runtime
from ..training.onloaded_units import OnloadedUnits
from ..training.resident_param_guard import ResidentParamGuard
from .param_access import ParamAccess

log = logging.getLogger("overspill")


class Materializing:
    """See ``overspill.materialized``.  The engine makes one; each block is a ``Materialized``."""

    def __init__(
        self,
        runtime: Runtime,
        onloaded_units: OnloadedUnits,
        resident_guard: ResidentParamGuard,
        weights: ParamAccess,
    ) -> None:
        self._runtime, self._onloaded_units = runtime, onloaded_units
        self._resident_guard, self._weights = resident_guard, weights
        self.active = False

    def require_ended(self) -> None:
        """
        Raises:
            OffloadError: the parameters are ordinary ones now.
        """
        self.end_if_over()
        if self.active:
            raise OffloadError("the model is materialized; leave the `with` block before training")

    def end_if_over(self) -> None:
        """Parameters show again what they did before the block, if an exception came in between."""
        if self._onloaded_units.returning is not None:
            self._onloaded_units.returning()

    def begin(self) -> None:
        """Every parameter has its weights."""
        full = self._weights.read_all()
        try:
            self.active = True
            self._onloaded_units.give_away(full)
        except BaseException:
            self._onloaded_units.returning = self._return
            self._return()
            raise

    def end(self) -> Mapping[int, torch.Tensor]:
        """The block is over, for good or not; what the parameters had."""
        self._onloaded_units.returning = self._return
        params = self._runtime.parts.parameters
        found = {index: p.data for index, p in enumerate(params)}
        self._return()
        return found

    def _return(self) -> None:
        """Where an exception cuts this off, the next use does it again."""
        if not self._runtime.closed:
            self._onloaded_units.take_back(self._weights)
        self.active, self._onloaded_units.returning = False, None

    def abandon(self) -> None:
        """An exception came before the block could end: the next use ends it, and drops edits."""
        if self.active and self._onloaded_units.returning is None:
            log.warning("overspill: materialized was interrupted at its end; edits are dropped")
            self._onloaded_units.returning = self._return

    def write_back(self, found: Mapping[int, torch.Tensor]) -> None:
        """What was edited is written to the weights, and nothing else: a bf16 weight written back
        would round its master."""
        if not self._runtime.closed:
            changed = {
                index: value
                for index, value in found.items()
                if not torch.equal(value, self._weights.read(index))
            }
            self._weights.write_all(changed)


class Materialized:
    """A block inside which every parameter has its weights, and nothing else may be done with the
    model.  No generator: the collector would end that late."""

    def __init__(
        self, materializing: Materializing, require: Callable[[], None], model: nn.Module,
        *, writeback: bool,
    ) -> None:  # fmt: skip
        """``require`` raises where the model cannot be used."""
        self._materializing, self._require = materializing, require
        self._model, self._writeback, self._open = model, writeback, False

    def __enter__(self) -> nn.Module:
        self._require()
        self._materializing.begin()
        self._open = True
        return self._model

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._open = False
        clean_up(self._end, "the end of materialized()", raised)

    def _end(self) -> None:
        found = self._materializing.end()
        if self._writeback:
            self._materializing.write_back(found)

    def __del__(self) -> None:
        if self._open:
            self._materializing.abandon()
