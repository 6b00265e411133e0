"""Families with what long sequences need: attention that is kept while units are recomputed, layers
in tiles, and micro-batches that are repeated after they ran out of memory."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.activations import offloader, tiles
from tests.devices import DEVICE, about_sim, plainly
from tests.families.diffusion import DIFFUSION
from tests.families.table import FAMILIES, Family
from tests.families.test_families import drop_kept_graphs, moved, places
from tests.robust.test_make_room import Failing

STEPS, LR = 3, 1e-2
WITHOUT_TILES = {"gpt2", "opt", "bert", "t5", "mixtral"}  # their layers are not known
NAMES = (
    "llama", "qwen3", "mistral", "gemma2", "gemma3 text", "phi3", "neox", "falcon", "vit", "flux",
    "dit", "gpt2", "opt", "bert", "t5", "mixtral",
)  # fmt: skip
ALL = {**FAMILIES, **DIFFUSION}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations of tiny models move, and their layers run in tiles."""
    monkeypatch.setattr(offloader, "LEAST_BYTES", 1 << 10)
    monkeypatch.setattr(tiles, "TILE_BYTES", 1)
    monkeypatch.setattr(tiles, "LEAST_TOKENS", 5)


def micro_batch(family: Family, model: Any, step: int) -> torch.Tensor:
    torch.manual_seed(step)  # of dropout
    loss = family.loss(model, moved(family.batch(step)))
    loss.backward()
    drop_kept_graphs(model)
    return loss.detach()


def plain_run(family: Family) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = family.build().train()
    inner = plainly(overspill.optim.AdamW, list(model.parameters()), lr=LR)
    model.to(DEVICE)
    losses = []
    for step in range(STEPS):
        losses.append(micro_batch(family, model, step).item())
        inner.step()
        inner.zero_grad()
    return losses, model.state_dict()


def run(
    family: Family, place: str, folder: Path, fails: random.Random | None = None, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    model = family.build().train()
    inner = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    given = {**places(model, family.beside + (128 << 10))[place], "nvme": folder, **options}
    with overspill.wrap(model, inner, durable=False, rates=overspill.Rates(), **given) as ours:
        for step in range(STEPS):
            if fails is None:
                losses.append(micro_batch(family, model, step).item())
            else:
                losses.append(ours.with_room(failing(family, model, step, fails)).item())
            ours.step()
            ours.zero_grad()
        computed = dict(ours._engine._loop.tuner.recompute.computed)
        return losses, {n: t.clone() for n, t in model.state_dict().items()}, computed


def failing(family: Family, model: Any, step: int, chance: random.Random) -> Any:
    """Return what runs a micro-batch, and fails at a drawn operator at first."""
    modes = [Failing(chance.randrange(20, 200))]

    def once() -> torch.Tensor:
        first = bool(modes)
        with modes.pop() if first else Failing(None):
            loss = micro_batch(family, model, step)
        assert not first, "it has failed"
        return loss

    return once


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())


@about_sim
@pytest.mark.parametrize("name", NAMES)
def test_attention_that_is_kept(name: str, tmp_path: Path) -> None:
    family = ALL[name]
    found = run(family, "tight device", tmp_path, activations="selective")
    same(found, plain_run(family))
    assert found[2], "units are recomputed"


@about_sim
@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_TILES])
def test_layers_in_tiles(name: str, tmp_path: Path) -> None:
    """The same bits in tight and in ample memory, and the losses of plain torch to rounding."""
    family = ALL[name]
    model = family.build()
    layers = set(tiles.layers_in(model))
    assert layers
    names = [name for name, module in model.named_modules() if module in layers]
    tight = run(family, "tight device", tmp_path, tile=names, activations="host")
    same(run(family, "ample device", tmp_path, tile=names, activations="keep"), tight)
    torch.testing.assert_close(tight[0], plain_run(family)[0], rtol=1e-3, atol=1e-4)


@about_sim
@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_that_run_out_of_memory(name: str, tmp_path: Path) -> None:
    family = ALL[name]
    found = run(family, "tight device", tmp_path, random.Random(0), activations="auto")
    same(found, plain_run(family))
