"""Where everything lives: the fixed homes, and the regions that the rest moves through."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..facts.tier import Tier
from .arena import Place
from .messages import Key, Kind
from .units import PAGE, Subgroup, Unit, align


@dataclass(frozen=True)
class UnitHome:
    """The homes of one unit.

    ``weights`` is the tier that owns the weights; ``resident`` says that the copy that compute
    uses never leaves.  ``grads`` is where gradients wait between backward and the update
    (``None``: only from arrival to an immediate update).  ``state`` is by subgroup.  Places are
    set for what stays put: a host home, a resident device copy, and so on.  The host place of a
    page may lie on the device, from where its weights are unpacked; of a store's it is a copy.
    """

    weights: Tier
    resident: bool
    grads: Tier | None
    state: tuple[Tier, ...]
    host_place: Place | None = None
    device_place: Place | None = None
    grad_place: Place | None = None
    state_places: tuple[Place | None, ...] = ()

    @property
    def stays(self) -> bool:
        """Whether some copy of the weights never leaves memory."""
        return self.device_place is not None or self.host_place is not None

    @property
    def page_on_device(self) -> bool:
        """Whether its page has its home there: nothing has to come over the link."""
        return self.host_place is not None and self.host_place.tier is Tier.DEVICE


COUNTED = 1 << 60  # where the names of places that are only counted begin


PARTS_AT_ONCE = 4  # parts of saved storages that host memory has room for, at least


class SavedRoom(NamedTuple):
    """Bytes for what autograd saves: that may stay where compute has them, whoever allocates them;
    of a region of host memory that is taken piece by piece as it fills, beyond all others; and on
    disk.  ``policy``: see ``wrap``; ``recompute``: the units whose forward is computed again."""

    policy: str = "keep"
    compute: int = 0
    host: int = 0
    disk: int = 0
    recompute: frozenset[int] = frozenset()

    def part_bytes(self, nbytes: int) -> int:
        """Return the size of the parts in which a storage of ``nbytes`` moves.

        All parts have this size, a multiple of a page, except that the last one may be smaller.
        Host memory has room for several parts, so that a storage larger than that room can still
        pass through it on the way to disk.
        """
        pages = align(nbytes, PAGE) // PAGE
        most = max(1, self.host // PARTS_AT_ONCE // PAGE) if self.host else pages
        count = max(1, -(-pages // most))
        return max(1, -(-pages // count)) * PAGE

    def part_sizes(self, nbytes: int) -> list[int]:
        """Return the sizes of all parts of a storage of ``nbytes``, in whole pages."""
        each, left = self.part_bytes(nbytes), align(nbytes, PAGE)
        return [min(each, left - start) for start in range(0, left, each)] or [0]


NO_ROOM = SavedRoom()


class Region(NamedTuple):
    """A part of a tier's arena that items move through; handed out in slots of ``slot_bytes``, or
    piece by piece where that is 0."""

    tier: Tier
    base: int
    nbytes: int
    slot_bytes: int = 0


@dataclass(frozen=True)
class Regions:
    """Bytes of each part of the two memory arenas; the fixed part comes first in both."""

    device_fixed: int = 0
    device_weights: int = 0
    device_grads: int = 0
    host_fixed: int = 0
    host_weights: int = 0
    host_grads: int = 0
    state_slot: int = 0
    state_slots: int = 0
    visit_slot: int = 0
    visit_slots: int = 0

    @property
    def device_bytes(self) -> int:
        return self.fixed_bytes(Tier.DEVICE) + sum(r.nbytes for r in self.of(Tier.DEVICE).values())

    @property
    def host_bytes(self) -> int:
        return self.fixed_bytes(Tier.HOST) + sum(r.nbytes for r in self.of(Tier.HOST).values())

    def fixed_bytes(self, tier: Tier) -> int:
        """Of what stays put, at the start of the arena."""
        return self.device_fixed if tier is Tier.DEVICE else self.host_fixed

    def of(self, tier: Tier) -> dict[Kind, Region]:
        """The regions of a tier, by the kind that they are for, in the order in which they lie."""
        state, device_updates = (
            self.state_slot * self.state_slots,
            self.visit_slot * self.visit_slots,
        )
        sizes: dict[Kind, tuple[int, int]] = (
            {
                Kind.WEIGHTS: (self.device_weights, 0),
                Kind.GATHERED: (self.device_grads, 0),
                Kind.VISIT: (device_updates, self.visit_slot),
            }
            if tier is Tier.DEVICE
            else {
                Kind.WEIGHTS: (self.host_weights, 0),
                Kind.GRADS: (self.host_grads, 0),
                Kind.STATE: (state, self.state_slot),
            }
        )
        found, base = {}, self.fixed_bytes(tier)
        for kind, (nbytes, slot_bytes) in sizes.items():
            found[kind] = Region(tier, base, nbytes, slot_bytes)
            base += nbytes
        return found


@dataclass(frozen=True)
class Layout:
    """All that the residency machine must know: sizes, homes and regions.  Plain facts."""

    units: tuple[Unit, ...]
    subgroups: tuple[tuple[Subgroup, ...], ...]
    homes: tuple[UnitHome, ...]
    regions: Regions
    grad_bytes: tuple[int, ...]  # a unit's gradients as the host keeps them
    converts: tuple[bool, ...]  # whether that is in another dtype than they come in
    has_device: bool
    durable: bool
    prefetch_depth: int
    visiting: float = 0.0  # share of the records kept elsewhere that are updated on the device
    saved: SavedRoom = NO_ROOM
    in_place: frozenset[int] = frozenset()  # units that are read from files which are not ours
    cached_bytes: int = 0  # of these, what the region of weights in host memory has room to keep

    @property
    def trains(self) -> bool:
        """Whether anything is trained; else a step is one forward."""
        return any(unit.trainable for unit in self.units)

    @property
    def unchangeable(self) -> frozenset[int]:
        """The units whose weights nothing may change."""
        return self.in_place | {unit.index for unit in self.units if unit.packed}

    @property
    def compute_tier(self) -> Tier:
        """Where gradients come from."""
        return Tier.DEVICE if self.has_device else Tier.HOST

    @cached_property
    def apart(self) -> tuple[bool, ...]:
        """By unit, whether compute has its weights apart from where they wait: on a device, or
        unpacked, in slots that are called ``DEVICE`` also where compute has no memory of its own.
        """
        return tuple(self.has_device or unit.packed for unit in self.units)

    def tier_of(self, unit: int) -> Tier:
        """Where the weights of a unit must be for compute to use them."""
        return Tier.DEVICE if self.apart[unit] else Tier.HOST

    def slot_bytes(self, unit: int) -> int:
        """What the weights of a unit take where compute has them.  On a device, a page that is to
        be unpacked is copied behind them."""
        each = self.units[unit]
        behind = self.has_device and not self.homes[unit].page_on_device
        return each.weight_bytes + (each.page_bytes if behind else 0)

    def region(self, kind: Kind, tier: Tier) -> Region:
        """What items of a kind move through in a tier.  Gradients that come share that of those
        that wait.  What autograd saved is only counted where compute has it, which is called
        ``DEVICE`` also where compute has no memory of its own."""
        if kind is Kind.SAVED:
            if tier is Tier.DEVICE:
                return Region(tier, COUNTED, self.saved.compute)
            return Region(tier, self.regions.host_bytes, self.saved.host)
        if kind is Kind.GATHERED and tier is Tier.HOST:
            kind = Kind.GRADS
        return self.regions.of(tier).get(kind, Region(tier, 0, 0))

    # -- by unit --------------------------------------------------------------------------------

    @cached_property
    def together(self) -> tuple[tuple[int, ...], ...]:
        """By unit, what comes to compute with it: itself, and those whose weights it shares."""
        return tuple((unit.index, *unit.shares) for unit in self.units)

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """By unit, those with which it comes to compute."""
        return tuple(
            tuple(user for user, group in enumerate(self.together) if unit.index in group)
            for unit in self.units
        )

    @cached_property
    def streamed(self) -> tuple[bool, ...]:
        """By unit, whether any of these may have to come to compute."""
        return tuple(not all(self.homes[u].resident for u in group) for group in self.together)

    # -- by item --------------------------------------------------------------------------------

    @cached_property
    def records(self) -> tuple[Subgroup, ...]:
        """Every subgroup, by its number."""
        return tuple(s for group in self.subgroups for s in group)

    @cached_property
    def _state_homes(self) -> tuple[tuple[Tier, Place | None], ...]:
        return tuple(
            each for home in self.homes for each in zip(home.state, home.state_places, strict=True)
        )

    @cached_property
    def stored(self) -> tuple[Key, ...]:
        """The items that a store keeps: weights by unit, then records."""
        weights = [
            Key(Kind.WEIGHTS, unit.index)
            for unit in self.units
            if unit.weight_bytes and unit.index not in self.in_place
        ]
        return (*weights, *(Key(Kind.STATE, number) for number in range(len(self.records))))

    @property
    def spare_bytes(self) -> int:
        """Of a durable store, room for edits of what is not trained: taken when one comes."""
        return sum(align(unit.stored_bytes, PAGE) for unit in self.clean) if self.durable else 0

    @property
    def clean(self) -> list[Unit]:
        """What a store keeps and nothing trains."""
        mine = [u for u in self.units if u.weight_bytes and u.index not in self.in_place]
        return [unit for unit in mine if not unit.trainable]

    def nbytes(self, item: Key) -> int:
        """Size of an item, where it waits."""
        if item.kind is Kind.STATE:
            return self.records[item.number].nbytes
        if item.kind is Kind.WEIGHTS:
            return self.units[item.number].stored_bytes
        assert item.kind is Kind.GRADS, f"{item} has no size of its own"
        return self.grad_bytes[item.number]

    def home(self, item: Key) -> tuple[Tier | None, Place | None]:
        """The tier that owns an item, and its place there, if it has one that is its own."""
        if item.kind is Kind.STATE:
            return self._state_homes[item.number]
        home = self.homes[item.number]
        if item.kind is Kind.WEIGHTS:
            own = {Tier.DEVICE: home.device_place, Tier.HOST: home.host_place}
            return home.weights, own.get(home.weights)
        return home.grads, home.grad_place

    def name(self, item: Key) -> str:
        """What an item is called in traces and errors."""
        if item.kind in (Kind.STATE, Kind.VISIT):
            unit = self.units[self.records[item.number].unit].name
            return f"{item.kind.value} {unit} {item.number}"
        if item.kind is Kind.SAVED:
            return f"{item.kind.value} {item.number}"
        return f"{item.kind.value} {self.units[item.number].name}"
