"""TRL's trainers over overspill: losses and norms of the trainer alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers
import trl
from tokenizers import Tokenizer, models, pre_tokenizers
from trl.experimental.gkd import GKDConfig, GKDTrainer

import overspill
from overspill.integrations.transformers import offloaded
from tests.devices import NAME, SIM

WORDS = 120
TIGHT = {"device": SIM, "device_memory": "1MiB", "host_memory": "4MiB", "durable": False}
SHAPE: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def tokenizer_of_words() -> Any:
    known = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(WORDS))]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        unk_token="<unk>",
    )  # fmt: skip


@pytest.fixture(scope="module")
def words() -> Any:
    return tokenizer_of_words()


def rows(*columns: tuple[str, int], count: int = 32) -> Any:
    """Columns of so many drawn words."""
    drawn = random.Random(0)
    return datasets.Dataset.from_list(
        [
            {name: " ".join(f"w{drawn.randrange(WORDS)}" for _ in range(n)) for name, n in columns}
            for _ in range(count)
        ]
    )


def llama(kind: Any = transformers.LlamaForCausalLM, seed: int = 0, **more: Any) -> Any:
    torch.manual_seed(seed)
    return kind(transformers.LlamaConfig(**SHAPE, **more))


def lora() -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


TEXT, ANSWERS = [("text", 30)], [("prompt", 8), ("completion", 10)]
PAIRS = [("prompt", 8), ("chosen", 10), ("rejected", 10)]


def unlike(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion.split()))) for completion in completions]


def prompts_and_answers(rows: list[dict[str, str]]) -> dict[str, torch.Tensor]:
    """A batch as GKD's collator makes it of chats, of which these words are none."""
    ids = torch.tensor([[4 + int(word[1:]) for word in row["text"].split()] for row in rows])
    labels = ids.clone()
    labels[:, :10] = -100
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels,
        "prompts": ids[:, :10], "prompt_attention_mask": torch.ones_like(ids[:, :10]),
    }  # fmt: skip


# By name: the trainer, its arguments' class, the rows, arguments, and what else the trainer takes.
CASES: dict[str, tuple[Any, Any, Any, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "sft": (trl.SFTTrainer, trl.SFTConfig, TEXT, {}, dict),
    "packed": (trl.SFTTrainer, trl.SFTConfig, TEXT, {"packing": True, "max_length": 64}, dict),
    "completions": (
        trl.SFTTrainer, trl.SFTConfig, ANSWERS, {"completion_only_loss": True}, dict,
    ),
    "checkpointed": (
        trl.SFTTrainer, trl.SFTConfig, TEXT,
        {"gradient_checkpointing": True, "loss_type": "nll"}, dict,
    ),
    "sft lora": (trl.SFTTrainer, trl.SFTConfig, TEXT, {}, lambda: {"peft_config": lora()}),
    "dpo": (
        trl.DPOTrainer, trl.DPOConfig, PAIRS, {"precompute_ref_log_probs": True},
        lambda: {"ref_model": llama()},
    ),
    "dpo with a reference": (
        trl.DPOTrainer, trl.DPOConfig, PAIRS, {}, lambda: {"ref_model": llama(seed=1)},
    ),
    "kto with a reference": (
        trl.KTOTrainer, trl.KTOConfig, PAIRS, {}, lambda: {"ref_model": llama(seed=1)},
    ),
    "distillation": (
        trl.DistillationTrainer, trl.DistillationConfig, [("prompt", 6)],
        {"max_completion_length": 8, "max_steps": 3},
        lambda: {"teacher_model": llama(seed=1)},
    ),
    "gkd": (
        GKDTrainer, GKDConfig, TEXT, {"max_new_tokens": 8, "max_steps": 4, "lmbda": 0.7},
        lambda: {"teacher_model": llama(seed=1), "data_collator": prompts_and_answers},
    ),
    "dpo lora": (trl.DPOTrainer, trl.DPOConfig, PAIRS, {}, lambda: {"peft_config": lora()}),
    "reward": (trl.RewardTrainer, trl.RewardConfig, PAIRS, {}, dict),
    "grpo": (
        trl.GRPOTrainer, trl.GRPOConfig, [("prompt", 6)],
        {"num_generations": 4, "max_completion_length": 8, "max_steps": 3},
        lambda: {"reward_funcs": unlike},
    ),
}  # fmt: skip


def test_an_accelerator_that_is_made_again_places_batches(words: Any, tmp_path: Path) -> None:
    """As ``hyperparameter_search`` does; only while the trainer is made, nothing is placed."""
    made = offloaded(trl.SFTTrainer)(
        model=llama(), train_dataset=rows(*TEXT), processing_class=words,
        args=trl.SFTConfig(str(tmp_path), report_to=[], use_cpu=True, bf16=False),
    )  # fmt: skip
    assert made.accelerator.device_placement
    made.create_accelerator_and_postprocess()
    assert made.accelerator.device_placement


class WithTeacher(transformers.Trainer):
    """Its loss uses a model of its own."""

    teacher: Any

    def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
        with torch.no_grad():
            target = self.teacher(**inputs).logits
        return torch.nn.functional.mse_loss(model(**inputs).logits, target)


def test_a_teacher_outlives_the_models_of_several_runs(tmp_path: Path) -> None:
    """As in a search over hyper-parameters: each run makes its model anew."""
    ids = [{"input_ids": torch.arange(8) + n, "labels": torch.arange(8) + n} for n in range(8)]
    losses = []
    for kind in (WithTeacher, offloaded(WithTeacher)):
        mine = {} if kind is WithTeacher else {"overspill": {**TIGHT, "nvme": tmp_path}}
        made = kind(
            model_init=lambda: llama(), train_dataset=ids,
            args=transformers.TrainingArguments(
                str(tmp_path / kind.__name__), max_steps=3, report_to=[], use_cpu=True,
                save_strategy="no", logging_steps=1, disable_tqdm=True, learning_rate=1e-3,
            ), **mine,
        )  # fmt: skip
        made.teacher = teacher = llama(seed=1)
        for _ in range(2):
            made.train()
        losses.append([e["loss"] for e in made.state.log_history if "loss" in e])
        if mine:
            overspill.unwrap({"model": made.model, "teacher": teacher})
            for p, q in zip(teacher.parameters(), llama(seed=1).parameters(), strict=True):
                assert torch.equal(p, q)
    assert len(losses[0]) == 3 and losses[0] == pytest.approx(losses[1], abs=2e-4)


def test_options_name_modules_of_the_trained_model(words: Any, tmp_path: Path) -> None:
    """Its first child is called ``model``, too."""
    made = offloaded(trl.DPOTrainer)(
        model=llama(), ref_model=llama(seed=1), train_dataset=rows(*PAIRS), processing_class=words,
        args=trl.DPOConfig(str(tmp_path), report_to=[], use_cpu=True, bf16=False),
        overspill={**TIGHT, "nvme": tmp_path, "resident": ["model.embed_tokens"]},
    )  # fmt: skip
    optimizer = made.create_optimizer()
    assert isinstance(optimizer, overspill.OffloadedOptimizer)
    with optimizer:
        placed = optimizer.plan.placement
        assert placed["model.model.embed_tokens"].resident
        assert "ref_model.model.embed_tokens" in placed


@pytest.mark.parametrize("case", CASES)
def test_the_losses_are_those_of_the_trainer_alone(case: str, words: Any, tmp_path: Path) -> None:
    if NAME == "testdev" and case == "grpo":
        pytest.skip("shuffled by an index on the CPU, which the test device does not take")
    kind, arguments, columns, more, others = CASES[case]
    logs = []
    for trainer in (kind, offloaded(kind)):
        mine = {} if trainer is kind else {"overspill": {**TIGHT, "nvme": tmp_path}}
        if case == "reward":
            model = llama(transformers.LlamaForSequenceClassification, num_labels=1)
        else:
            model = llama()
        given = {
            "max_steps": 8, "logging_steps": 1, "learning_rate": 1e-3, "bf16": False,
            "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True,
            "disable_tqdm": True, "save_strategy": "no", **more,
        }  # fmt: skip
        made = trainer(
            model=model, args=arguments(output_dir=str(tmp_path / trainer.__name__), **given),
            train_dataset=rows(*columns), processing_class=words, **others(), **mine,
        )  # fmt: skip
        made.train()
        logs.append([(e["loss"], e["grad_norm"]) for e in made.state.log_history if "loss" in e])
        optimizer = getattr(made.optimizer, "optimizer", None)
        if mine:
            assert isinstance(optimizer, overspill.OffloadedOptimizer)
            named = {name.partition(".")[0] for name in optimizer.plan.placement}
            beside = {n for n in ("ref_model", "teacher_model") if getattr(made, n, None)}
            assert not beside or named == {"model", *beside}
            optimizer.close()
    assert len(logs[0]) == len(logs[1]) == given["max_steps"]
    assert max(abs(a - b) for one, other in zip(*logs, strict=True)
               for a, b in zip(one, other, strict=True)) < 2e-4  # fmt: skip
