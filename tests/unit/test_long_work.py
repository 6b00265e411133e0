"""Long work tells how far it has come, and short work nothing."""

from __future__ import annotations

import logging
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

import overspill
from overspill.observe import long_work as module
from overspill.observe.long_work import LongWork
from tests.models import adamw
from tests.parity.twins import make

MIB = 1 << 20


class Clock:
    """A time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def test_lines_say_bytes_and_rate(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "overspill")
    with LongWork("loading weights", 4000 * MIB) as done:
        for _ in range(40):
            clock.now += 0.5
            done(100 * MIB)
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "overspill: loading weights, 2 GiB of 3.9 GiB, 0.21 GB/s",
        "overspill: loading weights, 3.9 GiB of 3.9 GiB, 0.21 GB/s",
        "overspill: loading weights took 20 s, 3.9 GiB of 3.9 GiB, 0.21 GB/s",
    ]


def test_short_work_says_nothing(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "overspill")
    with LongWork("loading weights", MIB) as done:
        clock.now += 0.9
        done(MIB)
    assert not caplog.records


def test_it_ends_with_the_exception_that_ended_it(clock: Clock) -> None:
    with pytest.raises(KeyError), LongWork("verifying", MIB) as done:
        clock.now += 5
        done(MIB)
        raise KeyError


def test_wrap_tells_of_all_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "AFTER_S", 0.0)
    monkeypatch.setattr(module, "EVERY_S", 0.0)
    caplog.set_level(logging.INFO, "overspill")
    model = make(depth=3)
    overspill.wrap(model, adamw(model), host_memory="8MiB", nvme=tmp_path, device="cpu").close()
    told = [r.getMessage() for r in caplog.records if "loading weights" in r.getMessage()]
    done, total = told[-1].split(", ")[1].split(" of ")
    assert "took" in told[-1] and done == total and len(told) > 3


def test_a_terminal_gets_a_bar() -> None:
    """Drawn in a real one, and gone at the end."""
    script = (
        "import time\n"
        "from overspill.observe import long_work as module\n"
        "module.AFTER_S = 0.05\n"
        "with module.LongWork('verifying {v}[/x]', 100 << 20) as done:\n"
        "    for _ in range(10):\n"
        "        time.sleep(0.05)\n"
        "        done(10 << 20)\n"
    )
    ours, theirs = pty.openpty()
    try:
        running = subprocess.Popen(
            [sys.executable, "-c", script], stderr=theirs, env={**os.environ, "TERM": "xterm"}
        )
        os.close(theirs)
        seen, until_s = b"", time.monotonic() + 60
        while time.monotonic() < until_s:
            try:
                part = os.read(ours, 4096)
            except OSError:  # nobody has the other end any more
                break
            if not part:
                break
            seen += part
        assert running.wait(timeout=60) == 0
    finally:
        os.close(ours)
    text = seen.decode()
    assert "verifying {v}[/x]" in text and "/100.0 MiB" in text and "MB/s" in text
    assert "\x1b[2K" in text, "the bar is taken away"
