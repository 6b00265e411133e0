"""Layers that bitsandbytes has quantised: the same bits, what moves of them, what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import overspill
from overspill.facts.tier import Tier
from tests.devices import CPU, SIM, about_cpu, normal, plainly

nn_of_theirs: Any = pytest.importorskip("bitsandbytes.nn")
pytestmark = about_cpu  # the test device has no kernels of theirs

WIDTH = 64
KINDS = ("4 bits", "8 bits")
STREAMED = {
    CPU: {"device": CPU, "host_memory": "24KiB"},
    SIM: {"device": SIM, "device_memory": "24KiB", "host_memory": "100KiB"},
}


def layer(kind: str, **options: Any) -> Any:
    if kind == "8 bits":
        return nn_of_theirs.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False)
    return nn_of_theirs.Linear4bit(
        WIDTH, WIDTH, compute_dtype=torch.float32, quant_type="nf4", **options
    )


class Block(nn.Module):
    """A quantised base with an adapter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.base = layer(kind).requires_grad_(requires_grad=False)
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.base(x) + self.b(self.a(x))


def build(kind: str, *, quantised: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(kind) for _ in range(4)))
    return model.to("cpu") if quantised else model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def losses(model: nn.Module, optimizer: Any, steps: int = 4) -> list[float]:
    found = []
    for number in range(steps):
        loss = model(normal(number, 4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(each.detach().contiguous().view(-1).view(torch.uint8) for each in (a, b)))


@pytest.mark.parametrize("place", STREAMED)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits(kind: str, place: str, tmp_path: Path) -> None:
    """While training, in files, after ``unwrap`` and after ``resume``."""
    store = tmp_path / "store"
    store.mkdir()
    plain, model = build(kind), build(kind)
    expected = losses(plain, plainly(overspill.optim.AdamW, trained(plain), lr=0.01))
    inner = torch.optim.AdamW(trained(model), lr=0.01)
    options = {"nvme": store, **STREAMED[place]}
    with overspill.wrap(model, inner, **options) as optimizer:
        assert losses(model, optimizer) == expected
        optimizer.save(tmp_path / "out")
    saved, state = load_file(tmp_path / "out" / "model.safetensors"), plain.state_dict()
    assert saved.keys() == state.keys()
    assert all(same_bits(saved[name], value) for name, value in state.items())
    again = build(kind)
    optimizer, _ = overspill.resume(
        again, store, torch.optim.AdamW(trained(again), lr=0.01), **STREAMED[place]
    )
    assert optimizer.step_count == 4
    overspill.unwrap(again)
    assert all(same_bits(value, state[name]) for name, value in again.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_codes_move_and_nothing_keeps_them(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither graphs nor layers: the largest of eight would otherwise not fit."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(kind) for _ in range(8))).to("cpu")
    inner = torch.optim.AdamW(trained(model), lr=0.01)
    more = {**STREAMED[SIM], "host_memory": "400KiB"}
    with overspill.wrap(model, inner, **more) as optimizer:
        losses(model, optimizer)
        codes = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
        assert optimizer.stats.copy_in.bytes > codes, "in forward, and again in backward"
        device = optimizer.memory[Tier.DEVICE]
        assert device.peak_bytes <= device.budget_bytes
        model.eval()
        with torch.no_grad():
            model(normal(0, 4, WIDTH))
    assert not [each for each in caplog.records if each.name.startswith("overspill")]


def test_what_stays_on_the_device_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Packed(nn.Linear):
        """As GPTQ's layers, which keep their codes in buffers."""

        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("qweight", torch.zeros(64, 64, dtype=torch.int32))

    model = nn.Sequential(Packed(), nn.Linear(4, 4))
    inner = torch.optim.AdamW(trained(model))
    with overspill.wrap(model, inner, nvme=tmp_path, **STREAMED[SIM]):
        assert "stay on the device, and every commit writes them" in caplog.text
        assert "0.qweight (Tensor)" in caplog.text
        assert "To move weights that another library has quantised" in caplog.text
    caplog.clear()
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    with overspill.wrap(model, torch.optim.AdamW(model.parameters()), device=CPU):
        assert not caplog.records


@pytest.mark.parametrize("frozen", ["nf4", "int8"])
def test_the_base_moves_if_overspill_packs_it(
    frozen: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As the warning says."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 1))
    model[:3].requires_grad_(requires_grad=False)
    inner = torch.optim.AdamW(trained(model), lr=0.01)
    with overspill.wrap(model, inner, device=SIM, device_memory="32KiB", frozen=frozen) as made:
        assert len(losses(model, made)) == 4
        assert made.stats.copy_in.bytes > 0
    assert not caplog.records


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_are_not_quantised_yet_are_refused(kind: str) -> None:
    model = build(kind, quantised=False)
    inner = torch.optim.AdamW(trained(model), lr=0.01)
    with pytest.raises(overspill.OffloadError, match=r"call model.to\('cpu'\) before wrap"):
        overspill.wrap(model, inner, device=CPU)
    model.to("cpu")  # the remedy
    with overspill.wrap(model, inner, device=CPU) as optimizer:
        assert len(losses(model, optimizer)) == 4


@pytest.mark.parametrize("remedy", ["integers", "no precision"])
def test_codes_that_are_stored_as_numbers_are_not_converted(remedy: str) -> None:
    def build_with(storage: torch.dtype) -> Any:
        made = nn.Sequential(layer("4 bits", quant_storage=storage), nn.Linear(WIDTH, 1))
        return made.to("cpu")

    model = build_with(torch.bfloat16)
    inner = torch.optim.AdamW(model[1].parameters())
    with pytest.raises(overspill.OffloadError, match=r"bnb_4bit_quant_storage=torch\.uint8"):
        overspill.wrap(model, inner, device=CPU, precision="fp32")
    options = {"precision": "fp32"} if remedy == "integers" else {}
    if remedy == "integers":
        model = build_with(torch.uint8)
    plain = copy.deepcopy(model)
    expected = losses(plain, plainly(overspill.optim.AdamW, list(plain[1].parameters()), lr=0.01))
    inner = torch.optim.AdamW(model[1].parameters(), lr=0.01)
    with overspill.wrap(model, inner, device=SIM, device_memory="1MiB", **options) as optimizer:
        assert losses(model, optimizer) == expected


def test_weights_that_are_quantised_when_they_are_used_are_trained() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn_of_theirs.Linear8bitLt(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    with overspill.wrap(model, inner, device=CPU) as optimizer:
        found = losses(model, optimizer, 8)
    assert found[-1] < found[0]
