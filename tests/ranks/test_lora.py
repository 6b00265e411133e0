"""LoRA over frozen shards: on every tier, packed, and read in place from a checkpoint's files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import overspill

from .spawned import RATES, folder_of, spawn, whole

LAYERS, STEPS = 3, 3
CI = 2  # ranks, where not all formats are tried
DEVICE = 1120 * 1024  # bytes of all ranks together


def tight(size: int) -> dict[str, Any]:
    """Device memory for a part of a rank's shards."""
    return {"device_memory": DEVICE // size}


raw = DTensor._local_tensor.__get__  # type: ignore[attr-defined]


def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=120, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16)


def adapted(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, lora_dropout=0.1))  # type: ignore[arg-type]
    return model


def spread(model: Any, **options: Any) -> Any:
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train(model: Any, optimizer: torch.optim.Optimizer, rank: int, first: int = 0) -> list[float]:
    losses = []
    torch.manual_seed(5)  # of dropout
    for number in range(first, first + STEPS):
        drawn = torch.Generator().manual_seed(100 * number + rank)
        tokens = torch.randint(0, 120, (2, 32), generator=drawn)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def wrapped(model: nn.Module, folder: Path | None = None, **options: Any) -> Any:
    given = {"device": "sim", "host_memory": "1GiB", "rates": RATES, **options}
    if folder is not None:
        given["nvme"] = folder_of(folder)
    return overspill.wrap(model, optimizer_of(model), **given)


def homes_of(optimizer: Any) -> set[str]:
    """Where frozen weights are."""
    layout = optimizer.plan.detail.layout
    pairs = zip(layout.units, layout.homes, strict=True)
    return {home.weights.value for unit, home in pairs if not unit.trainable}


def forms_of(size: int) -> tuple[str, ...]:
    """The formats that are tried; both where CI does not wait for it."""
    return ("nf4",) if size == CI else ("int8", "nf4")


def frozen_shards(rank: int, size: int, folder: Path) -> None:
    """The losses do not depend on where the base is, and without a format they are FSDP2's."""
    model = spread(adapted(base()))
    expected = train(model, optimizer_of(model), rank)
    untouched = whole(model)
    for form in (None, *forms_of(size)):
        model = spread(adapted(base()))
        with wrapped(model, frozen=form) as optimizer:
            losses = train(model, optimizer, rank)
        places: list[dict[str, Any]] = [
            tight(size), {**tight(size), "activations": "recompute"},
            {**tight(size), "host_memory": "600KiB", "folder": folder / f"{size}{form}"},
        ]  # fmt: skip
        for number, place in enumerate(places):
            model = spread(adapted(base()))
            with wrapped(model, frozen=form, **place) as optimizer:
                found = train(model, optimizer, rank)
                assert optimizer.memory["device"].peak_bytes <= DEVICE // size
                assert "host" in homes_of(optimizer) or number == 2
                if number == 2:
                    assert "nvme" in homes_of(optimizer), homes_of(optimizer)
                values = whole(model)
            assert found == losses, (form, place)
        if form is None:
            assert losses == pytest.approx(expected, rel=1e-3)
            for name, value in values.items():
                if "lora" not in name:
                    assert torch.equal(value, untouched[name]), name
        else:
            assert losses != expected and losses == pytest.approx(expected, rel=0.05)


def resumed_elsewhere(rank: int, size: int, folder: Path) -> None:
    """A run over a packed base goes on, and its base stays as it was packed."""
    for form in forms_of(size):
        run = folder_of(folder / f"run-{form}-{size}")
        model = spread(adapted(base()))
        with wrapped(model, run, frozen=form, **tight(size)) as optimizer:
            train(model, optimizer, rank)
            weights = whole(model)
            expected = train(model, optimizer, rank, STEPS)
            optimizer.rollback()
        run = folder_of(folder / f"again-{form}-{size}")
        model = spread(adapted(base()))
        with wrapped(model, run, frozen=form, **tight(size)) as optimizer:
            train(model, optimizer, rank)
        model = spread(adapted(base()))
        optimizer, _ = overspill.resume(
            model,
            run,
            optimizer_of(model),
            device="sim",
            host_memory="1GiB",
            rates=RATES,
            **tight(size),
        )
        with optimizer:
            for name, value in whole(model).items():
                assert torch.equal(value, weights[name]), (form, name)
            assert train(model, optimizer, rank, STEPS) == expected


def reads_once(rank: int, size: int, folder: Path) -> None:
    """Each rank reads its rows in place: together they read as much as one device does."""
    model = spread(empty())
    tighter = {"host_memory": "600KiB", "device_memory": DEVICE * 2 // 3 // size, "durable": False}
    with wrapped(model, folder / f"reads-{size}", weights=folder / "base", **tighter) as optimizer:
        train(model, optimizer, rank)
        read: list[Any] = [None] * size
        dist.all_gather_object(read, optimizer.stats.read.bytes)
    frozen = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    # In forward and in backward, but for what stays in memory.
    assert 1.1 * frozen <= sum(read) <= 1.5 * frozen, (read, frozen)


def in_place(rank: int, size: int, folder: Path) -> None:
    """A base that was never in memory: built empty, and read from the folder row by row.

    The adapters are those of one device, where the first rank's random numbers draw them.
    """
    alone = empty()
    torch.manual_seed(1)
    with wrapped(alone, weights=folder / "base"):
        drawn = {n: p.detach().clone() for n, p in overspill.named_weights(alone) if "lora" in n}
    states, losses = [], list[float]()
    for number, place in enumerate(({}, tight(size), {**tight(size), "frozen": "nf4"})):
        model = spread(empty())
        torch.manual_seed(1 + rank)  # the first rank's numbers count: the adapters are the same
        with wrapped(model, weights=folder / "base", **place) as optimizer:
            states.append(torch.get_rng_state())
            for name, value in whole(model).items():
                assert "lora" not in name or torch.equal(value, drawn[name]), name
            found = train(model, optimizer, rank)
            layout = optimizer.plan.detail.layout
            if number == 1:
                assert len(layout.in_place) >= LAYERS, "read where they are"
            values = whole(model)
        losses = losses or found
        if number == 1:
            assert found == losses
            for name, p in base().named_parameters():
                kept = values[f"base_model.model.{name}"] if "proj" not in name else None
                assert kept is None or torch.equal(kept, p), name
    reads_once(rank, size, folder)
    if rank:  # other ranks' random numbers are their own
        torch.manual_seed(1 + rank)
        assert torch.equal(states[0], torch.get_rng_state())


def empty() -> nn.Module:
    """The model with adapters, all of it on ``meta``."""
    config = base().config
    with overspill.empty_init():
        model = adapted(LlamaForCausalLM(config).to(torch.bfloat16))
    assert all(p.is_meta for p in model.parameters())
    return model


def refused_files(rank: int, size: int, folder: Path) -> None:
    """After an error the model is on meta, as before, and can be wrapped with the right files."""
    with torch.device("meta"):
        model = spread(adapted(LlamaForCausalLM(base().config).to(torch.bfloat16)))
    with pytest.raises(overspill.OffloadError, match="it is not persistent"):
        wrapped(model, weights=folder / "base")
    model = spread(empty())
    with pytest.raises(ValueError, match="does not match the model"):
        wrapped(model, weights=folder / "other")
    assert all(p.is_meta for p in model.parameters())
    with pytest.raises(overspill.BudgetError):
        wrapped(model, weights=folder / "base", host_memory="64KiB", device_memory="64KiB")
    assert all(p.is_meta for p in model.parameters())
    with wrapped(model, weights=folder / "base") as optimizer:
        assert all(map(torch.isfinite, map(torch.tensor, train(model, optimizer, rank))))


def host_shards(rank: int, size: int, folder: Path) -> None:
    """With FSDP2's CPUOffloadPolicy, the engine takes shards from host memory."""
    policy = CPUOffloadPolicy(pin_memory=False)
    expected = train(model := spread(adapted(base())), optimizer_of(model), rank)
    model = spread(adapted(base()), offload_policy=policy)
    with wrapped(model, **tight(size)) as optimizer:
        assert any(raw(p).is_meta for p in model.parameters())
        assert train(model, optimizer, rank) == pytest.approx(expected, rel=1e-3)
        overspill.unwrap(model)
    assert all(not raw(p).is_meta and p.isfinite().all() for p in model.parameters())
    train(model, optimizer_of(model), rank)


WORKS: list[Callable[..., Any]] = [
    frozen_shards, resumed_elsewhere, in_place, refused_files, host_shards
]  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    model = base()
    model.save_pretrained(folder / "base")
    small = LlamaForCausalLM(LlamaConfig(
        hidden_size=64, intermediate_size=256, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=120,
    ))  # fmt: skip
    small.save_pretrained(folder / "other")
    return folder


def all_of_it(rank: int, size: int, folder: Path) -> None:
    """In one process a rank, which takes long to import peft and transformers."""
    for work in WORKS:
        work(rank, size, folder)


@pytest.mark.parametrize("size", [CI, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 3))])
def test_on_ranks(size: int, files: Path) -> None:
    spawn(size, all_of_it, files)


def begins(rank: int, size: int, folder: Path, form: str) -> dict[str, torch.Tensor]:
    model = spread(adapted(base()))
    with wrapped(model, folder, frozen=form, **tight(size)) as optimizer:
        train(model, optimizer, rank)
        return whole(model)


def goes_on(rank: int, size: int, folder: Path, form: str) -> dict[str, torch.Tensor]:
    model = spread(empty() if form == "int8" else adapted(base()))  # values are in the store
    optimizer, _ = overspill.resume(
        model, folder, optimizer_of(model), device="sim", host_memory="1GiB", rates=RATES
    )
    with optimizer:
        found = whole(model)
        train(model, optimizer, rank, STEPS)
    return found


@pytest.mark.soak
@pytest.mark.parametrize("form", ["int8", "nf4"])
@pytest.mark.parametrize("sizes", [(2, 1), (1, 3), (3, 2)], ids=str)
def test_a_packed_base_on_other_ranks(sizes: tuple[int, int], form: str, tmp_path: Path) -> None:
    """int8 has a scale for each row, so rows that are packed again are the same."""
    before, *_ = spawn(sizes[0], begins, tmp_path, form)
    after, *_ = spawn(sizes[1], goes_on, tmp_path, form)
    for name, value in after.items():
        if "lora" in name or form == "int8":
            assert torch.equal(value, before[name]), name
        else:
            assert (value - before[name]).abs().max() <= before[name].abs().max() / 16, name


def merges(rank: int, size: int, folder: Path) -> None:
    """Merged weights are those of the whole weights; afterwards the adapters are as before."""
    for frozen in (None, "nf4"):
        model = spread(adapted(base()))
        optimizer = wrapped(model, frozen=frozen, **tight(size))
        train(model, optimizer, rank)
        found, out = dict(overspill.named_weights(model)), folder / str(frozen)
        layer = "base_model.model.model.layers.1.self_attn.q_proj"
        a, b = (found[f"{layer}.lora_{one}.default.weight"] for one in "AB")
        expected = found[f"{layer}.base_layer.weight"] + (b @ a) * 2  # lora_alpha / r
        with overspill.materialized(model):
            model.merge_adapter()
            if rank == 0:
                model.get_base_model().save_pretrained(out)
        merged = model.get_submodule(layer).merged_adapters
        assert merged == [] and b.any()
        with overspill.materialized(model):
            assert torch.equal(
                model.get_submodule(layer).base_layer.weight, found[f"{layer}.base_layer.weight"]
            )
        dist.barrier()
        saved = load_file(out / "model.safetensors")
        close = saved["model.layers.1.self_attn.q_proj.base_layer.weight"]
        torch.testing.assert_close(close, expected.cpu().to(close.dtype), rtol=0.02, atol=1e-3)
        train(model, optimizer, rank, first=STEPS)
        optimizer.close()


def test_adapters_are_merged(tmp_path: Path) -> None:
    spawn(2, merges, tmp_path)
