"""Something that happens once, whoever waits and whatever interrupts him."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest

from overspill.io_engine.one_shot_event import OneShotEvent
from tests.patience import WAIT_S


def test_everybody_goes_on() -> None:
    once, gone = OneShotEvent(), []
    threads = [threading.Thread(target=lambda: gone.append(once.wait(WAIT_S))) for _ in range(5)]
    for thread in threads:
        thread.start()
    assert not once.wait(0.01) and not once.is_set() and not gone
    once.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert gone == [True] * 5
    assert once.wait() and once.is_set() and once.wait(0)


def test_an_interrupted_waiter_takes_nothing_from_others() -> None:
    """Not for the one who sets it either, as a lock that is left locked would."""

    def handler(*_: Any) -> None:
        raise InterruptedError

    before, stopped = signal.signal(signal.SIGALRM, handler), 0
    try:
        for number in range(300):
            once = OneShotEvent()
            setter = threading.Thread(target=lambda once=once: (time.sleep(0.001), once.set()))
            setter.start()
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, 1e-5 * (1 + number % 150))
                    once.wait()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except InterruptedError:
                stopped += 1
            setter.join(WAIT_S)
            assert not setter.is_alive() and once.wait(WAIT_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if stopped < 30:
        pytest.fail(f"only {stopped} of 300 were interrupted")
