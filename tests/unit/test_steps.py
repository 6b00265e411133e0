"""What is counted of a step beside its lanes."""

from __future__ import annotations

import hashlib
import threading
import time

import pytest

from overspill.facts.trace import Trace
from overspill.measure.steps import StepFigures


def _busy(seconds: float) -> None:
    data = bytes(1 << 22)
    while time.thread_time() < seconds:
        hashlib.sha256(data)  # lets other threads run meanwhile


def test_processors_are_counted_over_all_threads_and_step_by_step() -> None:
    figures = StepFigures(Trace(), {}, None)
    assert figures.last.cpu_s is None, "no step yet"
    threads = [threading.Thread(target=_busy, args=(0.2,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    figures.taken(1)
    assert figures.last.cpu_s == pytest.approx(0.4, abs=0.15)
    time.sleep(0.2)
    figures.taken(2)
    assert figures.last.step_s >= 0.2
    assert figures.last.cpu_s is not None and figures.last.cpu_s < 0.1, "who waits uses none"
