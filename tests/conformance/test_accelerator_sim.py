"""What ``sim`` adds: it finds missing waits whatever the timing, and keeps to the given rates."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from overspill.facts.rates import Rates
from overspill.movement.accelerators.make import CopyDone, Event, OverlapError
from overspill.movement.accelerators.sim import SimAccelerator
from tests.patience import WAIT_S, in_the_end

KIB = 1 << 10
MIB = 1 << 20


def ignore(copy: CopyDone) -> None:
    return None


class Bench:
    """A sim with one arena and one host buffer, and copies between the same offsets of both."""

    def __init__(self) -> None:
        self.sim = SimAccelerator()
        self.arena, self.host = self.sim.allocate(MIB), torch.zeros(MIB, dtype=torch.uint8)

    def copy_in(self, start: int, stop: int, *after: Event) -> Event:
        dst, src = self.arena[start:stop], self.host[start:stop]
        return self.sim.copy_in(dst, src, after=after, on_done=ignore)

    def copy_out(self, start: int, stop: int, *after: Event) -> Event:
        dst, src = self.host[start:stop], self.arena[start:stop]
        return self.sim.copy_out(dst, src, after=after, on_done=ignore)

    def used(self, start: int, stop: int) -> None:
        self.sim.used(self.arena[start:stop])

    def settle(self) -> None:
        """Lets all copies end in real time, without anybody being told."""
        for lane in self.sim._last.values():
            lane.passed.wait()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.sim.close()


# -- missing edges ------------------------------------------------------------------------------


def test_compute_without_a_wait_raises(bench: Bench) -> None:
    bench.copy_in(0, 4 * KIB)
    bench.settle()  # the right bytes are there; the wait is missing all the same
    with pytest.raises(OverlapError, match=r"not ordered after the write .* by 'copy_in'"):
        bench.used(0, 4 * KIB)


def test_a_copy_in_over_memory_in_use_raises(bench: Bench) -> None:
    bench.used(0, 4 * KIB)
    with pytest.raises(OverlapError, match="'copy_in' has seen 0 of 'compute'"):
        bench.copy_in(0, 4 * KIB)
    bench.copy_in(0, 4 * KIB, bench.sim.record())


def test_an_event_recorded_before_the_use_does_not_cover_it(bench: Bench) -> None:
    stale = bench.sim.record()
    bench.used(0, 4 * KIB)
    with pytest.raises(OverlapError):
        bench.copy_in(0, 4 * KIB, stale)
    with pytest.raises(OverlapError):
        bench.copy_out(0, 4 * KIB, stale)


def test_a_copy_out_without_the_copy_in_raises(bench: Bench) -> None:
    copied = bench.copy_in(0, 4 * KIB)
    bench.settle()
    with pytest.raises(OverlapError):
        bench.copy_out(0, 4 * KIB)
    bench.copy_out(0, 4 * KIB, copied)


def test_a_slot_is_not_refilled_while_it_is_copied_out(bench: Bench) -> None:
    out = bench.copy_out(0, 4 * KIB)
    bench.settle()
    with pytest.raises(OverlapError, match="after the read"):
        bench.copy_in(0, 4 * KIB)
    bench.copy_in(0, 4 * KIB, out)


def test_updates_and_compute_must_wait_for_each_other(bench: Bench) -> None:
    bench.used(0, 4 * KIB)
    computed = bench.sim.record()
    with bench.sim.update_stream():
        with pytest.raises(OverlapError, match="'update' has seen 0 of 'compute'"):
            bench.used(0, 4 * KIB)
        bench.sim.wait(computed)
        bench.used(0, 4 * KIB)
        updated = bench.sim.record()
    with pytest.raises(OverlapError, match="by 'update'"):
        bench.used(0, 4 * KIB)
    bench.sim.wait(updated)
    bench.used(0, 4 * KIB)


def test_one_shared_byte_is_enough(bench: Bench) -> None:
    bench.copy_in(4 * KIB, 8 * KIB)
    bench.used(0, 4 * KIB)
    bench.used(8 * KIB, 12 * KIB)
    for start, stop in ((0, 4 * KIB + 1), (8 * KIB - 1, 9 * KIB), (0, MIB), (5000, 5001)):
        with pytest.raises(OverlapError):
            bench.used(start, stop)


def test_a_later_write_to_a_part_leaves_the_rest_unordered(bench: Bench) -> None:
    bench.copy_in(0, 8 * KIB)
    second = bench.copy_in(2 * KIB, 4 * KIB)
    bench.settle()
    for start, stop in ((0, 2 * KIB), (2 * KIB, 4 * KIB), (4 * KIB, 8 * KIB)):
        with pytest.raises(OverlapError):
            bench.used(start, stop)
    bench.sim.wait(second)  # it came after the first on the same stream
    bench.used(0, 8 * KIB)


# -- edges --------------------------------------------------------------------------------------


def test_edges_reach_through_other_streams(bench: Bench) -> None:
    copied = bench.copy_in(0, 4 * KIB)
    out = bench.copy_out(0, 4 * KIB, copied)
    bench.sim.wait(out)
    bench.used(0, 4 * KIB)
    assert copied.done() and out.done(), "whoever waited for the second has waited for the first"


def test_what_the_host_has_seen_orders_what_it_starts(bench: Bench) -> None:
    bench.copy_in(0, 4 * KIB).synchronize()
    bench.used(0, 4 * KIB)
    out = bench.copy_out(0, 4 * KIB, bench.sim.record())
    while not out.done():
        time.sleep(0.0005)
    bench.host.fill_(3)
    bench.copy_in(0, 4 * KIB)
    bench.sim.synchronize()
    bench.used(0, 4 * KIB)
    assert bench.arena[: 4 * KIB].eq(3).all()


def test_what_another_thread_has_seen_orders_nothing(bench: Bench) -> None:
    copied = bench.copy_in(0, 4 * KIB)
    other = threading.Thread(target=copied.synchronize)
    other.start()
    other.join()
    with pytest.raises(OverlapError):
        bench.used(0, 4 * KIB)


def test_an_asked_event_that_has_not_passed_orders_nothing() -> None:
    hold = threading.Event()
    sim = SimAccelerator(disturb=lambda lane, nbytes: hold.wait(WAIT_S) and None)
    try:
        arena, host = sim.allocate(4096), torch.zeros(4096, dtype=torch.uint8)
        copied = sim.copy_in(arena, host, after=[], on_done=ignore)
        assert not copied.done()
        with pytest.raises(OverlapError):
            sim.used(arena)
    finally:
        hold.set()
        sim.close()


def test_on_done_may_start_the_next_copy(bench: Bench) -> None:
    started: list[Event] = []
    over = threading.Event()

    def then(copy: CopyDone) -> None:
        started.append(bench.copy_out(0, 4 * KIB))
        over.set()

    bench.sim.copy_in(bench.arena[: 4 * KIB], bench.host[: 4 * KIB], after=[], on_done=then)
    assert over.wait(WAIT_S)
    started[0].synchronize()


def test_copies_out_and_reads_do_not_hinder_each_other(bench: Bench) -> None:
    bench.host.fill_(3)
    copied = bench.copy_in(0, 8 * KIB)
    bench.copy_out(0, 8 * KIB, copied)
    last = bench.copy_out(0, 4 * KIB, copied)
    last.synchronize()
    assert bench.host.eq(3).all() and bench.arena[: 8 * KIB].eq(3).all()


def test_a_refused_access_leaves_no_trace(bench: Bench) -> None:
    copied = bench.copy_in(0, 4 * KIB)
    with pytest.raises(OverlapError):
        bench.used(0, 4 * KIB)
    bench.copy_out(0, 4 * KIB, copied)


def test_the_history_stays_short(bench: Bench) -> None:
    for turn in range(300):
        start = (turn * 5 * KIB) % (MIB - 16 * KIB)
        copied = bench.copy_in(start, start + 16 * KIB, bench.sim.record())
        bench.sim.wait(copied)
        bench.used(start, start + 16 * KIB)
    assert len(bench.sim._ordering._accesses) <= 2 * MIB // (5 * KIB)


# -- memory -------------------------------------------------------------------------------------


def test_new_memory_reads_as_nan(bench: Bench) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert bool(bench.arena.view(dtype).isnan().all())


def test_the_arena_is_a_bound(bench: Bench) -> None:
    outside = torch.zeros(4096, dtype=torch.uint8)
    with pytest.raises(ValueError, match="not on device"):
        bench.sim.used(outside)
    with pytest.raises(ValueError, match="between host memory"):
        bench.sim.copy_in(outside, outside.clone(), after=[], on_done=ignore)
    nbytes = bench.arena.numel() + 4096  # beyond its end; nobody touches it
    past = (ctypes.c_uint8 * nbytes).from_address(bench.arena.data_ptr())
    around = torch.frombuffer(past, dtype=torch.uint8)
    with pytest.raises(ValueError, match="border"):
        bench.sim.used(around)


# -- rates and errors ---------------------------------------------------------------------------


@pytest.mark.alone
def test_copies_take_the_time_of_the_link() -> None:
    in_the_end(copies_take_their_time)


def copies_take_their_time() -> None:
    rates = Rates(h2d_bytes_s=200e6, d2h_bytes_s=100e6, link_latency_s=0.002)
    sim = SimAccelerator(rates)
    try:
        arena, host = sim.allocate(4 * MIB), torch.zeros(4 * MIB, dtype=torch.uint8)
        for copy, dst, src, rate in (
            (sim.copy_in, arena, host, 200e6),
            (sim.copy_out, host, arena, 100e6),
        ):
            sim.synchronize()
            ends: list[CopyDone] = []
            started = time.perf_counter()
            for part in range(4):
                span = slice(part * MIB, (part + 1) * MIB)
                last = copy(dst[span], src[span], after=[], on_done=ends.append)
            last.synchronize()
            took, wire = time.perf_counter() - started, 4 * (MIB / rate + 0.002)
            assert wire <= took < 1.5 * wire + 0.02
    finally:
        sim.close()


@pytest.mark.alone
def test_both_directions_run_at_once() -> None:
    in_the_end(both_run_at_once)


def both_run_at_once() -> None:
    sim = SimAccelerator(Rates(h2d_bytes_s=20e6, d2h_bytes_s=20e6))
    try:
        arena, host = sim.allocate(2 * MIB), torch.zeros(2 * MIB, dtype=torch.uint8)
        started = time.perf_counter()
        events = [
            sim.copy_in(arena[:MIB], host[:MIB], after=[], on_done=ignore),
            sim.copy_out(host[MIB:], arena[MIB:], after=[], on_done=ignore),
        ]
        for event in events:
            event.synchronize()
        assert time.perf_counter() - started < 1.7 * MIB / 20e6
    finally:
        sim.close()


def test_waiting_does_not_spin() -> None:
    sim = SimAccelerator(Rates(h2d_bytes_s=10e6))
    try:
        arena, host = sim.allocate(2 * MIB), torch.zeros(2 * MIB, dtype=torch.uint8)
        before = time.process_time()
        sim.copy_in(arena, host, after=[], on_done=ignore).synchronize()
        assert time.process_time() - before < 0.05  # of 0.2 s
    finally:
        sim.close()


def test_an_error_in_a_copy_is_delivered_and_the_next_one_runs() -> None:
    failing = iter([OSError("link down"), None])

    def disturb(lane: str, nbytes: int) -> None:
        error = next(failing)
        if error is not None:
            raise error

    sim = SimAccelerator(disturb=disturb)
    try:
        arena, host = sim.allocate(4096), torch.ones(4096, dtype=torch.uint8)
        ends: list[CopyDone] = []
        first = sim.copy_in(arena, host, after=[], on_done=ends.append)
        second = sim.copy_in(arena, host, after=[first], on_done=ends.append)
        second.synchronize()
        sim.close()
        assert isinstance(ends[0].error, OSError) and ends[1].error is None
        assert bool((arena == 1).all())
    finally:
        sim.close()
