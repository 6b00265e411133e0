"""What the parameters of each unit point at: their weights, or a placeholder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from ..planning.partition import Partition
from .edit_watch import EditWatch
from .param_handle import ParamHandle, WeightAccess
from .parameters import manage
from .stubs import Stubs


class UnitParams:
    """The parameters of all units, which the engine manages until they are given away.

    Attributes:
        of: by unit, its parameters in the order of its specs.
        edits: notices changes that user code makes to them in place.
    """

    def __init__(self, parts: Partition, stubs: Stubs, changing: set[int]) -> None:
        """Set up; ``changing``: parameters that their modules have changed in forward."""
        self._units, self._stubs = parts.units, stubs
        self.of: list[tuple[nn.Parameter, ...]] = [
            tuple(parts.parameters[spec.index] for _, spec in unit.params) for unit in parts.units
        ]
        self.edits = EditWatch(parts, self.of, changing)
        self._managed: list[tuple[ParamHandle, ...]] = [()] * len(parts.units)
        self._hidden: list[tuple[torch.Tensor, ...]] = [()] * len(parts.units)  # data while hidden

    def manage(self, unit: int, access: WeightAccess) -> None:
        """Take over the parameters of a unit."""
        pairs = zip(self.of[unit], self._units[unit].params, strict=True)
        self._managed[unit] = tuple(manage(p, spec, access) for p, (_, spec) in pairs)

    def give_away(self, values: Mapping[int, torch.Tensor], units: Iterable[int]) -> None:
        """Make parameters ordinary, with ``values`` by index; repeatable after an exception."""
        for unit in units:
            for p, known in zip(self.of[unit], self._managed[unit], strict=False):
                known.release(p, values[known.index])
            self._managed[unit] = ()

    def set_hidden_data(self, unit: int, tensors: Sequence[torch.Tensor] | None) -> None:
        """Set what parameters point at while they are hidden; ``None``: placeholders."""
        hidden = self._stubs.of(self._units[unit]) if tensors is None else tuple(tensors)
        self._hidden[unit] = hidden

    # A unit that was given away has no managed parameters, so these two do nothing for it.

    def hide(self, unit: int) -> None:
        """Point the parameters at what ``set_hidden_data`` has set."""
        params = zip(self.of[unit], self._managed[unit], self._hidden[unit], strict=False)
        for p, known, stub in params:
            known.hide(p, stub)
        self.edits.hidden(unit)

    def show(self, unit: int, views: Sequence[torch.Tensor]) -> None:
        """Point the parameters at their weights."""
        self.edits.end_of_hiding(unit)
        params = zip(self.of[unit], self._managed[unit], views, strict=False)
        for p, known, view in params:
            known.show(p, view)
        self.edits.shown(unit)

    def hide_with_placeholders(self, unit: int) -> None:
        """Point hidden parameters at placeholders."""
        self.set_hidden_data(unit, None)
        self.hide(unit)

    def invalidate_graphs(self, unit: int) -> None:
        """Increment versions of the parameters, so that graphs that saved them fail in backward.

        This does not count as an edit.
        """
        self.edits.outdate(unit, lambda _: bool(self._managed[unit]))
