"""Find weights that were changed in place, and refuse changes that cannot be kept.

# Note [Changes in forward]
# Some modules change their own weights in place when they run: Gemma 3n clamps coefficients
# (`self.coefs.weight.data.clamp_(-c, c)`).  The slot that compute uses may be one of several copies
# of the weight, and the master is elsewhere.  So the changed weight is copied when the parameter
# gets its placeholder back.  The copy is written to the engine like an edit from outside (see
# `ParamAccess`) before the next module runs, or, if backward uses the unit, after it has ended.  If
# the unit is onloaded before that, the copy is written over its weights in the slot.
#
# A parameter that was changed once is also copied each time its unit is onloaded.  Most clamps
# leave all bits as they are: then the two copies are equal, and nothing is written.  With a split
# master, an element that keeps its value also keeps the low half of its master; the two copies show
# which elements those are.  So commits record which parameters modules change, and a resumed run
# copies the same ones.  A first change in a later forward, of a slot that is the only copy, keeps
# all low halves, and a warning says so (`Contents.load`).
#
# With device="cpu", compute changes the same memory that updates and commits are written to disk
# from.  So the engine waits for these writes before it runs a module for the first time, or one
# that changed its weights when it last ran (`Loop.catch_up`).  A unit that first changes its
# weights in a later run stays in memory until its change is written, because its copy on disk may
# mix old and new values.  A commit that includes such a copy fails with an error.
#
# Changes are found by tensor version counters.  A tensor over a slot that outlives the forward may
# point to memory of another unit by the time it is changed: that is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..errors import WeightError
from ..planning.partition import Partition
from ..private import torch_private


class Change(NamedTuple):
    """A weight that its own module has changed, and its value ``before``.

    ``before`` is ``None`` if it is not known.  A split master needs it where the slot holds the
    only copy of the weight.
    """

    weight: torch.Tensor
    before: torch.Tensor | None


class EditWatch:
    """Detection of writes to parameters, by version counters and by unit.

    Writes are found while parameters are shown, and while they are hidden, through a tensor that
    was made before and shares the counter.
    """

    def __init__(
        self, parts: Partition, params: Sequence[Sequence[nn.Parameter]], changing: set[int]
    ) -> None:
        """
        Args:
            params: by unit, in the order of its specs.
            changing: parameters that were changed before; others are added when they are changed.
        """
        self._known = changing
        self._specs = [[spec for _, spec in unit.params] for unit in parts.units]
        self._params = params
        self._seen: list[tuple[int, ...]] = [()] * len(params)  # versions when they were shown
        self._hid: list[tuple[int, ...]] = [()] * len(params)  # and when they were hidden
        # By unit, for parameters that were changed before, by place: their values when shown
        self._before: list[dict[int, torch.Tensor]] = [{} for _ in params]
        self._ran: set[int] = set()  # units that have run
        self._changing: set[int] = set()  # units whose last change was not to the same bits
        self._changed: dict[int, Change] = {}  # by parameter: see Note [Changes in forward]
        self._edited: list[str] = []

    def _versions(self, unit: int) -> tuple[int, ...]:
        with torch_private.without_overrides():  # reading a hidden one would ask its class
            return torch_private.versions_of(self._params[unit])

    def _written(self, unit: int, before: tuple[int, ...]) -> list[int]:
        """Return the positions of parameters written since ``before``; none if it is empty."""
        if not before or before == (now := self._versions(unit)):
            return []
        return [n for n, (a, b) in enumerate(zip(before, now, strict=True)) if a != b]

    @torch_private.without_grad
    def put_on_top(self, unit: int, views: Sequence[torch.Tensor]) -> None:
        """Write changes that the engine does not have yet over the weights of an onloaded unit."""
        if self._changed:
            for spec, view in zip(self._specs[unit], views, strict=True):
                if spec.index in self._changed:
                    view.copy_(self._changed[spec.index].weight)

    def shown(self, unit: int) -> None:
        """Record the versions of parameters that were just shown."""
        self._seen[unit] = self._versions(unit)
        if self._known:
            self._before[unit] = {
                place: self._copy(unit, place)
                for place, spec in enumerate(self._specs[unit])
                if spec.index in self._known
            }

    def hidden(self, unit: int) -> None:
        """Record the versions of parameters that were just hidden."""
        self._hid[unit] = self._versions(unit)

    def look_while_shown(self, unit: int, wait: Callable[[], None]) -> None:
        """Copy what was changed since the weights were onloaded; they stay visible.

        ``wait`` makes the calling thread's stream wait for all streams that have used them.
        """
        before, self._seen[unit] = self._seen[unit], ()
        written = self._written(unit, before)
        if written:
            wait()
            if not torch_private.in_backward():  # a recomputation's clamp changes nothing
                self._changing.discard(unit)
        for place in written:
            now, then = self._copy(unit, place), self._before[unit].get(place)
            self._known.add(self._specs[unit][place].index)
            if then is None or not torch_private.same_bits(now, then):
                self._changing.add(unit)
                index = self._specs[unit][place].index
                kept = self._changed.get(index)
                self._changed[index] = Change(now, then if kept is None else kept.before)
        self._before[unit] = {}

    @torch_private.without_grad
    def _copy(self, unit: int, place: int) -> torch.Tensor:
        with torch_private.without_overrides():
            return self._params[unit][place].detach().clone()

    @property
    def changed(self) -> Mapping[int, Change]:
        """Weights that were changed while shown and are not written yet, by parameter."""
        return self._changed

    def may_change(self, unit: int, group: Iterable[int]) -> bool:
        """Return whether a unit that is about to run may change its weights.

        It may if it has not run before, or if it, or a unit that shares its weights (``group``),
        changed them when it last ran.
        """
        return unit not in self._ran or not self._changing.isdisjoint(group)

    def changed_before(self, group: Iterable[int]) -> bool:
        """Return whether the modules of these units have changed their weights in any run."""
        return bool(self._known) and any(
            spec.index in self._known for unit in group for spec in self._specs[unit]
        )

    def will_run(self, unit: int) -> None:
        """Record that a unit runs now."""
        self._ran.add(unit)

    def any_changed(self, units: Iterable[int]) -> bool:
        """Return whether ``changed`` has weights of these units."""
        return bool(self._changed) and any(
            spec.index in self._changed for unit in units for spec in self._specs[unit]
        )

    def forget(self, indices: Iterable[int]) -> None:
        """Forget changes that were written, or that are to be dropped."""
        for index in list(indices):
            del self._changed[index]

    def look_while_hidden(self, unit: int) -> None:
        """Record changes made since a unit's parameters were hidden, if they are hidden."""
        if self._hid[unit]:
            self.end_of_hiding(unit)
            self.hidden(unit)

    def end_of_hiding(self, unit: int) -> None:
        """Record changes made while a unit's parameters were hidden; they are about to be shown."""
        before, self._hid[unit] = self._hid[unit], ()
        self._edited += [self._specs[unit][place].name for place in self._written(unit, before)]

    def outdate(self, unit: int, changes: Callable[[int], bool]) -> None:
        """Make graphs that saved parameters themselves fail in backward; this counts as no edit.

        ``changes`` says by parameter index whether its weights change.
        """
        seen, hid = bool(self._seen[unit]), bool(self._hid[unit])
        self._seen[unit] = self._hid[unit] = ()  # no edit, even if an exception follows
        pairs = zip(self._params[unit], self._specs[unit], strict=True)
        torch_private.outdate(p for p, spec in pairs if changes(spec.index))
        if seen:
            self.shown(unit)
        if hid:
            self.hidden(unit)

    def refuse(self) -> None:
        """Raise if a change was recorded that cannot be kept.

        Raises:
            OffloadError: weights were changed by a tensor that was made while they were shown.
        """
        if self._edited:
            names, self._edited = ", ".join(dict.fromkeys(self._edited)), []
            raise WeightError(
                f"the weights of {names} were changed after their module's forward, through a "
                "tensor that was made in it (p.detach(), p[...]); the change would be lost or half "
                "saved. Read p again where you change it, instead of keeping that tensor"
            )
