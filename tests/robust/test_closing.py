"""``close`` from wherever: another thread, a signal handler, the collector, the end of the process.
Nobody waits for ever, nothing is left, and what was whole is committed."""

from __future__ import annotations

import contextlib
import gc
import random
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.errors import OffloadError
from overspill.movement.engine_port import EnginePort
from overspill.movement.executor import Executor
from overspill.params.onloaded_units import OnloadedUnits
from overspill.private import reentrancy, torch_private
from tests.devices import CPU, about_cpu, normal
from tests.patience import WAIT_S
from tests.robust.test_interrupted_uses import WIDTH, build, wrapped

PLACE = "cpu" if CPU == "cpu" else "device"


def step(model: torch.nn.Module, optimizer: Any, number: int = 0) -> None:
    model(normal(number, 4, WIDTH)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def engine_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if "overspill" in each.name]


def ended() -> None:
    until_s = time.monotonic() + WAIT_S
    while engine_threads():
        assert time.monotonic() < until_s, engine_threads()
        time.sleep(0.01)


def closer_of(optimizer: Any, delay_s: float = 0.0) -> tuple[threading.Thread, list[BaseException]]:
    """A thread that will close the engine, and what that raises."""
    raised: list[BaseException] = []

    def close() -> None:
        time.sleep(delay_s)
        try:
            optimizer.close()
        except BaseException as error:
            raised.append(error)

    return threading.Thread(target=close), raised


def elsewhere(close: Any) -> None:
    thread = threading.Thread(target=close)
    thread.start()
    thread.join()


def test_what_is_asked_after_the_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pump has ended between the look whether it is there, and the question."""
    monkeypatch.setattr(reentrancy, "PATIENCE_S", 0.1)
    model, optimizer = wrapped(tmp_path, PLACE)
    step(model, optimizer)
    executor: Executor = optimizer._engine.runtime.executor
    tickets, closed = executor.engine_port._tickets, [False]

    class Tickets:
        def __next__(self) -> int:
            if not closed[0]:
                closed[0] = True
                elsewhere(optimizer.close)
            return next(tickets)

    monkeypatch.setattr(executor.engine_port, "_tickets", Tickets())
    with pytest.raises(OffloadError, match="closed"):
        model(normal(1, 4, WIDTH))
    executor.engine_port.catch_up()  # returns
    ended()


@pytest.mark.parametrize("seed", range(6))
def test_another_thread_closes_while_this_one_trains(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    update = ("step", "next_forward")[seed % 2]
    model, optimizer = wrapped(tmp_path, PLACE, update=update)
    delay_s = draw.random() * 0.1

    closers = [closer_of(optimizer, delay_s) for _ in range(1 + 2 * (seed % 2))]
    threads = [thread for thread, _ in closers]
    for thread in threads:
        thread.start()
    done, until_s = 0, time.monotonic() + WAIT_S
    with pytest.raises(OffloadError, match="closed"):
        while time.monotonic() < until_s:
            step(model, optimizer, done)
            done += 1
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert not any(raised for _, raised in closers)
    ended()
    if done:
        with overspill.resume(
            build(), tmp_path, device=CPU, rates=overspill.Rates()
        )[0] as again:  # fmt: skip
            assert again.step_count in (done, done + 1)


def test_a_stack_that_changes_while_it_is_read_is_read_again() -> None:
    """Up to Python 3.11 the frame behind a generator may be anything."""

    def below(count: int) -> Any:
        return reentrancy._stack(sys._getframe()) if count == 0 else below(count - 1)

    assert [frame.f_code.co_name for frame in below(3)][:5] == ["below"] * 4 + [
        sys._getframe().f_code.co_name
    ]
    assert reentrancy._stack({}) is None  # type: ignore[arg-type]


def test_a_forward_goes_on_while_another_thread_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the hooks of a forward no frame shows that this thread uses the engine."""
    model, optimizer = wrapped(tmp_path, PLACE)
    step(model, optimizer)
    resets, over = threading.Event(), threading.Event()
    reset, release = OnloadedUnits.reset, OnloadedUnits._release
    closer, raised = closer_of(optimizer)

    def reset_slowly(self: OnloadedUnits) -> None:
        if threading.current_thread() is closer:
            resets.set()
            time.sleep(0.2)
        reset(self)
        if threading.current_thread() is closer:
            over.set()

    def release_late(self: OnloadedUnits, unit: int) -> None:
        if resets.is_set() and threading.current_thread() is not closer:
            over.wait(WAIT_S)
        release(self, unit)

    def compute(x: torch.Tensor) -> torch.Tensor:
        y = nn.Linear.forward(module, x)
        closer.start()
        assert resets.wait(WAIT_S)
        return y

    monkeypatch.setattr(OnloadedUnits, "reset", reset_slowly)
    monkeypatch.setattr(OnloadedUnits, "_release", release_late)
    units: OnloadedUnits = optimizer._engine._onloaded_units
    moving = [unit for unit, moves in enumerate(units.streamed) if moves]
    module: Any = units.parts.found[moving[0]].module
    monkeypatch.setattr(module, "forward", compute)
    with pytest.raises(OffloadError, match="closed"):
        step(model, optimizer, 1)
    closer.join(WAIT_S)
    assert not closer.is_alive() and not raised
    ended()
    with overspill.resume(build(), tmp_path, device=CPU, rates=overspill.Rates())[0] as again:
        assert again.step_count == 1


def test_a_unit_runs_while_another_thread_closes_the_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one of the two threads releases a unit that an exception left open."""
    model, optimizer = wrapped(tmp_path, PLACE)
    step(model, optimizer)
    units: OnloadedUnits = optimizer._engine._onloaded_units
    unit = next(unit for unit, moves in enumerate(units.streamed) if moves)
    units.executor.protocol.need(unit)  # granted, and then lost to an exception
    closes, begun, lost = threading.Event(), threading.Event(), EnginePort.lost
    closer, raised = closer_of(optimizer)

    def find_slowly(self: EnginePort, uses: Any) -> list[int]:
        found = lost(self, uses)
        if threading.current_thread() is closer:
            closes.set()
            begun.wait(WAIT_S)
        return found

    monkeypatch.setattr(EnginePort, "lost", find_slowly)
    closer.start()
    assert closes.wait(WAIT_S)
    with pytest.raises(OffloadError, match="closed"):
        units.parts.found[unit].module(normal(1, 4, WIDTH))
    begun.set()
    closer.join(WAIT_S)
    assert not closer.is_alive() and not raised
    ended()


@pytest.mark.parametrize("raises", [True, False])
def test_a_handler_closes_amid_a_forward(
    raises: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No hook of the engine's stays on the thread."""
    monkeypatch.setattr(reentrancy, "PATIENCE_S", 0.5)
    model, optimizer = wrapped(tmp_path, PLACE, activations="host")
    step(model, optimizer)
    inner, times = OnloadedUnits.enter, [0]

    def enter(self: OnloadedUnits, unit: int) -> None:
        times[0] += 1
        if times[0] == 3:
            optimizer.close()
            if raises:
                raise KeyboardInterrupt
        inner(self, unit)

    monkeypatch.setattr(OnloadedUnits, "enter", enter)
    with pytest.raises(KeyboardInterrupt if raises else OffloadError):
        model(normal(1, 4, WIDTH))
    ended()
    optimizer.close()
    assert torch_private.top_saved_tensor_hooks() is None


def test_the_collector_comes_by_amid_the_library_of_threads(tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path, PLACE)
    step(model, optimizer)
    lock: Any = threading._active_limbo_lock  # type: ignore[attr-defined]
    del model, optimizer
    until_s = time.monotonic() + WAIT_S
    while engine_threads():  # what one collection finds may be other garbage alone
        assert time.monotonic() < until_s, engine_threads()
        with lock:  # as ``Thread.start`` and ``threading.enumerate`` have it
            gc.collect()
        time.sleep(0.01)
    ended()


@about_cpu
def test_an_interrupt_at_the_end_of_the_process_waits_for_the_commits(tmp_path: Path) -> None:
    code = """
    import os, signal, sys, time
    from pathlib import Path
    from tests.robust.test_closing import PLACE, step, wrapped
    from overspill.durable.commits import Commits
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where nobody waits for us
    inner, kept = Commits.close, []
    def close(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        inner(self)
    for folder in sys.argv[1:]:
        Path(folder).mkdir()
        kept.append(wrapped(Path(folder), PLACE, commit_every=5))
        for number in range(3):
            step(*kept[-1], number)
    Commits.close = close
    """
    folders = [tmp_path / "one", tmp_path / "two"]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, folders)],
        capture_output=True, text=True, timeout=2 * WAIT_S, check=False,
    )  # fmt: skip
    assert "KeyboardInterrupt" in done.stderr
    for folder in folders:
        with overspill.resume(build(), folder, device=CPU, rates=overspill.Rates())[0] as again:
            assert again.step_count == 3


def test_without_another_thread_it_ends_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = wrapped(tmp_path, PLACE)
    step(model, optimizer)
    inner = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == "closes-overspill":
            raise RuntimeError("can't start new thread")
        inner(self)

    with monkeypatch.context() as patch, contextlib.suppress(RuntimeError):
        patch.setattr(threading.Thread, "start", start)
        optimizer.close()
    assert not engine_threads()


@about_cpu
def test_no_collection_while_the_interpreter_lists_threads() -> None:
    """``sys._current_frames`` waits for ever if the collector lets another thread run in it."""
    script = textwrap.dedent("""
        import faulthandler, gc, os, sys, threading, time
        from overspill.private import reentrancy

        faulthandler.dump_traceback_later(30, exit=True)

        class Slow:
            def __init__(self):
                self.itself = self

            def __del__(self):
                time.sleep(0)

        def start_threads():
            while True:
                thread = threading.Thread(target=time.sleep, args=(0,))
                thread.start()
                thread.join()

        for _ in range(3):
            threading.Thread(target=start_threads, daemon=True).start()
        gc.set_threshold(5)
        ends_s = time.monotonic() + 3
        while time.monotonic() < ends_s:
            garbage = [Slow() for _ in range(6)]
            reentrancy._innermost_frames()
        os._exit(0 if gc.isenabled() else 1)
    """)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=WAIT_S)
