"""The figures of every step of a run, and whether its lanes keep the rates it was planned with."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace

from ..facts.stats import Stats, step_stats
from ..facts.trace import Trace
from .calibration import Calibration
from .drift import Drift

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
