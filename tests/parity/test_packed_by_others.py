"""Layers that bitsandbytes has quantised: the same bits, what moves of them, what is refused."""

from __future__ import annotations

import copy
import subprocess
import sys
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


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_biases_of_another_dtype(kind: str, compute: torch.dtype) -> None:
    """bitsandbytes converts them to the dtype of the product, in its first forward, for good."""

    def build_biased() -> nn.Sequential:
        model = build(kind)
        for block in model:
            if kind == "4 bits":
                block.base.compute_dtype = compute
            bias = torch.linspace(-1, 1, WIDTH, dtype=torch.bfloat16)
            block.base.bias = nn.Parameter(bias, requires_grad=False)
        return model

    plain, model = build_biased(), build_biased()
    expected = losses(plain, plainly(overspill.optim.AdamW, trained(plain), lr=0.01))
    inner = torch.optim.AdamW(trained(model), lr=0.01)
    with overspill.wrap(model, inner, **STREAMED[SIM]) as optimizer:
        assert losses(model, optimizer) == expected
        assert model[0].base.bias.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_an_unwrapped_model_is_one_of_bitsandbytes_alone(kind: str, tmp_path: Path) -> None:
    """In a process that knows nothing of overspill."""
    model = (layer(kind, bias=False) if kind == "4 bits" else layer(kind)).to("cpu").train()
    x = normal(0, 4, WIDTH)
    with torch.no_grad():
        expected = model(x)
    root = nn.Sequential(model)
    overspill.wrap(root, device=SIM, device_memory="1MiB")
    overspill.unwrap(root)
    torch.save((model, x, expected), tmp_path / "model.pt")
    script = (
        "import sys, torch\n"
        f"model, x, expected = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "with torch.no_grad(): assert torch.equal(model(x), expected)\n"
        "assert 'overspill' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_codes_in_another_order_are_refused() -> None:
    model = nn.Sequential(layer("4 bits"), nn.Linear(WIDTH, 1)).to("cpu")
    model[0].weight.quant_state.packing_format_for_cpu = True
    inner = torch.optim.AdamW(model[1].parameters())
    with pytest.raises(overspill.OffloadError, match="wrap it before its first forward"):
        overspill.wrap(model, inner, device=CPU)
    model = nn.Sequential(layer("4 bits"), nn.Linear(WIDTH, 1)).to("cpu")
    with overspill.wrap(model, torch.optim.AdamW(model[1].parameters()), device=CPU) as optimizer:
        assert len(losses(model, optimizer)) == 4
        model.eval()
        with torch.no_grad():
            model(normal(0, 4, WIDTH))
        assert not getattr(model[0].weight.quant_state, "packing_format_for_cpu", False)


def test_a_base_that_is_quantised_otherwise_is_refused(tmp_path: Path) -> None:
    def build_with(block: int) -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(layer("4 bits"), nn.Linear(WIDTH, 1))
        model[0].weight.blocksize = block
        return model.to("cpu")

    model = build_with(64)
    inner = torch.optim.AdamW(model[1].parameters())
    with overspill.wrap(model, inner, nvme=tmp_path, **STREAMED[CPU]) as optimizer:
        expected = losses(model, optimizer)
    for block in (128, 64):
        again = build_with(block)
        inner = torch.optim.AdamW(again[1].parameters())
        if block == 128:
            with pytest.raises(overspill.OffloadError, match="load the same base in the same way"):
                overspill.resume(again, tmp_path, inner, **STREAMED[CPU])
            continue
        resumed, _ = overspill.resume(again, tmp_path, inner, **STREAMED[CPU])
        with resumed:
            assert losses(again, resumed)[0] < expected[0]


def test_what_stays_on_the_device_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Packed(nn.Linear):
        """Its codes are in a buffer of another name than those of GPTQ."""

        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("codes", torch.zeros(64, 64, dtype=torch.int32))

    model = nn.Sequential(Packed(), nn.Linear(4, 4))
    inner = torch.optim.AdamW(trained(model))
    with overspill.wrap(model, inner, nvme=tmp_path, **STREAMED[SIM]):
        assert "stay on the device, and every commit writes them" in caplog.text
        assert "0.codes (Tensor)" in caplog.text
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
