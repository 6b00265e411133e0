"""Steps whose activations are not tracked, because none of them has to be offloaded."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..private import torch_private

MARGIN = 1.25  # times what the largest step saved is set aside
SHARE = 2  # at most ``1 / SHARE`` of the room is set aside
MOST_SHAPES = 64  # inputs whose saved bytes are remembered
MOST_PARTS = 64  # of inputs that are looked at
RECOUNT = 32  # forwards, of which one is counted

# Note [Forwards without saved-tensor hooks]
# In an ``UntrackedStep``, saved tensors are counted, but not offloaded. Hooks cost time for each
# tensor even if they only count it. So they count the bytes that the first forward of the whole
# model saves for each new combination of input shapes. Later forwards with the same shapes skip the
# hooks around the model and around units that never move, and subtract the recorded bytes from
# ``UntrackedStep.left``. Inputs that are no larger in any dimension, and otherwise the same, use
# the record of the larger ones.
#
# The saved bytes may depend on more than shapes. If a forward makes another number of graph nodes,
# or its units return more elements, all records are discarded, and hooks count the next forward. If
# more units run than recorded, the extra ones run with hooks. Every ``RECOUNT``-th forward is
# counted in any case.
#
# In each forward, units run with hooks until one saved tensor was counted. What this hook packs
# holds a reference to the ``UntrackedStep``, so a weak reference shows whether the user still keeps
# a graph of it.
#
# Without hooks, autograd saves the weights of resident units directly, as it does with
# ``activations="keep"``. An update increments their version counters, so a backward through an
# older graph raises an error. Hooks stay on units whose weights graphs must hold by handles (see
# ``SavedTensors.by_handles``).

Shapes = tuple[Any, ...]


def shapes_of(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Shapes | None:
    """Return what of a model's inputs determines how much its forward saves.

    ``None``: it is not known, because there are inputs of other types than usual, or too many.
    """
    found: list[Any] = [torch.is_grad_enabled()]
    known = _look(args, found) and _look(kwargs, found)
    return tuple(found) if known and any(type(each) is tuple for each in found) else None


def _look(value: Any, found: list[Any]) -> bool:
    """Add the shapes in ``value`` to ``found``; return false if they are not known."""
    if len(found) > MOST_PARTS:
        return False
    if isinstance(value, torch.Tensor):
        found.append((value.dtype, *value.shape))
        return torch_private.has_memory(value)
    if value is None or isinstance(value, bool | int | float | str):
        found.append(value)
        return True
    found.append(len(value) if isinstance(value, list | tuple | Mapping) else None)
    if isinstance(value, list | tuple):
        return all(_look(each, found) for each in value)
    if isinstance(value, Mapping):
        found.extend(value)
        return all(_look(each, found) for each in value.values())
    return False


def _at_most(some: Shapes, others: Shapes) -> bool:
    """Return whether shapes are smaller than others in every dimension, or equal."""
    return len(some) == len(others) and all(
        a == b
        or (
            type(a) is type(b) is tuple
            and len(a) == len(b)
            and a[0] == b[0]
            and all(m <= n for m, n in zip(a[1:], b[1:], strict=True))
        )
        for a, b in zip(some, others, strict=True)
    )


class Saves(NamedTuple):
    """What a forward has saved and done.

    Attributes:
        nbytes: saved by autograd.
        nodes: graph nodes made.
        elements: of the tensors that its units have returned.
        units: runs of units.
    """

    nbytes: int
    nodes: int
    elements: int
    units: int


class UntrackedForward:
    """A forward of a whole model in an untracked step.

    Attributes:
        known: what a forward of these inputs saves; ``None``: hooks count it.
        elements: as in ``Saves``, so far.
        units: as in ``Saves``, so far.
    """

    __slots__ = ("_clock", "_left", "elements", "known", "shapes", "step", "units")

    def __init__(self, shapes: Shapes, known: Saves | None, step: UntrackedStep) -> None:
        self.shapes, self.known, self.step = shapes, known, step
        self.elements = self.units = 0
        self._left, self._clock = step.left, torch_private.graph_clock()

    def counted(self) -> Saves:
        """Return what hooks have counted since it began, and what it has done."""
        nodes = torch_private.graph_clock() - self._clock
        return Saves(self._left - self.step.left, nodes, self.elements, self.units)

    @property
    def held(self) -> bool:
        """Whether its graph holds the step."""
        return self._left > self.step.left


class UntrackedStep:
    """A forward and its backward in which saved tensors are only counted.

    All tensors that are saved meanwhile hold a reference to it.

    Attributes:
        left: bytes that may still be saved untracked.
    """

    __slots__ = ("__weakref__", "left")

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes


class UntrackedActivations:
    """The decision which steps go untracked.

    If a step leaves most of the room empty, the next one is an ``UntrackedStep``, and a part of the
    room is set aside for its activations. If they exceed it, tracking starts again.

    Attributes:
        rest: the current untracked step, or ``None``.
        aside_bytes: the part of the room that is set aside, for as long as a graph holds untracked
            activations.
        passed_bytes: bytes tracked in this step, counting a storage each time it is saved.
        share: the share of these bytes that autograd held at once, in the last tracked step.
    """

    def __init__(self) -> None:
        self.rest: UntrackedStep | None = None
        self.aside_bytes = self.passed_bytes = 0
        self._last: weakref.ref[UntrackedStep] | None = None
        self._most = 0  # the most that was ever set aside
        self.share = 1.0
        self._saves: dict[Shapes, Saves] = {}
        self._uncounted = 0  # forwards since the last one that hooks have counted

    def take(self, nbytes: int) -> UntrackedStep | None:
        """Count bytes that stay untracked, and return what they must hold.

        ``None``: they must be tracked, like everything after them.
        """
        rest = self.rest
        if rest is not None:
            rest.left -= nbytes
            if rest.left < 0:
                rest = self.rest = None
        return rest

    def begin(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> UntrackedForward | None:
        """Begin a forward of the whole model; ``None``: it is tracked, or its inputs are unusual.

        See Note [Forwards without saved-tensor hooks].
        """
        if self.rest is None or (shapes := shapes_of(args, kwargs)) is None:
            return None
        known = self._saves.get(shapes)
        if known is None:
            larger = [saves for each, saves in self._saves.items() if _at_most(shapes, each)]
            known = min(larger, default=None)
        if known is not None and known.nbytes > self.rest.left:
            known = None  # hooks track what is too much
        self._uncounted += 1
        if known is None or self._uncounted >= RECOUNT:
            known, self._uncounted = None, 0
        return UntrackedForward(shapes, known, self.rest)

    def without_hooks(self, forward: UntrackedForward) -> bool:
        """Return whether the unit that a forward now runs needs no hooks."""
        known = forward.known
        usual = known is not None and forward.units <= known.units
        return usual and forward.held and forward.step is self.rest

    def end(self, forward: UntrackedForward) -> int:
        """Return the bytes that a forward has saved without being counted."""
        counted, known = forward.counted(), forward.known
        if forward.step is not self.rest:  # hooks have counted more than there is room for
            if known is not None:
                self._saves.clear()
            return 0
        if known is None:
            if len(self._saves) >= MOST_SHAPES:
                self._saves.clear()
            before = self._saves.get(forward.shapes)
            if before is not None and before[1:] == counted[1:]:  # some inputs may save more
                counted = max(before, counted)
            self._saves[forward.shapes] = counted
            return 0
        more = 1.0
        if counted.nodes != known.nodes or counted.elements > known.elements:
            self._saves.clear()
            nodes = counted.nodes / max(1, known.nodes)
            more = max(more, nodes, counted.elements / max(1, known.elements))
        return max(0, int(more * known.nbytes) - counted.nbytes)

    def backward_begins(self, saved_bytes: int) -> int:
        """Return roughly how many untracked bytes autograd holds.

        If a step was tracked only in part, these are all bytes that were set aside for it.
        ``saved_bytes``: the tracked bytes that autograd holds.
        """
        if self.rest is not None:
            return round(self.share * (self.aside_bytes - self.rest.left))
        if not self.aside_bytes and self.passed_bytes:
            self.share = min(1.0, saved_bytes / self.passed_bytes)
        return self.aside_bytes

    def step_over(self, room_bytes: int, *, quiet: bool) -> None:
        """Decide on the next step; ``quiet``: nothing was offloaded in this one.

        A step that was tracked in part is followed by one that is tracked as a whole.
        """
        in_part = self.aside_bytes > 0 and self.rest is None
        saved, self.passed_bytes = self.passed_bytes, 0
        if self.rest is not None:
            saved += self.aside_bytes - self.rest.left
            self.rest = None
        if self._last is not None and self._last() is not None:
            return  # a graph was kept
        self._last, self.aside_bytes = None, 0
        if quiet and not in_part and 0 < MARGIN * saved <= room_bytes // SHARE:
            self._most = min(room_bytes // SHARE, max(self._most, int(MARGIN * saved)))
            self.aside_bytes, self.rest = self._most, UntrackedStep(self._most)
            self._last = weakref.ref(self.rest)
