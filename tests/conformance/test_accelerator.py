"""One suite for every accelerator.  The one without memory of its own must refuse to copy."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from overspill.errors import OffloadError
from overspill.movement.accelerators.make import Accelerator, CopyDone, Event, make_accelerator
from overspill.movement.accelerators.sim import SimAccelerator
from overspill.optim import activation_blocks
from overspill.optim.activation_blocks import ActivationBlocks
from tests.devices import NAME
from tests.patience import WAIT_S, in_the_end

MIB = 1 << 20
WITH_MEMORY = [NAME or "sim"]


def slow_sim() -> SimAccelerator:
    """A sim whose copies take a millisecond more, so that what does not wait comes too early."""
    return SimAccelerator(disturb=lambda lane, nbytes: time.sleep(0.001))


def make(kind: str) -> Accelerator:
    return slow_sim() if kind == "sim" else make_accelerator(kind, None)


@pytest.fixture(params=["cpu", *WITH_MEMORY])
def any_accelerator(request: pytest.FixtureRequest) -> Iterator[Accelerator]:
    accelerator = make(request.param)
    yield accelerator
    accelerator.close()


@pytest.fixture(params=WITH_MEMORY)
def accelerator(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Accelerator]:
    accelerator = make(request.param)
    arenas: list[torch.Tensor] = []  # kept until nothing is in progress on them
    allocate = accelerator.allocate
    monkeypatch.setattr(
        accelerator, "allocate", lambda nbytes: arenas.append(allocate(nbytes)) or arenas[-1]
    )
    yield accelerator
    accelerator.close()


class Ends:
    """Collects what ``on_done`` is given; ``next`` waits for it."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[CopyDone, str]] = queue.Queue()

    def __call__(self, copy: CopyDone) -> None:
        self._queue.put((copy, threading.current_thread().name))

    def next(self) -> tuple[CopyDone, str]:
        return self._queue.get(timeout=WAIT_S)

    def empty(self) -> bool:
        return self._queue.empty()


def ignore(copy: CopyDone) -> None:
    assert copy.error is None


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator, device="cpu")


def copies_of_ours() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("overspill-copy")]


def bring_back(accelerator: Accelerator, memory: torch.Tensor, after: Event) -> torch.Tensor:
    host = torch.zeros(memory.numel(), dtype=torch.uint8, device="cpu")
    accelerator.copy_out(host, memory, after=[after], on_done=ignore).synchronize()
    return host


# -- all three ----------------------------------------------------------------------------------


def test_it_says_what_it_is(any_accelerator: Accelerator) -> None:
    name, device = any_accelerator.name, any_accelerator.device
    assert name.split(":")[0] in ("cpu", *WITH_MEMORY)
    assert str(device) == ("cpu" if name == "sim" else name)
    assert any_accelerator.has_device_memory is (name != "cpu")


def test_a_recorded_event_passes(any_accelerator: Accelerator) -> None:
    torch.ones(1000, device=any_accelerator.device).sum()
    event = any_accelerator.record()
    event.synchronize()
    assert event.done()
    any_accelerator.wait(event)
    any_accelerator.synchronize()


def test_an_instant_is_when_compute_came_to_it(any_accelerator: Accelerator) -> None:
    """By the host's clock, however far ahead of the device the host is."""
    size = 4000 if any_accelerator.device.type == "cuda" else 500  # so that it takes a while
    large = torch.ones(size, size, device=any_accelerator.device)

    def products() -> None:
        for _ in range(20):
            large @ large

    def is_right() -> None:
        products()
        any_accelerator.synchronize()
        started_ns = time.perf_counter_ns()
        first = any_accelerator.instant()
        products()
        last = any_accelerator.instant()
        any_accelerator.synchronize()
        ended_ns = time.perf_counter_ns()
        first_ns, last_ns = first.ns(), last.ns()
        assert first_ns is not None and last_ns is not None
        took_ns = ended_ns - started_ns
        assert started_ns - 0.1 * took_ns <= first_ns <= started_ns + 0.2 * took_ns
        assert ended_ns - 0.2 * took_ns <= last_ns <= ended_ns + 0.1 * took_ns

    in_the_end(is_right)


def test_updates_see_what_compute_recorded(any_accelerator: Accelerator) -> None:
    values = torch.full((4 * MIB,), 2.0, device=any_accelerator.device)
    computed = any_accelerator.record()
    with any_accelerator.update_stream():
        any_accelerator.wait(computed)
        values.mul_(3.0)
        updated = any_accelerator.record()
    any_accelerator.wait(updated)
    assert bool((values == 6.0).all())


def test_page_lock_is_undone_by_close(any_accelerator: Accelerator) -> None:
    host = torch.zeros(4 * MIB, dtype=torch.uint8, device="cpu")
    any_accelerator.page_lock(host.data_ptr(), host.numel())
    any_accelerator.close()
    again = make(any_accelerator.name)  # a vendor refuses what is locked already
    try:
        again.page_lock(host.data_ptr(), host.numel())
        assert host.fill_(1).sum() == host.numel()
    finally:
        again.close()


@pytest.mark.parametrize("kind", ["cpu", *WITH_MEMORY])
def test_close_ends_all_threads_and_again_does_nothing(kind: str) -> None:
    before = set(threading.enumerate())
    accelerator = make(kind)
    accelerator.close()
    accelerator.close()
    assert set(threading.enumerate()) == before


def test_the_cpu_refuses_memory_and_copies() -> None:
    cpu, memory = make_accelerator("cpu", None), torch.zeros(8, dtype=torch.uint8, device="cpu")
    with pytest.raises(AssertionError, match="no memory of its own"):
        cpu.allocate(64)
    with pytest.raises(AssertionError, match="copy in"):
        cpu.copy_in(memory, memory, after=[], on_done=ignore)
    with pytest.raises(AssertionError, match="copy out"):
        cpu.copy_out(memory, memory, after=[], on_done=ignore)


# -- those with memory --------------------------------------------------------------------------


def test_the_arena_is_flat_aligned_and_separate(accelerator: Accelerator) -> None:
    first, second = accelerator.allocate(3 * MIB + 5), accelerator.allocate(4096)
    for arena, nbytes in ((first, 3 * MIB + 5), (second, 4096)):
        assert arena.shape == (nbytes,) and arena.dtype == torch.uint8
        assert arena.device == accelerator.device
        assert arena.data_ptr() % 4096 == 0
    first.fill_(1)
    second.fill_(2)
    assert bool((first == 1).all())


def test_bytes_survive_the_way_in_and_out(accelerator: Accelerator) -> None:
    arena = accelerator.allocate(2 * MIB)
    for seed, nbytes in enumerate((1, 63, 4096, 100_001, 2 * MIB)):
        host = random_bytes(nbytes, seed)
        accelerator.synchronize()
        copied = accelerator.copy_in(arena[:nbytes], host, after=[], on_done=ignore)
        assert torch.equal(bring_back(accelerator, arena[:nbytes], copied), host)


def test_activations_are_packed_on_their_way(
    any_accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In windows where the device has its own memory, with the same bytes as all at once."""
    accelerator = any_accelerator
    monkeypatch.setattr(activation_blocks, "WINDOW", 1000 * activation_blocks.BLOCK)
    accelerator.stage(1000 * activation_blocks.BLOCK_BYTES)
    for dtype, numel in ((torch.bfloat16, 300_001), (torch.float32, 128_000), (torch.float16, 5)):
        blocks, values = ActivationBlocks(dtype), torch.randn(numel, device="cpu").to(dtype)
        flat = values.view(torch.uint8)
        expected = torch.zeros(blocks.packed_bytes(flat.numel()), dtype=torch.uint8, device="cpu")
        blocks.pack(flat, expected)
        there, ends = flat.to(accelerator.device, copy=True), Ends()
        packed, computed = torch.zeros_like(expected), accelerator.record()
        accelerator.spill(packed, there, after=[computed], on_done=ends, blocks=blocks)
        assert ends.next()[0].nbytes == packed.numel()
        assert torch.equal(packed, expected)
        back = accelerator.lend(flat.numel())
        fetched = accelerator.fetch(back, packed, after=[], on_done=ends, blocks=blocks)
        assert ends.next()[0].nbytes == packed.numel()
        accelerator.wait(fetched)
        found = torch.zeros_like(flat)
        blocks.unpack(expected, found)
        assert torch.equal(back.cpu(), found)


def test_a_copy_out_waits_for_the_copy_in(accelerator: Accelerator) -> None:
    arena, host = accelerator.allocate(8 * MIB), random_bytes(8 * MIB, 1)
    back = torch.zeros_like(host)
    copied = accelerator.copy_in(arena, host, after=[], on_done=ignore)
    accelerator.copy_out(back, arena, after=[copied], on_done=ignore).synchronize()
    assert torch.equal(back, host)


def test_one_direction_keeps_its_order(accelerator: Accelerator) -> None:
    arena, ends = accelerator.allocate(MIB), Ends()
    last = None
    for value in range(5):
        host = torch.full((MIB - value,), value, dtype=torch.uint8, device="cpu")
        last = accelerator.copy_in(arena[: MIB - value], host, after=[], on_done=ends)
    assert last is not None
    copies = [ends.next()[0] for _ in range(5)]
    assert [copy.nbytes for copy in copies] == [MIB - value for value in range(5)]
    assert all(a.finished_ns <= b.finished_ns for a, b in itertools.pairwise(copies))
    assert int(bring_back(accelerator, arena, last)[0]) == 4


def test_compute_waits_for_a_copy(accelerator: Accelerator) -> None:
    arena, host = accelerator.allocate(4 * MIB), torch.ones(MIB, dtype=torch.float32, device="cpu")
    copied = accelerator.copy_in(arena, host.view(torch.uint8), after=[], on_done=ignore)
    accelerator.wait(copied)
    accelerator.used(arena)
    assert float(arena.view(torch.float32).double().sum()) == MIB


def test_a_copy_waits_for_compute(accelerator: Accelerator) -> None:
    arena = accelerator.allocate(4 * MIB)
    values = arena.view(torch.float32)
    accelerator.used(arena)
    values.fill_(1.0)
    for _ in range(20):
        values.add_(1.0)
    back = torch.zeros(4 * MIB, dtype=torch.uint8, device="cpu")
    computed = accelerator.record()
    out = accelerator.copy_out(back, arena, after=[computed], on_done=ignore)
    zeros = torch.zeros(4 * MIB, dtype=torch.uint8, device="cpu")
    accelerator.copy_in(arena, zeros, after=[out, computed], on_done=ignore).synchronize()
    out.synchronize()
    assert bool((back.view(torch.float32) == 21.0).all())


def test_a_changed_host_copy_does_not_show(accelerator: Accelerator) -> None:
    arena, host = (
        accelerator.allocate(4096),
        torch.full((4096,), 7, dtype=torch.uint8, device="cpu"),
    )
    copied = accelerator.copy_in(arena, host, after=[], on_done=ignore)
    copied.synchronize()
    host.fill_(9)
    assert bool((bring_back(accelerator, arena, copied) == 7).all())


def test_an_end_is_told_once_and_elsewhere(accelerator: Accelerator) -> None:
    arena, ends = accelerator.allocate(MIB), Ends()
    before_ns = time.perf_counter_ns()
    event = accelerator.copy_in(arena, random_bytes(MIB, 3), after=[], on_done=ends)
    copy, thread = ends.next()
    assert event.done()
    assert before_ns <= copy.started_ns + 100_000 and copy.started_ns <= copy.finished_ns
    assert copy.finished_ns <= time.perf_counter_ns()
    assert copy.nbytes == MIB and copy.error is None
    assert thread != threading.current_thread().name
    accelerator.close()
    assert ends.empty()


def test_events_order_on_the_host_too(accelerator: Accelerator) -> None:
    arena = accelerator.allocate(MIB)
    event = accelerator.copy_in(arena, random_bytes(MIB, 4), after=[], on_done=ignore)
    while not event.done():
        time.sleep(0.0005)
    accelerator.used(arena)
    back = torch.zeros(MIB, dtype=torch.uint8, device="cpu")
    accelerator.record().synchronize()
    accelerator.copy_out(back, arena, after=[], on_done=ignore).synchronize()
    assert torch.equal(back, random_bytes(MIB, 4))


def test_synchronize_waits_for_copies(accelerator: Accelerator) -> None:
    arena, ends = accelerator.allocate(MIB), Ends()
    accelerator.copy_in(arena, random_bytes(MIB, 5), after=[], on_done=ends)
    accelerator.synchronize()
    assert torch.equal(arena.cpu(), random_bytes(MIB, 5))


def test_a_raising_on_done_is_logged_and_copies_go_on(
    accelerator: Accelerator, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(copy: CopyDone) -> None:
        raise KeyError("from on_done")

    arena, ends = accelerator.allocate(4096), Ends()
    with caplog.at_level(logging.ERROR, logger="overspill"):
        accelerator.copy_in(arena, random_bytes(4096, 1), after=[], on_done=fails)
        accelerator.copy_in(arena, random_bytes(4096, 2), after=[], on_done=ends)
        assert ends.next()[0].error is None
    assert "from on_done" in caplog.text
    accelerator.synchronize()  # the arena goes at the end, and the copies are over


@pytest.mark.parametrize("direction", ["copy_in", "copy_out"])
def test_impossible_copies_are_refused(accelerator: Accelerator, direction: str) -> None:
    arena, host = accelerator.allocate(4096), torch.zeros(4096, dtype=torch.uint8, device="cpu")
    pairs = [
        (arena[:100], host[:99], "100 bytes|99 bytes"),
        (arena.view(torch.int32), host.view(torch.int32), "uint8"),
        (arena.view(64, 64), host.view(64, 64), "flat"),
        (arena[::2], host[::2], "flat"),
        (host, arena, "between host memory"),
        (host, host.clone(), "between host memory"),
        (arena, accelerator.allocate(4096), "between host memory"),
    ]
    copy = getattr(accelerator, direction)
    for device, other, message in pairs:
        dst, src = (device, other) if direction == "copy_in" else (other, device)
        with pytest.raises(ValueError, match=message):
            copy(dst, src, after=[], on_done=ignore)


def test_events_of_others_are_refused(accelerator: Accelerator) -> None:
    arena, host = accelerator.allocate(4096), torch.zeros(4096, dtype=torch.uint8, device="cpu")
    foreign = make_accelerator("cpu", None).record()
    with pytest.raises(TypeError, match="another accelerator"):
        accelerator.wait(foreign)
    with pytest.raises(TypeError, match="another accelerator"):
        accelerator.copy_in(arena, host, after=[foreign], on_done=ignore)


def test_close_ends_copies_and_joins_threads() -> None:
    before = copies_of_ours()
    for kind in WITH_MEMORY:
        accelerator, ends = make(kind), Ends()
        arena = accelerator.allocate(MIB)
        assert len(copies_of_ours()) == len(before) + 2
        assert all(thread.daemon for thread in copies_of_ours())
        for seed in range(4):
            accelerator.copy_in(arena, random_bytes(MIB, seed), after=[], on_done=ends)
        accelerator.close()
        assert copies_of_ours() == before
        assert [ends.next()[0].error for _ in range(4)] == [None] * 4
        with pytest.raises(OffloadError, match="closed"):
            accelerator.copy_in(arena, random_bytes(MIB, 0), after=[], on_done=ends)
        with pytest.raises(OffloadError, match="closed"):
            accelerator.allocate(4096)
