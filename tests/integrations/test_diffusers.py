"""What scripts of diffusers do to a model that is wrapped: averages, networks beside it, dtypes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import overspill
from tests.devices import CPU, DEVICE, about_cpu, plainly
from tests.families.diffusion import DIFFUSION
from tests.families.test_families import moved, places

pytest.importorskip("diffusers")
FAMILY = DIFFUSION["stable diffusion"]
STEPS = 3


def wrapped(model: Any, inner: Any, place: str, folder: Path) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"nvme": folder, "durable": False, "rates": overspill.Rates()}
    return overspill.wrap(model, inner, **options, **places(model, 64 << 10)[place])


def averaging(model: Any, optimizer: Any, out: Path) -> list[Any]:
    """A loop with ``EMAModel``, whose values are put into the model for a while, and at the end."""
    from diffusers.training_utils import EMAModel

    average = EMAModel(
        model.parameters(), 0.9, use_ema_warmup=True, model_cls=type(model),
        model_config=model.config,
    )  # fmt: skip
    average.to(DEVICE)
    found: list[Any] = []
    for seed in range(STEPS):
        loss = FAMILY.loss(model, moved(FAMILY.batch(seed)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        found.append(loss.item())
        average.store(model.parameters())
        average.copy_to(model.parameters())
        with torch.no_grad():
            found.append(FAMILY.loss(model, moved(FAMILY.batch(9))).item())
        average.restore(model.parameters())
    average.save_pretrained(out / "average")
    average.copy_to(model.parameters())
    model.save_pretrained(out / "model")
    return found


@pytest.mark.parametrize("place", ["tight device", *["tight cpu"] * (CPU == "cpu")])
def test_an_average_of_diffusers(place: str, tmp_path: Path) -> None:
    plain, model = FAMILY.build().to(DEVICE), FAMILY.build()
    theirs = plainly(overspill.optim.AdamW, list(plain.parameters()), lr=1e-2)
    expected = averaging(plain, theirs, tmp_path / "plain")
    with wrapped(model, torch.optim.AdamW(model.parameters(), lr=1e-2), place, tmp_path) as ours:
        assert averaging(model, ours, tmp_path / "ours") == expected
    fresh = FAMILY.build().state_dict()
    for name in ("average", "model"):
        saved, mine = (
            type(model).from_pretrained(tmp_path / run / name).state_dict()
            for run in ("plain", "ours")
        )
        assert all(torch.equal(value, mine[key]) for key, value in saved.items())
        assert any(not torch.equal(value, fresh[key]) for key, value in saved.items())


class Network(nn.Module):
    """A LoRA that is no part of the model: it takes the place of a layer's ``forward``."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)
        self.before: Callable[[torch.Tensor], torch.Tensor] = layer.forward
        layer.forward = self.forward  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.before(x) + self.up(self.down(x))


def with_network(model: Any) -> nn.ModuleList:
    model.requires_grad_(False)
    torch.manual_seed(1)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return nn.ModuleList([Network(layer) for layer in layers])


def train(model: Any, network: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    found = []
    for seed in range(STEPS):
        loss = FAMILY.loss(model, moved(FAMILY.batch(seed)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("when", ["before wrap", "after wrap"])
@pytest.mark.parametrize("place", ["tight device", *["tight cpu"] * (CPU == "cpu")])
def test_a_network_beside_the_model(place: str, when: str, tmp_path: Path) -> None:
    plain, model = FAMILY.build().to(DEVICE), FAMILY.build()
    network = with_network(plain).to(DEVICE)
    expected = train(plain, network)
    mine = with_network(model).to(DEVICE) if when == "before wrap" else None
    model.requires_grad_(False)
    with wrapped(model, None, place, tmp_path):
        mine = with_network(model).to(DEVICE) if mine is None else mine
        assert train(model, mine) == expected
        assert all(
            torch.equal(a, b) for a, b in zip(network.parameters(), mine.parameters(), strict=True)
        )


@about_cpu
@pytest.mark.parametrize("first", ["unwrap", "nothing"])
def test_a_script_that_casts_before_it_saves(
    first: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """While it is wrapped the model keeps its dtype, and a warning says so."""
    model = FAMILY.build()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with wrapped(model, inner, "tight device", tmp_path):
        if first == "unwrap":
            overspill.unwrap(model)
        model.to(torch.float16).save_pretrained(tmp_path / "saved")
    again = load_file(tmp_path / "saved/diffusion_pytorch_model.safetensors")
    expected = torch.float16 if first == "unwrap" else torch.float32
    assert {value.dtype for value in again.values()} == {expected}
    assert all(
        torch.equal(v.to(expected), again[k]) for k, v in FAMILY.build().state_dict().items()
    )
    assert ("was not converted" in caplog.text) == (first == "nothing")
