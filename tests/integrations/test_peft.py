"""Adapters of peft over a frozen base that moves: losses and adapters are those of peft alone, and
nothing of the base is ever written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import overspill
from overspill.io_engine.file_ranges import LEAST_THREADS, held_bytes
from overspill.params.onloaded_units import OnloadedUnits
from overspill.state.weight_files import WeightFiles
from tests.devices import CPU, DEVICE, SIM, plainly

SHAPE: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
STEPS = 20
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS: dict[str, Callable[[], peft.PeftConfig]] = {
    "lora": lambda: peft.LoraConfig(r=16, target_modules=LINEAR, lora_dropout=0.1),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], use_dora=True),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "saved too": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]
    ),
}
PLACES = ["sim", "cpu"] if CPU == "cpu" else ["sim"]


def tight(model: Any, place: str) -> dict[str, Any]:
    """Room for all that is trained, and for half of the base."""
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    half = sum(p.nbytes for p in model.parameters() if not p.requires_grad) // 2
    rest = 192 << 10  # units are whole pages
    if place == "cpu":
        return {"device": CPU, "host_memory": 4 * trained + half + rest}
    return {"device": SIM, "device_memory": 2 * trained + half + rest, "host_memory": "3MiB"}


def adapted(kind: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).to(dtype)
    return peft.get_peft_model(base, KINDS[kind]())


def adamw(kind: Any, model: Any, **more: Any) -> Any:
    return kind([p for p in model.parameters() if p.requires_grad], lr=1e-2, **more)


def in_memory(params: Any, **more: Any) -> Any:
    return plainly(overspill.optim.AdamW, params, master="split", **more)


def train(model: Any, optimizer: Any, steps: int = STEPS) -> list[float]:
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        drawn = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 128, (2, 17), generator=drawn, device="cpu").to(DEVICE)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adapters(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: value.detach().cpu().clone()
        for name, value in model.named_parameters() if value.requires_grad
    }  # fmt: skip


@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_adapters_are_those_of_peft_alone(
    kind: str, place: str, update: Any, tmp_path: Path
) -> None:
    plain = adapted(kind)
    theirs = adamw(in_memory, plain)
    expected = train(plain.to(DEVICE) if SIM != "sim" else plain, theirs)
    model = adapted(kind)
    with overspill.wrap(
        model, adamw(torch.optim.AdamW, model), update=update, nvme=tmp_path,
        rates=overspill.Rates(), **tight(model, place),
    ) as optimizer:  # fmt: skip
        assert train(model, optimizer) == expected
        layout = optimizer.plan.detail.layout
        assert layout is not None
        moves = [u for u, h in zip(layout.units, layout.homes, strict=True) if not h.resident]
        assert [u for u in moves if not u.trainable]
        mine = adapters(model)
        for name, value in adapters(plain).items():
            assert torch.equal(mine[name], value), name
    written = [s for s in optimizer._engine.trace.spans() if s.lane == "write"]
    frozen = {f"weights {u.name}" for u in layout.units if not u.trainable}
    base = [s for s in written if s.name in frozen]
    assert len(base) == len({s.name for s in base}), "more than the first commit has the base"
    trains = sum(u.weight_bytes for u in layout.units if u.trainable) + sum(layout.grad_bytes)
    trains += sum(s.nbytes for s in layout.records)
    assert sum(s.nbytes for s in written) <= trains * (STEPS + 1) + sum(s.nbytes for s in base)


def test_adapters_are_saved_merged_and_exchanged(tmp_path: Path) -> None:
    plain = adapted("lora")
    theirs = adamw(in_memory, plain)
    train(plain.to(DEVICE) if SIM != "sim" else plain, theirs, 3)
    model = adapted("lora")
    (tmp_path / "store").mkdir()
    options = {**tight(model, "sim"), "nvme": tmp_path / "store", "rates": overspill.Rates()}
    with overspill.wrap(model, adamw(torch.optim.AdamW, model), **options) as optimizer:
        train(model, optimizer, 3)
        for each, folder in ((plain, "theirs"), (model, "mine")):
            each.save_pretrained(tmp_path / folder)
        names = [path.name for path in (tmp_path / "theirs").iterdir()]
        assert "adapter_model.safetensors" in names
        for name in names:
            mine, other = ((tmp_path / f / name).read_bytes() for f in ("mine", "theirs"))
            assert mine == other, name
        with overspill.materialized(model):
            merged = model.merge_and_unload()
            found = {n: v.detach().cpu().clone() for n, v in merged.state_dict().items()}
    expected = {n: v.detach().cpu() for n, v in plain.merge_and_unload().state_dict().items()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


FILES = ["lora", "ia3", "saved too", "prompt"]


@pytest.mark.parametrize("frozen", [None, "nf4", "int8"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", FILES)
def test_a_base_that_is_in_files_alone(kind: str, place: str, frozen: Any, tmp_path: Path) -> None:
    """Built without memory, adapters too: they begin as peft has them begin; the base is read where
    it lies, or packed on its way."""
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).to(torch.bfloat16)
    base.save_pretrained(tmp_path / "base", max_shard_size="100KB")
    with overspill.empty_init():
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).to(torch.bfloat16)
    model = peft.get_peft_model(model, KINDS[kind]())
    (tmp_path / "store").mkdir()
    options = {**tight(model, place), "rates": overspill.Rates()}
    reader = held_bytes(LEAST_THREADS)
    options["host_memory"] = reader + (options["host_memory"] if place == "cpu" else 3 << 20)
    with overspill.wrap(
        model, adamw(torch.optim.AdamW, model), weights=tmp_path / "base", frozen=frozen,
        nvme=tmp_path / "store", **options,
    ) as optimizer:  # fmt: skip
        layout = optimizer.plan.detail.layout
        assert layout is not None
        clean = {u.index for u in layout.units if not u.trainable and u.weight_bytes}
        packed = {u.index for u in layout.units if u.packed}
        assert layout.in_place == clean - packed and bool(packed) == (frozen is not None)
        begun = adapters(model)
        expected = dict(base.named_parameters())
        for name, value in model.named_parameters():
            assert torch.isfinite(value).all(), name
            known = name.removeprefix("base_model.model.").replace(".base_layer", "")
            if frozen is None and known in expected:
                assert torch.equal(value.cpu(), expected[known]), name
        if kind == "lora":
            assert all(bool((v == 0).all()) == ("lora_B" in n) for n, v in begun.items())
        if kind == "saved too":
            (head,) = (v for n, v in begun.items() if "lm_head" in n)
            assert torch.equal(head, expected["lm_head.weight"])
        losses = train(model, optimizer, 3)
        after = adapters(model)
    if frozen is not None or kind == "prompt":
        return
    plain = peft.get_peft_model(base, KINDS[kind]())
    plain.load_state_dict(begun, strict=False)
    theirs = adamw(in_memory, plain)
    assert train(plain.to(DEVICE) if SIM != "sim" else plain, theirs, 3) == losses
    for name, value in adapters(plain).items():
        assert torch.equal(after[name], value), name


UNKNOWN: dict[str, Callable[[], peft.PeftConfig]] = {
    "dora of an embedding": lambda: peft.LoraConfig(
        r=4, target_modules=["embed_tokens"], use_dora=True
    ),
    "not set": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=["q_proj"]),
    "fourier": lambda: peft.FourierFTConfig(n_frequency=8, target_modules=["q_proj"]),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj"], feedforward_modules=[], init_ia3_weights=False
    ),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_adapters_that_begin_as_nobody_knows_are_refused(kind: str, tmp_path: Path) -> None:
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    base.save_pretrained(tmp_path)
    with overspill.empty_init():
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    model = peft.get_peft_model(model, UNKNOWN[kind]())
    with pytest.raises(overspill.OffloadError, match="their initial values are not known"):
        overspill.wrap(
            model, adamw(torch.optim.AdamW, model), weights=tmp_path, device=SIM,
            rates=overspill.Rates(),
        )  # fmt: skip
    assert all(p.is_meta for p in model.parameters()), "nothing was changed"


@pytest.mark.parametrize("frozen", ["nf4", "int8"])
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_adapters_over_a_packed_base_are_those_over_the_unpacked_one(
    kind: str, frozen: Any, tmp_path: Path
) -> None:
    """And they are saved, merged and exchanged as ever: several at a time."""
    model = adapted(kind)
    options = {**tight(model, PLACES[-1]), "rates": overspill.Rates(), "nvme": tmp_path}
    with overspill.wrap(
        model, adamw(torch.optim.AdamW, model), frozen=frozen, durable=False, **options
    ) as optimizer:
        values = {n: t.detach().cpu().clone() for n, t in overspill.named_weights(model)}
        losses = train(model, optimizer, 6)
        mine = adapters(model)
        with overspill.materialized(model):
            merged = model.merge_and_unload()
            found = {n: v.detach().cpu().clone() for n, v in merged.state_dict().items()}
    plain = adapted(kind)
    plain.load_state_dict(values, strict=False)
    theirs = adamw(in_memory, plain)
    assert train(plain.to(DEVICE) if SIM != "sim" else plain, theirs, 6) == losses
    for name, value in adapters(plain).items():
        assert torch.equal(mine[name], value), name
    for name, value in plain.merge_and_unload().state_dict().items():
        assert torch.equal(found[name], value.cpu()), name


def test_of_several_adapters_those_with_values_keep_them(tmp_path: Path) -> None:
    """And one that does not train is not packed: it is saved as it is."""
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).to(torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    for layers in (2, 4):
        shape = {**SHAPE, "num_hidden_layers": layers}
        with overspill.empty_init():
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
            model = model.to(torch.bfloat16)
        kind = peft.LoraConfig(r=64, target_modules=["q_proj", "v_proj"])
        model = peft.get_peft_model(model, kind, adapter_name="first")
        model.add_adapter("second", kind)
        model.set_adapter("second")
        for name, p in model.named_parameters():
            if ".first." in name:
                owner, _, last = name.rpartition(".")
                real = torch.nn.Parameter(torch.full(p.shape, 7.0, device="cpu"), False)
                setattr(model.get_submodule(owner), last, real)
        with overspill.wrap(
            model, adamw(torch.optim.AdamW, model), weights=tmp_path / "base", frozen="nf4",
            ignore_weights=["model.layers.[23].*"] if layers == 2 else None,
            device=SIM, device_memory="64MiB", host_memory="64MiB", rates=overspill.Rates(),
        ):  # fmt: skip
            for name, p in model.named_parameters():
                if ".first." in name:
                    assert bool((p == 7.0).all()), name
                elif ".second." in name:
                    assert bool((p == 0).all()) == ("lora_B" in name), name


def test_a_trained_adapter_that_peft_has_left_on_meta_is_not_generated_with(tmp_path: Path) -> None:
    plain = adapted("lora")
    plain.get_base_model().save_pretrained(tmp_path / "base")
    plain.save_pretrained(tmp_path / "adapter")
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).to(torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    with overspill.empty_init():
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).to(torch.bfloat16)
    model = peft.PeftModel.from_pretrained(model, tmp_path / "adapter", low_cpu_mem_usage=True)
    if not any(p.is_meta and "lora" in n for n, p in model.named_parameters()):
        return  # peft gives them memory by now
    with pytest.raises(overspill.OffloadError, match="so they have no values"):
        overspill.wrap(model, weights=tmp_path / "base", device=SIM, rates=overspill.Rates())


@pytest.mark.parametrize("writeback", [False, True])
def test_a_merge_ends_with_the_weights_that_it_changed(writeback: bool) -> None:
    """``materialized`` drops edits, so that adapters count as not merged afterwards."""
    model = adapted("lora")
    ids = torch.arange(34, device=DEVICE).view(2, 17)
    with overspill.wrap(
        model, adamw(torch.optim.AdamW, model), **tight(model, "sim"), rates=overspill.Rates()
    ) as optimizer:
        train(model, optimizer, 2)
        model.eval()  # without dropout
        with torch.no_grad():
            expected = model(input_ids=ids).logits
            with overspill.materialized(model, writeback=writeback):
                model.merge_adapter()
                merged = model(input_ids=ids).logits
            found = model(input_ids=ids).logits
            assert torch.equal(found, merged if writeback else expected)
            model.unmerge_adapter()
        layer = next(m for m in model.modules() if hasattr(m, "merged_adapters"))
        assert not layer.merged
        assert len(train(model, optimizer, 1)) == 1


def test_a_merge_that_is_not_written_back_counts_as_none() -> None:
    """A packed base cannot be changed."""
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).to(torch.bfloat16)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"])).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.fill_(0.1)
    ids = torch.arange(34, device=DEVICE).view(2, 17)
    inner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with overspill.wrap(
        model, inner, frozen="nf4", device=SIM, device_memory="8MiB", host_memory="64MiB"
    ), torch.no_grad():  # fmt: skip
        expected = model(input_ids=ids).logits
        with (
            pytest.raises(overspill.OffloadError, match="cannot be changed"),
            overspill.materialized(model, writeback=True),
        ):
            model.merge_adapter()
        assert torch.equal(model(input_ids=ids).logits, expected)
        with model.disable_adapter():
            assert not torch.equal(model(input_ids=ids).logits, expected)


def test_a_merge_is_forgotten_if_the_end_of_its_block_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = adapted("lora").eval()
    ids = torch.arange(34, device=DEVICE).view(2, 17)
    take_back = OnloadedUnits.take_back

    def interrupted(self: OnloadedUnits, *args: Any) -> None:
        monkeypatch.setattr(OnloadedUnits, "take_back", take_back)
        raise KeyboardInterrupt

    with overspill.wrap(
        model, adamw(torch.optim.AdamW, model), **tight(model, "sim"), rates=overspill.Rates()
    ), torch.no_grad():  # fmt: skip
        expected = model(input_ids=ids).logits
        monkeypatch.setattr(OnloadedUnits, "take_back", interrupted)
        with pytest.raises(KeyboardInterrupt), overspill.materialized(model, writeback=True):
            model.merge_adapter()
        assert torch.equal(model(input_ids=ids).logits, expected)


@pytest.mark.parametrize("broken", ["embedding", "read"])
def test_adapters_stay_on_meta_if_one_cannot_begin(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next try would take what is half begun for trained values."""
    config = transformers.LlamaConfig(**SHAPE)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    targets = ["q_proj", "embed_tokens"] if broken == "embedding" else ["q_proj"]
    with overspill.empty_init():
        model = peft.get_peft_model(
            transformers.LlamaForCausalLM(config).to(torch.bfloat16),
            peft.LoraConfig(target_modules=targets, use_dora=True),
        )
    inner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    read, left = WeightFiles.read, [2]

    def fails(self: WeightFiles, name: str) -> torch.Tensor:
        left[0] -= 1
        if not left[0]:
            raise OSError("the disk is gone")
        return read(self, name)

    place = {"device": SIM, "device_memory": "8MiB", "host_memory": "64MiB"}
    if broken == "read":
        monkeypatch.setattr(WeightFiles, "read", fails)
    kind = OSError if broken == "read" else overspill.OffloadError
    with pytest.raises(kind, match=r"disk is gone|load the base before get_peft_model"):
        overspill.wrap(model, inner, weights=tmp_path, **place)
    assert all(p.is_meta for n, p in model.named_parameters() if "lora_" in n)
