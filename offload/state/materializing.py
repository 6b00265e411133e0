"""All weights in memory at once, as in an ordinary model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import TracebackType

import torch
from torch import nn

from ..errors import OffloadError, clean_up
from ..movement.runtime import Runtime
from ..params.onloaded_units import OnloadedUnits
from ..params.resident_param_guard import ResidentParamGuard
from .param_access import ParamAccess

log = logging.getLogger("overspill")


class Materializing:
    """Implements ``overspill.materialized``; each block is a ``Materialized``."""

    def __init__(
        self,
        runtime: Runtime,
        onloaded_units: OnloadedUnits,
        resident_guard: ResidentParamGuard,
        weights: ParamAccess,
    ) -> None:
        self._runtime, self._onloaded_units = runtime, onloaded_units
        self._resident_guard, self._weights = resident_guard, weights
        self._block: object | None = None  # the block that has begun and has not ended

    @property
    def active(self) -> bool:
        """Whether the parameters are ordinary ones."""
        return self._block is not None

    def require_ended(self) -> None:
        """Raise if the model is materialized.

        Raises:
            OffloadError: the parameters are ordinary ones now.
        """
        self.end_if_over()
        if self.active:
            raise OffloadError("the model is materialized; leave the `with` block before training")

    def end_if_over(self) -> None:
        """Restore the parameters if an exception kept the end of a block from doing so."""
        if self._onloaded_units.returning is not None:
            self._onloaded_units.returning()

    def begin(self, block: object) -> None:
        """Load all weights into ordinary tensors, for a ``block``."""
        full = self._weights.read_all()
        try:
            self._block = block
            self._onloaded_units.give_away(full)
        except BaseException:
            self._onloaded_units.returning = self._return
            self._return()
            raise

    def end(self) -> Mapping[int, torch.Tensor]:
        """End the block, after an error too, and return what the parameters held."""
        self._onloaded_units.returning = self._return
        params = self._runtime.parts.parameters
        found = {index: p.data for index, p in enumerate(params)}
        self._return()
        return found

    def _return(self) -> None:
        """Make all parameters managed again; if an exception interrupts this, the next use does."""
        if not self._runtime.closed:
            self._onloaded_units.take_back(self._weights)
        self._block, self._onloaded_units.returning = None, None

    def abandon(self, block: object) -> None:
        """Leave the end of an interrupted ``block`` to the next use; edits are dropped."""
        if self._block is block and self._onloaded_units.returning is None:
            log.warning("overspill: materialized was interrupted at its end; edits are dropped")
            self._onloaded_units.returning = self._return

    def write_back(self, found: Mapping[int, torch.Tensor]) -> None:
        """Write the weights that were edited.

        Others are left alone: writing an unchanged bf16 weight would round its master.
        """
        if not self._runtime.closed:
            changed = {
                index: value
                for index, value in found.items()
                if not torch.equal(value, self._weights.read(index))
            }
            self._weights.write_all(changed)


class Materialized:
    """A block in which every parameter holds its weights, and the model cannot be trained.

    Not a generator: its ``finally`` could run late, during garbage collection.
    """

    _block: object | None = None  # since before it begins; an exception may interrupt any line

    def __init__(
        self, materializing: Materializing, require: Callable[[], None], model: nn.Module,
        *, writeback: bool,
    ) -> None:  # fmt: skip
        """
        Args:
            require: raises if the model cannot be used.
        """
        self._materializing, self._require = materializing, require
        self._model, self._writeback = model, writeback

    def __enter__(self) -> nn.Module:
        self._require()
        self._block = object()
        self._materializing.begin(self._block)
        return self._model

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        clean_up(self._end, "the end of materialized()", raised)

    def _end(self) -> None:
        found = self._materializing.end()
        if self._writeback:
            self._materializing.write_back(found)

    def __del__(self) -> None:
        if self._block is not None:
            self._materializing.abandon(self._block)
