"""A base that is quantised in its files trains and generates as the dequantised one does."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import PreTrainedModel

import overspill
from overspill.durable.export import export_store
from overspill.engine import engine_of
from overspill.errors import CorruptionError, OffloadError
from overspill.state.quantised_files import dequantising
from overspill.state.weight_files import WeightFiles
from tests.devices import CPU, DEVICE, SIM, about_cpu, plainly
from tests.parity.test_in_place import written
from tests.quantised import folders
from tests.quantised.folders import EXPERTS, GPT_OSS, LLAMA, Folders, empty

RATES = overspill.Rates()
# About two layers of each.
TIGHT = {"fp8": "600KiB", "nf4": "500KiB", "qint4": "500KiB", "mxfp4": "450KiB"}
PLACES: dict[str, dict[str, Any]] = {
    "tight": {"device": SIM, "host_memory": "8600KiB"},
    "ample": {"device": SIM, "device_memory": "64MiB", "host_memory": "64MiB"},
    "host": {"device": CPU, "host_memory": "64MiB"},
}
MODELS = {"fp8": LLAMA, "nf4": LLAMA, "qint4": LLAMA}
if CPU == "cpu":
    MODELS["mxfp4"] = GPT_OSS  # the test device cannot count tokens by expert
TARGETS = ["q_proj", "v_proj"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folders]:
    """Both folders, by format."""
    return {
        how: folders.made(tmp_path_factory.mktemp(how), config, how)
        for how, config in MODELS.items()
    }


def wrapped(folder: Path, *, adapters: bool = True, **options: Any) -> tuple[Any, Any]:
    with overspill.empty_init():
        model: Any = empty(folder)
    if adapters:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=TARGETS))
    torch.manual_seed(5)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2) if adapters else None
    return model, overspill.wrap(model, optimizer, weights=folder, rates=RATES, **options)


def place_of(how: str, place: str) -> dict[str, Any]:
    more = {"device_memory": TIGHT[how]} if place == "tight" else {}
    return {**PLACES[place], **more}


def ids(number: int) -> torch.Tensor:
    draw = torch.Generator("cpu").manual_seed(number)
    return torch.randint(0, 128, (2, 16), generator=draw, device="cpu").to(DEVICE)


def steps(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    losses = []
    for number in range(first, last):
        batch = ids(number)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(folder: Path, count: int = 3, **options: Any) -> list[float]:
    model, optimizer = wrapped(folder, **options)
    with optimizer:
        return steps(model, optimizer, 0, count)


@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize("how", list(MODELS))
def test_lora_losses_are_those_over_the_dequantised_base(
    pairs: dict[str, Folders], how: str, place: str
) -> None:
    expected = trained(pairs[how].plain, **PLACES["ample"])
    assert trained(pairs[how].quantised, **place_of(how, place)) == expected


def test_dora_starts_from_the_weights_in_the_files(pairs: dict[str, Folders]) -> None:
    """Its magnitudes are norms of the base, which is on meta when peft makes the adapters."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    config = {"r": 4, "target_modules": ["q_proj", "down_proj"], "use_dora": True}
    for each in (pairs["nf4"].quantised, pairs["nf4"].plain):
        plain = get_peft_model(loaded(pairs["nf4"].plain), LoraConfig(**config))
        values = {n: t.clone() for n, t in get_peft_model_state_dict(plain).items()}
        theirs = plainly(overspill.optim.AdamW, trainable(plain), lr=1e-2)
        expected = steps(plain.to(DEVICE), theirs, 0, 3)
        with overspill.empty_init():
            model = get_peft_model(empty(each), LoraConfig(**config))
        inner = torch.optim.AdamW(trainable(model), lr=1e-2)
        with overspill.wrap(
            model, inner, weights=each, device=SIM, device_memory="1MiB", host_memory="64MiB"
        ) as optimizer:
            for name, value in get_peft_model_state_dict(model).items():
                if "magnitude" in name:
                    assert torch.equal(value.cpu(), values[name].cpu()), name
            set_peft_model_state_dict(model, values)
            assert steps(model, optimizer, 0, 3) == expected


def trainable(model: Any) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("how", list(MODELS))
def test_pages_are_read_in_place_and_nothing_is_written(
    pairs: dict[str, Folders], how: str, tmp_path: Path
) -> None:
    model, optimizer = wrapped(pairs[how].quantised, nvme=tmp_path, **place_of(how, "tight"))
    with optimizer:
        losses = steps(model, optimizer, 0, 2)
        layout = optimizer.plan.detail.layout
        packed = {unit.index for unit in layout.units if unit.packed}
        assert packed and packed <= layout.in_place
        for unit in layout.units:
            if unit.packed:
                assert unit.page_bytes < 0.75 * unit.weight_bytes
        assert not [span.name for span in written(optimizer) if "(frozen)" in span.name]
    assert losses == trained(pairs[how].plain, 2, **PLACES["ample"])


@about_cpu
@pytest.mark.parametrize("how", ["fp8", "nf4"])
def test_a_step_reads_the_files_twice_at_most(how: str, tmp_path: Path) -> None:
    """Once forward and once backward, where host memory caches next to nothing."""
    config = copy.copy(LLAMA)
    config.num_hidden_layers = 12
    pair = folders.made(tmp_path, config, how)
    options = {"device": CPU, "host_memory": "10MiB", "nvme": tmp_path}
    model, optimizer = wrapped(pair.quantised, **options)
    with optimizer:
        losses = steps(model, optimizer, 0, 3)
        spans = optimizer._engine.trace.spans()
        read = sum(s.nbytes for s in spans if s.lane == "read" and "(frozen)" in s.name)
    in_files = (pair.quantised / "model.safetensors").stat().st_size
    assert 0.2 * 3 * in_files < read <= 3 * 2 * in_files
    assert losses == trained(pair.plain, **PLACES["ample"])


def test_the_run_goes_on_from_its_store(pairs: dict[str, Folders], tmp_path: Path) -> None:
    moved = tmp_path / "base"
    shutil.copytree(pairs["nf4"].quantised, moved)
    store = tmp_path / "store"
    store.mkdir()
    model, optimizer = wrapped(moved, nvme=store, **place_of("nf4", "tight"))
    with optimizer:
        before = steps(model, optimizer, 0, 2)
    moved.rename(tmp_path / "elsewhere")
    with overspill.empty_init():
        model = get_peft_model(
            empty(tmp_path / "elsewhere"), LoraConfig(r=4, target_modules=TARGETS)
        )
    inner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    optimizer, _ = overspill.resume(
        model, store, inner, weights=tmp_path / "elsewhere", rates=RATES, **PLACES["host"]
    )
    with optimizer:
        after = steps(model, optimizer, 2, 4)
    assert before + after == trained(pairs["nf4"].plain, 4, **PLACES["ample"])


@about_cpu
def test_ample_memory_resumes_from_pages_in_the_store(
    pairs: dict[str, Folders], tmp_path: Path
) -> None:
    """Whatever the first run has copied to its store, the second needs no files for."""
    model, optimizer = wrapped(pairs["fp8"].quantised, nvme=tmp_path, **PLACES["ample"])
    with optimizer:
        before = steps(model, optimizer, 0, 2)
    with overspill.empty_init():
        model = get_peft_model(
            empty(pairs["fp8"].quantised), LoraConfig(r=4, target_modules=TARGETS)
        )
    inner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    optimizer, _ = overspill.resume(model, tmp_path, inner, rates=RATES, **place_of("fp8", "tight"))
    with optimizer:
        after = steps(model, optimizer, 2, 4)
    assert before + after == trained(pairs["fp8"].plain, 4, **PLACES["ample"])


@about_cpu
@pytest.mark.parametrize("how", list(MODELS))
def test_weights_are_read_dequantised_everywhere(
    pairs: dict[str, Folders], how: str, tmp_path: Path
) -> None:
    expected = {
        name: p.detach().cpu().clone()
        for name, p in loaded(pairs[how].plain).named_parameters()
    }  # fmt: skip
    model, engine = wrapped(pairs[how].quantised, adapters=False, **place_of(how, "tight"))
    with engine:
        found = {name: weight.cpu() for name, weight in overspill.named_weights(model)}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        state = model.state_dict()
        assert all(torch.equal(state[name].cpu(), expected[name]) for name in expected)
        with overspill.materialized(model):
            for name, p in model.named_parameters():
                assert torch.equal(p.detach().cpu(), expected[name])
        model.save_pretrained(tmp_path / "saved")
        assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()
    again = loaded(tmp_path / "saved")
    for name, p in again.named_parameters():
        assert torch.equal(p.detach().cpu(), expected[name]), name


def loaded(folder: Path) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model


def test_an_export_has_the_merged_base(pairs: dict[str, Folders], tmp_path: Path) -> None:
    from overspill.state.weight_files import WeightFiles

    model, optimizer = wrapped(pairs["nf4"].quantised, nvme=tmp_path, **place_of("nf4", "tight"))
    with optimizer:
        steps(model, optimizer, 0, 1)
        optimizer.save(tmp_path / "export")
    assert "quantization_config" not in (tmp_path / "export" / "config.json").read_text()
    files, plain = WeightFiles(tmp_path / "export"), WeightFiles(pairs["nf4"].plain)
    names = [name for name in files.names if "lora_" not in name]
    assert len(names) == len(plain.names)
    for name in names:
        own = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert torch.equal(files.read(name), plain.read(own)), name


def test_the_command_exports_a_folder_that_loads(pairs: dict[str, Folders], tmp_path: Path) -> None:
    """Its configuration is copied from the quantised folder, and its weights are not quantised."""
    store, out = tmp_path / "store", tmp_path / "out"
    store.mkdir()
    model, optimizer = wrapped(pairs["nf4"].quantised, nvme=store, **place_of("nf4", "tight"))
    with optimizer:
        steps(model, optimizer, 0, 1)
    export_store(store, out, config=pairs["nf4"].quantised)
    assert "quantization_config" not in (out / "config.json").read_text()
    assert "hidden_size" in (out / "config.json").read_text()


def test_a_merge_is_refused_where_weights_are_not_in_memory(pairs: dict[str, Folders]) -> None:
    model, optimizer = wrapped(pairs["nf4"].quantised, **place_of("nf4", "tight"))
    message = r"files of weights=.* merge adapters inside"
    with optimizer:
        steps(model, optimizer, 0, 1)  # from which on adapters change the weights
        with pytest.raises(OffloadError, match=message):
            model.merge_and_unload().state_dict()
    model, optimizer = wrapped(pairs["nf4"].quantised, **place_of("nf4", "tight"))
    with optimizer, overspill.materialized(model):  # the remedy
        merged = model.merge_and_unload()
        assert not any("lora" in name for name in merged.state_dict())


@pytest.mark.parametrize("place", ["tight", "host"])
def test_every_weight_can_be_trained(pairs: dict[str, Folders], place: str) -> None:
    """Then the dequantised values are what training starts from."""
    losses = []
    for folder in pairs["fp8"]:
        with overspill.empty_init():
            model = empty(folder)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        more = {**PLACES[place], "host_memory": "64MiB"}
        more |= {"device_memory": "3MiB"} if place == "tight" else {}
        with overspill.wrap(model, inner, weights=folder, rates=RATES, **more) as optimizer:
            losses.append(steps(model, optimizer, 0, 3))
    assert losses[0] == losses[1]


@about_cpu
@pytest.mark.parametrize("how", ["fp8", "mxfp4", "qint8"])
def test_experts_are_read_in_sections(how: str, pairs: dict[str, Folders], tmp_path: Path) -> None:
    pair = pairs[how] if how == "mxfp4" else folders.made(tmp_path, EXPERTS, how)
    results = []
    for folder in pair:
        with overspill.empty_init():
            model = empty(folder)
        from overspill.integrations.experts import split_experts

        split_experts(model, 2)
        with overspill.wrap(
            model, weights=folder, rates=RATES, device_memory="1MiB", **PLACES["tight"]
        ) as engine:
            layout = engine.plan.detail.layout
            if folder == pair.quantised:
                packed = [unit.name for unit in layout.units if unit.packed]
                assert any("experts" in name for name in packed), packed
            with torch.no_grad():
                results.append(model(input_ids=ids(0)).logits.cpu())
    assert torch.equal(*results)


@about_cpu
def test_generated_tokens_are_those_of_the_dequantised_model(pairs: dict[str, Folders]) -> None:
    for how in MODELS:
        tokens = []
        for folder in pairs[how]:
            model, engine = wrapped(folder, adapters=False, **PLACES["ample"])
            with engine:
                made = model.generate(ids(3), max_new_tokens=6, do_sample=False)
                tokens.append(made.tolist())
        assert tokens[0] == tokens[1]


def test_precision_holds_for_trained_and_frozen_weights_alike(pairs: dict[str, Folders]) -> None:
    """The folder's weights are dequantised to that dtype, whatever the model's is."""
    found = []
    for trains in (False, True):
        with overspill.empty_init():
            model = empty(pairs["fp8"].quantised)
        inner = torch.optim.AdamW(model.parameters() if trains else [model.lm_head.weight])
        model.requires_grad_(trains)
        model.lm_head.requires_grad_()
        options = {**PLACES["ample"], "weights": pairs["fp8"].quantised, "precision": "fp32"}
        with overspill.wrap(model, inner, rates=RATES, **options):
            found.append(dict(overspill.named_weights(model)))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_file_that_changed_is_noticed(pairs: dict[str, Folders], tmp_path: Path) -> None:
    folder = tmp_path / "base"
    shutil.copytree(pairs["fp8"].quantised, folder)
    model, optimizer = wrapped(folder, **place_of("fp8", "tight"))
    steps(model, optimizer, 0, 1)
    file = folder / "model.safetensors"
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        stream.write(b"\xff" * (file.stat().st_size // 3))
    with pytest.raises(CorruptionError, match="have changed since"):
        steps(model, optimizer, 1, 3)
    optimizer.close()
    assert engine_of(model) is not None


def test_frozen_formats_repack_what_is_dequantised(pairs: dict[str, Folders]) -> None:
    losses = [
        trained(folder, 2, frozen="nf4", **place_of("fp8", "tight")) for folder in pairs["fp8"]
    ]
    assert losses[0] == losses[1]


def test_groups_take_the_shape_of_the_model(pairs: dict[str, Folders]) -> None:
    """Quanto's files do not have it; a bias in them does, and then the model must agree."""
    files = WeightFiles(pairs["qint4"].quantised)
    name, mine = "layers.0.mlp.down_proj.weight", torch.empty(128, 256)
    for known in (f"model.{name}", name, f"other.{name}"):
        found = dequantising(files, {known: mine}).shape(f"model.{name}")
        assert found == ((256, 128) if known.startswith("other") else (128, 256))
    told = {n: files.read(n) for n in files.names} | {
        f"model.{name.removesuffix('weight')}bias": torch.zeros(128)
    }
    folder = pairs["qint4"].quantised.parent / "told"
    folder.mkdir()
    save_file({n: t.cpu() for n, t in told.items()}, folder / "model.safetensors")
    config = (pairs["qint4"].quantised / "config.json").read_text()
    (folder / "config.json").write_text(config)
    other = {f"model.{name}": mine.mT.contiguous()}
    assert dequantising(WeightFiles(folder), other).shape(f"model.{name}") == (128, 256)
