"""What torch's profiler shows of a run: units, and every lane; nothing while it is off."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

import overspill
from overspill.facts.trace import NO_RANGE, Trace
from overspill.params import profiler_ranges
from overspill.params.profiler_ranges import ProfilerRanges


def test_units_and_lanes_are_named_in_a_profile(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    adamw = torch.optim.AdamW(model.parameters())
    with overspill.wrap(
        model, adamw, device="sim", device_memory="64KiB", host_memory="128KiB", nvme=tmp_path
    ) as optimizer:

        def step() -> None:
            model(torch.ones(4, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        everywhere = _ExperimentalConfig(profile_all_threads=True)
        with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as profiled:
            step()
            step()
        step()
    names = {event.key for event in profiled.key_averages() if event.key.startswith("overspill")}
    assert "overspill compute: model" in names and "overspill compute: 3" in names, names
    for lane in ("read: state 2 ", "write: state 2 ", "copy_in: 1", "copy_out: 1", "update: 4"):
        assert any(name.startswith(f"overspill {lane}") for name in names), (lane, names)


def test_without_a_profiler_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(profiler_ranges, "record_function", never)
    trace = Trace(ranges=ProfilerRanges())
    trace.compute_resume("h.0")
    assert trace.compute_pause() == "h.0"
    assert trace.during("read", "weights h.0") is NO_RANGE


@pytest.mark.alone
def test_a_span_with_its_range_costs_little_while_no_profiler_runs() -> None:
    """At most 2 us a span, resume and pause of compute included, where one that is written down
    by hand, its start and end measured, costs 0.22 us: a slower machine has more time."""
    trace = Trace(ranges=ProfilerRanges())
    plain: list[tuple[str, str, int, int, int]] = []

    def spans() -> None:
        for i in range(10_000):
            with trace.during("read", "weights transformer.h.3"):
                trace.add("read", "weights transformer.h.3", i, i + 1, 4096)
            trace.compute_resume("h.3")
            trace.compute_pause()

    def by_hand() -> None:
        plain.clear()
        for _ in range(20_000):
            started, ended = time.perf_counter_ns(), time.perf_counter_ns()
            plain.append(("read", "weights transformer.h.3", started, ended, 4096))

    def seconds(work: Callable[[], None]) -> float:
        started = time.thread_time()
        work()
        return time.thread_time() - started

    both = [(seconds(spans), seconds(by_hand)) for _ in range(20)]
    spent, least = (min(times) for times in zip(*both, strict=True))
    assert spent / 20_000 < 2e-6 or spent < 2 / 0.22 * least, (spent, least)


def test_a_range_is_not_ended_by_another_thread() -> None:
    import threading

    trace = Trace(ranges=ProfilerRanges())
    with profile(activities=[ProfilerActivity.CPU]):
        trace.compute_resume("h.0")
        other = threading.Thread(target=trace.compute_pause)
        other.start()
        other.join()
        trace.compute_resume("h.1")
        trace.compute_pause()
    assert [span.name for span in trace.spans()] == ["h.0", "h.1"]
