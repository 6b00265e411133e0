"""Trainer, SFT, DPO and peft over overspill: the losses of the framework alone, its checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments

import overspill
from overspill.engine import engine_of
from overspill.integrations.transformers import OverspillTrainer, offloaded
from tests.devices import CPU, SIM, about_cpu

AMPLE = {"device": CPU, "host_memory": "1GiB"}
PLACES: dict[str, dict[str, Any]] = {
    "memory": AMPLE,
    "disk": {"device": CPU, "host_memory": "1200KiB"},
    "device": {"device": SIM, "device_memory": "1MiB", "host_memory": "4MiB"},
}
STEPS, SAVED = 12, 8


class Rows(torch.utils.data.Dataset[Any]):
    """Rows of tokens, the same every time."""

    def __init__(self, count: int = 64) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 128, (24,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens}


def llama(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
            bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def gpt2(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=128, n_embd=64, n_layer=4, n_head=4, n_positions=64,
            bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


class Stop(TrainerCallback):
    """As a run that is cut off after a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.at:
            control.should_training_stop = True


def arguments(out: Path, **more: Any) -> TrainingArguments:
    """The trainer's defaults, which clip at 1.0, with all that people set beside them."""
    given: dict[str, Any] = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": STEPS,
        "learning_rate": 1e-3, "warmup_steps": 2, "weight_decay": 0.1, "logging_steps": 1,
        "eval_strategy": "steps", "eval_steps": 4, "save_steps": 4, "report_to": [],
        "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    return TrainingArguments(output_dir=str(out), **{**given, **more})


def train(
    trainer: type[Trainer], model: Any, out: Path, options: dict[str, Any] | None = None,
    resume: Path | None = None, **more: Any,
) -> Any:  # fmt: skip
    """A run; of one that is offloaded the store lies beside its folder."""
    extra = {}
    if options is not None:
        store = out.with_name(f"{out.name}-store")
        store.mkdir(parents=True)
        extra["overspill"] = {**options, "nvme": store, "rates": overspill.Rates()}
    made = trainer(
        model, arguments(out, **more), train_dataset=Rows(), eval_dataset=Rows(8), **extra
    )
    made.train(resume_from_checkpoint=None if resume is None else str(resume))
    return made


def logged(trainer: Any, after: int = 0) -> list[tuple[Any, ...]]:
    """What it has logged of every step: loss, norm and learning rate, or the loss in evaluation."""
    keys = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
    steps = [tuple(entry.get(key) for key in keys) for entry in trainer.state.log_history]
    return [s for s in steps if s[0] > after and any(v is not None for v in s[1:])]


def far(ones: list[tuple[Any, ...]], others: list[tuple[Any, ...]]) -> float:
    assert len(ones) == len(others) > 3
    pairs = [
        (a, b)
        for one, other in zip(ones, others, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    assert all((a is None) == (b is None) for a, b in pairs)
    return max(abs(a - b) for a, b in pairs if a is not None)


def same_weights(one: Any, other: Any) -> bool:
    theirs = other.state_dict()
    return all(
        torch.equal(value.cpu(), theirs[name].cpu()) for name, value in one.state_dict().items()
    )


@pytest.fixture(autouse=True)
def closes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines end with their test."""
    made: list[Any] = []
    create = OverspillTrainer.create_optimizer

    def noted(self: Any, *args: Any, **more: Any) -> Any:
        made.append(create(self, *args, **more))
        return made[-1]

    monkeypatch.setattr(OverspillTrainer.__mro__[1], "create_optimizer", noted)
    yield
    for optimizer in made:
        optimizer.close()


@pytest.mark.parametrize("build", [llama, gpt2])
def test_a_trainer_learns_the_same_wherever_its_memory_is(build: Any, tmp_path: Path) -> None:
    """Near plain torch, whose kernels round otherwise; bit for bit from place to place."""
    plain = train(Trainer, build(), tmp_path / "plain")
    runs = {
        name: train(OverspillTrainer, build(), tmp_path / name, o) for name, o in PLACES.items()
    }
    for run in runs.values():
        assert far(logged(plain), logged(run)) < 2e-4
        assert logged(run) == logged(runs["memory"])
        assert same_weights(run.model, runs["memory"].model)


@pytest.mark.parametrize(
    ("update", "more"),
    [
        ("next_forward", {"gradient_checkpointing": True}),
        ("step", {"max_grad_norm": 0.0}),
        ("backward", {"max_grad_norm": 0.0, "gradient_checkpointing": True}),
        ("next_forward", {"lr_scheduler_type": "cosine", "per_device_train_batch_size": 5,
                          "num_train_epochs": 2, "max_steps": -1}),
        ("backward", {"max_grad_norm": 0.0, "per_device_train_batch_size": 5,
                      "num_train_epochs": 2, "max_steps": -1}),
        ("step", {"optim": "sgd", "learning_rate": 1e-2}),
    ],
    ids=["checkpointing", "unclipped", "in backward", "uneven", "uneven in backward", "sgd"],
)  # fmt: skip
def test_what_people_set(update: str, more: dict[str, Any], tmp_path: Path) -> None:
    plain = train(Trainer, llama(), tmp_path / "plain", **more)
    ours = train(
        OverspillTrainer, llama(), tmp_path / "ours", {**PLACES["device"], "update": update}, **more
    )
    assert far(logged(plain), logged(ours)) < 2e-4


@pytest.mark.parametrize(
    "more",
    [{}, {"bf16": True}, {"optim": "adamw_8bit"}, {"gradient_checkpointing": True}],
    ids=["fp32", "bf16", "8bit", "checkpointing"],
)
def test_a_run_that_was_cut_off_goes_on_bit_for_bit(more: dict[str, Any], tmp_path: Path) -> None:
    """From a checkpoint of its own, in other memory than before."""
    whole = train(OverspillTrainer, llama(), tmp_path / "whole", PLACES["device"], **more)
    saved = tmp_path / "whole" / f"checkpoint-{SAVED}"
    again = train(OverspillTrainer, llama(1), tmp_path / "again", PLACES["disk"], saved, **more)
    assert logged(again, SAVED) == logged(whole, SAVED)
    assert same_weights(again.model, whole.model)


def test_checkpoints_go_from_one_to_the_other(tmp_path: Path) -> None:
    plain = train(Trainer, llama(), tmp_path / "plain")
    ours = train(OverspillTrainer, llama(), tmp_path / "ours", PLACES["device"])
    theirs, mine = (tmp_path / name / f"checkpoint-{SAVED}" for name in ("plain", "ours"))
    assert {f.name for f in theirs.iterdir()} == {f.name for f in mine.iterdir()}
    loaded = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "ours" / f"checkpoint-{STEPS}"
    )
    assert same_weights(loaded, ours.model)
    back = train(Trainer, llama(1), tmp_path / "back", resume=mine)
    assert far(logged(back, SAVED), logged(ours, SAVED)) < 2e-4
    there = train(OverspillTrainer, llama(1), tmp_path / "there", PLACES["disk"], theirs)
    assert far(logged(there, SAVED), logged(plain, SAVED)) < 2e-4


def test_the_best_model_is_there_in_the_end(tmp_path: Path) -> None:
    more = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "max_steps": 12,
            "learning_rate": 3e-2, "save_total_limit": 1}  # fmt: skip
    ours = train(OverspillTrainer, llama(), tmp_path / "ours", PLACES["device"], **more)
    best = ours.state.best_model_checkpoint
    assert best is not None
    assert same_weights(transformers.LlamaForCausalLM.from_pretrained(best), ours.model)
    seen = [e["eval_loss"] for e in ours.state.log_history if "eval_loss" in e]
    assert abs(ours.evaluate()["eval_loss"] - min(seen)) < 1e-6


def test_evaluation_comes_before_training(tmp_path: Path) -> None:
    """The model is wrapped for it, and nothing is moved to a device as a whole."""
    data: dict[str, Any] = {"train_dataset": Rows(), "eval_dataset": Rows(8)}
    plain = Trainer(llama(), arguments(tmp_path / "plain"), **data)
    options = {**PLACES["device"], "nvme": tmp_path}
    ours = OverspillTrainer(llama(), arguments(tmp_path / "ours"), overspill=options, **data)
    assert abs(plain.evaluate()["eval_loss"] - ours.evaluate()["eval_loss"]) < 1e-5
    assert isinstance(ours.optimizer, overspill.OffloadedOptimizer)
    given, expected = (t.predict(Rows(4)).predictions for t in (ours, plain))
    assert torch.allclose(torch.tensor(given), torch.tensor(expected), atol=1e-5)
    plain.train()
    ours.train()
    assert far(logged(plain), logged(ours)) < 2e-4


def test_a_model_that_a_trainer_makes_itself_is_made_anew(tmp_path: Path) -> None:
    options = {**PLACES["disk"], "nvme": tmp_path, "durable": False}
    ours = OverspillTrainer(
        args=arguments(tmp_path / "ours"), train_dataset=Rows(), eval_dataset=Rows(8),
        model_init=lambda: llama(), overspill=options,
    )  # fmt: skip
    ours.train()
    first = logged(ours)
    ours.train()
    assert logged(ours) == first


@pytest.mark.parametrize(
    ("options", "more", "error", "told"),
    [
        ({"host_memry": "1GiB"}, {}, TypeError, "host_memry"),
        ({"host_memory": "much"}, {}, ValueError, "much"),
        ({}, {"bf16_full_eval": True}, ValueError, "bf16_full_eval"),
        ({}, {"auto_find_batch_size": True}, ValueError, "auto_find_batch_size"),
        ({"update": "backward"}, {}, ValueError, "max_grad_norm"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(
    options: dict[str, Any], more: dict[str, Any], error: type[Exception], told: str, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    with pytest.raises(error, match=told):
        OverspillTrainer(
            llama(),
            arguments(tmp_path / "ours", eval_strategy="no", **more),
            train_dataset=Rows(),
            overspill={**PLACES["device"], "nvme": store, **options},
        ).train()


@pytest.mark.parametrize("optim", ["adafactor", "schedule_free_adamw"])
def test_optimizers_that_run_their_own_step(optim: str, tmp_path: Path) -> None:
    """Clipping is left out, since the last bit of a norm depends on its order."""
    more = {"optim": optim, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    plain = train(Trainer, llama(), tmp_path / "plain", **more)
    ours = train(OverspillTrainer, llama(), tmp_path / "ours", PLACES["device"], **more)
    assert far(logged(plain), logged(ours)) < 2e-4


def test_adapters_are_saved_alone_and_loaded_again(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted(seed: int = 0) -> Any:
        model = llama(seed=0)
        torch.manual_seed(seed)
        return peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        )

    plain = train(Trainer, adapted(), tmp_path / "plain")
    ours = train(OverspillTrainer, adapted(), tmp_path / "ours", PLACES["device"])
    assert far(logged(plain), logged(ours)) < 2e-4
    saved = tmp_path / "ours" / f"checkpoint-{SAVED}"
    assert (saved / "adapter_model.safetensors").is_file()
    assert not (saved / "model.safetensors").exists()
    again = train(OverspillTrainer, adapted(1), tmp_path / "again", PLACES["disk"], saved)
    assert logged(again, SAVED) == logged(ours, SAVED)
    last = tmp_path / "ours" / f"checkpoint-{STEPS}"
    loaded = peft.PeftModel.from_pretrained(llama(), last).state_dict()
    trained = {n: v for n, v in ours.model.state_dict().items() if "lora_" in n}
    assert trained and all(torch.equal(v.cpu(), loaded[n]) for n, v in trained.items())


def test_adapters_of_transformers_own_are_saved_alone(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted(seed: int = 0) -> Any:
        model = llama(seed=0)
        torch.manual_seed(seed)
        model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        return model

    plain = train(Trainer, adapted(), tmp_path / "plain")
    ours = train(OverspillTrainer, adapted(), tmp_path / "ours", PLACES["device"])
    assert far(logged(plain), logged(ours)) < 2e-4
    theirs, mine = (tmp_path / name / f"checkpoint-{SAVED}" for name in ("plain", "ours"))
    assert {f.name for f in theirs.iterdir()} == {f.name for f in mine.iterdir()}
    again = train(OverspillTrainer, adapted(1), tmp_path / "again", PLACES["disk"], mine)
    assert logged(again, SAVED) == logged(ours, SAVED)
    loaded = llama()
    loaded.load_adapter(str(tmp_path / "ours" / f"checkpoint-{STEPS}"))
    there = loaded.state_dict()
    assert all(torch.equal(v.cpu(), there[n]) for n, v in ours.model.state_dict().items())


def test_each_trial_has_the_optimizer_that_its_arguments_ask_for(tmp_path: Path) -> None:
    options = {**PLACES["disk"], "nvme": tmp_path}
    ours = OverspillTrainer(
        args=arguments(tmp_path / "ours", optim="adamw_8bit", max_steps=2), overspill=options,
        train_dataset=Rows(), eval_dataset=Rows(8), model_init=lambda: llama(),
    )  # fmt: skip
    for rate in (1e-3, 5e-3):
        ours.args.learning_rate = rate
        ours.train()
        assert ours._offloaded.defaults["lr"] == rate
        engine = engine_of(ours.model)
        assert engine is not None and engine.config.moments == "int8"


@pytest.mark.parametrize("optim", ["adamw_torch_8bit", "adamw_torch_4bit", "paged_adamw_8bit"])
def test_compact_optimizers_are_adamw_with_compact_moments(optim: str, tmp_path: Path) -> None:
    def made(**more: Any) -> Any:
        return OverspillTrainer(
            llama(), arguments(tmp_path / "ours", optim=optim, max_steps=2, **more),
            train_dataset=Rows(), eval_dataset=Rows(8), overspill=PLACES["memory"],
        )  # fmt: skip

    ours = made()
    ours.train()
    engine = engine_of(ours.model)
    assert engine is not None
    assert engine.config.moments == "int8"
    ours._offloaded.close()
    with pytest.raises(ValueError, match="leave optim_args out"):
        made(optim_args="block_size=128").train()


@pytest.mark.parametrize("cut_off", [False, True])
def test_a_script_is_run_again_in_the_same_folders(cut_off: bool, tmp_path: Path) -> None:
    """The trainer resumes from its checkpoints; what the last run has left is in no way."""
    (tmp_path / "store").mkdir()
    options = {**PLACES["disk"], "nvme": tmp_path / "store"}
    for resume in (None, True):
        ours = OverspillTrainer(
            llama(), arguments(tmp_path / "ours"), train_dataset=Rows(), eval_dataset=Rows(8),
            overspill=options, callbacks=[Stop(9)] if cut_off and not resume else [],
        )  # fmt: skip
        ours.train(resume_from_checkpoint=resume)
        ours._offloaded.close()
    assert ours.state.global_step >= STEPS  # one step more, where the run was at its end


def marian() -> Any:
    torch.manual_seed(0)
    return transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48,
            decoder_ffn_dim=48, encoder_attention_heads=4, decoder_attention_heads=4,
            max_position_embeddings=32, pad_token_id=0, decoder_start_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def test_tables_that_files_leave_out_are_as_they_were(tmp_path: Path) -> None:
    original = marian()
    original.save_pretrained(tmp_path / "files")
    given = [marian()]
    with overspill.empty_init():
        given.append(marian())
    for model in given:
        inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        with overspill.wrap(model, inner, weights=tmp_path / "files", **AMPLE):
            assert same_weights(model, original)


def test_only_trainers_can_be_offloaded() -> None:
    class Mine(Trainer):
        pass

    made = offloaded(Mine)
    assert issubclass(made, Mine) and made.__name__ == "OverspillMine"
    assert offloaded(Mine) is made and offloaded(made) is made
    with pytest.raises(TypeError, match="Trainer"):
        offloaded(dict)  # type: ignore[type-var]


LARGE = """
import json, sys, threading, time
import torch, transformers, overspill
from overspill.integrations.transformers import OverspillTrainer
from tests.integrations.test_transformers import Rows, arguments
from pathlib import Path

out, store, resume = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] or None
config = transformers.LlamaConfig(
    vocab_size=128, hidden_size=768, intermediate_size=2048, num_hidden_layers=10,
    num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=64)
with overspill.empty_init():
    model = transformers.LlamaForCausalLM(config)
parameters = sum(p.numel() for p in model.parameters())

most = 0

def watch():  # pages of mapped files aside, which the kernel takes back at will
    global most
    while True:
        lines = open("/proc/self/status").read().splitlines()
        most = max(most, *(int(l.split()[1]) << 10 for l in lines if l.startswith("RssAnon")))
        time.sleep(0.002)

threading.Thread(target=watch, daemon=True).start()
trainer = OverspillTrainer(
    model, arguments(out, max_steps=2 if resume else 1, save_steps=1, eval_strategy="no"),
    train_dataset=Rows(8),
    overspill={"device": "cpu", "host_memory": "160MiB", "nvme": store, "durable": False})
time.sleep(0.1)
before = most
trainer.train(resume_from_checkpoint=resume)
trainer.optimizer.optimizer.close()
print(json.dumps({"bytes": parameters * 12, "before": before, "after": most}))
"""


@pytest.mark.soak  # takes a minute
@about_cpu
def test_a_model_is_saved_and_resumed_that_the_process_may_not_hold(tmp_path: Path) -> None:
    """Weights and state of 850 MB, while the process takes not three quarters of that for all:
    160 MiB are the engine's, most of the rest is torch's for a step."""
    (tmp_path / "store").mkdir()
    for resume in ("", str(tmp_path / "out" / "checkpoint-1")):
        done = subprocess.run(
            [sys.executable, "-c", LARGE, str(tmp_path / "out"), str(tmp_path / "store"), resume],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        told = json.loads(done.stdout.strip().splitlines()[-1])
        assert told["bytes"] > 800e6
        assert told["after"] - told["before"] < 0.75 * told["bytes"], told
