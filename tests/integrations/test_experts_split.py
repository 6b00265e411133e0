"""Splitting experts into sections: what is refused, what stays as it was, and what goes on."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from transformers.integrations.moe import use_experts_implementation
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import overspill
from overspill.integrations.experts import NAME, join_experts, split_experts
from overspill.integrations.transformers import OverspillTrainer
from overspill.planning.sections import Section, Sections, joined
from tests.devices import CPU, SIM, about_cpu, plainly
from tests.integrations import test_transformers as trainer
from tests.integrations.test_experts import (
    MODELS,
    SECTION,
    SHAPE,
    adapted,
    batch,
    build,
    files_in,
    same,
    train,
)


@about_cpu
def test_a_trainer_goes_on_from_whole_stacks(tmp_path: Path) -> None:
    """Its checkpoints are those of a model that is not split, and it resumes from them."""

    def run(out: str, model: Any, resume: Path | None = None) -> Any:
        return trainer.train(
            OverspillTrainer, model, tmp_path / out, {"device": SIM, "device_memory": "2MiB"},
            resume, eval_strategy="no", max_steps=4, save_steps=2, max_grad_norm=100.0,
        )  # fmt: skip

    def made() -> Any:
        return MODELS["mixtral"](experts_implementation="eager")

    torch.manual_seed(0)
    whole = run("whole", made())
    torch.manual_seed(0)
    split = run("split", split_experts(made(), SECTION))
    assert losses_of(split) == losses_of(whole)
    for one, other in zip(trainer.logged(split), trainer.logged(whole), strict=True):
        assert one[:4] == pytest.approx(other[:4], rel=1e-6), "a norm is summed section by section"
    there, here = (tmp_path / out / "checkpoint-2" for out in ("whole", "split"))
    same(files_in(here), files_in(there))
    again = run("again", split_experts(made(), SECTION), here)
    assert losses_of(again)[-2:] == losses_of(whole)[-2:]


def losses_of(run: Any) -> list[float]:
    return [step[1] for step in trainer.logged(run)]


def test_random_weights_are_those_of_whole_stacks() -> None:
    """On meta, sections begin as the model has whole stacks begin: nothing is left as it was."""
    with overspill.empty_init():
        split = split_experts(build("mixtral", "eager"), SECTION)
    torch.manual_seed(5)
    with overspill.wrap(
        split, torch.optim.AdamW(split.parameters()), device=SIM, device_memory="8MiB",
        host_memory="64MiB", rates=overspill.Rates(),
    ):  # fmt: skip
        for name, value in split.state_dict().items():
            if "experts" in name:
                assert 0.018 < value.std() < 0.022, name
                assert value.abs().max() < 0.15, name


def test_what_cannot_be_split_is_refused() -> None:
    dense = hf.LlamaForCausalLM(hf.LlamaConfig(**{**SHAPE, "num_hidden_layers": 1}))
    with pytest.raises(ValueError, match="has no experts in stacks"):
        split_experts(dense)
    model = build("mixtral", "eager")
    with pytest.raises(ValueError, match="batched_mm"):
        split_experts(model, arithmetic="batched_mm")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="number of bytes"):
        split_experts(model, "50%")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["experts"])
    with pytest.raises(ValueError, match="peft saves a copy"):
        split_experts(peft.get_peft_model(build("mixtral", "eager"), config))
    experts = [m for n, m in model.named_modules() if n.endswith("experts")]
    experts[1].down_proj = experts[0].down_proj
    with pytest.raises(ValueError, match="the same parameter"):
        split_experts(model)
    assert not any(isinstance(m, Sections) for m in model.modules()), "nothing was changed"
    model = split_experts(build("mixtral", "eager"))
    with pytest.raises(ValueError, match="in sections already"):
        split_experts(model)
    with (
        overspill.wrap(model, device=CPU, rates=overspill.Rates()),
        pytest.raises(ValueError, match="wrapped"),
    ):
        join_experts(model)


class Summed(MixtralExperts):
    """Experts whose own code adds up in fp32, as those of some models do."""

    def forward(self, hidden: Any, index: Any, weights: Any) -> Any:
        out = torch.zeros_like(hidden, dtype=torch.float32)
        for expert in index.unique().tolist():
            token, place = torch.where(index == expert)
            rows = torch.nn.functional.linear(hidden[token], self.gate_up_proj[expert])
            rows = torch.nn.functional.linear(self._apply_gate(rows), self.down_proj[expert])
            out.index_add_(0, token, rows.float() * weights[token, place, None].float())
        return out.to(hidden.dtype)


def test_experts_that_compute_otherwise_are_refused() -> None:
    """They are tried in small, and nothing is changed."""
    model = build("mixtral", "eager")
    for module in model.modules():
        if isinstance(module, MixtralExperts):
            module.__class__ = use_experts_implementation(Summed)
    with pytest.raises(ValueError, match=r"'eager' of .* computes otherwise .*'grouped_mm'"):
        split_experts(model)
    assert not any(isinstance(m, Sections) for m in model.modules())
    split_experts(model, 1, arithmetic="grouped_mm")


def test_a_model_that_is_wrapped_is_neither_split_nor_joined() -> None:
    model = build("mixtral", "eager")
    optimizer = overspill.wrap(model, torch.optim.AdamW(model.parameters()), device="cpu")
    with pytest.raises(ValueError, match="the model is wrapped already; call it before wrap"):
        split_experts(model)
    overspill.unwrap(model)
    split_experts(model)
    optimizer = overspill.wrap(model, torch.optim.AdamW(model.parameters()), device="cpu")
    with pytest.raises(ValueError, match=r"the model is wrapped; overspill\.unwrap\(model\) first"):
        join_experts(model)
    overspill.unwrap(model)
    join_experts(model)
    assert not any(isinstance(m, Sections) for m in model.modules())
    optimizer.close()


def test_a_config_that_others_have_too_stays_as_it_is() -> None:
    one = build("mixtral", "eager")
    torch.manual_seed(0)
    other = hf.MixtralForCausalLM(one.config)
    ids = batch(0).cpu()
    expected = other(input_ids=ids).logits
    split_experts(one.model.layers[1], 1)
    assert torch.equal(other(input_ids=ids).logits, expected)
    assert torch.equal(one(input_ids=ids).logits, expected)
    one.set_experts_implementation("grouped_mm")
    with pytest.raises(overspill.OffloadError, match="join_experts"):
        one(input_ids=ids)
    one.set_experts_implementation("eager")
    join_experts(one)
    assert torch.equal(one(input_ids=ids).logits, expected)


def test_what_generate_does_to_the_name_on_a_device_changes_nothing() -> None:
    """While it decodes there, transformers has the model compute by another implementation."""
    plain, model = build("mixtral", "grouped_mm"), split_experts(build("mixtral", "grouped_mm"), 1)
    ids = batch(0).cpu()
    expected = plain(input_ids=ids).logits
    model.set_experts_implementation("batched_mm")
    assert torch.equal(model(input_ids=ids).logits, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_they_are_split_where_nothing_is_differentiated(mode: Any) -> None:
    with mode():
        model = split_experts(build("mixtral", "eager"))
    assert any(isinstance(m, Sections) for m in model.modules())


def test_stacks_that_are_not_whole_are_refused() -> None:
    names = {f"experts.{n}.section_of_experts": n for n in (0, 2)}
    with pytest.raises(ValueError, match="experts has not all of its sections"):
        joined(names, lambda _, parts: len(parts))
    with pytest.raises(ValueError, match="as a whole too"):
        joined({**names, "experts.1.section_of_experts": 1, "experts": 3}, lambda _, p: len(p))
    assert joined({"a": 1, "b.section": 2}, lambda _, p: len(p)) == {"a": 1, "b.section": 2}


def test_files_of_another_shape_are_named_by_the_stack(tmp_path: Path) -> None:
    build("mixtral", "eager").save_pretrained(tmp_path)
    config = hf.MixtralConfig(**SHAPE, num_local_experts=8)
    config.intermediate_size = 64
    with overspill.empty_init():
        model = split_experts(hf.MixtralForCausalLM(config))
    with pytest.raises(ValueError, match=r"experts\.gate_up_proj has shape"):
        overspill.wrap(model, device=SIM, weights=tmp_path, rates=overspill.Rates())


def test_configs_may_say_by_layer_how_many_experts_a_token_has() -> None:
    model = build("mixtral", "eager")
    vars(model.config)["num_experts_per_tok"] = [2, 1, 3]  # as HunYuan's may
    split_experts(model, 1)
    (section, *_) = (m for m in model.modules() if isinstance(m, Section))
    assert section.rows_per_token == 2 / 8


def test_a_checkpoint_of_another_shape_is_an_error_of_the_stack() -> None:
    model = split_experts(build("mixtral", "eager"), SECTION)
    state = model.state_dict()
    name = "model.layers.0.mlp.experts.down_proj"
    state[name] = torch.cat([state[name], state[name]])
    with pytest.raises(RuntimeError, match=f"size mismatch for {name}"):
        model.load_state_dict(state, strict=False)


def test_a_state_dict_is_looked_at_as_a_whole_before_it_is_loaded(tmp_path: Path) -> None:
    """Also by a model that was put around the sections after the split."""
    build("mixtral", "eager", torch.bfloat16).save_pretrained(tmp_path / "base")
    with overspill.empty_init():
        empty = split_experts(build("mixtral", "eager", torch.bfloat16), SECTION // 2)
    model = adapted(empty)
    with overspill.wrap(
        model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]),
        weights=tmp_path / "base", nvme=tmp_path, device=SIM, device_memory="700KiB",
        host_memory="64MiB",
        rates=overspill.Rates(), activations="keep",
    ) as made:  # fmt: skip
        assert made.plan.detail.layout.in_place
        before = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        others = ("experts", "lora")
        other = {n: v + 1 if any(o in n for o in others) else v for n, v in before.items()}
        with pytest.raises(overspill.OffloadError, match="cannot be changed"):
            model.load_state_dict(other)
        same(model.state_dict(), before)
        model.load_state_dict(before)


@about_cpu
def test_weights_that_were_assigned_are_trained(tmp_path: Path) -> None:
    expected = build("mixtral", "eager")
    theirs = plainly(overspill.optim.AdamW, list(expected.parameters()), lr=1e-2)
    with overspill.empty_init():
        model = split_experts(build("mixtral", "eager"), SECTION)
    model.load_state_dict(expected.state_dict(), assign=True)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with overspill.wrap(
        model, inner, device=CPU, host_memory="2MiB", nvme=tmp_path, durable=False,
        rates=overspill.Rates(), activations="keep",
    ) as ours:  # fmt: skip
        assert train(model, ours, 4) == train(expected, theirs, 4)


def test_weights_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    whole = build("mixtral", "eager")
    dcp.save(whole.state_dict(), checkpoint_id=tmp_path)
    with overspill.empty_init():
        empty = split_experts(build("mixtral", "eager"), SECTION)
    with overspill.wrap(
        empty, torch.optim.AdamW(empty.parameters()), weights=tmp_path, device=SIM,
        device_memory="4MiB", host_memory="64MiB", rates=overspill.Rates(),
    ):  # fmt: skip
        same(empty.state_dict(), whole.state_dict())


def test_they_can_be_computed_again(caplog: pytest.LogCaptureFixture) -> None:
    model = split_experts(build("mixtral", "eager"), SECTION)
    with overspill.wrap(
        model, torch.optim.AdamW(model.parameters()), device=SIM, device_memory="4MiB",
        host_memory="64MiB", activations="recompute", rates=overspill.Rates(),
    ) as ours:  # fmt: skip
        train(model, ours, 2)
    assert not [
        r for r in caplog.records if "is called with" in r.message and "expert" in r.message
    ]


@about_cpu
def test_what_is_around_them_may_be_compiled_and_differentiated_otherwise() -> None:
    plain, split = build("mixtral", "eager"), split_experts(build("mixtral", "eager"), 1)
    ids = batch(0, 3)
    compiled = torch.compile(split, backend="eager")
    assert torch.equal(compiled(input_ids=ids).logits, plain(input_ids=ids).logits)
    experts = split.model.layers[0].mlp.experts
    index, weights = torch.tensor([[0, 1]]), torch.ones(1, 2)
    grad = torch.func.grad(lambda x: experts(x, index, weights).sum())(torch.ones(1, 64))
    assert grad.shape == (1, 64) and grad.any()


def test_experts_without_any_token_have_gradients_of_zeros() -> None:
    experts = split_experts(build("mixtral", "grouped_mm"), 1).model.layers[0].mlp.experts
    none = torch.zeros(0, 64, requires_grad=True)
    out = experts(none, torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    out.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in experts.parameters())


def test_a_stack_is_trained_if_a_section_is() -> None:
    model = split_experts(build("mixtral", "eager"), 1)
    first = next(m for m in model.modules() if isinstance(m, Section))
    first.requires_grad_(False)
    join_experts(model)
    assert all(p.requires_grad for p in model.parameters())


def test_a_model_that_nobody_has_is_freed_at_once() -> None:
    model = split_experts(build("mixtral", "eager"), 1)
    ids = batch(0).cpu()
    model(input_ids=ids)
    kept = [weakref.ref(m.section) for m in model.modules() if isinstance(m, Section)]
    gc.disable()
    try:
        del model
        assert not [each for each in kept if each() is not None]
    finally:
        gc.enable()


def test_copies_stand_alone() -> None:
    model = split_experts(build("mixtral", "eager"), SECTION)
    same(copy.deepcopy(model).state_dict(), model.state_dict())
    same(pickle.loads(pickle.dumps(model)).state_dict(), model.state_dict())
    other = split_experts(build("mixtral", "eager"), 1)
    other.load_state_dict(model.state_dict())
    same(other.state_dict(), model.state_dict())


@about_cpu
def test_the_name_may_be_given_to_models_that_are_not_split() -> None:
    one, other = build("mixtral", NAME), build("mixtral", "grouped_mm")
    ids = batch(0)
    assert torch.equal(one(input_ids=ids).logits, other(input_ids=ids).logits)
