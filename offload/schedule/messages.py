"""The inputs of the residency machine (signals) and its outputs (instructions)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from ..facts.tier import Tier
from .arena import Place


class Kind(enum.Enum):
    """The kind of an item."""

    WEIGHTS = "weights"  # of a unit
    GRADS = "grads"  # of a unit, as the update reads them
    STATE = "state"  # the state record of a subgroup
    GATHERED = "gathered"  # gradients of a unit, between compute and where they wait
    VISIT = "visit"  # a state record with its gradients and weights, updated on the device
    SAVED = "saved"  # a storage that autograd saved for backward

    __hash__ = object.__hash__  # Enum's own is slow, and kinds are part of many dict keys


class Key(NamedTuple):
    """The identity of an item.

    Attributes:
        number: of a unit, a subgroup (``STATE``, ``VISIT``) or, unique in a run, a saved storage.
        part: index of a part of a saved storage.
    """

    kind: Kind
    number: int
    part: int = 0


# -- instructions -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Read:
    """Read extent ``role`` of ``item`` from disk into ``place`` in host memory.

    An ``urgent`` read overtakes prefetch.
    """

    item: Key
    role: int
    place: Place
    urgent: bool = False


@dataclass(frozen=True)
class Clear:
    """Fill ``place`` with zeros: ``item`` was never written to disk."""

    item: Key
    place: Place


@dataclass(frozen=True)
class Write:
    """Write ``place`` in memory to extent ``role`` of ``item`` on disk.

    ``saves``: the item lives in memory and is written for a commit.
    """

    item: Key
    role: int
    place: Place
    saves: bool = False


@dataclass(frozen=True)
class CopyIn:
    """Copy ``item`` from host to device."""

    item: Key
    source: Place
    place: Place


@dataclass(frozen=True)
class CopyOut:
    """Copy ``item`` from device to host."""

    item: Key
    source: Place
    place: Place


@dataclass(frozen=True)
class Accumulate:
    """Merge arrived gradients of ``unit`` into ``place``: add or convert them from ``source``."""

    unit: int
    source: Place
    place: Place


@dataclass(frozen=True)
class Update:
    """Run the optimizer on one subgroup, where its weights and state are.

    With a ``visit``, the subgroup is copied to that slot on the device, updated there, and copied
    back.
    """

    subgroup: int
    unit: int
    weights: Place
    grads: Place
    state: Place
    visit: Place | None = None

    @property
    def on_device(self) -> bool:
        """Whether the update runs on the device rather than the CPU."""
        return self.visit is not None or self.state.tier is Tier.DEVICE


@dataclass(frozen=True)
class Commit:
    """Flush all writes and make the snapshot durable whose metadata has ``number``.

    ``table`` has the extent of every stored item in that snapshot.
    """

    number: int
    table: tuple[tuple[Key, int], ...]


@dataclass(frozen=True)
class Grant:
    """Let the caller that waits with ``ticket`` continue.

    Attributes:
        places: the places granted; for ``Need``, one per member of the unit's group.
        roles: for ``Locate``, the extent to read (-1: it reads as zeros) and the one to write.
        items: for ``Rollback``, the items that must be read again.
    """

    ticket: int
    places: tuple[Place, ...] = ()
    roles: tuple[int, int] | None = None
    items: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Refuse:
    """Refuse ``ticket``: no work in progress can make room for ``item`` in ``tier``.

    Attributes:
        need_bytes: bytes that the item needs.
        have_bytes: bytes that the tier has.
        unit: the unit in which autograd saved the item; negative for other items.
    """

    ticket: int
    item: Key
    tier: Tier
    need_bytes: int
    have_bytes: int
    unit: int = -1


@dataclass(frozen=True)
class GradientStored:
    """Report whether compute may gather gradients of ``unit`` in their home without a request."""

    unit: int
    free: bool


@dataclass(frozen=True)
class FreeDeviceCopy:
    """Free compute's copy of ``item``, a storage that autograd saved and that was offloaded."""

    item: Key


@dataclass(frozen=True)
class FreeItem:
    """Forget ``item``, a part of a saved storage that nothing needs any more."""

    item: Key


Work = Read | Clear | Write | CopyIn | CopyOut | Accumulate | Update | Commit
Instruction = Work | Grant | Refuse | GradientStored | FreeDeviceCopy | FreeItem


# -- signals: compute ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Need:
    """Compute is about to use ``unit``: grant ``ticket`` when its weights are there, pinned."""

    unit: int
    ticket: int


@dataclass(frozen=True)
class AwaitUpdate:
    """Compute is about to use ``unit``, whose weights are resident: grant ``ticket`` when no
    update of them is queued or running."""

    unit: int
    ticket: int


@dataclass(frozen=True)
class Repeat:
    """A forward without training begins: the uses recorded since the last one are its order."""


@dataclass(frozen=True)
class ExpertsRouted:
    """Of the units ``among``, in this order, compute will use only the ``likely`` ones.

    ``now``: compute reaches them next, and does not use the others.
    """

    among: tuple[int, ...]
    likely: frozenset[int]
    now: bool


class Held(NamedTuple):
    """A storage over a slot of ``unit`` that an autograd graph keeps; ``token`` identifies it."""

    unit: int
    place: Place
    token: int


@dataclass(frozen=True)
class Release:
    """Compute has finished with ``unit``.  ``held``: storages over its slots that graphs keep."""

    unit: int
    held: tuple[Held, ...] = ()


@dataclass(frozen=True)
class Freed:
    """A graph has released ``held``, which an earlier ``Release`` may have reported."""

    held: Held


@dataclass(frozen=True)
class GradRoom:
    """Compute needs a place for the gradients of ``unit``; ``merge``: holding the earlier ones."""

    unit: int
    ticket: int
    merge: bool = False


@dataclass(frozen=True)
class GradReady:
    """The gradients of ``unit`` are gathered.

    Attributes:
        merge: add them to the earlier ones of the step.
        update: they are the last ones of the step, so the update may run now.
        in_place: they were gathered in their home and need no further processing.
    """

    unit: int
    merge: bool = False
    update: bool = False
    in_place: bool = False


@dataclass(frozen=True)
class GradLost:
    """Compute will not gather the gradients of ``unit`` in the place that it was granted."""

    unit: int


@dataclass(frozen=True)
class Step:
    """Update ``units``, except the ones that were updated already.

    Attributes:
        ticket: granted when all updates and their writes are over, or at once in the background.
        background: compute continues at once, and waits for updates unit by unit.
        commit: commit the state that this step leaves.
        counts: this is a training step, not the end of an abandoned one.
    """

    units: tuple[int, ...]
    ticket: int
    background: bool = False
    commit: bool = False
    counts: bool = True


# -- signals: activations -----------------------------------------------------------------------


class SavedBytes(NamedTuple):
    """A storage of ``nbytes`` that autograd keeps until backward, saved in ``unit`` (-1: none);
    ``itemsize``: bytes of an element if it is packed on its way out, else 0."""

    number: int
    nbytes: int
    unit: int
    itemsize: int = 0


@dataclass(frozen=True)
class Saved:
    """Autograd has saved ``items``, in this order; some may have been saved before.

    Attributes:
        ticket: if set, the caller waits until the saved storages are within their room again.
        unit: if set, the unit (or none, if negative) that runs from now on.
    """

    items: tuple[SavedBytes, ...]
    ticket: int | None = None
    unit: int | None = None


@dataclass(frozen=True)
class Fetch:
    """Backward needs the saved storage ``number``: grant ``ticket`` when compute has it."""

    number: int
    ticket: int


@dataclass(frozen=True)
class SavedDropped:
    """Nothing needs the saved storages ``numbers`` any more."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class BackwardPhase:
    """A backward begins (it first needs what was saved last), or it has ended.

    Attributes:
        room: bytes that may stay at compute from now on; ``None``: unchanged.
        beside: bytes that stay at compute and are not reported by ``Saved``.
    """

    backward: bool
    room: int | None = None
    beside: int = 0


# -- signals: waiting ---------------------------------------------------------------------------


class Until(enum.Enum):
    """A condition that a caller can wait for."""

    ARRIVED = "arrived"  # all gradients on their way have arrived
    LANDED = "landed"  # the last step's updates and their writes are over
    DURABLE = "durable"  # no commit is in progress
    QUIET = "quiet"  # nothing moves; cached copies are dropped then

    __hash__ = object.__hash__


@dataclass(frozen=True)
class Await:
    """Grant ``ticket`` once the condition ``until`` holds."""

    until: Until
    ticket: int


# -- signals: commits ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Seal:
    """The metadata ``number`` of the last step's snapshot is known, so it may become durable."""

    number: int


@dataclass(frozen=True)
class Cut:
    """Commit the current state, with metadata ``number``, once no update and no commit runs.

    Unless ``always``, only if something is newer than the last commit.
    """

    number: int
    always: bool = True


@dataclass(frozen=True)
class FiniteCheck:
    """Whether all values of ``unit`` are finite.

    While any unit has non-finite values, nothing is committed.  Replacing the values, or a
    rollback, ends this.
    """

    unit: int
    finite: bool


@dataclass(frozen=True)
class AbortCommit:
    """Give up the last step's snapshot: its state is about to be edited and joins a later one.

    Sent only before its metadata is known, and after all updates are over.
    """


@dataclass(frozen=True)
class Rollback:
    """Go back to the last commit while nothing moves.  The grant lists what to read again."""

    ticket: int


@dataclass(frozen=True)
class Restored:
    """All items that the grant of ``Rollback`` listed have been read."""


# -- signals: edits, while nothing moves --------------------------------------------------------


@dataclass(frozen=True)
class Locate:
    """Grant ``ticket`` with a place for the bytes of ``item`` and with its extents.

    The place is the item's home, or free room in the region that it moves through.
    """

    item: Key
    ticket: int


@dataclass(frozen=True)
class Edited:
    """The place of ``item`` holds its current value.

    ``role``: the extent that it was also written to, if the item lives on disk.
    """

    item: Key
    role: int | None = None


@dataclass(frozen=True)
class Adopt:
    """A reopened store has a committed value of ``item`` in this extent."""

    item: Key
    role: int


# -- signals: work that has ended ---------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """``work`` is finished."""

    work: Work


@dataclass(frozen=True)
class Failed:
    """``work`` failed; from now on the machine only drains the work in progress."""

    work: Work


@dataclass(frozen=True)
class NotCommitted:
    """The commit ``work`` failed before its record was begun.

    The previous commit stays valid, and newer data can still be read.
    """

    work: Commit


Signal = (
    Need | AwaitUpdate | Release | Freed | GradRoom | GradReady | GradLost | Step | Await | Seal
    | Cut | FiniteCheck | AbortCommit | Rollback | Restored | Locate | Edited | Adopt | Done
    | Failed | Saved | Fetch | SavedDropped | BackwardPhase | Repeat | ExpertsRouted | NotCommitted
)  # fmt: skip
