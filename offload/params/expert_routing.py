"""Reports of the expert sections that compute is about to use, to the residency machine."""

from __future__ import annotations

import weakref
from collections.abc import Collection

from torch import nn

from ..planning.sections import Announce, Section, stacks_of
from .onloaded_units import OnloadedUnits


class Choices:
    """A listener that reports the choices of routers, until ``remove``."""

    def __init__(self, model: nn.Module, onloaded_units: OnloadedUnits) -> None:
        self._protocol = onloaded_units.executor.protocol
        self._unit_of = {
            id(found.module): unit for unit, found in onloaded_units.parts.running
            if isinstance(found.module, Section) and onloaded_units.streamed[unit]
        }  # fmt: skip
        self._holders = [module for module in model.modules() if stacks_of(module)]
        self._number_of = {id(holder): number for number, holder in enumerate(self._holders)}
        me = weakref.ref(self)

        def told(holder: nn.Module, now: Collection[int], then: Collection[int] | None) -> None:
            mine = me()
            if mine is not None and id(holder) in mine._number_of:  # and not in a copy of the model
                mine._told(mine._number_of[id(holder)], now, then)

        self._announce_to(told)

    def _announce_to(self, told: Announce | None) -> None:
        for holder in self._holders:
            for stack in stacks_of(holder).values():
                stack.announce = told

    def _told(self, number: int, now: Collection[int], then: Collection[int] | None) -> None:
        self._choose(self._holders[number], now, now=True)
        if then is not None:
            self._choose(self._holders[(number + 1) % len(self._holders)], then, now=False)

    def _choose(self, holder: nn.Module, experts: Collection[int], *, now: bool) -> None:
        chosen, among, likely = frozenset(experts), list[int](), set[int]()
        for stack in stacks_of(holder).values():
            for section in stack:
                unit = self._unit_of.get(id(section))  # none for resident sections
                if unit is not None:
                    among.append(unit)
                    if not chosen.isdisjoint(section.experts):
                        likely.add(unit)
        if among:
            self._protocol.chosen(among, likely, now=now)

    def remove(self) -> None:
        """Stop reporting choices."""
        self._announce_to(None)
