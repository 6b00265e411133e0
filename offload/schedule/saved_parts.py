"""A storage that autograd saved, and the parts in which it moves."""

from __future__ import annotations

from collections.abc import Sequence

from .items import Item
from .layout import packed_bytes
from .messages import Key, Kind
from .units import PAGE, align

# Note [Parts of saved storages]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# Torch allocates and frees the memory of a storage as a whole.  What moves are its parts: items of
# at most a quarter of the host memory that saved storages pass through (``SavedRoom.part_bytes``).
# If storages moved as a whole, one that is larger than this room could not leave, however much disk
# is free.  The logits of a step are often that large.
#
# A storage leaves in one of two ways.  If it may stay in host memory and fits there, all its parts
# get their slots before the first one is copied.  Otherwise it *streams*: each part is copied out,
# written to disk and dropped, and its slot serves another part.  It reserves its disk space before
# it begins.  In both ways compute's copy is freed (``FreeDeviceCopy``) once all parts are copied
# out.
#
# On the way back, room at compute is taken for the whole storage.  Parts are read as slots become
# free, and copied in in any order; a slot is free again once its part has arrived.  An urgent
# storage is read ahead before it has room at compute: parts that were read are clean, so they can
# be evicted.
#
# A storage of which any part is on disk alone has reserved its disk space, so its other parts can
# be written too.  Host memory therefore never fills with parts that can neither leave nor be used.


class PartedStorage:
    """One storage that autograd saved.  See Note [Parts of saved storages].

    Attributes:
        parts: the items that move, in their order in the storage.
        nbytes, below_bytes: its size at compute, and on lower tiers, where it may be packed.
        turn: when it was last saved, as a count of all saves.
        here: whether compute has it, or room for it is taken.
        pending: parts that compute lacks and whose copy in has not started.
        out: number of parts whose copy out was started or was not needed, while ``leaving``.
        streams: whether it leaves, or has left, part by part through host memory to disk.
        wanted: whether compute needs it while it is leaving; it stays once running copies end.
        copying: number of copies out in progress.
        moving: number of moves of any kind in progress.
        on_disk: whether disk space is reserved for it.
        used: whether nothing needs it any more; it is removed once no move of it runs.
    """

    __slots__ = (
        "below_bytes", "copying", "here", "leaving", "moving", "nbytes", "number", "on_disk",
        "out", "parts", "pending", "streams", "turn", "unit", "used", "wanted",
    )  # fmt: skip

    def __init__(self, number: int, sizes: Sequence[int], unit: int, itemsize: int = 0) -> None:
        self.parts = [
            Item(Key(Kind.SAVED, number, i), align(packed_bytes(n, itemsize), PAGE), slot_bytes=n)
            for i, n in enumerate(sizes)
        ]
        self.number, self.nbytes, self.unit = number, sum(sizes), unit
        self.below_bytes = sum(part.nbytes for part in self.parts)
        self.turn = self.out = self.copying = self.moving = 0
        self.pending: list[Item] = []
        self.here = True
        self.leaving = self.streams = self.wanted = self.on_disk = self.used = False

    @property
    def complete(self) -> bool:
        """Whether compute has every part, or a copy in of it was started."""
        return self.here and not self.pending

    @property
    def arrived(self) -> bool:
        """Whether compute has every part now."""
        return self.here and all(p.device is not None and p.device.valid for p in self.parts)

    @property
    def missing_bytes(self) -> int:
        """Bytes on lower tiers of parts of which compute has the only copy."""
        return sum(part.nbytes for part in self.parts if not is_below(part))


def is_below(part: Item) -> bool:
    """Return whether host memory or disk has a current copy of the part."""
    return part.stored or (part.host is not None and part.host.valid)


def is_in_host_alone(part: Item) -> bool:
    """Return whether the part is in host memory, not moving, and not on disk."""
    copy = part.host
    return copy is not None and copy.valid and not copy.holds and not part.stored
