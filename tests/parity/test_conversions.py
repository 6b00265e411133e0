"""``to``, ``half``, ``cpu`` and the like on a wrapped model: nothing is lost or silent."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from tests.devices import CPU, DEVICE, NAME, SIM, about_cpu
from tests.models import TinyLM, adamw, batch, train
from tests.parity.twins import close, make
from tests.resumed import weights

CALLS: dict[str, Callable[[Any], Any]] = {
    "to a dtype": lambda model: model.to(torch.float64),
    "to another model's": lambda model: model.to(torch.ones(1, dtype=torch.float16)),
    "to meta": lambda model: model.to("meta"),
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "double": lambda model: model.double(),
    "type": lambda model: model.type(torch.float64),
    "to_empty": lambda model: model.to_empty(device="meta"),
    "a container": lambda model: nn.ModuleList([model, nn.Linear(2, 2)]).half(),
}
if NAME:  # else it changes nothing
    CALLS["cpu"] = lambda model: model.cpu()
TIGHT = {"device_memory": "700KiB", "host_memory": "1500KiB"}
PLACES: list[dict[str, Any]] = [{"device": CPU}, {"device": SIM, **TIGHT}]


class WithBuffers(TinyLM):
    """Buffers that a forward uses, kept and not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("shift", torch.tensor(0.25), persistent=False)

    def forward(self, *rows: torch.Tensor) -> torch.Tensor:
        return super().forward(*rows) * self.scale + self.shift


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if "was not converted" in r.message]


@pytest.mark.parametrize("options", PLACES, ids=["cpu", "device"])
@pytest.mark.parametrize("call", CALLS)
def test_a_wrapped_model_keeps_what_it_has(
    call: str, options: dict[str, Any], tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights, buffers, state and what training gives; a warning says so, once a call."""
    runs = []
    for converted in (False, True):
        torch.manual_seed(0)
        model = WithBuffers()
        folder = tmp_path / str(converted)
        folder.mkdir()
        with overspill.wrap(
            model, adamw(model), nvme=folder, durable=False, **options
        ) as optimizer:
            train(model, optimizer, 2)
            before = weights(model)
            if converted:
                CALLS[call](model)
                assert len(told(caplog)) == 1
                assert "WithBuffers keeps weights of float32 on" in told(caplog)[0]
                assert "overspill.unwrap(model)" in told(caplog)[0]
                close(weights(model), before, 0.0)
                assert {b.dtype for b in model.buffers()} == {torch.float32}
                assert {b.device.type for b in model.buffers()} == {DEVICE.type}
            train(model, optimizer, 2)
            runs.append(weights(model))
    close(*runs, 0.0)


@pytest.mark.parametrize("options", PLACES, ids=["cpu", "device"])
def test_what_changes_nothing_says_nothing(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    with overspill.wrap(model, adamw(model), **{**options, "host_memory": "64MiB"}):
        model.to(DEVICE)
        model.float()
        model.to(torch.float32)
        assert model.to(DEVICE, torch.float32) is model
        model.blocks[0].float()
    assert not told(caplog)


def test_a_part_of_a_model_keeps_what_it_has(caplog: pytest.LogCaptureFixture) -> None:
    """As a script does that holds one of several models in one wrapped container."""
    torch.manual_seed(0)
    both = nn.ModuleList([WithBuffers(), WithBuffers()])
    with overspill.wrap(both, adamw(both), device=CPU):
        both[0].half()
        assert len(told(caplog)) == 1
        assert {p.dtype for p in both.parameters()} == {torch.float32}
        assert {b.dtype for b in both.buffers()} == {torch.float32}
        both[1].blocks[0].up.half()
        assert len(told(caplog)) == 2


@about_cpu
def test_inside_a_forward_it_is_an_error() -> None:
    """The code behind it relies on the conversion."""

    class Converts(TinyLM):
        now = False

        def forward(self, *rows: torch.Tensor) -> torch.Tensor:
            if self.now:
                self.half()
            return super().forward(*rows)

    model = Converts()
    with overspill.wrap(model, adamw(model), device=CPU):
        train_loss = model(*batch(0))
        model.now = True
        with pytest.raises(overspill.OffloadError, match="was replaced"):
            model(*batch(0))
        model.now = False
        assert torch.equal(model(*batch(0)), train_loss)


def test_the_remedy_of_the_warning_works() -> None:
    model = make()
    optimizer = overspill.wrap(model, adamw(model), device=CPU)
    train(model, optimizer, 1)
    before = weights(model)
    overspill.unwrap(model)
    model.to(torch.float64)
    assert all(torch.equal(p, before[n].double()) for n, p in model.named_parameters())
    assert "_apply" not in {name for m in model.modules() for name in vars(m)}


def test_a_model_without_an_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    model = make().eval()
    with torch.no_grad():
        expected = model(*batch(0))
        with overspill.wrap(model, device=CPU):
            model.half()
            assert torch.equal(model(*batch(0)), expected) and len(told(caplog)) == 1


def test_a_closed_model_says_that_it_is_closed() -> None:
    model = make()
    overspill.wrap(model, adamw(model), device=CPU).close()
    with pytest.raises(overspill.OffloadError, match="closed"):
        model.half()


def test_copies_of_parts_convert_as_usual(caplog: pytest.LogCaptureFixture) -> None:
    model = make()
    with overspill.wrap(model, adamw(model), device=CPU):
        for copied in (
            copy.deepcopy(model.blocks[0].up), copy.deepcopy(model.blocks[0].up)
        ):  # fmt: skip
            copied.half()
            assert {p.dtype for p in copied.parameters()} == {torch.float16}
        again = copy.deepcopy(copied).double()
        assert {p.dtype for p in again.parameters()} == {torch.float64}
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert not told(caplog)
    overspill_free = nn.Linear(2, 2)
    assert pickle.loads(pickle.dumps(overspill_free)).half().weight.dtype == torch.float16


def test_a_lora_script_that_converts_after_its_last_step(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As diffusers' scripts for LoRA end: the adapter is written, with the trained values."""
    peft = pytest.importorskip("peft")
    from safetensors.torch import load_file

    torch.manual_seed(0)
    base = TinyLM().to(torch.bfloat16)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["up", "down"]))
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.data = p.to(torch.float32)  # diffusers' cast_training_params
    (tmp_path / "store").mkdir()
    inner = torch.optim.AdamW(trained, lr=1e-2)
    optimizer = overspill.wrap(
        model, inner, device=CPU, host_memory="900KiB", nvme=tmp_path / "store"
    )
    for seed in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            model(*batch(seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    model = model.to(torch.float32)
    model.save_pretrained(tmp_path / "adapter")
    optimizer.close()
    assert "bfloat16" in told(caplog)[0]
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(found) == len(expected) == 16
    for name, value in found.items():
        mine = expected[name.replace(".weight", ".default.weight")]
        assert value.dtype == torch.float32 and torch.equal(value, mine.cpu())
