"""Gives out budgets: homes and regions for a model, or what falls short.  Allocates nothing.

The demand path is reserved first (the largest unit's weights and gradients, one subgroup's
record), so that there is always progress.  What is left goes to room for prefetch, then to homes,
if nothing else is preferred in the order of bytes saved per byte kept: weights (read twice and
written once a step), gradients, optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..facts.tier import Tier
from ..schedule.arena import Place
from ..schedule.layout import Layout, Regions, SavedRoom, UnitHome
from ..schedule.units import PAGE, Unit, align
from ..schedule.visits import SLOTS as VISIT_SLOTS
from ..schedule.visits import visit_of
from .partition import Partition
from .plan import Budgets, Needs, Shortfall, converts_grads, host_grad_bytes
from .spread import spread
from .subgroups import bytes_per_element, choose_numel, cut_subgroups

STATE_SLOTS = 4  # one updates, one reads ahead, one writes back, one in hand
DEFAULT_DEPTH = 3
UNKNOWN_SHARE = 0.25  # of the room that nothing needs, to activations of which nothing is known
KNOWN_SHARE = 0.5  # at most, to those that are known, if they can leave
UNITS_BESIDE = 3  # that what autograd saved has room for at least: one in use, one to come or go
BESIDE_SHARE = 0.5  # of the room that nothing needs, to weights that are trained beside frozen ones
STAGING_SHARE = 4  # of host memory left for activations, to those on their way to or from disk


def _pages(nbytes: int) -> int:
    return nbytes // PAGE * PAGE


class _Spend:
    """A budget that is being given out."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes

    def take(self, nbytes: int) -> bool:
        if nbytes > self.left:
            return False
        self.left -= nbytes
        return True


class _Planner:
    """One use: reserves the demand path, then gives out what is left."""

    def __init__(self, parts: Partition, budgets: Budgets, needs: Needs) -> None:
        self.units, self.budgets, self.needs = parts.units, budgets, needs
        self.has_device = budgets.device is not None
        order = needs.prefer.order
        even = spread(self.units) if order is None else [self.units[i] for i in order]
        # Trained beside frozen weights: small, and all that is written.
        self.beside = [u for u in even if u.trainable and not self._alone(u)]
        self.order = self.beside + [u for u in even if u not in self.beside]
        self.depth = DEFAULT_DEPTH if needs.prefetch_depth is None else needs.prefetch_depth
        self.visit_slot = self.saved_room = 0
        self.unpacked = 0  # of host memory, for what compute has unpacked there
        self.pages_there: set[int] = set()  # units whose page lives on the device
        self._fewer = ", or fewer in resident=" if needs.pinned else ""
        self.shortfalls: list[Shortfall] = []
        self.grad_bytes = tuple(host_grad_bytes(u, needs.accumulate) for u in self.units)
        self.lower = Tier.NVME if budgets.nvme is not None else Tier.HOST
        element = bytes_per_element(self.units, needs.fields_of)
        room = budgets.host // 4 if budgets.nvme is not None else budgets.host
        numel = needs.numel or choose_numel(element, room, STATE_SLOTS)
        self.subgroups = cut_subgroups(self.units, needs.fields_of, numel)
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
                self.weights[unit.index] = Tier.NVME  # also where there is no store
        self.cached: set[int] = set()  # of these, what host memory has room to keep
        self.grads: list[Tier | None] = [self._first_grads(u) for u in self.units]
        self.state = [[self.lower] * len(group) for group in self.subgroups]

    def _alone(self, unit: Unit) -> bool:
        return all(self.units[i].runs for i in unit.shares)

    def _stays(self, unit: Unit) -> bool:
        """Whether a unit's weights stay where compute is, whatever else does."""
        return unit.encloses or unit.weight_bytes == 0 or unit.index in self.needs.pinned

    def _first_grads(self, unit: Unit) -> Tier | None:
        return None if self.needs.transient_grads or not unit.trainable else self.lower

    # -- sizes ----------------------------------------------------------------------------------

    def _apart(self, unit: Unit) -> bool:
        """Whether compute has its weights apart from where they wait; see ``Layout.apart``."""
        return self.has_device or unit.packed

    def _slot(self, unit: Unit) -> int:
        """See ``Layout.slot_bytes``."""
        behind = self.has_device and unit.index not in self.pages_there
        return unit.weight_bytes + (unit.page_bytes if behind else 0)

    def _demand(self, *, apart: bool) -> int:
        """The most that weights used at once take, of those that move: apart, or where they are."""
        return max(self._group_bytes(u, apart=apart) for u in self.units)

    def _group_bytes(self, unit: Unit, *, apart: bool) -> int:
        members = [unit, *(self.units[i] for i in unit.shares)]
        moving = [m for m in members if not self.resident[m.index]]
        there = [m for m in moving if self._apart(m) == apart]
        if apart:
            return sum(map(self._slot, there))
        through = max((m.page_bytes for m in moving if self._apart(m)), default=0)  # one at a time
        return through + sum(m.weight_bytes for m in there)

    def _device_weights(self, ahead: int) -> int:
        """The region that weights move through which compute has apart: the largest demand, and
        room ahead."""
        streamed = [u for u in self.units if not self.resident[u.index] and self._apart(u)]
        if not streamed:
            return 0
        total = sum(map(self._slot, streamed))
        return min(total, self._demand(apart=True) + ahead * max(map(self._slot, streamed)))

    def _host_weights(self, ahead: int) -> int:
        paged = [u for u in self.units if self.weights[u.index] is Tier.NVME]
        moving = [u.stored_bytes for u in paged if u.index not in self.cached]
        total = sum(u.stored_bytes for u in paged)
        if not moving:
            return total
        largest, kept = max(moving), total - sum(moving)
        if self.has_device:
            return min(total, kept + largest * (1 + ahead))
        demand = self._demand(apart=False)
        # An update in the middle of backward needs its unit beside the one that computes; the
        # factor two lets it in wherever the latter lies.
        beside = 2 * largest if self.needs.update_in_backward else 0
        return min(total, kept + max(demand, largest) + beside + ahead * largest)

    def _host_grads(self) -> int:
        sizes = [(self.grad_bytes[u.index], u.grad_bytes, self.grads[u.index]) for u in self.units]
        moving = max((g for g, _, home in sizes if home in (Tier.NVME, None)), default=0)
        staged = [gathered for _, gathered, home in sizes if home is not Tier.DEVICE]
        staging = max(staged, default=0) if self.has_device else 0
        return moving * (2 if moving else 1) + staging if moving else staging

    def _slot_bytes(self) -> int:
        """The largest record on disk.  There may be ten thousand: whole units are seen at once."""
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

    # -- device ---------------------------------------------------------------------------------

    def _plan_device(self) -> tuple[int, int]:
        """Regions (weights, gradients); marks resident units, and those wholly on the device."""
        assert self.budgets.device is not None
        gather = max((u.grad_bytes for u in self.units), default=0)
        fixed = sum(u.weight_bytes for u in self.units if self.resident[u.index])
        need = fixed + self._device_weights(0) + gather
        if need > self.budgets.device:
            largest = max(self.units, key=lambda u: self._group_bytes(u, apart=True))
            self.shortfalls.append(
                Shortfall(
                    Tier.DEVICE,
                    f"unit {largest.name!r} with its gradient",
                    need,
                    self.budgets.device,
                    "raise device_memory or name smaller units" + self._fewer,
                )
            )
            return self._device_weights(0), gather
        budget = self.budgets.device - self._for_saved(self.budgets.device - need)
        budget -= self._make_room_for_visits(budget - need)
        everything = sum(u.weight_bytes for u in self.units) + gather
        if everything <= budget:
            self.resident = [True] * len(self.units)
            self._move_to_device(_Spend(budget - everything))
            return 0, gather
        small = [u for u in self.beside if not self.resident[u.index]]
        taken = sum(u.weight_bytes for u in small)
        if taken <= BESIDE_SHARE * (budget - need):
            for unit in small:
                self.resident[unit.index] = True
            fixed += taken
        ahead = self._ahead(budget - fixed - gather, self._device_weights)
        fixed += self._keep_pages(budget - fixed - gather - self._device_weights(ahead))
        room = budget - fixed - gather - self._device_weights(ahead)
        prefer = self.needs.prefer
        whole = _Spend(int(room * prefer.share * prefer.device))
        if prefer.device:
            self._move_to_device(whole)
        spend = _Spend(int(room * prefer.share * (1 - prefer.device)) + whole.left)
        for unit in self.order:
            if not self.resident[unit.index] and unit.index not in self.pages_there:
                self.resident[unit.index] = spend.take(unit.weight_bytes)
        return self._device_weights(ahead), gather

    def _keep_pages(self, room: int) -> int:
        """Lets as many pages as fit live on the device, where all weights do not: they take a part
        of the room of unpacked ones, and nothing comes over the link.  Their bytes."""
        if self.needs.durable:
            return 0  # commits are written from host memory
        spend = _Spend(room)
        for unit in self.order:
            stays = self.resident[unit.index] or not unit.packed
            if not stays and spend.take(unit.page_bytes):
                self.pages_there.add(unit.index)
                self.weights[unit.index] = Tier.HOST
        return room - spend.left

    def _make_room_for_visits(self, room: int) -> int:
        """Bytes of the slots for records that visit the device; 0: none do, or there is no room."""
        if not self.needs.prefer.visiting:
            return 0
        slot = 0
        for unit, group in zip(self.units, self.subgroups, strict=True):
            converts = converts_grads(unit, self.needs.accumulate)
            for s in group:
                visit = visit_of(s, unit.chunks[s.chunk].dtype, converts=converts)
                slot = max(slot, visit.slot_bytes)
        if VISIT_SLOTS * slot > room:
            return 0
        self.visit_slot = slot
        return VISIT_SLOTS * slot

    def _move_to_device(self, spend: _Spend) -> None:
        """As many units as fit live there as a whole; weights that are resident are paid for."""
        if self.needs.update_in_backward or self.needs.durable:
            return  # commits are written from host memory
        for unit in self.order:
            if unit.index in self.pages_there:
                continue
            nbytes = self.grad_bytes[unit.index] + self.state_bytes[unit.index]
            if not self.resident[unit.index]:
                nbytes += unit.weight_bytes
            if spend.take(nbytes):
                self.resident[unit.index] = True
                self.weights[unit.index] = Tier.DEVICE
                self.in_place.discard(unit.index)  # read once
                if unit.trainable:
                    self.grads[unit.index] = Tier.DEVICE
                self.state[unit.index] = [Tier.DEVICE] * len(self.state[unit.index])

    def _for_saved(self, spare: int, *, ends: bool = False) -> int:
        """Room that is left to what autograd saves, of that which nothing needs; ``ends``: it
        cannot go further."""
        policy, sizes = self.needs.activations, self.needs.saved_bytes
        if sizes is None:
            share = 0.0 if policy == "keep" else UNKNOWN_SHARE
            return int(max(0, spare) * share)
        want = sum(sizes)
        stays = policy == "keep" or (ends and self.has_device)
        if not stays:  # it comes and goes beside what backward is at
            want = min(want, max(int(KNOWN_SHARE * spare), UNITS_BESIDE * max(sizes, default=0)))
        return int(min(max(0, spare), want))

    def _saved(self, regions: Regions, disk: int) -> SavedRoom:
        """All that is left in every tier is for what autograd saves."""
        policy = self.needs.activations
        if policy == "keep":
            return SavedRoom()
        again = self.needs.recomputable if policy == "recompute" else self.needs.prefer.recompute
        host = max(0, self.budgets.host - self.unpacked - regions.host_bytes)
        nvme = 0
        if policy != "host" and self.budgets.nvme is not None:
            nvme = max(0, self.budgets.nvme - disk)
        if self.has_device:
            assert self.budgets.device is not None
            there = max(0, self.budgets.device - regions.device_bytes)
            staged = host // STAGING_SHARE if policy == "nvme" else host
            return SavedRoom(policy, there, _pages(staged), nvme, again)
        staged = host // 2 if nvme else 0
        return SavedRoom(policy, host - staged, _pages(staged), nvme, again)

    def _plan_unpacked(self) -> int:
        """The region that weights are unpacked to where compute has no memory of its own."""
        least = self._homes() + self._regions(0, 1)
        room = self.budgets.host - least
        return self._device_weights(min(1, self._ahead(room, self._device_weights)))

    def _ahead(self, room: int, region: object) -> int:
        assert callable(region)
        for ahead in range(self.depth, 0, -1):
            if region(ahead) <= room:
                return ahead
        return 0

    # -- host -----------------------------------------------------------------------------------

    def _regions(self, ahead: int, slots: int) -> int:
        return self._host_weights(ahead) + self._host_grads() + slots * self._slot_bytes()

    def _plan_host(self) -> tuple[int, int]:
        """(units of room ahead, state slots); moves homes from disk to host as far as it goes."""
        budget = self.budgets.host - self.unpacked
        least = self._homes() + self._regions(min(1, self.depth), STATE_SLOTS)
        self.saved_room = self._for_saved(budget - least, ends=self.needs.activations == "host")
        self._fill()
        need = self._homes() + self._regions(0, 1)
        if need > budget:
            what = "the model's weights, gradients and optimizer state"
            remedy = "give a directory with nvme=, or raise host_memory"
            if self.lower is Tier.NVME:
                largest = max(self.units, key=lambda u: u.weight_bytes + u.grad_bytes)
                what = f"unit {largest.name!r} with its gradient and one subgroup's state"
                remedy = "raise host_memory or name smaller units" + self._fewer
            self.shortfalls.append(Shortfall(Tier.HOST, what, need, budget, remedy))
            return 0, 1
        room = budget - self.saved_room - self._homes()
        slots = max(
            (n for n in range(1, STATE_SLOTS + 1) if self._regions(0, n) <= room), default=1
        )
        ahead = self._ahead(room, lambda k: self._regions(k, slots))
        return ahead, slots

    def _homes(self) -> int:
        total = 0
        for unit in range(len(self.units)):
            if self.weights[unit] is Tier.HOST and unit not in self.pages_there:
                total += self.units[unit].stored_bytes
            if self.grads[unit] is Tier.HOST:
                total += self.grad_bytes[unit]
            held = self.state[unit].count(Tier.HOST)
            if held == len(self.state[unit]):
                total += self.state_bytes[unit]
            elif held:
                pairs = zip(self.subgroups[unit], self.state[unit], strict=True)
                total += sum(s.nbytes for s, tier in pairs if tier is Tier.HOST)
        return total

    def _fill(self) -> None:
        """Moves homes up from disk while there is room, one kind after the other."""
        if self.lower is Tier.HOST and not self.in_place:
            return
        slots = STATE_SLOTS
        kinds: dict[str, Callable[[_Spend, Sequence[Unit]], None]] = {
            "weights": self._lift_weights, "gradients": self._lift_grads, "state": self._lift_state,
        }  # fmt: skip
        lifts = [(kinds[kind], self.beside) for kind in kinds if self.beside]
        lifts += [(kinds[kind], self.order) for kind in self.needs.prefer.kinds]
        least = self._homes() + self._regions(min(1, self.depth), slots)
        spare = self.budgets.host - self.unpacked - self.saved_room - least
        budget = least + int(spare * self.needs.prefer.share)
        for lift, units in lifts:
            saved = list(self.weights), list(self.grads), [list(s) for s in self.state]
            cached = set(self.cached)
            lift(_Spend(1 << 62), units)
            # All of a kind at once also saves the region that its last one would need.
            if self._homes() + self._regions(min(1, self.depth), slots) <= budget:
                continue
            self.weights, self.grads, self.state = saved
            self.cached, room = cached, -1
            while True:  # what was lifted may have made the regions smaller
                before = room
                used = self._homes() + self._regions(min(1, self.depth), slots)
                room = budget - used
                if room <= 0 or room == before:
                    break
                lift(_Spend(room), units)

    def _lift_weights(self, spend: _Spend, units: Sequence[Unit]) -> None:
        for unit in units:
            if self.weights[unit.index] is not Tier.NVME or unit.index in self.cached:
                continue
            if self.has_device and self.resident[unit.index] and not unit.trainable:
                continue  # the copy that compute uses is all that is needed
            if spend.take(unit.stored_bytes):
                if unit.index in self.in_place:
                    self.cached.add(unit.index)
                else:
                    self.weights[unit.index] = Tier.HOST

    def _lift_grads(self, spend: _Spend, units: Sequence[Unit]) -> None:
        for unit in units:
            if self.grads[unit.index] is Tier.NVME and spend.take(self.grad_bytes[unit.index]):
                self.grads[unit.index] = Tier.HOST

    def _lift_state(self, spend: _Spend, units: Sequence[Unit]) -> None:
        for unit in units:
            tiers = self.state[unit.index]
            for i, subgroup in enumerate(self.subgroups[unit.index]):
                if tiers[i] is Tier.NVME and spend.take(subgroup.nbytes):
                    tiers[i] = Tier.HOST

    # -- result ---------------------------------------------------------------------------------

    def disk_bytes(self) -> int:
        copies = 2 if self.needs.durable else 1
        total = 0
        kept = self.needs.durable  # what lives in memory is committed too
        for unit in self.units:
            if unit.index not in self.in_place and (kept or self.weights[unit.index] is Tier.NVME):
                total += align(unit.stored_bytes, 4096) * (copies if unit.trainable else 1)
            if self.grads[unit.index] is Tier.NVME:
                total += align(self.grad_bytes[unit.index], 4096)
            for s, tier in zip(self.subgroups[unit.index], self.state[unit.index], strict=True):
                total += s.nbytes * copies if kept or tier is Tier.NVME else 0
        return total

    def run(self) -> tuple[Layout, int]:
        device_weights = device_grads = 0
        if self.has_device:
            device_weights, device_grads = self._plan_device()
        elif any(u.packed for u in self.units):
            device_weights = self.unpacked = self._plan_unpacked()
        ahead, slots = self._plan_host()
        homes, device_fixed, host_fixed = self._assign()
        regions = Regions(
            device_fixed,
            device_weights,
            device_grads if any(g is not Tier.DEVICE for g in self.grads) else 0,
            host_fixed,
            self._host_weights(ahead),
            self._host_grads(),
            self._slot_bytes(),
            slots if self._slot_bytes() else 0,
            self.visit_slot,
            VISIT_SLOTS if self.visit_slot else 0,
        )
        disk = self.disk_bytes()
        if self.budgets.nvme is not None and disk > self.budgets.nvme:
            self.shortfalls.append(
                Shortfall(
                    Tier.NVME,
                    "the store",
                    disk,
                    self.budgets.nvme,
                    "free disk space, raise nvme_memory or set durable=False (half the size)",
                )
            )
        return (
            Layout(
                self.units,
                self.subgroups,
                homes,
                regions,
                self.grad_bytes,
                tuple(converts_grads(u, self.needs.accumulate) for u in self.units),
                self.has_device,
                self.needs.durable,
                self.depth,
                self.needs.prefer.visiting if self.visit_slot else 0.0,
                self._saved(regions, disk),
                frozenset(self.in_place),
                sum(self.units[i].weight_bytes for i in self.cached),
            ),
            disk,
        )

    def _assign(self) -> tuple[tuple[UnitHome, ...], int, int]:
        """Gives every fixed home its place, in the order of the units."""
        ends = {Tier.DEVICE: 0, Tier.HOST: 0}

        def put(tier: Tier | None, nbytes: int) -> Place | None:
            if tier not in (Tier.DEVICE, Tier.HOST):
                return None
            place = Place(tier, ends[tier], nbytes)
            ends[tier] += align(nbytes, 4096)
            return place

        homes: list[UnitHome] = []
        for unit in self.units:
            i = unit.index
            resident = self.resident[i] if self._apart(unit) else self.weights[i] is Tier.HOST
            home = UnitHome(self.weights[i], resident, self.grads[i], tuple(self.state[i]))
            homes.append(
                replace(
                    home,
                    device_place=put(Tier.DEVICE, unit.weight_bytes)
                    if self._apart(unit) and resident
                    else None,
                    host_place=put(
                        Tier.DEVICE if i in self.pages_there else Tier.HOST, unit.stored_bytes
                    )
                    if home.weights is Tier.HOST
                    else None,
                    grad_place=put(home.grads, self.grad_bytes[i]),
                    state_places=tuple(
                        put(t, s.nbytes) for t, s in zip(home.state, self.subgroups[i], strict=True)
                    ),
                )
            )
        return tuple(homes), ends[Tier.DEVICE], ends[Tier.HOST]


def make_layout(
    parts: Partition, budgets: Budgets, needs: Needs
) -> tuple[Layout, int, tuple[Shortfall, ...]]:
    """Homes and regions for a model under budgets, the store's size, and what falls short."""
    planner = _Planner(parts, budgets, needs)
    layout, disk = planner.run()
    return layout, disk, tuple(planner.shortfalls)
