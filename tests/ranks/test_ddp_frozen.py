"""Frozen weights under ``DistributedDataParallel``: on every tier, packed, and read in place."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import overspill
from overspill.ranks.world import World
from overspill.state.contents import Contents
from tests.unit.test_shared_memory import mapped_bytes

from .spawned import RATES, VOCABULARY, folder_of, loss_of, spawn
from .test_shared_memory import kept_bytes, read_from_disk_once

WIDTH, STEPS = 64, 3
TIGHT = {"device_memory": "140KiB"}  # for one unit and little more
PLACES: list[dict[str, Any]] = [
    {}, TIGHT, {**TIGHT, "activations": "recompute"}, {**TIGHT, "host_memory": "600KiB", "nvme": 1},
    {"device": "cpu"}, {"device_memory": "210KiB", "resident": ["layers.1"]},
    {**TIGHT, "activations": "host"},
]  # fmt: skip


class Adapted(nn.Module):
    """A frozen layer with an adapter, as LoRA has."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.base = nn.Linear(inside, outside).requires_grad_(False)
        self.a, self.b = nn.Linear(inside, 2, bias=False), nn.Linear(2, outside, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = Adapted(WIDTH, 2 * WIDTH), Adapted(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Its frozen embedding is tied to the head, one block runs twice, and one is checkpointed.

    Its first parameter is frozen, and its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(WIDTH) + 0.01 * torch.rand(WIDTH, WIDTH))
        self.mix.requires_grad = False
        self.embed = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.shift, self.still = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.ones(()))
        self.still.requires_grad = False
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) @ self.mix + self.shift * self.still
        x = self.layers[2](self.layers[1](self.layers[0](x)))
        x = checkpoint(self.layers[3], self.layers[1](x), use_reentrant=False)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def net(*, empty: bool = False) -> Net:
    torch.manual_seed(0)
    model = Net()
    if empty:
        for module in model.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                if not p.requires_grad:
                    setattr(module, name, nn.Parameter(p.detach().to("meta"), requires_grad=False))
        model.head.weight = model.embed.weight
    return model


def replicated(model: nn.Module, **options: Any) -> Any:
    """DDP sends no parameters that are on meta."""
    away = [name for name, p in model.named_parameters(remove_duplicate=False) if p.is_meta]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, away)
    return DistributedDataParallel(model, **options)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)


def wrapped(model: nn.Module, folder: Path | None = None, **options: Any) -> Any:
    given = {"device": "sim", "host_memory": "256MiB", "rates": RATES, **options}
    if given.get("device") == "cpu":
        given.pop("device_memory", None)
    if folder is not None:
        given["nvme"] = folder_of(folder)
    return overspill.wrap(model, adamw(model), **given)


def train(
    model: Any, optimizer: torch.optim.Optimizer, rank: int, first: int = 0, *,
    accumulate: int = 1, clip: float | None = None,
) -> list[float]:  # fmt: skip
    losses = []
    for number in range(first, first + STEPS):
        for micro in range(accumulate):
            with model.no_sync() if micro < accumulate - 1 else nullcontext():
                loss = loss_of(model, number * accumulate + micro, rank)
                loss.backward()
            losses.append(loss.item())
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            losses.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def layout_of(optimizer: Any) -> Any:
    return optimizer.plan.detail.layout


def same_losses(rank: int, size: int, folder: Path) -> None:
    """They are DDP's with the unpacked weights, wherever these are."""
    for form in (None, "int8", "nf4"):
        options: dict[str, Any] = {"frozen": form} if form else {"weights": folder / "base"}
        plain, alone = net(), net(empty=form is None)
        with wrapped(alone, **options):
            packed = weights_of(alone)
        model = replicated(net(empty=form is None))
        with wrapped(model, **options) as optimizer:
            for name, value in dict(overspill.named_weights(model)).items():
                mine = plain.get_parameter(name)
                assert form or torch.equal(value, mine), name
                assert torch.equal(value, packed[name]), (form, name)
                mine.data.copy_(value)
        how = {"accumulate": 2, "clip": 0.5} if form == "int8" else {}
        reference = replicated(plain, gradient_as_bucket_view=form == "nf4")
        expected = train(reference, adamw(reference), rank, **how)
        found = list[float]()
        for number, place in enumerate(PLACES):
            model = replicated(net(empty=form is None), gradient_as_bucket_view=form == "nf4")
            place = dict(place)
            where = folder / f"{form}{number}" if place.pop("nvme", None) else None
            update = ("step", "next_forward")[number % 2]
            with wrapped(model, where, **options, **place, update=update) as optimizer:
                losses = train(model, optimizer, rank, **how)
                homes = zip(layout_of(optimizer).units, layout_of(optimizer).homes, strict=True)
                moves = [not h.resident for unit, h in homes if not unit.trainable]
                if "device_memory" in place:
                    assert any(moves), (form, place)
                    budget = int(place["device_memory"][:3]) << 10
                    assert optimizer.memory["device"].peak_bytes <= budget
                same = form is None or "resident" not in place  # which are not packed
                for name, value in weights_of(model.module).items() if same else ():
                    apart = (value - plain.get_parameter(name)).abs().max()
                    assert apart <= 1e-6, (form, place, name)
            found = found or losses
            assert losses == found or not same, (form, place)
        assert found == pytest.approx(expected, rel=2e-6), form


def held_once(rank: int, size: int, folder: Path) -> None:
    """The ranks of a machine map the same host memory, and read files once."""
    for options in {"frozen": "int8"}, {"weights": folder / "base"}:
        assert not kept_bytes()
        with mock.patch.object(World, "shared_memory", return_value=None):
            model = replicated(net(empty="weights" in options))
            with wrapped(model, **options, **TIGHT) as optimizer:
                assert not layout_of(optimizer).shared_places
                losses = train(model, optimizer, rank)
                alone = optimizer.memory["host"].held_bytes
        model = replicated(net(empty="weights" in options))
        with wrapped(model, **options, **TIGHT) as optimizer:
            dist.barrier()
            shared = layout_of(optimizer).regions.host_shared
            assert len(layout_of(optimizer).shared_places) >= 2, options
            seen = mapped_bytes("Rss"), mapped_bytes("Pss")
            assert seen[0] == shared, (options, seen)
            assert abs(seen[1] - shared / size) <= 4096, (options, seen, shared)  # it is rounded
            if "frozen" in options:
                less = shared - shared // size
                assert optimizer.memory["host"].held_bytes <= alone - less + 65536
            assert train(model, optimizer, rank) == losses
            dist.barrier()
        del model, optimizer
        assert not kept_bytes()


def read_once(rank: int, size: int, folder: Path) -> None:
    """What host memory has no room for is read by each rank in each pass, but from disk once."""
    model = replicated(net(empty=True))
    options = {"weights": folder / "base", "host_memory": f"{8340 * size}KiB"}
    with wrapped(model, **options, **TIGHT) as optimizer:
        assert len(layout_of(optimizer).in_place) >= 4 and not layout_of(optimizer).shared_places
        file = folder / "base" / "model.safetensors"
        read_from_disk_once(file, optimizer, lambda: train(model, optimizer, rank))


def readers(rank: int, size: int, folder: Path) -> None:
    """Weights are read, copied, saved, merged and given back as those of an ordinary model."""
    model = replicated(net())
    optimizer = wrapped(model, folder / "readers", frozen="int8", commit_every=1000, **TIGHT)
    train(model, optimizer, rank)
    expected = weights_of(model.module)
    inside = model.module
    if rank == 0:  # a rank may read on its own
        with torch.no_grad():
            seen = inside(torch.arange(5)[None])
        state = inside.state_dict()
        assert all(torch.equal(state[name], value) for name, value in expected.items())
        assert state["head.weight"] is state["embed.weight"]
        target = io.BytesIO()
        torch.save(inside, target)
        target.seek(0)
        for other in copy.deepcopy(inside), torch.load(target, weights_only=False):
            assert all(torch.equal(p, expected[n]) for n, p in other.named_parameters())
            assert torch.equal(other(torch.arange(5)[None]), seen)
    found = dict(overspill.named_weights(model))
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    with overspill.materialized(model):
        for block in inside.layers:
            block.up.base.weight.data += block.up.b.weight @ block.up.a.weight
        merged = inside.layers[0].up.base.weight.detach().clone()
    assert not torch.equal(merged, expected["layers.0.up.base.weight"])
    assert all(torch.equal(p, expected[name]) for name, p in inside.named_parameters())
    optimizer.save(folder / "saved")
    dist.barrier()
    saved = load_file(folder / "saved" / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in expected.items())
    model.load_state_dict(model.state_dict())
    later = train(model, optimizer, rank, STEPS)
    optimizer.rollback()  # to the commit of ``save``
    assert train(model, optimizer, rank, STEPS) == later
    overspill.unwrap(model)
    optimizer.close()
    assert all(type(p) is nn.Parameter and not p.is_meta for p in model.parameters())
    frozen = [name for name, p in inside.named_parameters() if not p.requires_grad]
    assert all(torch.equal(inside.get_parameter(name), expected[name]) for name in frozen)
    assert train(model, adamw(model), rank)


def edits(rank: int, size: int, folder: Path) -> None:
    """Packed weights cannot be edited; those beside them can, and the change is committed."""
    model = replicated(net())
    with wrapped(model, folder / "edits", frozen="int8", commit_every=1000, **TIGHT) as optimizer:
        train(model, optimizer, rank)
        why = "^layers.0.up.base.weight is not trained, and is kept in the format of frozen="
        with pytest.raises(overspill.OffloadError, match=why), torch.no_grad():
            model.module.layers[0].up.base.weight.mul_(2.0)
        with torch.no_grad():
            model.module.norm.weight.fill_(0.5)
            model.module.still.fill_(2.0)
        before = weights_of(model)
        refused = pytest.raises(overspill.OffloadError, match=why)
        with refused, overspill.materialized(model, writeback=True):
            for p in model.module.parameters():
                p.data += 1.0
        assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
        with overspill.materialized(model, writeback=True):
            model.module.norm.bias.data.fill_(0.25)
        optimizer.commit()
        losses = train(model, optimizer, rank, STEPS)
        optimizer.rollback()
        assert (model.module.norm.weight == 0.5).all() and model.module.still == 2.0
        assert (model.module.norm.bias == 0.25).all()
        assert train(model, optimizer, rank, STEPS) == losses


def resumes(rank: int, size: int, folder: Path) -> None:
    for form in "int8", None:
        options: dict[str, Any] = {"frozen": form} if form else {"weights": folder / "base"}
        run = folder / f"run-{form}"
        model = replicated(net(empty=form is None))
        with wrapped(model, run, **options, **TIGHT) as optimizer:
            train(model, optimizer, rank)
            optimizer.commit()
            expected, weights = train(model, optimizer, rank, STEPS), weights_of(model.module)
            optimizer.rollback()
        run = folder / f"again-{form}"
        model = replicated(net(empty=form is None))
        with wrapped(model, run, **options, **TIGHT) as optimizer:
            train(model, optimizer, rank)
        dist.barrier()
        for number in range(2):
            model = replicated(net(empty=True))
            optimizer, _ = overspill.resume(
                model, run, adamw(model), device="sim", host_memory="256MiB", rates=RATES,
                nvme=folder_of(folder / f"other-{form}") if number == 0 else None, **TIGHT,
            )  # fmt: skip
            with optimizer:
                assert layout_of(optimizer).shared_places, (form, number)
                losses = train(model, optimizer, rank, STEPS)
                if (number == 0 and form) or size > 2:  # packed again, or summed by DDP otherwise
                    assert losses == pytest.approx(expected, rel=1e-5)
                    continue
                assert losses == expected, (form, number)
                for name, value in weights_of(model.module).items():
                    assert torch.equal(value, weights[name]), name


def fails_together(rank: int, size: int, folder: Path) -> None:
    """After an error on one rank, all are as before, but for weights that were packed already."""
    model = replicated(net())
    expected = weights_of(model)
    for options in {"frozen": "int8", "host_memory": "1KiB"}, {"weights": folder / "none"}:
        with pytest.raises((ValueError, overspill.OffloadError)):
            wrapped(model, **options, **TIGHT)
        assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())
    fails = mock.patch.object(Contents, "load_page", side_effect=KeyError("drawn"))
    model = replicated(net(empty=True))
    for _ in range(2):
        with (
            fails if rank == 1 else nullcontext(),
            pytest.raises((KeyError, overspill.OffloadError)),
        ):
            wrapped(model, weights=folder / "base", frozen="int8", **TIGHT)
        gc.collect()
        assert all(p.is_meta != p.requires_grad for p in model.parameters())
    with wrapped(model, weights=folder / "base", frozen="int8", **TIGHT) as optimizer:
        train(model, optimizer, rank)


def refusals(rank: int, size: int, folder: Path) -> None:
    model = replicated(net())
    for options, why in (
        ({"precision": "bf16"}, "reserved memory for gradients"),
        ({"resident": ["layers.1"]}, "without frozen= or weights=, since all"),
        ({"weights": folder / "base", "update": "backward"}, "final only when backward is over"),
    ):
        with pytest.raises(ValueError, match=why):
            wrapped(model, **options)  # type: ignore[arg-type]
    with pytest.raises(overspill.OffloadError, match="pass weights= to wrap"):
        wrapped(replicated(net(empty=True)), frozen="int8")
    train(model, adamw(model), rank)


WORKS: list[Callable[..., Any]] = [
    same_losses, held_once, read_once, readers, edits, resumes, fails_together, refusals
]  # fmt: skip


def all_of_it(rank: int, size: int, folder: Path) -> None:
    for work in WORKS:
        work(rank, size, folder)


def save_base(folder: Path) -> None:
    weights = {name: p for name, p in net().state_dict().items() if name != "head.weight"}
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_ddp(size: int, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    save_base(tmp_path / "base")
    spawn(size, all_of_it, tmp_path)
