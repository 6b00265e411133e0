"""Placement of a model under budgets: homes and regions, or what is missing.  Allocates nothing.

The planner reserves the demand path first (the largest unit's weights and gradients, one subgroup's
record), so that there is always progress.  The rest goes to room for prefetch, then to homes.  The
default order of homes is by bytes moved less per byte kept: weights (read twice and written once
per step), gradients, optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..facts.tier import Tier
from ..schedule.arena import Place
from ..schedule.layout import Layout, Regions, SavedRoom, UnitHome
from ..schedule.units import PAGE, Unit, align
from ..schedule.visits import MATRIX_FLOPS, visit_of
from ..schedule.visits import SLOTS as VISIT_SLOTS
from .partition import Partition
from .placement import SHARED_GRANULE, STATE_SLOTS, Placement
from .plan import Budgets, Needs, Shortfall, converts_grads
from .sections import is_section

UNKNOWN_SHARE = 0.25  # of the room to spare, for activations of unknown size
KNOWN_SHARE = 0.5  # of the room to spare, at most, for activations of known size that can leave
UNITS_BESIDE = 3  # least number of units whose activations have room: one in use, others moving
BESIDE_SHARE = 0.5  # of the room to spare, for trained weights of units that also have frozen ones
STAGING_SHARE = 4  # divisor: part of the host memory for activations that stages disk transfers
OWN_STAGING_SHARE = 8  # the same on a CPU, where compute needs the rest of this memory itself


def _pages(nbytes: int) -> int:
    return nbytes // PAGE * PAGE


class _Spend:
    """A budget from which bytes are taken."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes

    def take(self, nbytes: int) -> bool:
        if nbytes > self.left:
            return False
        self.left -= nbytes
        return True


class _Planner(Placement):
    """A planner for one layout: it reserves the demand path, then distributes the rest.

    ``run`` may be called once.
    """

    # -- device ---------------------------------------------------------------------------------

    def _plan_device(self) -> tuple[int, int]:
        """Choose the resident units, and the units whose home is the device.

        Returns:
            Bytes of the device's regions for weights and gradients.
        """
        assert self.budgets.device is not None
        gather = max((u.grad_bytes for u in self.units), default=0)
        fixed = sum(u.weight_bytes for u in self.units if self.resident[u.index])
        self.visit_slot = self._visit_slot(matrices=True)
        need = fixed + self._device_weights(0) + gather + self.visit_slot
        if need > self.budgets.device:
            largest = max(self.units, key=lambda u: self._group_bytes(u, apart=True))
            self.shortfalls.append(
                Shortfall(
                    Tier.DEVICE,
                    f"unit {largest.name!r} with its gradient"
                    + (", and an update of a matrix," if self.visit_slot else ""),
                    need,
                    self.budgets.device,
                    "raise device_memory or name smaller units"
                    + self._fewer
                    + _in_sections(largest),
                )
            )
            return self._device_weights(0), gather
        budget = self.budgets.device - self._for_saved(self.budgets.device - need)
        need -= self.visit_slot
        budget -= self._make_room_for_visits(budget - need)
        everything = sum(u.weight_bytes for u in self.units) + gather
        if everything <= budget:
            self.resident = [True] * len(self.units)
            self._move_to_device(_Spend(budget - everything), self.order)
            return 0, gather
        small = [u for u in self.beside if not self.resident[u.index]]
        share = int(BESIDE_SHARE * max(0, budget - need))
        beside = _Spend(share)
        if beside.take(sum(u.weight_bytes for u in small)):
            for unit in small:
                self.resident[unit.index] = True
            if self.needs.prefer.beside:
                self._move_to_device(beside, small)
            fixed += share - beside.left
        ahead = self._ahead(budget - fixed - gather, self._device_weights)
        fixed += self._keep_pages(budget - fixed - gather - self._device_weights(ahead))
        room = budget - fixed - gather - self._device_weights(ahead)
        prefer = self.needs.prefer
        whole = _Spend(int(room * prefer.share * prefer.device))
        if prefer.device:
            self._move_to_device(whole, self.order)
        spend = _Spend(int(room * prefer.share * (1 - prefer.device)) + whole.left)
        for unit in self.order:
            if not self.resident[unit.index] and unit.index not in self.pages_there:
                self.resident[unit.index] = spend.take(unit.weight_bytes)
        return self._device_weights(ahead), gather

    def _keep_pages(self, room: int) -> int:
        """Place as many pages on the device as fit, if not all weights are resident.

        A page takes less room than the unpacked weights, and nothing is copied over the link.  A
        durable store also keeps the pages.

        Returns:
            The bytes of these pages.
        """
        spend = _Spend(room)
        for unit in self.order:
            stays = self.resident[unit.index] or not unit.packed
            if not stays and spend.take(unit.page_bytes):
                self.pages_there.add(unit.index)
                if not self.needs.durable:
                    self.weights[unit.index] = Tier.HOST
        return room - spend.left

    def _visit_slot(self, *, matrices: bool) -> int:
        """Return the bytes of a slot for records that are copied to the device for their update.

        Args:
            matrices: only for records that always are; see Note [Device updates of matrices].
        """
        slot = 0
        for unit, group in zip(self.units, self.subgroups, strict=True):
            converts = converts_grads(unit, self.needs.accumulate)
            for s in group:
                whole = bool(s.moved_bytes)
                if (self.needs.matrices_visit and s.matrix) or not (matrices or whole):
                    visit = visit_of(s, unit.chunks[s.chunk].dtype, converts=converts)
                    slot = max(slot, visit.slot_bytes)
        return slot

    def _make_room_for_visits(self, room: int) -> int:
        """Reserve slots for state records that are copied to the device for their update.

        Returns:
            Their bytes; 0 if no records are, or if there is no room.
        """
        if self.needs.prefer.visiting:
            slot = self._visit_slot(matrices=False)
            if VISIT_SLOTS * slot <= room:
                self.visit_slot, self.visit_slots, self.visiting = slot, VISIT_SLOTS, True
        if self.visit_slot and not self.visiting:
            self.visit_slots = min(VISIT_SLOTS, max(1, room // self.visit_slot))
        return self.visit_slot * self.visit_slots

    def _has_host_products(self, unit: Unit) -> bool:
        """Return whether the CPU updates a unit with many products: the device has no room for
        their temporaries, or a coupled optimizer steps all parameters in host memory."""
        return any(
            s.flops > MATRIX_FLOPS * s.count and not (self.needs.matrices_visit and s.matrix)
            for s in self.subgroups[unit.index]
        )

    def _move_to_device(self, spend: _Spend, units: Sequence[Unit]) -> None:
        """Place as many of these units on the device as fit, as a whole.

        The weights of resident units are accounted for already.
        """
        if self.needs.durable:
            return  # commits are written from host memory
        for unit in units:
            if unit.index in self.pages_there or self._has_host_products(unit):
                continue
            nbytes = self.grad_bytes[unit.index] + self.state_bytes[unit.index]
            if not self.resident[unit.index]:
                nbytes += unit.weight_bytes
            if self.weights[unit.index] is not Tier.DEVICE and spend.take(nbytes):
                self.resident[unit.index] = True
                self.weights[unit.index] = Tier.DEVICE
                self.in_place.discard(unit.index)  # it is read only once
                if unit.trainable:
                    self.grads[unit.index] = Tier.DEVICE
                self.state[unit.index] = [Tier.DEVICE] * len(self.state[unit.index])

    def _for_saved(self, spare: int, *, ends: bool = False) -> int:
        """Return the bytes of ``spare`` to leave for activations; ``ends``: they cannot be moved to
        a lower tier than this one."""
        policy, sizes = self.needs.activations, self.needs.saved_bytes
        if sizes is None:
            share = 0.0 if policy == "keep" else UNKNOWN_SHARE
            return int(max(0, spare) * share)
        want = sum(sizes)
        stays = policy == "keep" or (ends and self.has_device)
        if not stays:  # there must be room for the unit in backward, and for moves at the same time
            want = min(want, max(int(KNOWN_SHARE * spare), UNITS_BESIDE * max(sizes, default=0)))
        return int(min(max(0, spare), want))

    def _saved(self, regions: Regions, disk: int) -> SavedRoom:
        """Return the room for activations: all that is left in every tier."""
        policy = self.needs.activations
        if policy == "keep":
            return SavedRoom()
        again, kept = self.needs.prefer.recompute, self.needs.prefer.keep_attention
        if policy in ("recompute", "selective"):
            again = self.needs.recomputable
            kept = again if policy == "selective" else frozenset()
        host = max(0, self.budgets.host - self.unpacked - regions.counted_host_bytes)
        itemsize = self.needs.packed_itemsize
        nvme = 0
        if policy != "host" and self.budgets.nvme is not None:
            nvme = max(0, self.budgets.nvme - disk)
        if self.has_device:
            assert self.budgets.device is not None
            there = max(0, self.budgets.device - regions.device_bytes)
            staged = host // STAGING_SHARE if policy == "nvme" else host
            return SavedRoom(policy, there, _pages(staged), nvme, again, kept, itemsize)
        staged = host // OWN_STAGING_SHARE if nvme else 0
        return SavedRoom(policy, host - staged, _pages(staged), nvme, again, kept, itemsize)

    def _plan_unpacked(self) -> int:
        """Return the bytes of the region for unpacked weights if compute uses host memory."""
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

    def _plan_host(self) -> tuple[int, int]:
        """Move homes from disk to host memory as far as there is room.

        Returns:
            The units of room for prefetch, and the number of state slots.
        """
        budget = self.budgets.host - self.unpacked
        least = self._homes() + self._regions(min(1, self.depth), STATE_SLOTS)
        self.saved_room = self._for_saved(budget - least, ends=self.needs.activations == "host")
        self._fill()
        need = self._homes() + self._regions(0, 1)
        if need > budget:
            trained = any(u.grad_bytes for u in self.units)
            what = "the model" + (" with its gradients and optimizer state" if trained else "")
            remedy = "give a directory with nvme=, or raise host_memory"
            if self.lower is Tier.NVME:
                largest = max(self.units, key=lambda u: u.weight_bytes + u.grad_bytes)
                beside = " with its gradient and one record of state" if trained else ""
                what = f"unit {largest.name!r}{beside}"
                remedy = "raise host_memory or name smaller units" + self._fewer
            self.shortfalls.append(Shortfall(Tier.HOST, what, need, budget, remedy))
            return 0, 1
        room = budget - self.saved_room - self._homes()
        slots = max(
            (n for n in range(1, STATE_SLOTS + 1) if self._regions(0, n) <= room), default=1
        )
        ahead = self._ahead(room, lambda k: self._regions(k, slots))
        return ahead, slots

    def _fill(self) -> None:
        """Move homes up from disk while there is room, one kind after the other."""
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
            # First try all of a kind at once, which also saves the region to move them through.
            if self._homes() + self._regions(min(1, self.depth), slots) <= budget:
                continue
            self.weights, self.grads, self.state = saved
            self.cached, room = cached, -1
            while True:  # homes that moved up may have made the regions smaller
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
            if unit.index in self.pages_there:
                continue  # the device and the store have copies; a third one is not needed
            if self.has_device and self.resident[unit.index] and not unit.trainable:
                continue  # the copy that compute uses is enough
            if spend.take(self._home_bytes(unit)):
                if unit.index in self.in_place and not self.shared(unit):
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

    def run(self) -> tuple[Layout, int]:
        device_weights = device_grads = 0
        if self.has_device:
            device_weights, device_grads = self._plan_device()
        elif any(u.packed for u in self.units):
            device_weights = self.unpacked = self._plan_unpacked()
        ahead, slots = self._plan_host()
        homes, device_fixed, host_fixed, host_shared = self._assign()
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
            self.visit_slots,
            host_shared,
            self.needs.sharers,
        )
        disk = self.disk_bytes()
        if self.budgets.nvme is not None and disk > self.budgets.nvme:
            remedy = "free disk space or raise nvme_memory"
            if self.needs.durable:
                remedy = "free disk space, raise nvme_memory or set durable=False (half the size)"
            self.shortfalls.append(
                Shortfall(Tier.NVME, "the store", disk, self.budgets.nvme, remedy)
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
                self.needs.prefer.visiting if self.visiting else 0.0,
                self.needs.matrices_visit and self.visit_slots > 0,
                self._saved(regions, disk),
                frozenset(self.in_place),
                sum(self.units[i].weight_bytes for i in self.cached),
            ),
            disk,
        )

    def _assign(self) -> tuple[tuple[UnitHome, ...], int, int, int]:
        """Give every fixed home its place, in the order of the units; shared ones come first.

        Returns:
            The homes, and the bytes of the fixed parts of device and host memory, and of the part
            of the latter that ranks share.
        """
        ends = {Tier.DEVICE: 0, Tier.HOST: 0}

        def put(tier: Tier | None, nbytes: int) -> Place | None:
            if tier not in (Tier.DEVICE, Tier.HOST):
                return None
            place = Place(tier, ends[tier], nbytes)
            ends[tier] += align(nbytes, 4096)
            return place

        shared = {
            unit.index: put(Tier.HOST, unit.stored_bytes)
            for unit in self.units
            if self.weights[unit.index] is Tier.HOST and self.shared(unit)
        }
        ends[Tier.HOST] = host_shared = align(ends[Tier.HOST], SHARED_GRANULE)
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
                    host_place=shared[i]
                    if i in shared
                    else put(Tier.DEVICE if i in self.pages_there else Tier.HOST, unit.stored_bytes)
                    if home.weights is Tier.HOST or i in self.pages_there
                    else None,
                    grad_place=put(home.grads, self.grad_bytes[i]),
                    state_places=tuple(
                        put(t, s.nbytes) for t, s in zip(home.state, self.subgroups[i], strict=True)
                    ),
                )
            )
        return tuple(homes), ends[Tier.DEVICE], ends[Tier.HOST], host_shared


def _in_sections(unit: Unit) -> str:
    """Return a further remedy for a unit that is too large, if it has stacks of matrices."""
    if not any(len(spec.shape) == 3 for _, spec in unit.params):
        return ""
    if any(is_section(spec.name) for _, spec in unit.params):
        return ", or give split_experts a smaller section"
    return ", or cut its experts into sections (overspill.integrations.experts.split_experts)"


def make_layout(
    parts: Partition, budgets: Budgets, needs: Needs
) -> tuple[Layout, int, tuple[Shortfall, ...]]:
    """Return homes and regions for a model under budgets, the store's size, and all shortfalls."""
    planner = _Planner(parts, budgets, needs)
    layout, disk = planner.run()
    return layout, disk, tuple(planner.shortfalls)
