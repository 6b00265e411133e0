"""The figures of every step of a run, and whether its lanes keep the rates it was planned with."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace

from ..facts.rates import Rates
from ..facts.stats import Stats, step_stats
from ..facts.trace import Trace
from .calibration import Calibration

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


ADVISED_AT = 5  # steps of this process; the first ones are slower

log = logging.getLogger("overspill")


class StepFigures:
    """Looks at each step when it is over.  ``last``: the figures of the last one."""

    def __init__(
        self, trace: Trace, needed_s: Mapping[str, float], calibration: Calibration | None
    ) -> None:
        """``needed_s``: what lanes need for a step's bytes at the machine's rates; ``calibration``:
        where those were measured, ``None`` where the user gave them."""
        self._trace, self._needed_s, self._calibration = trace, needed_s, calibration
        self._drift = None if calibration is None else Drift(calibration.rates)
        self._cpu_ns = time.process_time_ns()  # that the process had used when the last step ended
        self._seen = 0
        self.last = Stats(0.0, 0.0)

    def taken(self, count: int, tokens: int | None = None) -> None:
        """Step number ``count`` is over, of so many ``tokens`` where they are counted."""
        mark = self._trace.mark_step(count, time.perf_counter_ns())
        used_ns = time.process_time_ns()
        cpu_s, self._cpu_ns = (used_ns - self._cpu_ns) / 1e9, used_ns
        figures = step_stats(self._trace, mark, self._needed_s)
        self.last = replace(figures, tokens=tokens, cpu_s=cpu_s)
        self._seen += 1
        trained = tokens is None
        if trained and self._seen == ADVISED_AT and (advice := self.last.advice()) is not None:
            log.info("overspill: %s", advice)
        wrong = None if self._drift is None else self._drift.see(self.last)
        if wrong is not None and self._calibration is not None:
            self._drift = None
            self._calibration.doubted(wrong)
