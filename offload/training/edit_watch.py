"""Which weights were changed in place where that can be neither kept nor made whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from ..errors import OffloadError
from ..planning.partition import Partition
from . import torch_private


class EditWatch:
    """Compares how often parameters were written, by unit: while they show, and while they do not,
    by a tensor over them that was made when they did and shares their version."""

    def __init__(self, parts: Partition, params: Sequence[Sequence[nn.Parameter]]) -> None:
        """``params``: by unit, in the order of its specs."""
        self._units, self._params = parts.units, params
        self._seen: list[tuple[int, ...]] = [()] * len(params)  # versions when they showed
        self._hid: list[tuple[int, ...]] = [()] * len(params)  # and when they went to their stubs
        self._edited: list[str] = []

    def _versions(self, unit: int) -> tuple[int, ...]:
        with torch_private.without_overrides():  # a hidden parameter's class would ask each time
            return tuple(map(torch_private.version_of, self._params[unit]))

    def _note(self, unit: int, before: tuple[int, ...]) -> None:
        specs = (spec for _, spec in self._units[unit].params)
        for spec, then, now in zip(specs, before, self._versions(unit), strict=False):
            if then != now:
                self._edited.append(spec.name)

    def shown(self, unit: int) -> None:
        """From now on a unit's parameters show."""
        self._seen[unit] = self._versions(unit)

    def hidden(self, unit: int) -> None:
        """From now on they do not."""
        self._hid[unit] = self._versions(unit)

    def look_while_shown(self, unit: int) -> None:
        """Notes what was changed since they showed."""
        before, self._seen[unit] = self._seen[unit], ()
        self._note(unit, before)

    def look_while_hidden(self, unit: int) -> None:
        """Notes what was changed since they were hidden, if they are."""
        if self._hid[unit]:
            self.end_of_hiding(unit)
            self.hidden(unit)

    def end_of_hiding(self, unit: int) -> None:
        """They are about to show: notes what was changed before."""
        before, self._hid[unit] = self._hid[unit], ()
        self._note(unit, before)

    def outdate(self, unit: int, changes: Callable[[int], bool]) -> None:
        """Weights change, of those parameters that ``changes`` says by their index: graphs that
        have saved these themselves are told, and that is no edit."""
        seen, hid = bool(self._seen[unit]), bool(self._hid[unit])
        self._seen[unit] = self._hid[unit] = ()  # an exception in between is none either
        specs = (spec for _, spec in self._units[unit].params)
        pairs = zip(self._params[unit], specs, strict=True)
        torch_private.outdate(p for p, spec in pairs if changes(spec.index))
        if seen:
            self.shown(unit)
        if hid:
            self.hidden(unit)

    def refuse(self) -> None:
        """Raises if something was noted.

        Raises:
            OffloadError: weights were changed where they are in use, or by a tensor of then.
        """
        if self._edited:
            names, self._edited = ", ".join(dict.fromkeys(self._edited)), []
            raise OffloadError(
                f"the weights of {names} were changed in place while they were in use (in "
                "forward), or later by a tensor over them that was made then (p.detach(), p[...]), "
                "which would be lost or half saved; change them outside of forward, by tensors "
                "that are made there"
            )
