"""All weights in memory at once, as in an ordinary model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from ..errors import WeightError, clean_up
from ..movement.runtime import Runtime
from ..params.onloaded_units import OnloadedUnits
from ..params.resident_param_guard import ResidentParamGuard
from ..private import peft_private
from .param_access import ParamAccess

log = logging.getLogger("overspill")
T = TypeVar("T")


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
        self._units: frozenset[int] = frozenset()  # the units that it materializes

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
            raise WeightError("the model is materialized; leave the `with` block before training")

    def end_if_over(self) -> None:
        """Restore the parameters if an exception kept the end of a block from doing so."""
        if self._onloaded_units.returning is not None:
            self._onloaded_units.returning()

    def begin(self, block: object, model: nn.Module) -> None:
        """Load all weights of a model into ordinary tensors, for a ``block``."""
        parts = self._runtime.parts
        index_of = {id(p): index for index, p in enumerate(parts.parameters)}
        mine = (index_of[id(p)] for p in model.parameters() if id(p) in index_of)
        units = frozenset(parts.unit_of[index] for index in mine)
        full = self._weights.read_all(units)
        try:
            self._units, self._block = units, block
            self._onloaded_units.give_away(full, units)
        except BaseException:
            self._onloaded_units.returning = self._return
            self._return()
            raise

    def end(self) -> Mapping[int, torch.Tensor]:
        """End the block, after an error too, and return what the parameters held."""
        self._onloaded_units.returning = self._return
        parts = self._runtime.parts
        given = (index for index, unit in enumerate(parts.unit_of) if unit in self._units)
        found = {index: parts.parameters[index].data for index in given}
        self._return()
        return found

    def _return(self) -> None:
        """Make all parameters managed again; if an exception interrupts this, the next use does."""
        if not self._runtime.closed:
            self._onloaded_units.take_back(self._weights, self._units)
        self._block, self._onloaded_units.returning = None, None

    def abandon(self, block: object) -> bool:
        """Leave the end of an interrupted ``block`` to the next use; return whether edits are
        dropped."""
        dropped = self._block is block and self._onloaded_units.returning is None
        if dropped:
            log.warning("overspill: materialized was interrupted at its end; edits are dropped")
            self._onloaded_units.returning = self._return
        return dropped

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


class Materializes(Protocol):
    """Begins and ends the blocks of ``overspill.materialized``; see ``Materializing``."""

    def begin(self, block: object, model: nn.Module) -> None: ...

    def end(self) -> Mapping[Any, torch.Tensor]: ...

    def write_back(self, found: Mapping[Any, torch.Tensor]) -> None: ...

    def abandon(self, block: object) -> bool: ...


class Materialized(Generic[T]):
    """A block in which every parameter holds its weights, and the model cannot be trained.

    Not a generator: its ``finally`` could run late, during garbage collection.
    """

    _block: object | None = None  # since before it begins; an exception may interrupt any line
    _unmerge: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self, materializing: Materializes, require: Callable[[], None], model: nn.Module,
        given: T, *, writeback: bool,
    ) -> None:  # fmt: skip
        """
        Args:
            require: raises if the model cannot be used.
            model: the engine's model, or a part of it.
            given: what the block returns at its start.
        """
        self._materializing, self._require = materializing, require
        self._model, self._given, self._writeback = model, given, writeback

    def __enter__(self) -> T:
        self._require()
        self._block = object()
        self._materializing.begin(self._block, self._model)
        self._unmerge = peft_private.keep_merged(self._model)
        return self._given

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        clean_up(self._end, "the end of materialized()", raised)

    def _end(self) -> None:
        kept = False
        try:
            found = self._materializing.end()
            if self._writeback:
                self._materializing.write_back(found)
                kept = True
        finally:
            if not kept:  # the weights are those from before
                self._unmerge()

    def __del__(self) -> None:
        if self._block is not None and self._materializing.abandon(self._block):
            self._unmerge()
