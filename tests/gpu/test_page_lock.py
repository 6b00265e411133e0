"""Host memory that CUDA refuses to page-lock: no error stays pending, and copies are right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.io_engine import Lease, allocate_host
from overspill.movement.accelerators.streams import StreamsAccelerator
from overspill.movement.accelerators.vendors import VENDORS
from overspill.optim import cuda_kernels as device_kernels
from tests.models import TinyLM, adamw, batch, weights

MIB = 1 << 20
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def memory() -> Iterator[Lease]:
    with allocate_host(8 * MIB) as lease:
        yield lease


def launch() -> None:
    torch.ones(4, device="cuda").add_(1)


def test_a_refused_registration_leaves_no_error(memory: Lease) -> None:
    device, runtime = torch.device("cuda:0"), torch.cuda.cudart()
    cuda = VENDORS["cuda"]
    assert cuda.register is not None and cuda.unregister is not None
    cuda.register(memory.address, memory.nbytes, device)
    try:
        launch()
        assert runtime.cudaHostRegister(memory.address, memory.nbytes, 0) != 0
        with pytest.raises(RuntimeError):  # this is what is at stake
            launch()
        launch()
        with pytest.raises(RuntimeError, match="CUDA error"):
            cuda.register(memory.address, memory.nbytes, device)
        launch()
    finally:
        cuda.unregister(memory.address)
    cuda.unregister(memory.address)  # is refused
    launch()


def test_copies_across_what_is_locked_and_what_is_not(memory: Lease) -> None:
    accelerator = StreamsAccelerator(torch.device("cuda:0"))
    try:
        for at in (1, 4):
            assert accelerator.page_lock(memory.address + at * MIB, 2 * MIB)
        host = torch.from_numpy(memory.array)
        host.copy_(torch.randint(0, 256, (host.numel(),), dtype=torch.uint8))
        wanted = host.clone()
        there = accelerator.allocate(host.numel())
        accelerator.copy_in(there, host, after=(), on_done=lambda _: None).synchronize()
        assert torch.equal(there.cpu(), wanted)
        host.zero_()
        accelerator.copy_out(host, there, after=(), on_done=lambda _: None).synchronize()
        assert torch.equal(host, wanted)
    finally:
        accelerator.close()


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_run_without_locked_memory_has_the_same_bits(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {
        "device": "cuda", "device_memory": "700KiB", "host_memory": "64MiB", "durable": False,
        "activations": "host", "rates": overspill.Rates(),
    }  # fmt: skip

    def trained(folder: str) -> tuple[list[float], dict[str, torch.Tensor], int]:
        torch.manual_seed(0)
        model = TinyLM().cpu()
        (tmp_path / folder).mkdir()
        losses = []
        with overspill.wrap(model, adamw(model), nvme=tmp_path / folder, **options) as optimizer:
            for number in range(3):
                loss = model(*(each.cuda() for each in batch(number)))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss))
            return losses, weights(model), optimizer.plan.detail.pageable_bytes

    cuda, taken, limit = VENDORS["cuda"], list[int](), 1 << 40

    def register(address: int, nbytes: int, device: torch.device) -> None:
        taken.append(nbytes)
        if sum(taken) > limit:
            raise RuntimeError("CUDA error 2")
        assert cuda.register is not None
        cuda.register(address, nbytes, device)

    monkeypatch.setitem(VENDORS, "cuda", replace(cuda, register=register))
    wanted = trained("locked")
    limit = int(share * sum(taken))
    taken.clear()
    losses, found, pageable = trained("pageable")
    assert losses == wanted[0] and not wanted[2] and pageable
    assert all(torch.equal(value, found[name]) for name, value in wanted[1].items())


def test_a_verdict_without_locked_memory_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros

    def refusing(*size: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return zeros(*size, **options)

    monkeypatch.setattr(torch, "zeros", refusing)
    assert device_kernels._verdict_flag(torch.device("cuda:0")).device.type == "cuda"
