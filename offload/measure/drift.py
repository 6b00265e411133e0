"""Whether a run's lanes still move at the rates that its plan was made with."""

from __future__ import annotations

from ..facts.rates import Rates
from ..facts.stats import Stats

LEAST_BYTES = 64 << 20  # a step that moves less says little of a lane
SLOW, FAST = 0.35, 1.6  # slow, since others use the same disk, memory and processors
LEAST_SHARE = 0.3  # of a step that a lane must be busy for its slowness to matter
STEPS = 5  # in a row


class Drift:
    """Watches the lanes of step after step."""

    def __init__(self, rates: Rates) -> None:
        self._rates = {
            "copy_in": rates.h2d_bytes_s,
            "copy_out": rates.d2h_bytes_s,
            "read": rates.disk_read_bytes_s,
            "write": rates.disk_write_bytes_s,
        }
        read, write, both = (
            rates.disk_read_bytes_s, rates.disk_write_bytes_s, rates.disk_both_bytes_s
        )  # fmt: skip
        # Of their own rates, what reads and writes have while both are in progress.
        self._share = min(1.0, both / (read + write)) if read and write and both else 1.0
        self._seen = dict.fromkeys(self._rates, 0)  # steps in a row; too slow ones count down

    def see(self, stats: Stats) -> str | None:
        """Takes in a step; says what is wrong once one lane was off for some steps in a row."""
        for lane, rate in self._rates.items():
            moved = stats.lanes[lane]
            if not rate or moved.bytes < LEAST_BYTES or not moved.busy_s:
                self._seen[lane] = 0
                continue
            measured = moved.bytes / moved.busy_s
            least = SLOW * rate * self._share_of(lane, stats)
            matters = moved.busy_s >= LEAST_SHARE * stats.step_s
            way = 1 if measured > FAST * rate else -1 if measured < least and matters else 0
            before = self._seen[lane]
            self._seen[lane] = before + way if before * way > 0 else way
            if abs(self._seen[lane]) >= STEPS:
                return (
                    f"lane {lane} moves {measured / 1e9:.2g} GB/s, {rate / 1e9:.2g} GB/s were "
                    f"measured"
                )
        return None

    def _share_of(self, lane: str, stats: Stats) -> float:
        """Return the share of its own rate that a lane has in a step."""
        other = {"read": "write", "write": "read"}.get(lane)
        return self._share if other and stats.lanes[other].bytes >= LEAST_BYTES else 1.0
