"""The test device itself: it runs by itself, hides its memory, and finds what is not ordered."""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
import threading
import time
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

SLEEP_US = 400_000  # longer than a busy machine keeps a thread from running


def train(model: nn.Module, device: str, steps: int = 4) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 50, (4, 8), generator=draw, device="cpu").to(device)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("delayed_percent", [0, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_the_cpus(native: ModuleType, dtype: torch.dtype, delayed_percent: int) -> None:
    native.set_delays(1, delayed_percent, 500)
    with torch.device("cpu"):
        parts = [nn.Embedding(50, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)]
        model = nn.Sequential(*parts, nn.LayerNorm(32), nn.Linear(32, 50)).to(dtype)
    there = copy.deepcopy(model).to("testdev")
    assert train(there, "testdev") == train(model, "cpu")
    for mine, theirs in zip(there.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.cpu(), theirs)


def test_convolutions_are_the_cpus(native: ModuleType) -> None:
    with torch.device("cpu"):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, groups=2, bias=False), nn.GroupNorm(2, 8),
            nn.ConvTranspose2d(8, 4, 2, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        images = torch.randn(4, 3, 16, 16)
    there = copy.deepcopy(model).to("testdev")
    for _ in range(2):  # what they give is learned, then known
        losses = []
        for each, inputs in ((model, images), (there, images.to("testdev"))):
            loss = each(inputs).square().mean()
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    for mine, theirs in zip(there.parameters(), model.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.equal(mine.grad.cpu(), theirs.grad)


def test_inference_mode(native: ModuleType) -> None:
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    expected = layer(x).detach()
    for _ in range(2):  # what it gives is learned, then known
        with torch.inference_mode():
            y = layer(x)
            y += 1
            kept = y.cpu()
        assert torch.equal(kept, expected.cpu() + 1)


def test_leaves_on_the_host_are_copied_to(native: ModuleType) -> None:
    leaf = nn.Parameter(torch.zeros(3, device="cpu"))
    with torch.no_grad():
        leaf.copy_(torch.ones(3))
    assert leaf.tolist() == [1, 1, 1]


def test_work_runs_by_itself(native: ModuleType) -> None:
    value = torch.ones(4)
    value + value  # what it gives is known from now on
    stream, done = torch.Stream(), torch.Event(enable_timing=True)
    begun = torch.Event(enable_timing=True)
    started = time.perf_counter()
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        begun.record()
        for _ in range(5):
            native.sleep(SLEEP_US)
        twice = value + value
        done.record()
    assert time.perf_counter() - started < 5 * SLEEP_US / 1e6 and not done.query()
    done.synchronize()
    assert done.query() and begun.elapsed_time(done) >= 5 * SLEEP_US / 1e3
    assert twice.tolist() == [2.0] * 4


def test_a_missing_order_is_found(native: ModuleType) -> None:
    stream, values = torch.Stream(), torch.zeros(100)
    with stream:
        values.add_(1)
    [race] = native.take_races()
    assert f"aten::add_ on stream {stream.stream_id} writes 400 bytes" in race
    assert "aten::zero_ on stream 0 wrote" in race and "test_testdev.py" in race
    torch.accelerator.current_stream().wait_stream(stream)
    values.add_(1)
    event = torch.accelerator.current_stream().record_event()
    stream.wait_event(event)
    with stream:
        values.add_(1)
        total = values.sum()
    stream.synchronize()  # the host knows, and what it starts comes after
    values.add_(1)
    assert total.item() == 300
    assert native.take_races() == []


def test_freed_memory_is_not_read_by_another_stream(native: ModuleType) -> None:
    torch.ones(1000).sum()
    for recorded in (True, False):
        stream, values = torch.Stream(), torch.ones(1000)
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            native.sleep(SLEEP_US // 4)
            total = values.sum()
        if recorded:
            values.record_stream(stream)
        del values
        other = torch.full((1000,), 7.0)
        stream.synchronize()
        races = native.take_races()
        assert total.item() == 1000 if recorded else races
        assert (not races) == recorded
        if races:
            assert "free on stream 0 writes" in races[0] and "aten::sum" in races[0]
        del other, total
        native.take_races()


def test_the_host_cannot_touch_its_memory() -> None:
    script = """
import ctypes, torch
import tests.devices
ctypes.string_at(torch.ones(4).data_ptr(), 4)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert ended.returncode == -signal.SIGSEGV, ended.stderr


def test_memory_has_a_budget(native: ModuleType) -> None:
    held = torch.accelerator.memory_allocated()
    native.set_budget(held + (1 << 20))
    kept = torch.empty(1 << 19, dtype=torch.uint8)
    assert torch.accelerator.memory_allocated() == held + (1 << 19)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(1 << 20, dtype=torch.uint8)
    del kept
    again = torch.empty(1 << 20, dtype=torch.uint8)
    assert torch.accelerator.get_memory_info()[0] == 0
    del again
    assert torch.accelerator.memory_allocated() == held


def test_pageable_copies_are_counted_and_wait(native: ModuleType) -> None:
    host = torch.zeros(1 << 16, dtype=torch.uint8, device="cpu")
    there = torch.ones(1 << 16, dtype=torch.uint8)
    before = native.counters()
    native.sleep(SLEEP_US)
    started = time.perf_counter()
    host.copy_(there, non_blocking=True)  # not pinned: it waits all the same
    assert time.perf_counter() - started > 0.8 * SLEEP_US / 1e6 and host.all()
    after = native.counters()
    assert after["pageable_out"] == before["pageable_out"] + 1
    native.register_host(host.data_ptr(), host.nbytes)
    host.zero_()
    torch.accelerator.synchronize()
    native.sleep(SLEEP_US)
    host.copy_(there, non_blocking=True)
    assert not host.any(), "it runs by itself, later"
    torch.accelerator.synchronize()
    assert host.all() and native.counters()["pageable_out"] == after["pageable_out"]
    native.unregister_host(host.data_ptr())


def test_a_copy_across_two_registered_ranges_is_pageable(native: ModuleType) -> None:
    host = torch.zeros(8192, dtype=torch.uint8, device="cpu")
    there = torch.ones(8192, dtype=torch.uint8)
    native.register_host(host.data_ptr(), 4096)
    native.register_host(host.data_ptr() + 4096, 4096)
    before = native.counters()["pageable_in"]
    there.copy_(host, non_blocking=True)
    assert native.counters()["pageable_in"] == before + 1
    native.unregister_host(host.data_ptr())
    native.unregister_host(host.data_ptr() + 4096)
    assert native.registered_bytes() == 0
    with pytest.raises(RuntimeError, match="was not registered"):
        native.unregister_host(host.data_ptr())


def test_links_have_rates(native: ModuleType) -> None:
    host = torch.zeros(1 << 20, dtype=torch.uint8, device="cpu")
    there = torch.ones(1 << 20, dtype=torch.uint8)
    native.register_host(host.data_ptr(), host.nbytes)
    native.set_rates(10 * 2**20, 20 * 2**20)
    for copy_, seconds in ((there.copy_, 0.1), (host.copy_, 0.05)):
        source = host if copy_ == there.copy_ else there
        torch.accelerator.synchronize()
        started = time.perf_counter()
        copy_(source, non_blocking=True)
        torch.accelerator.synchronize()
        assert time.perf_counter() - started >= seconds
    native.unregister_host(host.data_ptr())


def test_backward_runs_on_a_thread_of_the_device() -> None:
    values, seen = torch.ones(3, requires_grad=True), []
    values.register_hook(lambda grad: seen.append(threading.get_ident()))
    (values * 2).sum().backward()
    assert seen and seen[0] != threading.get_ident()


def test_a_broken_device_stays_broken(native: ModuleType) -> None:
    table, bad = torch.ones(4, 4), torch.tensor([1, 2])
    F.embedding(bad, table)
    worse = torch.tensor([1, 99])
    F.embedding(worse, table)  # as on a GPU: nobody knows yet
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"an earlier task failed.*index out of range"):
            torch.accelerator.synchronize()
    native.break_down("")
    torch.accelerator.synchronize()


def test_tensors_of_the_cpu_beside_its_own_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"on the CPU with 1 dimensions beside"):
        torch.ones(3) + torch.ones(3, device="cpu")
    assert (torch.ones(3) + torch.tensor(1.0, device="cpu")).tolist() == [2.0] * 3


def test_it_has_generators_of_its_own() -> None:
    def drawn() -> list[Any]:
        first = torch.rand(5).tolist()
        dropped = F.dropout(torch.ones(50), 0.5)
        return [first, dropped.tolist(), torch.randn(3, device="cpu").tolist()]

    torch.manual_seed(3)
    first = drawn()
    with torch.random.fork_rng():
        second = drawn()
    assert drawn() == second != first
    torch.manual_seed(3)
    assert drawn() == first
    own = torch.Generator("testdev").manual_seed(3)
    assert torch.rand(5, generator=own).tolist() == first[0]


def test_autocast_and_scaling_know_it() -> None:
    layer, scaler = nn.Linear(8, 8), torch.amp.GradScaler("testdev", init_scale=4.0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with torch.autocast("testdev", dtype=torch.bfloat16):
        out = layer(torch.ones(2, 8))
    assert out.dtype is torch.bfloat16
    scaler.scale(out.float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert layer.weight.grad is not None and float(layer.weight.grad.max()) == 2.0
