"""Frozen weights that are read in place, from the files that ``weights=`` names."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from torch import nn

import overspill
from overspill.durable.inspect import inspect_store
from overspill.facts.tier import Tier
from overspill.io_engine.file_ranges import LEAST_THREADS, held_bytes
from overspill.movement.memory import Memory
from tests.crossed import crossed
from tests.devices import CPU, DEVICE, SIM, normal
from tests.parity import test_inference as inference
from tests.parity.test_partly_frozen import WIDTH, build, trained

RATES = overspill.Rates()
READER = held_bytes(LEAST_THREADS) >> 10  # KiB that reads come through
TIGHT: dict[str, dict[str, Any]] = {
    "device": {
        "device": SIM, "device_memory": "120KiB", "host_memory": f"{READER + 160}KiB"
    },
    "resident": {"device": SIM, "device_memory": "64MiB", "host_memory": f"{READER + 200}KiB"},
}  # fmt: skip
if CPU == "cpu":
    TIGHT["host"] = {"device": CPU, "host_memory": f"{READER + 250}KiB"}
    TIGHT["cached"] = {"device": CPU, "host_memory": "64MiB"}
LLAMA = hf.LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
MIXTRAL = hf.MixtralConfig(**{
    **LLAMA.to_dict(), "num_local_experts": 4, "num_experts_per_tok": 2, "architectures": None,
    "model_type": "mixtral",
})  # fmt: skip
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(LLAMA),
    "mixtral": lambda: hf.MixtralForCausalLM(MIXTRAL),
}


def file_of(model: nn.Module, folder: Path, name: str = "base.safetensors") -> Path:
    """All weights, behind one that is nobody's: where they begin is no multiple of anything."""
    state = {n: t.detach().cpu().clone().contiguous() for n, t in model.state_dict().items()}
    save_file({"a": torch.zeros(3, dtype=torch.uint8), **state}, folder / name)
    return folder / name


def written(optimizer: Any) -> list[Any]:
    return [s for s in optimizer._engine.trace.spans() if s.lane == "write"]


def steps(model: nn.Module, optimizer: Any, first: int, last: int) -> list[float]:
    losses = []
    for number in range(first, last):
        loss = model(normal(number, 4, WIDTH)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model), lr=1e-2)


@pytest.fixture
def loaded(tmp_path: Path) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and weights after six steps of the same model, loaded before wrap."""
    model = build()
    with overspill.wrap(
        model, adamw(model), device=SIM, device_memory="64MiB", host_memory="64MiB", rates=RATES
    ) as made:
        losses = steps(model, made, 0, 6)
        return losses, [p.detach().cpu().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("place", "update", "durable"),
    crossed(list(TIGHT), ["step", "next_forward", "backward"], [True, False], every=2),
)
def test_training_is_the_same_and_none_of_it_is_written(
    place: str, update: Any, durable: bool, tmp_path: Path, loaded: Any
) -> None:
    file = file_of(build(), tmp_path)
    before = file.read_bytes(), file.stat().st_mtime_ns
    (tmp_path / "store").mkdir()
    model = build()
    options = {**TIGHT[place], "update": update, "durable": durable, "nvme": tmp_path / "store"}
    with overspill.wrap(
        model, adamw(model), weights=file, ignore_weights=["a"], rates=RATES, **options
    ) as made:
        losses = steps(model, made, 0, 6)
        after = [p.detach().cpu().clone() for p in model.parameters()]
        layout = made.plan.detail.layout
        held = made.memory[Tier.HOST]
    assert losses == loaded[0]
    assert all(map(torch.equal, after, loaded[1]))
    frozen = {u.index for u in layout.units if not u.trainable}
    if not (place == "resident" and not durable):  # there, units live on the device as a whole
        assert layout.in_place == frozen
    assert not [s for s in written(made) if "(frozen)" in s.name]
    assert held.peak_bytes <= held.budget_bytes
    assert before == (file.read_bytes(), file.stat().st_mtime_ns)


# The test device has no histogram of whole numbers, by which tokens come to their experts.
@pytest.mark.parametrize("family", ["llama", "mixtral"] if CPU == "cpu" else ["llama"])
@pytest.mark.parametrize("place", TIGHT)
def test_inference_needs_no_store_and_no_room_for_the_model(
    place: str, family: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain = FAMILIES[family]().to(torch.bfloat16).eval()
    plain.save_pretrained(tmp_path / "hub", max_shard_size="100KB")
    tokens = torch.arange(10, device="cpu").view(2, 5).to(DEVICE)
    with torch.no_grad():
        expected = plain.to(DEVICE)(tokens).logits
    with overspill.empty_init():
        model = FAMILIES[family]().to(torch.bfloat16).eval()
    size = max(sum(p.nbytes for p in layer.parameters()) for layer in model.model.layers)
    room = {**TIGHT[place], "weights": tmp_path / "hub", "rates": RATES}
    if place in ("device", "host"):
        room["host_memory"] = (READER << 10) + 3 * size
    if place == "device":
        room["device_memory"] = 3 * size
    with overspill.wrap(model, **room) as made, torch.no_grad():
        layout = made.plan.detail.layout
        if place != "resident":
            assert layout.in_place == {u.index for u in layout.units if u.weight_bytes}
        for _ in range(4):
            assert torch.equal(model(tokens).logits, expected)
        assert place != "cached" or not made.stats.lanes["read"].bytes
        assert place != "host" or made.stats.lanes["read"].bytes
        for name, value in plain.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
        generated = model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
    theirs = plain.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(generated, theirs)


def test_only_what_lies_in_the_files_as_in_memory_is_read_in_place(tmp_path: Path) -> None:
    """Another dtype, or a unit that lacks a tensor there, is loaded as ever."""
    file = file_of(inference.build().to(torch.bfloat16), tmp_path)
    model = inference.build()
    options: dict[str, Any] = {"host_memory": "64MiB", "rates": RATES, **inference.PLACES["device"]}
    with overspill.wrap(model, weights=file, ignore_weights=["a"], **options) as made:
        assert not made.plan.detail.layout.in_place
    model = inference.build()
    with overspill.wrap(
        model, weights=file, ignore_weights=["a"], precision="bf16", **options
    ) as made:
        assert made.plan.detail.layout.in_place == {*range(inference.BLOCKS)}
        assert made.plan.tier_bytes[Tier.NVME] == made.plan.disk_bytes == 0


def test_a_run_goes_on_with_the_same_files_alone(tmp_path: Path, loaded: Any) -> None:
    place = next(iter(TIGHT))
    (tmp_path / "files").mkdir()
    file = file_of(build(), tmp_path / "files")
    (tmp_path / "store").mkdir()
    model = build()
    options = {**TIGHT[place], "rates": RATES}
    with overspill.wrap(
        model, adamw(model), weights=file, ignore_weights=["a"], nvme=tmp_path / "store", **options
    ) as made:
        losses = steps(model, made, 0, 3)
    whole = file.read_bytes()
    assert not inspect_store(tmp_path / "store").wrong
    at = len(whole) - 3000
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    (told,) = inspect_store(tmp_path / "store").wrong
    assert "since the store was made" in told
    model = build()
    with pytest.raises(overspill.CorruptionError, match="since the store was made"):
        made, _ = overspill.resume(model, tmp_path / "store", adamw(model), **options)
        try:
            steps(model, made, 3, 4)
        finally:
            made.close()
    file.write_bytes(whole[:-1])
    with pytest.raises(overspill.OffloadError, match=r"has .* bytes, and the store has weights"):
        overspill.resume(build(), tmp_path / "store", **options)
    file.unlink()
    with pytest.raises(overspill.OffloadError, match="is not there"):
        overspill.resume(build(), tmp_path / "store", **options)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (moved / file.name).write_bytes(whole)
    model = build()
    made, _ = overspill.resume(model, tmp_path / "store", adamw(model), weights=moved, **options)
    with made:
        losses += steps(model, made, 3, 6)
        assert losses == loaded[0]
        made.save(tmp_path / "export")
        final = {n: t.detach().cpu().clone() for n, t in model.state_dict().items()}
    assert all(map(torch.equal, final.values(), loaded[1]))
    from safetensors.torch import load_file

    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == final.keys()
    assert all(torch.equal(exported[name], value) for name, value in final.items())


def test_a_store_moves_to_other_directories_without_them(tmp_path: Path) -> None:
    file = file_of(build(), tmp_path)
    for name in ("store", "other"):
        (tmp_path / name).mkdir()
    options = {**TIGHT["device"], "rates": RATES}
    model = build()
    with overspill.wrap(
        model, adamw(model), weights=file, ignore_weights=["a"], nvme=tmp_path / "store", **options
    ) as made:
        expected = steps(model, made, 0, 2)
        made.commit()
        shutil.copytree(tmp_path / "store", tmp_path / "kept")
        expected += steps(model, made, 2, 4)
    model = build()
    made, _ = overspill.resume(
        model, tmp_path / "kept", adamw(model), nvme=tmp_path / "other", **options
    )
    with made:
        assert steps(model, made, 2, 4) == expected[2:]


def test_what_is_read_in_place_is_not_changed(tmp_path: Path) -> None:
    file = file_of(build(), tmp_path)
    model = build()
    name, options = "1.base.weight", {**TIGHT["device"], "rates": RATES}
    with overspill.wrap(
        model,
        adamw(model),
        weights=file,
        ignore_weights=["a"],
        nvme=tmp_path,
        durable=False,
        **options,
    ) as made:
        losses = steps(model, made, 0, 1)
        same = {n: t.clone() for n, t in model.state_dict().items()}
        model.load_state_dict(same)  # changes nothing
        p = model.get_parameter(name)
        other = {**same, name: same[name] + 1}
        with pytest.raises(overspill.OffloadError, match=r"1\.base\.weight .* in place"):
            model.load_state_dict(other)
        with (
            pytest.raises(overspill.OffloadError, match="cannot be changed"),
            overspill.materialized(model, writeback=True),
            torch.no_grad(),
        ):
            p.add_(1.0)
        with torch.no_grad(), pytest.raises(overspill.OffloadError, match="cannot be changed"):
            p.add_(1.0)
            model(normal(0, 4, WIDTH))
        assert torch.equal(p.detach(), same[name])
        losses += steps(model, made, 1, 3)
    model = build()
    with overspill.wrap(model, adamw(model), device=SIM, device_memory="64MiB", rates=RATES) as m:
        assert steps(model, m, 0, 3) == losses


def test_a_file_that_changes_amid_a_run_ends_it(tmp_path: Path) -> None:
    file = file_of(inference.build(), tmp_path)
    options = inference.PLACES["all tiers"] | {"host_memory": f"{READER + 600}KiB"}
    model = inference.build()
    with (
        overspill.wrap(model, weights=file, ignore_weights=["a"], rates=RATES, **options) as made,
        torch.no_grad(),
    ):
        model(normal(0, 3, 64))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 0x10
        with file.open("r+b") as opened:
            opened.write(data)
        with pytest.raises(overspill.CorruptionError, match="since it was first read"):
            for number in range(3):
                model(normal(number, 3, 64))
        assert made.plan.fits


def test_a_plan_says_so_and_reads_headers_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = file_of(inference.build(), tmp_path)
    with overspill.empty_init():
        model = inference.build()
    made = overspill.plan(
        model, device=CPU, weights=file, ignore_weights=["a"], rates=RATES,
        host_memory=f"{READER + 600}KiB",
    ) if CPU == "cpu" else None  # fmt: skip
    if made is not None:
        assert made.fits and made.disk_bytes == 0 and made.link_bytes["read"] > 0
        assert made.tier_bytes[Tier.HOST] <= (READER + 600) << 10
        short = overspill.plan(
            model, device=CPU, weights=file, ignore_weights=["a"], host_memory="1MiB", rates=RATES
        )
        assert not short.fits


def test_a_file_that_is_replaced_before_it_is_opened_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header says where in one file things lie: of another one they would be other bytes."""
    file = file_of(inference.build(), tmp_path)
    other = file_of(inference.build(seed=1), tmp_path, "other.safetensors")
    make = Memory.__init__

    def late(self: Any, *given: Any) -> None:
        other.replace(file)
        make(self, *given)

    monkeypatch.setattr(Memory, "__init__", late)
    options = inference.PLACES["all tiers"] | {"host_memory": f"{READER + 600}KiB"}
    model = inference.build()
    with (
        overspill.wrap(model, weights=file, ignore_weights=["a"], rates=RATES, **options),
        torch.no_grad(),
        pytest.raises(overspill.CorruptionError, match="since its header was read"),
    ):
        model(normal(0, 3, 64))


def test_other_weights_than_nobody_has_read_yet_are_told_of(tmp_path: Path) -> None:
    """A commit that came before the first forward has no checksum of them: files keep a time."""
    (tmp_path / "store").mkdir()
    file = file_of(build(), tmp_path)
    options = {**TIGHT["device"], "rates": RATES}
    model = build()
    with overspill.wrap(
        model, adamw(model), weights=file, ignore_weights=["a"], nvme=tmp_path / "store", **options
    ) as made:
        made.commit()
    made, _ = overspill.resume(build(), tmp_path / "store", **options)
    made.close()
    file_of(nn.Sequential(*reversed(list(build()))), tmp_path)  # the same names and sizes
    with pytest.raises(overspill.OffloadError, match="it is not known whether they are the same"):
        overspill.resume(build(), tmp_path / "store", **options)


def test_folders_as_people_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that is not absolute, links as in the hub's cache, and one that leads nowhere."""
    real = file_of(build(), tmp_path, "blob")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(real)
    (folder / "unfinished.safetensors").symlink_to(tmp_path / "gone")
    (tmp_path / "store").mkdir()
    monkeypatch.chdir(tmp_path)
    model = build()
    with overspill.wrap(
        model,
        adamw(model),
        weights="snapshot",
        ignore_weights=["a"],
        nvme="store",
        **TIGHT["device"],
    ) as made:
        assert made.plan.detail.layout.in_place
        losses = steps(model, made, 0, 1)
        monkeypatch.chdir("/")
        losses += steps(model, made, 1, 2)
        made.save(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 0
