"""A placement in progress: the homes chosen so far, and the bytes they need of each tier."""

from __future__ import annotations

from collections.abc import Sequence

from ..facts.tier import Tier
from ..schedule.units import Unit, align
from ..schedule.visits import SLOTS as VISIT_SLOTS
from .partition import Partition
from .plan import Budgets, Needs, Shortfall, host_grad_bytes
from .subgroups import LARGEST_IN_MEMORY, bytes_per_element, choose_numel, cut_subgroups
from .van_der_corput import spread

STATE_SLOTS = 4  # one is updated, one read ahead, one written back, one spare
VISITS_SHARE = 0.125  # of the device's budget, at most, for records that are updated there
DEFAULT_DEPTH = 3
SHARED_GRANULE = 64 << 10  # bytes of the largest pages of host memory, a multiple of all others


class Placement:
    """A placement that begins with every home in the lowest tier.

    Attributes:
        resident: by unit, whether compute's copy of its weights never leaves.
        weights, grads, state: the tiers of homes: by unit; for state, by unit and record.
        in_place: units that are read from the user's own files.
        cached: the units of these that host memory has room to keep.
        pages_there: units whose page lives on the device.
        beside: units that are trained and share frozen weights, such as adapters.
        order: all units, in the order in which homes are chosen.
        unpacked: bytes of host memory for weights that are unpacked there.
    """

    def __init__(self, parts: Partition, budgets: Budgets, needs: Needs) -> None:
        self.units, self.budgets, self.needs = parts.units, budgets, needs
        self.has_device = budgets.device is not None
        order = needs.prefer.order
        even = spread(self.units) if order is None else [self.units[i] for i in order]
        # Trained weights of units with frozen ones: small, and the only weights that are written.
        self.beside = [u for u in even if u.trainable and not self._alone(u)]
        self.order = self.beside + [u for u in even if u not in self.beside]
        self.depth = DEFAULT_DEPTH if needs.prefetch_depth is None else needs.prefetch_depth
        self.visit_slot = self.visit_slots = self.saved_room = 0
        self.visiting = False
        self.unpacked = 0
        self.pages_there: set[int] = set()
        self._fewer = ", or fewer in resident=" if needs.named else ""
        self.shortfalls: list[Shortfall] = []
        self.grad_bytes = tuple(host_grad_bytes(u, needs.accumulate) for u in self.units)
        self.lower = Tier.NVME if budgets.nvme is not None else Tier.HOST
        numel = needs.numel or self._record_numel()
        self.subgroups = cut_subgroups(self.units, needs.fields_of, numel, needs.work_of)
        self.state_bytes = [sum(s.nbytes for s in group) for group in self.subgroups]
        self.largest_state = [max((s.nbytes for s in g), default=0) for g in self.subgroups]
        self.resident = [self._stays(u) for u in self.units]
        self.weights = [
            Tier.HOST if self._stays(u) and (u.weight_bytes == 0 or not self.has_device)
            else self.lower
            for u in self.units
        ]  # fmt: skip
        self.in_place = set(needs.in_place)
        for unit in self.units:
            if unit.index in self.in_place and (self.has_device or not self._stays(unit)):
                self.weights[unit.index] = Tier.NVME  # even without a store
        self.cached: set[int] = set()
        self.grads: list[Tier | None] = [self._first_grads(u) for u in self.units]
        self.state = [[self.lower] * len(group) for group in self.subgroups]

    def _record_numel(self) -> int:
        """Return the number of elements per state record."""
        element = bytes_per_element(self.units, self.needs.fields_of)
        if self.budgets.nvme is not None:
            return choose_numel(element, self.budgets.host // 4, STATE_SLOTS)
        usual = choose_numel(element, self.budgets.host, STATE_SLOTS)
        if self.budgets.device is None:
            return usual
        # Each slot for a visit must fit a record with its gradients and weights.
        sizes = [4 + c.dtype.itemsize for u in self.units for c in u.chunks]
        beside = max(sizes, default=0)
        room = min(self.budgets.host, int(self.budgets.device * VISITS_SHARE))
        return max(usual, choose_numel(element + beside, room, VISIT_SLOTS, LARGEST_IN_MEMORY))

    def _alone(self, unit: Unit) -> bool:
        return all(self.units[i].runs for i in unit.shares)

    def _stays(self, unit: Unit) -> bool:
        """Return whether a unit's weights must stay in compute's memory."""
        return unit.encloses or unit.weight_bytes == 0 or unit.index in self.needs.pinned

    def shared(self, unit: Unit) -> bool:
        """Return whether ranks share a host copy of a unit, if it has its home there.

        See Note [Shared host memory] in ``io_engine/shared_memory.py``.
        """
        fixed = not unit.trainable and (unit.packed or unit.index in self.in_place)
        if self.needs.sharers == 1 or not fixed:
            return False
        # Compute must not use the shared bytes themselves, which a user could write to.  Nor may a
        # resident copy be made of them: other ranks may not have loaded them yet.
        moves = self._apart(unit) and not self.resident[unit.index]
        return moves and unit.index not in self.pages_there

    def _home_bytes(self, unit: Unit) -> int:
        """Return the most bytes of a rank's budget that a host home of a unit's weights takes."""
        if not self.shared(unit):
            return unit.stored_bytes
        return self._counted(unit.stored_bytes + SHARED_GRANULE)

    def _counted(self, shared_bytes: int) -> int:
        return -(-shared_bytes // self.needs.sharers)

    def _first_grads(self, unit: Unit) -> Tier | None:
        return None if self.needs.transient_grads or not unit.trainable else self.lower

    # -- sizes ----------------------------------------------------------------------------------

    def _apart(self, unit: Unit) -> bool:
        """Return whether compute uses a separate copy of a unit's weights; see ``Layout.apart``."""
        return self.has_device or unit.packed

    def _slot(self, unit: Unit) -> int:
        """Return the bytes of a unit's slot for compute; see ``Layout.slot_bytes``."""
        behind = self.has_device and unit.index not in self.pages_there
        return unit.weight_bytes + (unit.page_bytes if behind else 0)

    def _demand(self, *, apart: bool) -> int:
        """Return the most bytes of streamed weights that are used at the same time.

        ``apart``: count separate copies for compute, else weights used where they are stored.
        """
        return max(self._group_bytes(u, apart=apart) for u in self.units)

    def _group_bytes(self, unit: Unit, *, apart: bool) -> int:
        members = [unit, *(self.units[i] for i in unit.shares)]
        moving = [m for m in members if not self.resident[m.index]]
        there = [m for m in moving if self._apart(m) == apart]
        if apart:
            return sum(map(self._slot, there))
        # Pages to unpack pass through host memory one at a time.
        through = max((m.page_bytes for m in moving if self._apart(m)), default=0)
        return through + sum(m.weight_bytes for m in there)

    def _device_weights(self, ahead: int) -> int:
        """Return the bytes of the region for compute's separate copies: the largest demand, and
        room for ``ahead`` prefetched units."""
        streamed = [u for u in self.units if not self.resident[u.index] and self._apart(u)]
        if not streamed:
            return 0
        total = sum(map(self._slot, streamed))
        return min(total, self._demand(apart=True) + ahead * max(map(self._slot, streamed)))

    def _host_weights(self, ahead: int) -> int:
        """Return the bytes of the region that weights move through in host memory.

        Pages of a store that stay on the device also pass through it, once.
        """
        paged = [u for u in self.units if self.weights[u.index] is Tier.NVME]
        moving = [u for u in paged if u.index not in self.pages_there]
        once = max((u.stored_bytes for u in paged if u.index in self.pages_there), default=0)
        return max(once, self._host_moving(moving, ahead))

    def _host_moving(self, paged: Sequence[Unit], ahead: int) -> int:
        moving = [u.stored_bytes for u in paged if u.index not in self.cached]
        total = sum(u.stored_bytes for u in paged)
        if not moving:
            return total
        largest, kept = max(moving), total - sum(moving)
        if self.has_device:
            return min(total, kept + largest * (1 + ahead))
        demand = self._demand(apart=False)
        # An update during backward needs room for its unit next to the unit in use.  The factor two
        # makes sure of contiguous room, wherever the unit in use is.
        beside = 2 * largest if self.needs.update_in_backward else 0
        return min(total, kept + max(demand, largest) + beside + ahead * largest)

    def _host_grads(self) -> int:
        sizes = [(self.grad_bytes[u.index], u.grad_bytes, self.grads[u.index]) for u in self.units]
        moving = max((g for g, _, home in sizes if home in (Tier.NVME, None)), default=0)
        staged = [gathered for _, gathered, home in sizes if home is not Tier.DEVICE]
        staging = max(staged, default=0) if self.has_device else 0
        return moving * (2 if moving else 1) + staging if moving else staging

    def _slot_bytes(self) -> int:
        """Return the bytes of the largest record on disk.

        There may be ten thousand records, so it looks at whole units if possible.
        """
        largest = 0
        for unit, tiers in enumerate(self.state):
            paged = tiers.count(Tier.NVME)
            if not paged or self.largest_state[unit] <= largest:
                continue
            if paged == len(tiers):
                largest = self.largest_state[unit]
            else:
                pairs = zip(self.subgroups[unit], tiers, strict=True)
                largest = max(largest, *(s.nbytes for s, tier in pairs if tier is Tier.NVME))
        return largest

    def _regions(self, ahead: int, slots: int) -> int:
        return self._host_weights(ahead) + self._host_grads() + slots * self._slot_bytes()

    def _homes(self) -> int:
        total = shared = 0
        for unit in range(len(self.units)):
            if self.weights[unit] is Tier.HOST and unit not in self.pages_there:
                nbytes = self.units[unit].stored_bytes
                if self.shared(self.units[unit]):
                    shared += align(nbytes, 4096)
                else:
                    total += nbytes
            if self.grads[unit] is Tier.HOST:
                total += self.grad_bytes[unit]
            held = self.state[unit].count(Tier.HOST)
            if held == len(self.state[unit]):
                total += self.state_bytes[unit]
            elif held:
                pairs = zip(self.subgroups[unit], self.state[unit], strict=True)
                total += sum(s.nbytes for s, tier in pairs if tier is Tier.HOST)
        return total + self._counted(align(shared, SHARED_GRANULE))

    def disk_bytes(self) -> int:
        copies = 2 if self.needs.durable else 1
        total = 0
        kept = self.needs.durable  # items that live in memory are committed too
        for unit in self.units:
            if unit.index not in self.in_place and (kept or self.weights[unit.index] is Tier.NVME):
                total += align(unit.stored_bytes, 4096) * (copies if unit.trainable else 1)
            if self.grads[unit.index] is Tier.NVME:
                total += align(self.grad_bytes[unit.index], 4096)
            for s, tier in zip(self.subgroups[unit.index], self.state[unit.index], strict=True):
                total += s.nbytes * copies if kept or tier is Tier.NVME else 0
        return total
