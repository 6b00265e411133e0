"""Lower bounds of a step's time from what each lane must do and the machine's rates (DESIGN 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..facts.rates import Rates
from ..facts.tier import Tier
from ..schedule.layout import Layout
from ..schedule.units import Unit
from ..schedule.visits import visitors


@dataclass(frozen=True)
class Bound:
    """The least seconds of a step, the lane that sets it, and the least of each lane."""

    seconds: float
    bottleneck: str | None
    lanes: Mapping[str, float]


def step_flops(units: Sequence[Unit], tokens: int) -> float:
    """FLOPs of all forwards and backwards over ``tokens`` tokens; nothing is computed twice."""
    return sum(unit.flops + unit.backward_flops for unit in units) * tokens


def _backward_share(units: Sequence[Unit]) -> float:
    """Of a micro-step's FLOPs."""
    backward = sum(unit.backward_flops for unit in units)
    return backward / max(1, backward + sum(unit.flops for unit in units))


def lane_seconds(
    links: Mapping[str, int], rates: Rates | None, *, update_params: float = 0, flops: float = 0.0
) -> dict[str, float]:
    """Seconds that each lane needs for its work of a step; lanes without a rate are left out.

    Args:
        links: bytes by lane.
        update_params: parameters that the optimizer updates on the CPU.
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
        "update": (update_params, rates.update_params_s),
    }
    return {lane: amount / rate for lane, (amount, rate) in work.items() if rate and amount}


def move_seconds(links: Mapping[str, int], rates: Rates | None) -> dict[str, float]:
    """Seconds that each lane's moves of a step need at the machine's rates, the slower of reads and
    writes at that of disks which do both at once."""
    seconds = lane_seconds(links, rates)
    return seconds if rates is None else {**seconds, **_disk_beside(seconds, rates)}


def trained_params(layout: Layout) -> int:
    """Parameters that a step updates, borders between them included."""
    return sum(s.count for group in layout.subgroups for s in group)


def update_work(layout: Layout, rates: Rates) -> float:
    """Parameters that the CPU would update in the time that CPU and device, side by side, need for
    all of a step's."""
    total = trained_params(layout)
    if not rates.update_params_s or not rates.device_update_params_s:
        return total
    there = total * device_update_share(layout)
    return max(total - there, there * rates.update_params_s / rates.device_update_params_s)


def device_update_share(layout: Layout) -> float:
    """Share of the parameters that the device updates: those whose state stays there, or goes there
    for it."""
    total = trained_params(layout)
    visiting = visitors(layout)
    there = sum(
        subgroup.count
        for group, home in zip(layout.subgroups, layout.homes, strict=True)
        for subgroup, tier in zip(group, home.state, strict=True)
        if tier is Tier.DEVICE or subgroup.index in visiting
    )
    return there / total if total else 0.0


def device_update_worth(rates: Rates) -> float | None:
    """Share of the update worth doing on the device for state that goes there for it (DESIGN 7):
    ``(B/U - 2) / (B/U + 10)`` with B bytes/s to the device and U parameters/s on the CPU.  The link
    then does nothing else."""
    if not rates.h2d_bytes_s or not rates.update_params_s:
        return None
    ratio = rates.h2d_bytes_s / rates.update_params_s
    return max(0.0, (ratio - 2) / (ratio + 10))


def least_seconds(layout: Layout, rates: Rates) -> float:
    """About what the slowest lane needs for a step of one forward and one backward; for a forward
    where nothing is trained."""
    streamed, paged = _moved_weights(layout)
    times_used = 2 if layout.trains else 1
    read, write = _state_seconds(layout, rates)
    times = [read, write]
    if rates.update_params_s:
        times.append(update_work(layout, rates) / rates.update_params_s)
    if layout.has_device and rates.h2d_bytes_s:
        times.append(times_used * streamed / rates.h2d_bytes_s)
    if rates.disk_read_bytes_s:
        times[0] += times_used * paged / rates.disk_read_bytes_s
    return max(times)


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
    """No schedule of this placement is faster.

    Any lane's own time is a bound, and that of disks which do both at once. Updates, and what
    memory does not let come early of their reads and go late of their writes, can lie under a part
    of a step only, so that the rest adds to them: with ``"step"`` all of it; with ``"backward"``
    the forward, save for updates whose gradients there is room to keep until the next one; with
    ``"next_forward"`` the last backward, which begins when all is updated and ends with the norm.
    Without a device, updates and the moves to and from disk take processors from compute, whose
    threads wait for one another, so that they add up: so it was measured where products use all
    processors.  Where some are idle, a run may be faster than that.

    Args:
        links: bytes of a step by lane.
        tokens: of a step, over all micro-steps; 0 leaves compute out.
        compute_s: seconds of compute of a step, where they were measured.
    """
    flops = step_flops(layout.units, tokens)
    seconds = lane_seconds(links, rates, update_params=update_work(layout, rates), flops=flops)
    if compute_s:
        seconds["compute"] = compute_s
    floors = dict(seconds)
    compute = seconds.get("compute", 0.0)
    last = compute * _backward_share(layout.units) / micro_steps  # backward
    before = max(compute - last, _first_forward(layout, rates))
    out = _gathered_bytes(layout) / rates.d2h_bytes_s if rates.d2h_bytes_s else 0.0
    out = out if micro_steps == 1 else 0.0
    gradients = max(last, out)  # from the begin of the last backward to the end of the last copy
    floors["copy_out"] = max(seconds.get("copy_out", 0.0), before + out)
    floors["compute"] = max(compute, before + last)
    if compute and not layout.has_device:
        floors["compute"] = max(
            floors["compute"],
            compute + seconds.get("update", 0.0) + _disk_cpu_seconds(links, rates),
        )
    aside = {"step": before + gradients, "backward": before, "next_forward": gradients}[update]
    due = 1.0
    if update == "backward":  # with more micro-steps all gradients have a home to wait in
        due = max(0.0, _due_share(layout)) if micro_steps == 1 else 0.0
    late = {"update": seconds.get("update", 0.0) * due, **_late_seconds(layout, rates, due)}
    if update == "step":
        state_read, state_write = _state_seconds(layout, rates)
        if max(late["write"], state_write):
            late["write"] = max(late["write"], _shared_seconds(state_read, state_write, rates))
    else:  # in one window, both of them
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
    """Seconds for which compute stands still, since moves to and from disk have a processor."""
    moved = links.get("read", 0) + links.get("write", 0)
    return moved / rates.disk_cpu_bytes_s if rates.disk_cpu_bytes_s else 0.0


def _gathered_bytes(layout: Layout) -> int:
    """Bytes of gradients that leave the device."""
    pairs = zip(layout.units, layout.homes, strict=True)
    trained = (u for u, home in pairs if u.trainable and home.grads is not Tier.DEVICE)
    return sum(unit.grad_bytes for unit in trained) if layout.has_device else 0


def _moved_weights(layout: Layout) -> tuple[int, int]:
    """Bytes of weights that are not resident, and of those among them that live on disk."""
    streamed = sum(
        unit.stored_bytes
        for unit, home in zip(layout.units, layout.homes, strict=True)
        if not home.resident and not home.page_on_device
    )
    paged = sum(
        unit.stored_bytes
        for unit, home in zip(layout.units, layout.homes, strict=True)
        if home.weights is Tier.NVME and not home.resident and not home.page_on_device
    )
    return streamed, max(0, paged - layout.cached_bytes)


def _first_forward(layout: Layout, rates: Rates) -> float:
    """Weights that stream in during a forward, less what room there is to have them before."""
    streamed, paged = _moved_weights(layout)
    regions, times = layout.regions, [0.0]
    if layout.has_device and rates.h2d_bytes_s:
        times.append((streamed - regions.device_weights) / rates.h2d_bytes_s)
    if rates.disk_read_bytes_s:
        room = regions.host_weights + regions.device_weights
        times.append((paged - room) / rates.disk_read_bytes_s)
    return max(times)


def _shared_seconds(read_s: float, write_s: float, rates: Rates) -> float:
    """Seconds of disks that read and write at once, for what takes so long alone."""
    read, write = rates.disk_read_bytes_s, rates.disk_write_bytes_s
    if not (read and write and rates.disk_both_bytes_s):
        return max(read_s, write_s)
    # While both go on, each runs at its own rate times this share; the longer ends alone.  Where
    # that is less than half, one after the other is faster.
    share = min(1.0, rates.disk_both_bytes_s / (read + write))
    return max(read_s, write_s) + min(read_s, write_s) * min(1.0, 1 / share - 1)


def _disk_beside(seconds: Mapping[str, float], rates: Rates) -> dict[str, float]:
    """Of reads and writes that go on at once, the lane that ends last, with its seconds."""
    read_s, write_s = seconds.get("read", 0.0), seconds.get("write", 0.0)
    if not (read_s and write_s):
        return {}
    lane = "read" if read_s >= write_s else "write"
    return {lane: _shared_seconds(read_s, write_s, rates)}


def _due_share(layout: Layout) -> float:
    """The least share of updates that are over when the next forward begins.

    Gradients of the others wait in memory, but not where those of the first unit just were.
    """
    waiting = [nbytes for nbytes in layout.grad_bytes if nbytes]
    if not waiting:
        return 1.0
    return min(1.0, 1 - (layout.regions.host_grads - waiting[0]) / sum(waiting))


def _late_seconds(layout: Layout, rates: Rates, due: float) -> dict[str, float]:
    """Seconds to read, and to write, what updates take and give on disk and memory cannot hold;
    ``due``: of this share of the updates."""
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
    """Bytes of optimizer state on disk."""
    return sum(
        subgroup.nbytes
        for group, home in zip(layout.subgroups, layout.homes, strict=True)
        for subgroup, tier in zip(group, home.state, strict=True)
        if tier is Tier.NVME
    )


def _late_state(layout: Layout) -> tuple[int, int]:
    """Bytes of optimizer state on disk: less what staging room lets come early, and all."""
    paged = _paged_state(layout)
    room = layout.regions.state_slot * layout.regions.state_slots
    return max(0, paged - room), paged


def _state_seconds(layout: Layout, rates: Rates) -> tuple[float, float]:
    """Seconds to read the optimizer's state, less what room there is to have it before, and to
    write it."""
    late, written = _late_state(layout)
    read, write = rates.disk_read_bytes_s, rates.disk_write_bytes_s
    return late / read if read else 0.0, written / write if write else 0.0
