"""Lower bounds of a step's time from what each lane must do and the machine's rates (DESIGN 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..observe.rates import Rates
from .partition import Unit

FORWARD_SHARE = 1 / 3  # of a micro-step's FLOPs: backward takes two products for each of forward's


def step_flops(units: Sequence[Unit], tokens: int) -> int:
    """FLOPs of all forwards and backwards over ``tokens`` tokens; nothing is computed twice."""
    return int(sum(unit.flops for unit in units) * tokens / FORWARD_SHARE)


def lane_seconds(
    links: Mapping[str, int], rates: Rates, *, update_params: int = 0, flops: float = 0.0
) -> dict[str, float]:
    """Seconds that each lane needs for its work of a step; lanes without a rate are left out.

    Args:
        links: bytes by lane.
        update_params: parameters that the optimizer updates on the CPU.
        flops: of all forwards and backwards of the step.
    """
    work: dict[str, tuple[float, float | None]] = {
        "compute": (flops, rates.device_flops_s),
        "copy_in": (links.get("copy_in", 0), rates.h2d_bytes_s),
        "copy_out": (links.get("copy_out", 0), rates.d2h_bytes_s),
        "read": (links.get("read", 0), rates.disk_read_bytes_s),
        "write": (links.get("write", 0), rates.disk_write_bytes_s),
        "update": (update_params, rates.update_params_s),
    }
    return {lane: amount / rate for lane, (amount, rate) in work.items() if rate and amount}


def step_bound(
    seconds: Mapping[str, float], update: str, micro_steps: int = 1
) -> tuple[float, str | None]:
    """The least time of a step and the lane that sets it; ``(0, None)`` where no lane is known.

    Any lane's own time is a bound.  What waits for the last gradients cannot lie under the compute
    before them either: with ``update="backward"`` that is everything but the last backward, with
    ``"step"`` all compute.  ``"next_forward"`` hides an update under the forward that follows.
    """
    if not seconds:
        return 0.0, None
    compute = seconds.get("compute", 0.0)
    before = {
        "backward": compute * (1 - (1 - FORWARD_SHARE) / micro_steps),
        "step": compute,
    }.get(update, 0.0)
    late = ("write", "update") if update == "step" or micro_steps > 1 else (
        "copy_out", "write", "update",
    )  # fmt: skip
    bounds = {
        lane: time + (before if lane in late and update != "next_forward" else 0.0)
        for lane, time in seconds.items()
    }
    lane = max(bounds, key=lambda name: bounds[name])
    return bounds[lane], lane
