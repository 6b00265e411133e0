"""Layers that keep quantised weights in buffers, as those of GPTQ do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import overspill
from overspill.optim.quantised import Codes, Scaling, codes_of, dequantise, table_of
from tests.devices import CPU, SIM, about_cpu, normal, plainly
from tests.parity.test_packed_by_others import losses

pytestmark = about_cpu
WIDTH, GROUP = 64, 32
PLACES: dict[str, dict[str, Any]] = {
    "device": {"device": SIM, "device_memory": "56KiB", "host_memory": "400KiB"},
    "host": {"device": CPU, "host_memory": "80KiB"},
}


class QuantLinear(nn.Module):
    """A layer of 4-bit codes along its inputs, with scales and zero points of groups."""

    def __init__(self) -> None:
        super().__init__()
        groups = WIDTH // GROUP
        words = torch.randint(-(2**31), 2**31 - 1, (WIDTH // 8, WIDTH), dtype=torch.int32)
        zeros = torch.randint(-(2**31), 2**31 - 1, (groups, WIDTH // 8), dtype=torch.int32)
        self.register_buffer("qweight", words)
        self.register_buffer("qzeros", zeros)
        self.register_buffer("scales", torch.rand(groups, WIDTH).half() / 64)
        self.register_buffer("g_idx", (torch.arange(WIDTH) // GROUP).int())
        self.register_buffer("shifts", torch.arange(0, 32, 4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = (self.qweight.unsqueeze(1) >> self.shifts.view(1, -1, 1)) & 15
        zeros = (self.qzeros.unsqueeze(2) >> self.shifts.view(1, 1, -1)) & 15
        index = self.g_idx.long()
        weight = self.scales[index] * (codes.reshape(WIDTH, WIDTH) - zeros.flatten(1)[index])
        return x @ weight.to(x.dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = QuantLinear()
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x) + self.b(self.a(x)))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(6)))


@pytest.mark.parametrize("precision", [None, "fp32"])
@pytest.mark.parametrize("place", PLACES)
def test_they_move_and_compute_the_same(place: str, precision: Any, tmp_path: Path) -> None:
    """While training, in files, after ``unwrap`` and after ``resume``."""
    (tmp_path / "store").mkdir()
    plain, model = build(), build()
    expected = losses(plain, plainly(overspill.optim.AdamW, list(plain.parameters()), lr=0.01))
    names, buffers = list(model.state_dict()), dict(model[0].base.named_buffers())
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {**PLACES[place], "precision": precision, "nvme": tmp_path / "store"}
    plan = overspill.plan(model, inner, rates=overspill.Rates(), **options)
    assert dict(model[0].base.named_buffers()).keys() == buffers.keys(), "as it was"
    with overspill.wrap(model, inner, **options) as optimizer:
        assert losses(model, optimizer) == expected
        assert sorted(model.state_dict()) == sorted(names)
        moved = optimizer.stats.copy_in.bytes + optimizer.stats.lanes["read"].bytes
        assert moved > 6 * 2 * buffers["qweight"].nbytes
        assert plan.tier_bytes == optimizer.plan.tier_bytes
        optimizer.save(tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in plain.state_dict().items())
    again = build()
    inner = torch.optim.AdamW(again.parameters(), lr=0.01)
    overspill.resume(again, tmp_path / "store", inner, **PLACES[place])
    overspill.unwrap(again)
    assert dict(again[0].base.named_buffers()).keys() == buffers.keys()
    for name, value in again.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name


def test_buffers_are_buffers_again_after_an_error() -> None:
    model = build()
    before = {name: (id(b), b.clone()) for name, b in model.named_buffers()}
    count = len(list(model.parameters()))
    with pytest.raises(overspill.BudgetError):
        overspill.wrap(model, torch.optim.AdamW(model.parameters()), device=SIM, device_memory=4096)
    assert len(list(model.parameters())) == count
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name][1])


def test_a_refused_plan_leaves_the_engine_alone(tmp_path: Path) -> None:
    """As when a cell of a notebook is run again."""
    plain, model = build(), build()
    expected = losses(plain, plainly(overspill.optim.AdamW, list(plain.parameters()), lr=0.01))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    with overspill.wrap(model, inner, nvme=tmp_path, **PLACES["device"]) as optimizer:
        for call in (overspill.plan, overspill.wrap):
            with pytest.raises(overspill.OffloadError, match="wrapped already"):
                call(model, torch.optim.AdamW(model.parameters()), device=CPU)
        assert losses(model, optimizer) == expected
    again = build()
    inner = torch.optim.AdamW(again.parameters(), lr=0.01)
    optimizer, _ = overspill.resume(again, tmp_path, inner, **PLACES["device"])
    optimizer.close()


def test_layers_may_share_their_codes() -> None:
    model = build()
    model[1].base.qweight = model[0].base.qweight
    with torch.no_grad():
        expected = model(normal(0, 4, WIDTH))
        with overspill.wrap(model, **PLACES["device"]):
            assert torch.equal(model(normal(0, 4, WIDTH)), expected)
            overspill.unwrap(model)
    assert model[1].base.qweight is model[0].base.qweight
    assert "qweight" in dict(model[1].base.named_buffers(remove_duplicate=False))


def test_the_layer_here_is_one_of_gptq() -> None:
    layer = build()[0].base
    zeros = codes_of(Codes("rows", 4, 2, WIDTH, 32), layer.qzeros.reshape(-1).view(torch.uint8))
    weight = torch.empty(WIDTH * WIDTH, dtype=torch.float16)
    dequantise(
        Codes("interleaved", 4, WIDTH, WIDTH), layer.qweight.reshape(-1).view(torch.uint8),
        table_of("unsigned", 4, torch.device("cpu")), layer.scales.t().float().contiguous(),
        Scaling((1, GROUP), through=torch.float16), weight, zeros=zeros.t().float().contiguous(),
    )  # fmt: skip
    x = normal(0, 4, WIDTH)
    assert torch.equal(layer(x), x @ weight.view(WIDTH, WIDTH).t().float())
