"""The memory layout: fixed homes, and the regions that all other items move through."""

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

    Attributes:
        weights: the tier that owns the weights.
        resident: whether the copy that compute uses never leaves.
        grads: the tier where gradients wait between backward and the update; ``None``: they are
            only kept from arrival to an immediate update.
        state: by subgroup, the tier of its state record.
        host_place: place of a fixed host copy.  That of a page may be on the device, where its
            weights are unpacked; if a store owns the page, this is a copy of it.
        device_place: place of a resident copy on the device.
        grad_place: place of gradients that have a home in memory.
        state_places: by subgroup, the place of a state record that has a home in memory.
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
        """Whether its page is kept on the device, so that nothing is copied over the link."""
        return self.host_place is not None and self.host_place.tier is Tier.DEVICE


COUNTED = 1 << 60  # the first offset of places that are only counted


SCALED_ELEMENTS, SCALE_BYTES = 128, 4  # of activations that are packed
PACKED_SHARE = 0.6  # of activations; attention and masks take the rest of most layers


PARTS_AT_ONCE = 4  # least number of parts of a saved storage that fit in host memory


class SavedRoom(NamedTuple):
    """The room for saved storages (activations), in bytes.

    Attributes:
        policy: see ``wrap``.
        compute: that may stay in compute's memory, where PyTorch allocates them.
        host: of a region of host memory, behind all others, that is allocated as it fills.
        disk: on disk.
        recompute: the units whose forward is recomputed in backward.
        keep_attention: those of them that keep the outputs of their attention.
        itemsize: bytes per element that plans assume of storages that are packed on their way out;
            0: none is packed.
    """

    policy: str = "keep"
    compute: int = 0
    host: int = 0
    disk: int = 0
    recompute: frozenset[int] = frozenset()
    keep_attention: frozenset[int] = frozenset()
    itemsize: int = 0

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

    def below_bytes(self, nbytes: int) -> int:
        """Return about the size on lower tiers of ``nbytes`` of activations, rather more."""
        packed = int(nbytes * PACKED_SHARE) if self.itemsize else 0
        return nbytes - packed + packed_bytes(packed, self.itemsize)


def packed_bytes(nbytes: int, itemsize: int) -> int:
    """Return the bytes on lower tiers of ``nbytes`` of activations; see ``ActivationBlocks``.

    Args:
        itemsize: bytes per element if they are packed, else 0.
    """
    if not itemsize:
        return nbytes
    elements = nbytes // itemsize
    return elements + SCALE_BYTES * -(-elements // SCALED_ELEMENTS)


NO_ROOM = SavedRoom()


class Region(NamedTuple):
    """A part of a tier's arena that items move through.

    It is allocated in slots of ``slot_bytes``, or in pieces of any size if that is 0.
    """

    tier: Tier
    base: int
    nbytes: int
    slot_bytes: int = 0


@dataclass(frozen=True)
class Regions:
    """The sizes of all parts of the two memory arenas, in bytes; the fixed part comes first.

    Attributes:
        host_shared: bytes at the start of the fixed part of host memory that ``sharers`` ranks map
            together; see Note [Shared host memory] in ``io_engine/shared_memory.py``.
    """

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
    host_shared: int = 0
    sharers: int = 1

    @property
    def device_bytes(self) -> int:
        return self.fixed_bytes(Tier.DEVICE) + sum(r.nbytes for r in self.of(Tier.DEVICE).values())

    @property
    def host_bytes(self) -> int:
        return self.fixed_bytes(Tier.HOST) + sum(r.nbytes for r in self.of(Tier.HOST).values())

    @property
    def counted_host_bytes(self) -> int:
        """The bytes of host memory that count against a rank's budget."""
        return self.host_bytes - self.host_shared + -(-self.host_shared // self.sharers)

    def fixed_bytes(self, tier: Tier) -> int:
        """Return the bytes of fixed homes, at the start of the arena."""
        return self.device_fixed if tier is Tier.DEVICE else self.host_fixed

    def of(self, tier: Tier) -> dict[Kind, Region]:
        """Return the regions of a tier by kind, in their order in the arena."""
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
    """The input of the residency machine: sizes, homes and regions.  Plain data."""

    units: tuple[Unit, ...]
    subgroups: tuple[tuple[Subgroup, ...], ...]
    homes: tuple[UnitHome, ...]
    regions: Regions
    grad_bytes: tuple[int, ...]  # by unit, its gradients as the host keeps them
    converts: tuple[bool, ...]  # by unit, whether the host keeps them in another dtype
    has_device: bool
    durable: bool
    prefetch_depth: int
    visiting: float = 0.0  # share of the records not kept on the device that are updated there
    matrices_visit: bool = False  # whether those with many matrix products are updated there
    saved: SavedRoom = NO_ROOM
    in_place: frozenset[int] = frozenset()  # units read from the user's own files
    cached_bytes: int = 0  # bytes of these that the host region of weights can keep

    @property
    def trains(self) -> bool:
        """Whether any unit is trained; otherwise a step is one forward."""
        return any(unit.trainable for unit in self.units)

    @cached_property
    def unchangeable(self) -> frozenset[int]:
        """The units whose weights nothing may change."""
        return self.in_place | {unit.index for unit in self.units if unit.packed}

    @property
    def compute_tier(self) -> Tier:
        """The tier of compute's memory, where gradients are produced."""
        return Tier.DEVICE if self.has_device else Tier.HOST

    @cached_property
    def apart(self) -> tuple[bool, ...]:
        """By unit, whether compute uses a separate copy of its weights: on a device, or unpacked.

        The slots of these copies are called ``DEVICE`` even if compute has no memory of its own.
        """
        return tuple(self.has_device or unit.packed for unit in self.units)

    def tier_of(self, unit: int) -> Tier:
        """Return the tier in which the weights of a unit must be for compute to use them."""
        return Tier.DEVICE if self.apart[unit] else Tier.HOST

    def slot_bytes(self, unit: int) -> int:
        """Return the bytes of a unit's slot for compute.

        On a device, a page that is to be unpacked is copied to the end of the slot.
        """
        each = self.units[unit]
        behind = self.has_device and not self.homes[unit].page_on_device
        return each.weight_bytes + (each.page_bytes if behind else 0)

    def region(self, kind: Kind, tier: Tier) -> Region:
        """Return the region of a tier that items of a kind move through.

        In host memory, gathered gradients share the region of waiting ones.  Saved storages are
        only counted at compute, which is called ``DEVICE`` even if it has no memory of its own.
        """
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
        """By unit, the units onloaded with it: itself, and the units whose weights it shares."""
        return tuple((unit.index, *unit.shares) for unit in self.units)

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """By unit, the units with which it is onloaded."""
        return tuple(
            tuple(user for user, group in enumerate(self.together) if unit.index in group)
            for unit in self.units
        )

    @cached_property
    def streamed(self) -> tuple[bool, ...]:
        """By unit, whether any unit onloaded with it is not resident."""
        return tuple(not all(self.homes[u].resident for u in group) for group in self.together)

    @cached_property
    def still(self) -> bool:
        """Whether nothing moves: compute and updates share all memory, and the processor's cores.

        Then updates behind the forward would only take cores away from it, so ``step()`` waits for
        them in every update mode.
        """
        state = (tier for home in self.homes for tier in home.state)
        moves = self.has_device or self.durable or any(self.streamed)
        return not moves and all(tier is Tier.HOST for tier in state)

    @cached_property
    def shared_places(self) -> dict[int, Place]:
        """By unit, the host places that other ranks map too."""
        end = self.regions.host_shared
        homes = ((unit, home.host_place) for unit, home in enumerate(self.homes))
        return {
            unit: place for unit, place in homes
            if place is not None and place.tier is Tier.HOST and place.offset < end
        }  # fmt: skip

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
        """The items that a store keeps: weights by unit, then state records."""
        weights = [
            Key(Kind.WEIGHTS, unit.index)
            for unit in self.units
            if unit.weight_bytes and unit.index not in self.in_place
        ]
        return (*weights, *(Key(Kind.STATE, number) for number in range(len(self.records))))

    @property
    def spare_bytes(self) -> int:
        """Bytes that a durable store may add for edits of weights that are not trained.

        The space is allocated with the first edit.
        """
        return sum(align(unit.stored_bytes, PAGE) for unit in self.clean) if self.durable else 0

    @property
    def clean(self) -> list[Unit]:
        """The units that a store keeps and that are not trained."""
        mine = [u for u in self.units if u.weight_bytes and u.index not in self.in_place]
        return [unit for unit in mine if not unit.trainable]

    def nbytes(self, item: Key) -> int:
        """Return the size of an item in its home."""
        if item.kind is Kind.STATE:
            return self.records[item.number].nbytes
        if item.kind is Kind.WEIGHTS:
            return self.units[item.number].stored_bytes
        assert item.kind is Kind.GRADS, f"{item} has no size of its own"
        return self.grad_bytes[item.number]

    def home(self, item: Key) -> tuple[Tier | None, Place | None]:
        """Return the tier that owns an item, and its place there if it has a fixed one."""
        if item.kind is Kind.STATE:
            return self._state_homes[item.number]
        home = self.homes[item.number]
        if item.kind is Kind.WEIGHTS:
            own = {Tier.DEVICE: home.device_place, Tier.HOST: home.host_place}
            return home.weights, own.get(home.weights)
        return home.grads, home.grad_place

    def name(self, item: Key) -> str:
        """Return the name of an item for traces and errors."""
        if item.kind in (Kind.STATE, Kind.VISIT):
            unit = self.units[self.records[item.number].unit].name
            return f"{item.kind.value} {unit} {item.number}"
        if item.kind is Kind.SAVED:
            return f"{item.kind.value} {item.number}"
        return f"{item.kind.value} {self.units[item.number].name}"
