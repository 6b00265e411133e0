"""Activations of models on several ranks: moved, packed and recomputed, with the losses of kept."""

from __future__ import annotations

import abc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import overspill
from overspill.private import torch_private

from .spawned import (
    RATES,
    VOCABULARY,
    WIDTH,
    Block,
    Net,
    adamw,
    folder_of,
    net,
    sharded,
    spawn,
    whole,
)
from .test_meshes import on_mesh, size_of

MIB = 1 << 20
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# What a model keeps: 64 rows of 64 tokens, of which a storage of each layer is larger than 1 MiB.
KEPT: dict[str, Any] = {"activations": "keep"}
CASES: list[dict[str, Any]] = [
    {"activations": "host", "device_memory": "3MiB"},
    {"activations": "nvme", "device_memory": "3MiB", "nvme": True},
    {"activations": "recompute"},
    {"activations": "auto", "device_memory": "3MiB"},
    {"activations": "host", "device_memory": "3MiB", "update": "step"},
    {"activations": "nvme", "device": "cpu", "nvme": True},
]  # fmt: skip


def loss_of(model: nn.Module, number: int, rank: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(1000 * number + rank)
    tokens = torch.randint(0, VOCABULARY, (64, 65), generator=drawn)
    logits = model(tokens[:, :-1]).flatten(0, 1).float()
    return functional.cross_entropy(logits, tokens[:, 1:].flatten())


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, *, clips: bool = True
) -> list[float]:
    losses = []
    for number in range(3):
        for micro in range(2):  # accumulated
            loss = loss_of(model, 2 * number + micro, rank)
            loss.backward()
            losses.append(loss.item())
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Checkpointing(Net):
    """Its loop uses torch's own checkpoints."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.shift
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        found: torch.Tensor = self.head(x)
        return found


class Abstract(Net):
    """Its layers have a metaclass, with which FSDP2 makes classes of another module."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.__class__ = _AbstractBlock


class _AbstractBlock(Block, abc.ABC):
    pass


def of_fsdp(kind: Callable[[], nn.Module], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model: Any = kind()
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    found: nn.Module = model
    return found


MODELS: dict[str, Callable[[], nn.Module]] = {
    "fsdp": sharded, "ddp": lambda: DistributedDataParallel(net()),
    "whole": lambda: fully_shard(net()),  # one unit, which is the model itself
    "kept weights": partial(of_fsdp, Net, reshard_after_forward=False),
    "half": partial(of_fsdp, Net, mp_policy=HALF),
    "checkpoints": partial(of_fsdp, Checkpointing),
}  # fmt: skip


def run(
    make: Callable[[], nn.Module], rank: int, folder: Path, *, clips: bool = True, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Losses, final weights, and figures of a run."""
    model = make()
    given = {"device": "sim", "host_memory": "1GiB", **options}
    if given.get("nvme"):
        given["nvme"] = folder_of(folder)
    with overspill.wrap(model, adamw(model), rates=RATES, **given) as optimizer:
        losses = train(model, optimizer, rank, clips=clips)
        figures = {tier.value: each.peak_bytes for tier, each in optimizer.memory.items()}
        figures["copied out"] = optimizer.stats.copy_out.bytes
        layout = optimizer.plan.detail.layout
        assert layout is not None
        figures["streams"] = not all(home.resident for home in layout.homes)
        if isinstance(model, DistributedDataParallel):
            return losses, {n: p.detach().clone() for n, p in model.named_parameters()}, figures
        return losses, whole(model), figures


def same_bits(rank: int, size: int, folder: Path, kinds: list[str]) -> None:
    for kind in kinds:
        make = MODELS[kind]
        expected, weights, kept = run(make, rank, folder, **KEPT)
        for number, case in enumerate(CASES):
            found, values, figures = run(make, rank, folder / f"{kind}{number}", **case)
            assert found == expected, (kind, case)
            for name, value in values.items():
                assert torch.equal(value, weights[name]), (kind, case, name)
            if case["activations"] in ("host", "auto") and kind not in ("whole", "checkpoints"):
                assert figures["device"] <= 3 * MIB
                assert figures["host"] >= kept["host"] + 4 * MIB, (kind, figures)
            if case["activations"] == "nvme":
                assert figures["nvme"] > (0 if kind == "checkpoints" else 2 * MIB), (kind, figures)


@pytest.mark.parametrize(
    "size, kinds",
    [
        (2, ["fsdp", "ddp"]), (1, ["half", "checkpoints"]),
        pytest.param(2, [*MODELS][2:], marks=pytest.mark.soak),
        pytest.param(4, [*MODELS], marks=pytest.mark.soak),
    ],
)  # fmt: skip
def test_bits_are_those_of_kept_activations(size: int, kinds: list[str], tmp_path: Path) -> None:
    assert 64 * 64 * WIDTH * 4 * 4 >= 2 * MIB
    spawn(size, same_bits, tmp_path, kinds)


def tensor_parallel(rank: int, size: int, folder: Path, kind: str) -> None:
    """What layers save is in part ``DTensor``s; torch does not clip norms over several meshes."""
    make = partial(on_mesh, kind)
    expected, weights, kept = run(make, 0, folder, clips=False, **KEPT)
    for number, case in enumerate(CASES):
        if case["activations"] == "recompute":
            with pytest.raises(ValueError, match="not for tensor parallelism"):
                run(make, 0, folder, **case)
            continue
        found, values, figures = run(make, 0, folder / f"{kind}{number}", clips=False, **case)
        assert found == expected, (kind, case)
        for name, value in values.items():
            assert torch.equal(value, weights[name]), (kind, case, name)
        if case["activations"] in ("host", "auto"):
            assert figures["device"] <= 3 * MIB
            assert kept["copied out"] == 0 and figures["copied out"] >= 8 * MIB, (kind, figures)


@pytest.mark.parametrize("kind", ["tp alone", pytest.param("sequence", marks=pytest.mark.soak)])
def test_bits_of_tensor_parallelism(kind: str, tmp_path: Path) -> None:
    spawn(size_of(kind), tensor_parallel, tmp_path, kind)


class Wide(Net):
    """Its weights take as much memory as what a layer keeps."""

    def __init__(self) -> None:
        super().__init__(layers=16)
        for layer in self.layers:
            assert isinstance(layer, Block)
            layer.up, layer.down = nn.Linear(WIDTH, 64 * WIDTH), nn.Linear(64 * WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(tokens[:2]).repeat(32, 1, 1)
        return found


def streams_all(rank: int, size: int, folder: Path) -> None:
    """Shards, state and activations leave the device at once."""
    wide = partial(of_fsdp, Wide)
    expected, weights, _ = run(wide, rank, folder, **KEPT)
    for number, policy in enumerate(("host", "recompute", "auto")):
        found, values, figures = run(
            wide, rank, folder / f"{number}", activations=policy, device_memory="5MiB",
            host_memory="96MiB", nvme=True, tokens=2 * 64,
        )  # fmt: skip
        assert figures["streams"], figures
        assert policy == "recompute" or figures["device"] <= 5 * MIB, (policy, figures)
        assert found == expected and all(torch.equal(values[n], w) for n, w in weights.items())


def recomputes(rank: int, size: int, folder: Path) -> None:
    """A unit's forward runs once more in backward, and what it would keep is not held."""
    abstract = partial(of_fsdp, Abstract)
    for make in (sharded, lambda: DistributedDataParallel(net()), abstract):
        model: Any = make()
        inner = getattr(model, "module", model)
        runs: list[bool] = []
        inner.layers[0].up.register_forward_hook(partial(_records, runs))
        with overspill.wrap(
            model, adamw(model), device="sim", rates=RATES, host_memory="1GiB",
            activations="recompute",
        ) as optimizer:  # fmt: skip
            for number in range(3):
                loss_of(model, number, rank).backward()
                optimizer.step()
            # A hook is code that must first be seen to change nothing.
            assert runs == [False, *[False, True] * 2], runs


def _records(runs: list[bool], *_: Any) -> None:
    runs.append(torch_private.in_backward())


def packs(rank: int, size: int, folder: Path) -> None:
    """Packed activations change the losses a little, and only from the first update on."""
    expected, _, _ = run(sharded, rank, folder, **KEPT)
    found, _, _ = run(
        sharded, rank, folder, activations="host", activations_format="int8", device_memory="12MiB"
    )
    assert found[:2] == expected[:2] and found != expected
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("work", [streams_all, recomputes, packs])
def test_on_two_ranks(work: Callable[..., Any], tmp_path: Path) -> None:
    spawn(2, work, tmp_path)
