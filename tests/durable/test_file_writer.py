"""The thread that writes an export: it ends and closes its file, whatever interrupts its caller."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from overspill.durable.tensors import FileWriter
from overspill.io_engine.one_shot_event import OneShotEvent
from tests.devices import about_files

pytestmark = about_files


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if "overspill-export" in each.name]


@pytest.mark.parametrize("ending", ["finish", "abort"])
def test_an_interrupt_while_it_ends(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = len(os.listdir("/proc/self/fd"))
    writer = FileWriter(tmp_path / "file", 1 << 20)
    writer.write(np.full(1 << 20, 7, np.uint8))
    wait, interrupts = OneShotEvent.wait, [KeyboardInterrupt, KeyboardInterrupt]

    def interrupted(once: OneShotEvent, timeout: float | None = None) -> bool:
        if interrupts:
            raise interrupts.pop()
        return wait(once, timeout)

    monkeypatch.setattr(OneShotEvent, "wait", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            getattr(writer, ending)()
    writer.abort()
    assert not threads()
    assert len(os.listdir("/proc/self/fd")) == files


def test_an_interrupt_while_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, start = len(os.listdir("/proc/self/fd")), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", interrupted)
        FileWriter(tmp_path / "file", 1 << 20)
    while threads():
        pass
    assert len(os.listdir("/proc/self/fd")) == files


def test_an_error_of_any_kind_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that comes with the last bytes."""
    files = len(os.listdir("/proc/self/fd"))
    writer = FileWriter(tmp_path / "file", 100)

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(writer._writers, "submit", refuse)
    writer.write(np.full(100, 7, np.uint8))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        writer.finish()
    assert not threads() and len(os.listdir("/proc/self/fd")) == files


def test_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = len(os.listdir("/proc/self/fd"))

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(threading.Thread, "start", refuse)
        FileWriter(tmp_path / "file", 100)
    assert len(os.listdir("/proc/self/fd")) == files
