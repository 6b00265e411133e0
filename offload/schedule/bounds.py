"""Lower bounds of a step's time from bytes and rates (DESIGN 7, without what depends on tokens)."""

from __future__ import annotations

from collections.abc import Mapping

from ..observe.rates import Rates


def lane_seconds(links: Mapping[str, int], rates: Rates) -> dict[str, float]:
    """Seconds that each lane needs for its bytes at its rate; lanes without a rate are left out."""
    speed = {
        "read": rates.disk_read_bytes_s,
        "write": rates.disk_write_bytes_s,
        "copy_in": rates.h2d_bytes_s,
        "copy_out": rates.d2h_bytes_s,
    }
    seconds: dict[str, float] = {}
    for lane, nbytes in links.items():
        rate = speed.get(lane)
        if rate and nbytes:
            seconds[lane] = nbytes / rate
    return seconds


def link_bound(
    links: Mapping[str, int], rates: Rates | None, update_params: int = 0
) -> tuple[float | None, str | None]:
    """The slowest lane's seconds and its name; ``(None, None)`` where no rate is known."""
    if rates is None:
        return None, None
    seconds = lane_seconds(links, rates)
    if update_params and rates.update_params_s:
        seconds["update"] = update_params / rates.update_params_s
    if not seconds:
        return (0.0, None) if not any(links.values()) else (None, None)
    lane = max(seconds, key=lambda name: seconds[name])
    return seconds[lane], lane
