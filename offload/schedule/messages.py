"""What goes into the residency machine (signals) and what comes out (instructions)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from ..facts.tier import Tier
from .arena import Place


class Kind(enum.Enum):
    """What an item is."""

    WEIGHTS = "weights"  # of a unit
    GRADS = "grads"  # of a unit, as the update reads them
    STATE = "state"  # the record of a subgroup
    GATHERED = "gathered"  # gradients of a unit, on their way from compute to where they wait
    VISIT = "visit"  # a record with its gradients and weights, on the device for its update
    SAVED = "saved"  # what autograd saved for backward: one storage

    __hash__ = object.__hash__  # Enum's own is slow, and moves are counted by their items


class Key(NamedTuple):
    """Identifies an item: ``number`` is that of a unit, of a subgroup (``STATE``, ``VISIT``), or of
    a saved storage, unique in a run (``SAVED``).  ``part`` counts the parts of a saved storage."""

    kind: Kind
    number: int
    part: int = 0


# -- instructions -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Read:
    """Disk to host: extent ``role`` of ``item`` into ``place``.  ``urgent`` overtakes prefetch."""

    item: Key
    role: int
    place: Place
    urgent: bool = False


@dataclass(frozen=True)
class Clear:
    """Zeroes into ``place``: ``item`` was never written."""

    item: Key
    place: Place


@dataclass(frozen=True)
class Write:
    """Host to disk: ``place`` into extent ``role`` of ``item``.  ``saves``: for a commit, of what
    lives in memory."""

    item: Key
    role: int
    place: Place
    saves: bool = False


@dataclass(frozen=True)
class CopyIn:
    """Host to device: ``item``."""

    item: Key
    source: Place
    place: Place


@dataclass(frozen=True)
class CopyOut:
    """Device to host: ``item``."""

    item: Key
    source: Place
    place: Place


@dataclass(frozen=True)
class Accumulate:
    """Bring arrived gradients of ``unit`` into ``place``: add or convert from ``source``."""

    unit: int
    source: Place
    place: Place


@dataclass(frozen=True)
class Update:
    """Run the optimizer on one subgroup, where its weights and state are; with a ``visit``, on the
    device, in that slot, to which they go for it and from which they come back."""

    subgroup: int
    unit: int
    weights: Place
    grads: Place
    state: Place
    visit: Place | None = None

    @property
    def on_device(self) -> bool:
        """Whether the device runs it, and not the CPU."""
        return self.visit is not None or self.state.tier is Tier.DEVICE


@dataclass(frozen=True)
class Commit:
    """Flush what is written, and make the cut whose facts have ``number`` the last one: every
    stored item in the extent that ``table`` has for it."""

    number: int
    table: tuple[tuple[Key, int], ...]


@dataclass(frozen=True)
class Grant:
    """Tell whoever holds ``ticket`` that it may go on.

    ``places``: what it was given, by member of a unit's group for ``Need``.  ``roles``: for
    ``Locate``, the extent to read (-1: it reads as zeroes) and the one to write.  ``items``: for
    ``Rollback``, what lives in memory and must be read again.
    """

    ticket: int
    places: tuple[Place, ...] = ()
    roles: tuple[int, int] | None = None
    items: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Refuse:
    """Nothing under way could make room for ``item``: ``need_bytes`` against ``have_bytes``.
    ``unit``: in which autograd saved it; negative for others."""

    ticket: int
    item: Key
    tier: Tier
    need_bytes: int
    have_bytes: int
    unit: int = -1


@dataclass(frozen=True)
class GradientStored:
    """Whether compute may now gather gradients of ``unit`` where they are kept, unasked."""

    unit: int
    free: bool


@dataclass(frozen=True)
class FreeDeviceCopy:
    """Compute's copy of ``item``, which autograd saved, is of no more use: its memory is freed."""

    item: Key


@dataclass(frozen=True)
class FreeItem:
    """Nothing needs ``item``, which autograd saved, any more: nothing of it is kept."""

    item: Key


Work = Read | Clear | Write | CopyIn | CopyOut | Accumulate | Update | Commit
Instruction = Work | Grant | Refuse | GradientStored | FreeDeviceCopy | FreeItem


# -- signals: compute ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Need:
    """Compute is about to use ``unit``; grant ``ticket`` when its weights are there (pinned)."""

    unit: int
    ticket: int


@dataclass(frozen=True)
class AwaitUpdate:
    """Compute is about to use those weights of ``unit`` that stay where they are: grant ``ticket``
    when no update of them is queued or runs."""

    unit: int
    ticket: int


@dataclass(frozen=True)
class Repeat:
    """Where nothing is trained: compute is about to use units in the order of the last time, and
    after that in the same order again."""


@dataclass(frozen=True)
class ExpertsRouted:
    """When compute comes to the units ``among``, in this order, it uses the ``likely`` ones alone.
    ``now``: that is what it does next, and the others are left out for sure."""

    among: tuple[int, ...]
    likely: frozenset[int]
    now: bool


class Held(NamedTuple):
    """A storage that a graph keeps over a slot of ``unit``; ``token`` tells it from others."""

    unit: int
    place: Place
    token: int


@dataclass(frozen=True)
class Release:
    """Compute let go of ``unit``.  ``held``: what graphs keep of the slots that it used."""

    unit: int
    held: tuple[Held, ...] = ()


@dataclass(frozen=True)
class Freed:
    """A graph let go of ``held``, of which ``Release`` may have told."""

    held: Held


@dataclass(frozen=True)
class GradRoom:
    """A place for the gradients of ``unit`` is wanted; ``merge``: with the earlier ones in it."""

    unit: int
    ticket: int
    merge: bool = False


@dataclass(frozen=True)
class GradReady:
    """The gradients of ``unit`` are gathered.  ``merge``: earlier ones of the step must be kept;
    ``update``: nothing more comes, the update may run now; ``in_place``: where they are kept, and
    nothing is left to be done with them there."""

    unit: int
    merge: bool = False
    update: bool = False
    in_place: bool = False


@dataclass(frozen=True)
class GradLost:
    """The gradients that compute was about to gather for ``unit``, in the place it was granted,
    will never come."""

    unit: int


@dataclass(frozen=True)
class Step:
    """Update ``units`` (those not updated already).  ``ticket`` is granted when all has landed, or
    in the ``background`` at once: compute then goes on, and waits unit by unit.  ``commit``: what
    is current when it has landed is to be committed.  ``counts``: it is a step of training, and not
    the end of one that was given up."""

    units: tuple[int, ...]
    ticket: int
    background: bool = False
    commit: bool = False
    counts: bool = True


# -- signals: activations -----------------------------------------------------------------------


class SavedBytes(NamedTuple):
    """A storage of ``nbytes`` that autograd keeps until backward, in ``unit`` (-1: in none)."""

    number: int
    nbytes: int
    unit: int


@dataclass(frozen=True)
class Saved:
    """Autograd has saved ``items``, in this order, maybe not for the first time.  With a ``ticket``
    who computes waits until what is saved keeps within its room again.  ``unit``: another one runs
    from now on, or none."""

    items: tuple[SavedBytes, ...]
    ticket: int | None = None
    unit: int | None = None


@dataclass(frozen=True)
class Fetch:
    """Backward needs what autograd saved under ``number``; grant ``ticket`` when compute has it."""

    number: int
    ticket: int


@dataclass(frozen=True)
class SavedDropped:
    """Nothing needs what autograd saved under ``numbers`` any more."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class BackwardPhase:
    """From now on a backward runs, which needs first what was saved last; or none does.
    ``room``: bytes that may stay with compute from now on; ``None``: as before.  ``beside``: that
    stay there, and that nobody tells of."""

    backward: bool
    room: int | None = None
    beside: int = 0


# -- signals: waiting ---------------------------------------------------------------------------


class Until(enum.Enum):
    """What somebody waits for."""

    ARRIVED = "arrived"  # every gradient that is on its way has arrived
    LANDED = "landed"  # the last step's updates and their writes are over
    DURABLE = "durable"  # no commit is under way
    QUIET = "quiet"  # nothing moves; copies that are only cached are dropped then

    __hash__ = object.__hash__


@dataclass(frozen=True)
class Await:
    """Grant ``ticket`` once that is so."""

    until: Until
    ticket: int


# -- signals: commits ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Seal:
    """The facts of the last step's cut are known, under ``number``: it may become durable."""

    number: int


@dataclass(frozen=True)
class Cut:
    """Commit what is current once nothing is under way; its facts are known under ``number``.
    Not ``always``: only if anything is newer than the last commit."""

    number: int
    always: bool = True


@dataclass(frozen=True)
class FiniteCheck:
    """Whether the values of ``unit`` are finite.  While those of one are not, nothing is committed,
    until they are replaced or all is rolled back."""

    unit: int
    finite: bool


@dataclass(frozen=True)
class AbortCommit:
    """The last step's cut is not made: what it holds is about to be edited, and will be in another.
    Its facts are not known, and all has landed."""


@dataclass(frozen=True)
class Rollback:
    """Go back to the last commit; nothing moves.  ``ticket``'s grant says what to read again."""

    ticket: int


@dataclass(frozen=True)
class Restored:
    """All that the grant of ``Rollback`` named was read."""


# -- signals: edits, while nothing moves --------------------------------------------------------


@dataclass(frozen=True)
class Locate:
    """Grant ``ticket`` with where the bytes of ``item`` are while in hand: its home, or room in the
    region that it moves through; and with its extents."""

    item: Key
    ticket: int


@dataclass(frozen=True)
class Edited:
    """What is in the place of ``item`` is its current value; ``role``: the extent that it was
    written to as well, if it lives on disk."""

    item: Key
    role: int | None = None


@dataclass(frozen=True)
class Adopt:
    """A store that was opened again has ``item``, committed, in this extent."""

    item: Key
    role: int


# -- signals: ends ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """``work`` is finished."""

    work: Work


@dataclass(frozen=True)
class Failed:
    """``work`` failed; from now on the machine only drains."""

    work: Work


@dataclass(frozen=True)
class NotCommitted:
    """The commit ``work`` failed before its record was begun.  The previous commit stays valid, and
    what is newer than it can still be read."""

    work: Commit


Signal = (
    Need | AwaitUpdate | Release | Freed | GradRoom | GradReady | GradLost | Step | Await | Seal
    | Cut | FiniteCheck | AbortCommit | Rollback | Restored | Locate | Edited | Adopt | Done
    | Failed | Saved | Fetch | SavedDropped | BackwardPhase | Repeat | ExpertsRouted | NotCommitted
)  # fmt: skip
