"""Lower bounds of a step's time, from each lane's work and the machine's rates (DESIGN 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..facts.rates import Rates
from ..facts.tier import Tier
from ..schedule.layout import Layout
from ..schedule.units import Subgroup, Unit
from ..schedule.visits import visitors


@dataclass(frozen=True)
class Bound:
    """A lower bound of a step's time.

    Attributes:
        seconds: the bound.
        bottleneck: the lane that sets it.
        lanes: by lane, the seconds of its own work.
    """

    seconds: float
    bottleneck: str | None
    lanes: Mapping[str, float]


def step_flops(units: Sequence[Unit], tokens: int) -> float:
    """Return the FLOPs of all forwards and backwards over ``tokens``, without recomputation."""
    return sum(unit.flops + unit.backward_flops for unit in units) * tokens


def _backward_share(layout: Layout) -> float:
    """Return the share of backward, with recomputation, in the FLOPs of a micro-step."""
    backward = sum(unit.backward_flops for unit in layout.units) + _recomputed_flops(layout)
    return backward / max(1, backward + sum(unit.flops for unit in layout.units))


def _recomputed_flops(layout: Layout) -> float:
    """Return the FLOPs of recomputation for a token, without units that keep their attention."""
    again = layout.saved.recompute - layout.saved.keep_attention
    return sum(layout.units[index].flops for index in again)


def lane_seconds(
    links: Mapping[str, int], rates: Rates | None, *, update_s: float = 0.0, flops: float = 0.0
) -> dict[str, float]:
    """Return the seconds that each lane needs for its work of a step.

    Lanes without a rate or without work are left out.

    Args:
        links: bytes by lane.
        update_s: seconds of the update.
        flops: of all forwards and backwards of the step.
    """
    if rates is None:
        return {}
    work: dict[str, tuple[float, float | None]] = {
        "compute": (flops, rates.device_flops_s),
        "copy_in": (links.get("copy_in", 0), rates.h2d_bytes_s),
        "copy_out": (links.get("copy_out", 0), rates.d2h_bytes_s),
        "read": (links.get("read", 0), rates.disk_read_bytes_s),
        "write": (links.get("write", 0), rates.disk_write_bytes_s),
        "update": (update_s, 1.0),
        "wire": (links.get("wire", 0), rates.wire_bytes_s),
    }
    return {lane: amount / rate for lane, (amount, rate) in work.items() if rate and amount}


def move_seconds(links: Mapping[str, int], rates: Rates | None) -> dict[str, float]:
    """Return the seconds of each lane's moves in a step.

    The slower of reads and writes is at the rate of disks that do both at the same time.
    """
    seconds = lane_seconds(links, rates)
    return seconds if rates is None else {**seconds, **_disk_beside(seconds, rates)}


def trained_params(layout: Layout) -> int:
    """Return the number of parameters that a step updates, with the padding between them."""
    return sum(s.count for group in layout.subgroups for s in group)


def update_seconds(subgroup: Subgroup, rates: Rates, *, on_device: bool) -> float:
    """Return the seconds to update one record; 0 without rates.

    Without rates of the device's updates, they take as long as on the CPU.
    """
    if subgroup.flops or subgroup.moved_bytes:  # see Note [Cost of an update]
        memory, products = rates.dram_bytes_s, rates.host_flops_s
        if on_device:
            memory = rates.device_memory_bytes_s or memory
            products = rates.device_update_flops_s or rates.device_flops_s
        return (subgroup.moved_bytes / memory if memory else 0.0) + (
            subgroup.flops / products if products else 0.0
        )
    there = rates.device_update_params_s if on_device else None
    rate = there or rates.update_params_s
    return subgroup.count / rate if rate else 0.0


def updates_beside(rates: Rates) -> bool:
    """Return whether updates on the device take its own time, and not the CPU's."""
    return bool(rates.device_update_params_s or rates.device_memory_bytes_s)


def step_update_seconds(layout: Layout, rates: Rates) -> float:
    """Return the seconds of a step's update, in which CPU and device each update their share at the
    same time."""
    there = updated_on_device(layout)
    seconds = [0.0, 0.0]
    for subgroup in layout.records:
        on_device = subgroup.index in there
        lane = int(on_device and updates_beside(rates))
        seconds[lane] += update_seconds(subgroup, rates, on_device=on_device)
    return max(seconds)


def device_update_flops(layout: Layout) -> int:
    """Return the FLOPs of the matrix products of a step's updates on the device."""
    there = updated_on_device(layout)
    return sum(s.flops for s in layout.records if s.index in there)


def device_update_share(layout: Layout) -> float:
    """Return the share of the parameters that the device updates, because their state stays there
    or is copied there for it."""
    total, there = trained_params(layout), updated_on_device(layout)
    return sum(s.count for s in layout.records if s.index in there) / total if total else 0.0


def updated_on_device(layout: Layout) -> frozenset[int]:
    """Return the records that the device updates."""
    pairs = zip(layout.subgroups, layout.homes, strict=True)
    stay = {
        subgroup.index
        for group, home in pairs
        for subgroup, tier in zip(group, home.state, strict=True)
        if tier is Tier.DEVICE
    }
    return visitors(layout) | stay


def device_update_worth(rates: Rates) -> float | None:
    """Return the share of the state in host memory that is worth updating on the device (DESIGN 7).

    It is ``(B/U - 2) / (B/U + 10)`` with B bytes/s to the device and U parameters/s on the CPU, if
    the link is otherwise idle.  ``None`` if a rate is not known.
    """
    if not rates.h2d_bytes_s or not rates.update_params_s:
        return None
    ratio = rates.h2d_bytes_s / rates.update_params_s
    return max(0.0, (ratio - 2) / (ratio + 10))


def least_seconds(layout: Layout, rates: Rates) -> float:
    """Return about the seconds that the slowest lane, without compute, needs for one forward and
    one backward; for one forward if nothing is trained."""
    streamed, paged = _moved_weights(layout)
    times_used = 2 if layout.trains else 1
    once = _moved_weights(layout, forward_only=True) if layout.trains else (0, 0)
    read, write = _state_seconds(layout, rates)
    times = [read, write, step_update_seconds(layout, rates)]
    if layout.has_device and rates.h2d_bytes_s:
        times.append((times_used * streamed - once[0]) / rates.h2d_bytes_s)
    if rates.disk_read_bytes_s:
        times[0] += max(0, times_used * paged - once[1]) / rates.disk_read_bytes_s
    return max(times)


# Note [Lower bound of a step]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# The time of each lane's own work is a bound, and so is the time of disks for reads and writes at
# the same time.  Stronger bounds follow from what cannot overlap with updates (``aside``).  Updates
# read weights, gradients and state from disk and write them back.  Memory lets some of these reads
# come early and some of these writes end late; the others (``_late_seconds``) must lie within the
# update's part of the step.  The time of the rest of the step then adds to them:
#
# * ``"step"``: the whole step, since updates run after all compute.
# * ``"backward"``: the forward.  Updates whose gradients can be kept in memory until the next
#   forward are excepted (``_due_share``).
# * ``"next_forward"``: the last backward.  It begins when all units are updated, and the gradient
#   norm is known only at its end.
#
# Without a device, updates and disk transfers take processors from compute, whose threads wait for
# each other, so their times add up; outside of the update's part, those of ``_early_bytes``.  This
# was measured with matrix products that use all processors; if some processors are idle, a run may
# be faster than this bound.


def step_bound(
    layout: Layout,
    links: Mapping[str, int],
    rates: Rates,
    *,
    update: str,
    micro_steps: int = 1,
    tokens: int = 0,
    compute_s: float | None = None,
) -> Bound:
    """Return a lower bound of a step's time for all schedules of this placement.

    See Note [Lower bound of a step].

    Args:
        links: bytes of a step by lane.
        update: when the update runs: ``"step"``, ``"backward"`` or ``"next_forward"``.
        tokens: of a step, over all micro-steps; 0 leaves compute out.
        compute_s: seconds of compute of a step, if they were measured.
    """
    flops = step_flops(layout.units, tokens) + _recomputed_flops(layout) * tokens
    update_s = step_update_seconds(layout, rates)
    seconds = lane_seconds(links, rates, update_s=update_s, flops=flops)
    if compute_s:
        seconds["compute"] = compute_s
    floors = dict(seconds)
    compute = seconds.get("compute", 0.0)
    last = compute * _backward_share(layout) / micro_steps  # backward
    before = max(compute - last, _first_forward(layout, rates))
    out = _gathered_bytes(layout) / rates.d2h_bytes_s if rates.d2h_bytes_s else 0.0
    out = out if micro_steps == 1 else 0.0
    gradients = max(last, out)  # from the start of the last backward to the end of the last copy
    floors["copy_out"] = max(seconds.get("copy_out", 0.0), before + out)
    floors["compute"] = max(compute, before + last)
    products = rates.device_update_flops_s or rates.device_flops_s
    if compute and products:  # those of updates take their time from compute
        floors["compute"] += device_update_flops(layout) / products
    if compute and not layout.has_device:
        floors["compute"] = max(
            floors["compute"],
            compute + seconds.get("update", 0.0) + _disk_cpu_seconds(links, rates),
        )
    aside = {"step": before + gradients, "backward": before, "next_forward": gradients}[update]
    if compute and not layout.has_device and rates.disk_cpu_bytes_s:
        aside += _early_bytes(layout, update) / rates.disk_cpu_bytes_s
    due = 1.0
    if update == "backward":  # with more micro-steps all gradients have a home to wait in
        due = max(0.0, _due_share(layout)) if micro_steps == 1 else 0.0
    late = {"update": seconds.get("update", 0.0) * due, **_late_seconds(layout, rates, due)}
    if update == "step":
        state_read, state_write = _state_seconds(layout, rates)
        if max(late["write"], state_write):
            late["write"] = max(late["write"], _shared_seconds(state_read, state_write, rates))
    else:  # late reads and writes share one window
        late.update(_disk_beside(late, rates))
    for lane, time in late.items():
        floors[lane] = max(floors.get(lane, 0.0), aside + time if time > 0 else 0.0)
    for lane, both_s in _disk_beside(seconds, rates).items():
        floors[lane] = max(floors[lane], both_s)
    floors = {lane: time for lane, time in floors.items() if seconds.get(lane)}
    if not floors:
        return Bound(0.0, None, seconds)
    lane = max(floors, key=lambda name: floors[name])
    return Bound(floors[lane], lane, seconds)


def _disk_cpu_seconds(links: Mapping[str, int], rates: Rates) -> float:
    """Return the seconds for which compute stops because disk transfers take a processor."""
    moved = links.get("read", 0) + links.get("write", 0)
    return moved / rates.disk_cpu_bytes_s if rates.disk_cpu_bytes_s else 0.0


def _gathered_bytes(layout: Layout) -> int:
    """Return the bytes of gradients that leave the device."""
    pairs = zip(layout.units, layout.homes, strict=True)
    trained = (u for u, home in pairs if u.trainable and home.grads is not Tier.DEVICE)
    return sum(unit.grad_bytes for unit in trained) if layout.has_device else 0


def _moved_weights(layout: Layout, *, forward_only: bool = False) -> tuple[int, int]:
    """Return the bytes of weights that are not resident, and the part of it on disk, without
    the bytes that host memory caches; of all units, or of units that are ``forward_only``."""
    moved = [
        (unit.stored_bytes, home.weights)
        for unit, home in zip(layout.units, layout.homes, strict=True)
        if not home.resident and not home.page_on_device
        and (unit.forward_only or not forward_only)
    ]  # fmt: skip
    streamed = sum(nbytes for nbytes, _ in moved)
    paged = sum(nbytes for nbytes, tier in moved if tier is Tier.NVME)
    return streamed, max(0, paged - layout.cached_bytes)


def _first_forward(layout: Layout, rates: Rates) -> float:
    """Return the least seconds to onload weights during a forward, apart from the weights that
    there is room to have onloaded before it."""
    streamed, paged = _moved_weights(layout)
    regions, times = layout.regions, [0.0]
    if layout.has_device and rates.h2d_bytes_s:
        times.append((streamed - regions.device_weights) / rates.h2d_bytes_s)
    if rates.disk_read_bytes_s:
        room = regions.host_weights + regions.device_weights
        times.append((paged - room) / rates.disk_read_bytes_s)
    return max(times)


def _shared_seconds(read_s: float, write_s: float, rates: Rates) -> float:
    """Return the seconds of reads and writes at the same time, given the seconds of each alone."""
    read, write = rates.disk_read_bytes_s, rates.disk_write_bytes_s
    if not (read and write and rates.disk_both_bytes_s):
        return max(read_s, write_s)
    # While both are in progress, each runs at its own rate times this share; the longer one ends
    # alone.  If the share is less than half, one after the other is faster.
    share = min(1.0, rates.disk_both_bytes_s / (read + write))
    return max(read_s, write_s) + min(read_s, write_s) * min(1.0, 1 / share - 1)


def _disk_beside(seconds: Mapping[str, float], rates: Rates) -> dict[str, float]:
    """Return which of reads and writes at the same time ends last, with its seconds."""
    read_s, write_s = seconds.get("read", 0.0), seconds.get("write", 0.0)
    if not (read_s and write_s):
        return {}
    lane = "read" if read_s >= write_s else "write"
    return {lane: _shared_seconds(read_s, write_s, rates)}


def _early_bytes(layout: Layout, update: str) -> int:
    """Return the least bytes that the disks move while compute runs and no update can: weights that
    it reads, and gradients that wait on disk."""
    paged = _moved_weights(layout)[1]
    if update == "next_forward":  # only its backward counts
        paged -= _moved_weights(layout, forward_only=True)[1]
    weights = paged - layout.regions.host_weights - layout.regions.device_weights
    grads = sum(
        nbytes
        for nbytes, home in zip(layout.grad_bytes, layout.homes, strict=True)
        if home.grads is Tier.NVME
    )
    waiting = 0 if update == "backward" else grads - layout.regions.host_grads
    return max(0, weights) + max(0, waiting)


def _due_share(layout: Layout) -> float:
    """Return the least share of updates that must be over when the next forward begins.

    The gradients of the others wait in memory, except in the space of the first unit's gradients.
    """
    waiting = [nbytes for nbytes in layout.grad_bytes if nbytes]
    if not waiting:
        return 1.0
    return min(1.0, 1 - (layout.regions.host_grads - waiting[0]) / sum(waiting))


def _late_seconds(layout: Layout, rates: Rates, due: float) -> dict[str, float]:
    """Return the seconds to read and write the data of updates that memory cannot hold.

    ``due`` is the share of the updates to count.
    """
    regions = layout.regions
    homes = layout.homes
    state = _paged_state(layout)
    weights = sum(
        unit.weight_bytes
        for unit, home in zip(layout.units, homes, strict=True)
        if home.weights is Tier.NVME and unit.trainable
    )
    grads = sum(
        nbytes
        for nbytes, home in zip(layout.grad_bytes, homes, strict=True)
        if home.grads is Tier.NVME
    )
    slots = regions.state_slot * regions.state_slots
    reads = (state * due - slots, weights * due - regions.host_weights, grads - regions.host_grads)
    writes = (state * due - slots, weights * due - regions.host_weights)
    read, write = rates.disk_read_bytes_s, rates.disk_write_bytes_s
    return {
        "read": sum(max(0.0, n) for n in reads) / read if read else 0.0,
        "write": sum(max(0.0, n) for n in writes) / write if write else 0.0,
    }


def _paged_state(layout: Layout) -> int:
    """Return the bytes of optimizer state on disk."""
    return sum(
        subgroup.nbytes
        for group, home in zip(layout.subgroups, layout.homes, strict=True)
        for subgroup, tier in zip(group, home.state, strict=True)
        if tier is Tier.NVME
    )


def _late_state(layout: Layout) -> tuple[int, int]:
    """Return the bytes of optimizer state on disk, without what the slots can prefetch, and all."""
    paged = _paged_state(layout)
    room = layout.regions.state_slot * layout.regions.state_slots
    return max(0, paged - room), paged


def _state_seconds(layout: Layout, rates: Rates) -> tuple[float, float]:
    """Return the seconds to read the optimizer state that cannot be prefetched, and to write all
    state on disk."""
    late, written = _late_state(layout)
    read, write = rates.disk_read_bytes_s, rates.disk_write_bytes_s
    return late / read if read else 0.0, written / write if write else 0.0
