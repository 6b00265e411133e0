"""What goes into the residency machine (signals) and what comes out (instructions)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from ..facts.tier import Tier
from .arena import Place


class Kind(enum.Enum):
    """What an extent holds."""

    WEIGHTS = "weights"  # indexed by unit
    GRADS = "grads"  # indexed by unit
    STATE = "state"  # indexed by subgroup

    __hash__ = object.__hash__  # Enum's own is slow, and moves are counted by their items


class Item(NamedTuple):
    kind: Kind
    number: int


# -- instructions -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Read:
    """Disk to host: extent ``role`` of ``item`` into ``place``.  ``urgent`` overtakes prefetch."""

    item: Item
    role: int
    place: Place
    urgent: bool = False


@dataclass(frozen=True)
class Clear:
    """Zeroes into ``place``: the state of ``item`` was never written."""

    item: Item
    place: Place


@dataclass(frozen=True)
class Write:
    """Host to disk: ``place`` into extent ``role`` of ``item``."""

    item: Item
    role: int
    place: Place


@dataclass(frozen=True)
class CopyIn:
    """Host to device: the weights of ``unit``."""

    unit: int
    source: Place
    place: Place


@dataclass(frozen=True)
class CopyOut:
    """Device to host: the gathered gradients of ``unit``."""

    unit: int
    source: Place
    place: Place


@dataclass(frozen=True)
class Settle:
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
    """Flush what is written, and make the cut whose facts have ``number`` the last one."""

    number: int


@dataclass(frozen=True)
class Grant:
    """Tell whoever holds ``ticket`` that it may go on; ``place`` is what it was given, if any."""

    ticket: int
    place: Place | None = None


@dataclass(frozen=True)
class Refuse:
    """Nothing under way could make room for ``unit``: ``need_bytes`` against ``have_bytes``."""

    ticket: int
    unit: int
    tier: str
    need_bytes: int
    have_bytes: int


Work = Read | Clear | Write | CopyIn | CopyOut | Settle | Update | Commit
Instruction = Work | Grant | Refuse


# -- signals ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Need:
    """Compute is about to use ``unit``; grant ``ticket`` when its weights are there (pinned)."""

    unit: int
    ticket: int


@dataclass(frozen=True)
class Release:
    """Compute let go of ``unit``.  ``held``: units into whose slots a graph points (see Freed)."""

    unit: int
    held: tuple[int, ...] = ()


@dataclass(frozen=True)
class Freed:
    """The last reference into a slot of ``unit`` that was held by a graph is gone."""

    unit: int
    place: Place


@dataclass(frozen=True)
class GradRoom:
    """A place for the gradients of ``unit`` is wanted; ``merge``: with the earlier ones in it."""

    unit: int
    ticket: int
    merge: bool = False


@dataclass(frozen=True)
class GradReady:
    """The gradients of ``unit`` are gathered.  ``merge``: earlier ones of the step must be kept;
    ``update``: nothing more comes, the update may run now; ``settled``: where they are kept, and
    nothing is left to be done with them there."""

    unit: int
    merge: bool = False
    update: bool = False
    settled: bool = False


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


@dataclass(frozen=True)
class Seal:
    """The facts of the last step's cut are known, under ``number``: it may become durable."""

    number: int


@dataclass(frozen=True)
class Cut:
    """Commit what is current once nothing is under way; its facts are known under ``number``."""

    number: int


@dataclass(frozen=True)
class Durable:
    """Grant ``ticket`` once no commit is under way."""

    ticket: int


@dataclass(frozen=True)
class Spoiled:
    """An update of ``unit`` gave values that are not finite: nothing is committed before the unit
    is ``Sound`` again, or all is rolled back."""

    unit: int


@dataclass(frozen=True)
class Sound:
    """All weights and state of ``unit`` were replaced by finite ones."""

    unit: int


@dataclass(frozen=True)
class GradLost:
    """The gradients that compute was about to gather for ``unit``, in the place it was granted,
    will never come."""

    unit: int


@dataclass(frozen=True)
class Landed:
    """Grant ``ticket`` once the last step's updates and their writes are over."""

    ticket: int


@dataclass(frozen=True)
class Settled:
    """Grant ``ticket`` once every gradient that is on its way has arrived."""

    ticket: int


@dataclass(frozen=True)
class Done:
    """``work`` is finished."""

    work: Work


@dataclass(frozen=True)
class Failed:
    """``work`` failed; from now on the machine only drains."""

    work: Work


Signal = (
    Need | Release | Freed | GradRoom | GradReady | GradLost | Step | Landed | Settled | Seal | Cut
    | Durable | Spoiled | Sound | Done | Failed
)  # fmt: skip
