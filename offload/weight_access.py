"""Full, current weights for whoever reads or changes them from outside: one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from .errors import OffloadError
from .runtime import parameters, torch_private
from .runtime.contents import Contents, Values
from .runtime.executor import Executor
from .runtime.residences import Residences
from .schedule.partition import ParamSpec, Partition
from .stepping import Stepping


@dataclass(frozen=True, eq=False)
class _Loan:
    """A copy of a weight that somebody else has a tensor over."""

    index: int
    copy: torch.Tensor
    version: int


class Weights:
    """See ``parameters.WeightAccess``; ``settle`` makes true what was done to copies meanwhile."""

    def __init__(
        self, parts: Partition, executor: Executor, residences: Residences, stepping: Stepping,
        contents: Contents, editing: Callable[[], AbstractContextManager[object]],
    ) -> None:  # fmt: skip
        """``editing``: inside of what it gives, nothing moves."""
        self._parts, self._executor, self._residences = parts, executor, residences
        self._stepping, self._contents, self._editing = stepping, contents, editing
        self._loans: list[_Loan] = []

    def name(self, index: int) -> str:
        """The parameter's name in the model."""
        unit = self._parts.units[self._parts.unit_of[index]]
        return next(spec.name for _, spec in unit.params if spec.index == index)

    # -- reading --------------------------------------------------------------------------------

    def read(self, index: int) -> torch.Tensor:
        """A copy of a parameter's current weight, on its device, in its own strides."""
        self._executor.raise_failure()  # after a failed update memory may hold two steps
        self.settle()
        unit = self._parts.unit_of[index]
        with torch.inference_mode(False), torch.no_grad(), self._stepping.reading(unit):
            return self._residences.weight(index).clone()

    def lend(self, index: int, copy: torch.Tensor) -> None:
        """Somebody has a tensor over ``copy``, which was read, and may change it."""
        alias = copy.detach()
        self._loans.append(_Loan(index, alias, torch_private.version_of(alias)))

    def copied(self, index: int, found: torch.Tensor) -> torch.Tensor:
        """What torch has put into a state dict, as a copy: what is done to it is not done to the
        weights."""
        if isinstance(found, parameters.Hidden):
            return self.read(index)
        key = torch_private.storage_key(found)
        lent = [loan for loan in self._loans if torch_private.storage_key(loan.copy) == key]
        for loan in lent:
            self._loans.remove(loan)
        return found if lent else found.detach().clone()

    def watch(self, index: int, alias: torch.Tensor) -> None:
        """Somebody has a tensor over the weights in their place."""
        self._residences.watch(index, alias)

    def settle(self) -> None:
        """Writes what was changed in copies that were lent, and forgets those that nobody has any
        more."""
        if not self._loans:
            return
        loans, self._loans = self._loans, []
        changed: dict[int, torch.Tensor] = {}
        for loan in loans:
            version = torch_private.version_of(loan.copy)
            if version != loan.version:
                changed[loan.index] = loan.copy
            if not torch_private.is_alone(loan.copy):
                self._loans.append(_Loan(loan.index, loan.copy, version))
        if changed:
            self.write_all(changed)

    # -- writing --------------------------------------------------------------------------------

    def write(self, index: int, value: torch.Tensor) -> None:
        """Another weight for one parameter; its master follows."""
        self.write_all({index: value})

    def write_all(self, values: Mapping[int, torch.Tensor]) -> None:
        """Writes weights (and their masters, exactly) by parameter index.

        Raises:
            OffloadError: a unit among them runs.
        """
        self._executor.raise_failure()
        units = sorted({self._parts.unit_of[index] for index in values})
        for unit in units:
            if self._residences.uses[unit]:
                name = self._parts.units[unit].name
                raise OffloadError(f"weights of unit {name!r} cannot be written while it runs")
        with torch.inference_mode(False), torch.no_grad(), self._editing():
            for unit in units:
                self._contents.fill(unit, _given(values), first=False)
                self._stepping.changed(unit)


def _given(values: Mapping[int, torch.Tensor]) -> Callable[[ParamSpec], Values | None]:
    def value_of(spec: ParamSpec) -> Values | None:
        value = values.get(spec.index)
        return None if value is None else {"weight": value.detach()}

    return value_of
