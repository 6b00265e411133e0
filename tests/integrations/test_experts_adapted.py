"""Adapters of peft on stacks of experts (``target_parameters``) that are in sections."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import overspill
from overspill.integrations.experts import join_experts, split_experts
from tests.devices import DEVICE, SIM, plainly
from tests.integrations.test_experts import (
    SECTION,
    WAYS,
    batch,
    build,
    generated,
    largest_layer,
    same,
    train,
)

STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
BF16 = torch.bfloat16


def adapted(model: Any, **more: Any) -> Any:
    """The model with adapters that change what its layers compute."""
    options = {"r": 4, "target_modules": ["q_proj"], "target_parameters": STACKS, **more}
    model = peft.get_peft_model(model, peft.LoraConfig(**options))
    begin(model)
    return model


def begin(model: Any) -> None:
    draw = torch.Generator("cpu").manual_seed(7)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(0.05 * torch.randn(p.shape, generator=draw, device="cpu"))


def trained(model: Any) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def options(plain: Any, **more: Any) -> dict[str, Any]:
    """A device with room for less than the experts of one layer, beside the rest."""
    inside = [m for n, m in plain.named_modules() if n.endswith("experts.base_layer.base_layer")]
    experts = {id(p) for m in inside for p in m.parameters()}
    rest = sum(p.nbytes for p in plain.parameters() if id(p) not in experts)
    room = rest + largest(inside) // 2
    return {
        "device": SIM, "device_memory": room, "host_memory": "64MiB",
        "rates": overspill.Rates(), **more,
    }  # fmt: skip


def largest(layers: list[Any]) -> int:
    return max(sum(p.nbytes for p in each.parameters()) for each in layers)


def run(plain: Any, steps: int, **more: Any) -> list[float]:
    optimizer = plainly(overspill.optim.AdamW, trained(plain), lr=1e-2, **more)
    plain.to(DEVICE)
    return train(plain, optimizer, steps)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["mixtral", "qwen3", "gpt_oss"])
def test_the_same_bits_without_an_engine(family: str, way: str) -> None:
    plain = adapted(build(family, way))
    split = split_experts(adapted(build(family, way)), 1)
    assert run(split, 4) == run(plain, 4)
    same(peft.get_peft_model_state_dict(split), peft.get_peft_model_state_dict(plain))
    same(dict(join_experts(split).state_dict()), dict(plain.state_dict()))
    assert run(split, 2) == run(plain, 2)


WAYS_TO_TRAIN: dict[str, dict[str, Any]] = {
    "step": {"activations": "keep"},
    "backward": {"update": "backward", "activations": "keep"},
    "next_forward": {"update": "next_forward"},
    "host": {"activations": "host"},
    "recompute": {"activations": "recompute"},
    "checkpoints": {"activations": "keep"},
}


@pytest.mark.parametrize("how", WAYS_TO_TRAIN)
@pytest.mark.parametrize("way", WAYS)
def test_a_layer_larger_than_the_device(way: str, how: str, tmp_path: Path) -> None:
    """Losses, adapters and saved files are those of whole stacks; nothing else is written."""
    plain, split = (adapted(build("mixtral", way, BF16)) for _ in range(2))
    expected = run(plain, 6, master="split")
    plain.save_pretrained(tmp_path / "plain")
    split_experts(split, SECTION // 2)
    if how == "checkpoints":
        split.enable_input_require_grads()
        split.gradient_checkpointing_enable()
        split.train()
    inner = torch.optim.AdamW(trained(split), lr=1e-2)
    with overspill.wrap(split, inner, **options(plain, **WAYS_TO_TRAIN[how])) as ours:
        layout = ours.plan.detail.layout
        names = [layout.units[n].name for n, moves in enumerate(layout.streamed) if moves]
        assert sum("proj." in name for name in names) > 10
        assert train(split, ours, 6) == expected
        split.save_pretrained(tmp_path / "own")
        same(peft.get_peft_model_state_dict(split), peft.get_peft_model_state_dict(plain))
        with torch.no_grad(), split.disable_adapter(), plain.disable_adapter():
            ids = batch(50)
            assert torch.equal(split(input_ids=ids).logits, plain(input_ids=ids).logits)
        overspill.unwrap(split)
    files = [(tmp_path / n / "adapter_model.safetensors").read_bytes() for n in ("plain", "own")]
    assert files[0] == files[1]
    split.to(DEVICE)
    with torch.no_grad():
        assert torch.equal(split(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_a_run_is_resumed(tmp_path: Path) -> None:
    """Over a base that stays in its files; exports have the names of whole stacks."""
    base, store = tmp_path / "base", tmp_path / "store"
    store.mkdir()
    build("mixtral", "eager", BF16).save_pretrained(base)
    plain = adapted(build("mixtral", "eager", BF16))
    expected = run(plain, 4, master="split")
    more = options(plain, activations="keep")

    def empty() -> Any:
        with overspill.empty_init():
            model = peft.get_peft_model(
                build("mixtral", "eager", BF16),
                peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=STACKS),
            )
            return split_experts(model, SECTION // 2)

    split = empty()
    inner = torch.optim.AdamW(trained(split), lr=1e-2)
    with overspill.wrap(split, inner, weights=base, nvme=store, **more) as ours:
        layout = ours.plan.detail.layout
        assert all(u.index in layout.in_place for u in layout.units if "proj." in u.name)
        begin(split)
        losses = train(split, ours, 2)
    again = empty()
    with overspill.resume(again, store, **more)[0] as ours:
        losses += train(again, ours, 2, first=2)
        same(peft.get_peft_model_state_dict(again), peft.get_peft_model_state_dict(plain))
    assert losses == expected


def test_sums_are_not_kept_for_backward() -> None:
    """A sum is as large as its section; backward makes it again."""
    plain, split = (adapted(build("mixtral", "eager", BF16)) for _ in range(2))
    split_experts(split, 1)
    assert kept_by(plain) > largest_layer(build("mixtral", "eager", BF16)) > kept_by(split)


def kept_by(model: Any) -> int:
    """Bytes that autograd keeps for backward, without parameters."""
    mine = {p.untyped_storage().data_ptr() for p in model.to(DEVICE).parameters()}
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in mine:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        ids = batch(0, 2)
        model(input_ids=ids, labels=ids).loss.backward()
    return sum(kept.values())


@pytest.mark.parametrize("way", WAYS)
def test_it_generates_the_tokens_of_whole_stacks(way: str) -> None:
    plain, split = (adapted(build("mixtral", way, BF16)).eval() for _ in range(2))
    split_experts(split, SECTION // 2)
    plain.to(DEVICE)
    with overspill.wrap(split, **options(plain)):
        prompt = batch(0, 7)
        assert torch.equal(generated(split, prompt), generated(plain, prompt))


def test_several_adapters_one_at_a_time() -> None:
    plain, split = (adapted(build("mixtral", "eager")) for _ in range(2))
    for model in (plain, split):
        model.add_adapter("other", peft.LoraConfig(r=2, target_parameters=STACKS))
        begin(model)
        model.set_adapter("other")
    split_experts(split, SECTION)
    assert run(split, 2) == run(plain, 2)
    split.base_model.set_adapter(["default", "other"])
    with pytest.raises(overspill.OffloadError, match="activate one adapter at a time"):
        split(input_ids=batch(0))
    split.set_adapter("default")
    plain.set_adapter("default")
    assert run(split, 2) == run(plain, 2)


@pytest.mark.parametrize("way", ["merge_adapter", "merge_and_unload"])
def test_merging_needs_whole_stacks(way: str) -> None:
    """Nothing is merged by a call that is refused."""
    plain, split = (adapted(build("mixtral", "eager")) for _ in range(2))
    split_experts(split, SECTION)
    with pytest.raises(overspill.OffloadError, match="join_experts"):
        getattr(split, way)()
    assert run(split, 2) == run(plain, 2)
    join_experts(split)  # the remedy
    made = [getattr(model, way)() or model for model in (split, plain)]
    same(made[0].state_dict(), made[1].state_dict())


def test_mixed_models_are_refused_alike() -> None:
    base = build("mixtral", "eager")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=STACKS)
    model = peft.get_peft_model(base, config, mixed=True)
    split_experts(model, SECTION)
    layer = next(m for m in model.modules() if hasattr(m, "merged_adapters"))
    for merge in (model.base_model.merge_adapter, model.merge_and_unload):
        with pytest.raises(overspill.OffloadError, match="join_experts"):
            merge()
        assert not layer.merged
    with pytest.raises(overspill.OffloadError, match="add adapters before split_experts"):
        peft.get_peft_model(split_experts(build("mixtral", "eager"), SECTION), config, mixed=True)


def test_other_adapters_can_be_merged() -> None:
    plain, split = (adapted(build("mixtral", "eager")) for _ in range(2))
    for model in (plain, split):
        model.add_adapter("beside", peft.LoraConfig(r=2, target_modules=["v_proj"]))
        begin(model)
    split_experts(split, SECTION)
    ids = batch(0).cpu()
    for step in ("merge", "unmerge"):
        for model in (plain, split):
            model.merge_adapter(["beside"]) if step == "merge" else model.unmerge_adapter()
        with torch.no_grad():
            assert torch.equal(split(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_what_cannot_be_split() -> None:
    merged = adapted(build("mixtral", "eager"))
    merged.merge_adapter()
    with pytest.raises(ValueError, match="unmerge it first"):
        split_experts(merged)
    merged.unmerge_adapter()  # the remedy
    split_experts(merged)
    alone = build("qwen3", "eager", num_experts=1, num_experts_per_tok=1)
    with pytest.raises(ValueError, match="one expert; leave it whole"):
        split_experts(adapted(alone), 1)


def test_adapters_come_before_sections() -> None:
    """peft does not find stacks in sections, and would leave them out."""
    split = split_experts(adapted(build("mixtral", "eager")), SECTION)
    late = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=STACKS)
    with pytest.raises(overspill.OffloadError, match="add adapters before split_experts"):
        split.add_adapter("late", late)
    assert list(split.peft_config) == ["default"]
    join_experts(split)  # the remedy
    split.add_adapter("late", late)
    model = split_experts(build("mixtral", "eager"), SECTION)
    with pytest.raises(overspill.OffloadError, match="add adapters before split_experts"):
        peft.get_peft_model(model, late)


def test_a_model_that_was_split_first_is_not_trained_in_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if peft was imported after the split, so that it could not be asked to refuse."""
    model = split_experts(build("mixtral", "eager"), SECTION)
    tuner: Any = peft.LoraModel
    monkeypatch.setattr(tuner, "inject_adapter", tuner.inject_adapter.__wrapped__)
    with pytest.warns(RuntimeWarning, match="no parameter was matched"):
        model = adapted(model)
    inner = torch.optim.AdamW(trained(model))
    with pytest.raises(overspill.OffloadError, match="call get_peft_model before split_experts"):
        overspill.wrap(model, inner, device="cpu", host_memory="64MiB")


def test_a_wrapped_model_is_pickled_in_materialized() -> None:
    split = split_experts(adapted(build("mixtral", "eager")), SECTION)
    inner = torch.optim.AdamW(trained(split), lr=1e-2)
    with overspill.wrap(split, inner, device=SIM, device_memory="4MiB", host_memory="64MiB"):
        train(split, torch.optim.SGD([torch.zeros(1)]), 1)
        with overspill.materialized(split) as whole:
            copies = [copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))]
            values = {n: t.clone() for n, t in whole.state_dict().items()}
    for each in copies:
        same(each.state_dict(), values)
