"""The whole job, small: what it leaves in its folder, and what its figures say."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.facts.stats import MemoryStats
from overspill.train.compare import in_memory_adamw, rounded
from overspill.train.data import Batches, Corpus
from overspill.train.job import Job, run
from overspill.train.save import save_masters, save_weights
from overspill.train.shapes import find_model
from overspill.train.training_loop import LoopSettings, StepRecord, train

safetensors_torch = pytest.importorskip("safetensors.torch")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

FILES = {
    "config.json", "loss.png", "timeline.png", "memory.png", "trace.json", "model.safetensors",
    "run.json", "planned.json", "report.html",
}  # fmt: skip


class Quiet:
    """A watch that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[StepRecord] = []
        self.tiers: list[set[str]] = []
        self.running = 0

    def note(self, text: str) -> None:
        self.notes.append(text)

    def begin(self, title: str, steps: int) -> None:
        self.running += 1

    def step(self, record: StepRecord, memory: Mapping[str, MemoryStats]) -> None:
        self.steps.append(record)
        self.tiers.append(set(memory))

    def end(self) -> None:
        self.running -= 1


def small(tmp_path: Path, **changes: Any) -> Job:
    (tmp_path / "store").mkdir(exist_ok=True)
    store = tempfile.mkdtemp(dir=tmp_path / "store")
    text = tmp_path / "text.txt"
    text.write_text("All work and no play makes a dull boy. " * 200)
    offload = {
        "device": "sim", "device_memory": "3MiB", "host_memory": "6MiB", "nvme": store,
        **changes.pop("offload", {}),
    }  # fmt: skip
    job = Job(
        model="gpt2-1m", data=text, steps=4, batch=2, seq=32, lr=1e-3, out=tmp_path / "out",
        offload=offload,
    )  # fmt: skip
    return replace(job, **changes)


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({}, 1e-4),
        ({"offload": {"precision": "bf16"}}, 0.02),
        ({"offload": {"max_grad_norm": 0.3}, "accumulate": 2}, 1e-4),
    ],
)
def test_the_run_matches_training_in_memory(
    tmp_path: Path, changes: dict[str, Any], tolerance: float
) -> None:
    watch = Quiet()
    report = run(small(tmp_path, compare=True, **changes), watch)
    assert report.comparison is not None
    assert report.comparison.loss_difference < tolerance
    losses = [r.loss for r in report.records]
    assert losses[-1] < losses[0]
    assert len(watch.steps) == 8 and watch.running == 0
    assert watch.tiers[0] == {"device", "host", "nvme"} and watch.tiers[-1] == set()
    assert {p.name for p in (tmp_path / "out").iterdir()} == FILES
    left = {p.name for p in (tmp_path / "store").rglob("overspill.*")}
    assert left == {"overspill.manifest", "overspill.store"}


def test_figures_on_file(tmp_path: Path) -> None:
    report = run(small(tmp_path), Quiet())
    figures = json.loads((tmp_path / "out" / "run.json").read_text())
    assert figures["loss_last"] == report.records[-1].loss
    assert figures["batches_taken"] == 4
    assert figures["parameters"] == sum(
        p.numel() for p in find_model("gpt2-1m").build().parameters()
    )
    assert figures["training_bytes"] >= 16 * figures["parameters"]
    assert figures["comparison"] is None
    for tier in ("device", "host", "nvme"):
        stats = figures["memory"][tier]
        assert 0 < stats["peak_bytes"] <= stats["budget_bytes"]
    assert figures["link_bytes_per_step"]["read"] > 0
    assert figures["cpu_s"] > 0 and all(step["cpu_s"] > 0 for step in figures["steps"])
    rows = dict(report.rows())
    assert "times the lower bound" in rows["step time"]
    assert rows["CPU time per step"] == f"{report.cpu_s:.3g} core-seconds"
    assert "of 3 MiB" in rows["peak memory, device"]


def test_the_folder_written_is_one_to_go_on_from(tmp_path: Path) -> None:
    first = run(small(tmp_path, steps=8), Quiet())
    watch = Quiet()
    more = small(tmp_path, model=str(tmp_path / "out"), out=tmp_path / "out2", steps=2, lr=1e-5)
    second = run(more, watch)
    assert any("weights from" in note for note in watch.notes)
    assert second.records[0].loss == pytest.approx(first.records[-1].loss, abs=0.25)
    assert second.records[0].loss < first.records[0].loss - 0.5


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    runs = [run(small(tmp_path, seed=s, steps=2), Quiet()).records for s in (3, 3, 4)]
    losses = [[r.loss for r in records] for records in runs]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"seq": 1}, "seq must be at least 2"),
        ({"lr": -1.0}, "lr must be a positive number"),
        ({"lr": float("nan")}, "lr must be a positive number"),
        ({"seed": -1}, "seed must not be negative"),
        ({"seq": 513}, "seq 513 exceeds the 512 positions of gpt2-1m"),
        ({"model": "gpt3"}, "neither a folder nor a named shape"),
    ],
)
def test_senseless_jobs_leave_nothing_behind(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(small(tmp_path, **changes), Quiet())
    assert not (tmp_path / "out").exists()


def test_a_budget_too_small_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(overspill.BudgetError, match="device memory"):
        run(small(tmp_path, offload={"device_memory": "100KiB"}), Quiet())
    assert not (tmp_path / "out").exists()
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


# -- parts ----------------------------------------------------------------------------------------


class Bowl(torch.nn.Module):
    """A model whose loss is what its one weight says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return type("Output", (), {"loss": self.weight**2})


def some_batches() -> Batches:
    import numpy as np

    return Batches(Corpus(np.zeros(100, dtype=np.int32), "zeros", Path("zeros")), 1, 10, 0)


def test_the_loop_stops_at_a_loss_that_is_not_finite() -> None:
    model = Bowl()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
    seen: list[StepRecord] = []
    with pytest.raises(overspill.OffloadError, match="at step 2; lower the learning rate"):
        train(
            model, optimizer, some_batches(), LoopSettings(5, 1, torch.device("cpu")), seen.append
        )
    assert [r.step for r in seen] == [1]


def test_the_loop_clips_and_accumulates() -> None:
    model = Bowl()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = LoopSettings(1, 4, torch.device("cpu"), clip=0.5)
    records = train(model, optimizer, some_batches(), settings, lambda r: None)
    assert float(model.weight) == pytest.approx(2.5, abs=1e-4), "a step of the clipped length"
    assert records[0].loss == 9.0 and records[0].tokens == 40


def test_in_memory_masters_keep_what_bf16_loses() -> None:
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = in_memory_adamw({p: torch.ones(4)}, lr=1e-4)
    for _ in range(100):
        p.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert p.dtype == torch.bfloat16
    assert torch.allclose(p.float(), torch.full((4,), 0.989), atol=4e-3), "bf16 alone stays at 1"


def test_bf16_rounds_ties_away_from_zero() -> None:
    tie = torch.tensor([1 + 2**-8, -(1 + 2**-8)])
    assert rounded(tie, torch.bfloat16).tolist() == [1 + 2**-7, -(1 + 2**-7)]


def test_saved_weights_are_the_current_ones(tmp_path: Path) -> None:
    model = find_model("gpt2-1m").build()
    optimizer = overspill.wrap(
        model, torch.optim.AdamW(model.parameters()), device="sim", device_memory="1500KiB",
        host_memory="64MiB", precision="bf16",
    )  # fmt: skip
    with optimizer:
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        for _ in range(2):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        nbytes = save_weights(model, tmp_path / "weights.safetensors")
        save_masters(model, tmp_path / "masters.safetensors")
        state = model.state_dict()
    saved = safetensors_torch.load_file(tmp_path / "weights.safetensors")
    masters = safetensors_torch.load_file(tmp_path / "masters.safetensors")
    assert nbytes == (tmp_path / "weights.safetensors").stat().st_size
    assert set(saved) == set(state) - {"lm_head.weight"}, "a tied weight is written once"
    for name, value in saved.items():
        assert torch.equal(value, state[name]), name
        assert torch.equal(rounded(masters[name], torch.bfloat16), value), name
    assert not list(tmp_path.glob("*.part"))


def test_the_learning_rate_warms_up() -> None:
    model = Bowl()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rates: list[float] = []
    settings = LoopSettings(5, 1, torch.device("cpu"), warmup=3)
    optimizer.register_step_pre_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))
    train(model, optimizer, some_batches(), settings, lambda r: None)
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])


# -- Hugging Face folders -------------------------------------------------------------------------


def folder_with_tokenizer(path: Path) -> Path:
    """A small llama with bf16 weights and a tokenizer of whole words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", "</s>", "all", "work", "and", "no", "play", "makes", "a", "dull", "boy"]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="</s>"
    ).save_pretrained(path)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(path, max_shard_size="100KB")
    return path


def test_fine_tuning_a_sharded_folder_with_its_tokenizer(tmp_path: Path) -> None:
    folder = folder_with_tokenizer(tmp_path / "model")
    assert len(list(folder.glob("*.safetensors"))) > 1
    offload = {"device_memory": "200KiB", "host_memory": "700KiB"}
    job = small(tmp_path, model=str(folder), compare=True, offload=offload, steps=6)
    report = run(job, Quiet())
    assert report.comparison is not None and report.comparison.loss_difference < 0.02
    assert report.records[-1].loss < report.records[0].loss
    assert "2,001 tokens" in report.data, "nine words and a stop, 200 times, and the end"
    saved = safetensors_torch.load_file(tmp_path / "out" / "model.safetensors")
    assert {v.dtype for v in saved.values()} == {torch.bfloat16}
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.parametrize("damage", ["cut", "noise", "other shape", "a tensor less"])
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "model"
    model = find_model("gpt2-1m")
    model.config.save_pretrained(folder)
    state = {n: torch.zeros(p.shape) for n, p in model.build().named_parameters()}
    if damage == "other shape":
        state["transformer.wpe.weight"] = torch.zeros(3, 3)
    if damage == "a tensor less":
        del state["transformer.h.2.mlp.c_fc.weight"]
    file = folder / "model.safetensors"
    safetensors_torch.save_file(state, file)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:5000])
    if damage == "noise":
        file.write_bytes(b"no such format" * 100)
    words = {
        "cut": "cannot be read as safetensors",
        "noise": "cannot be read as safetensors",
        "other shape": r"transformer\.wpe\.weight has shape \(3, 3\), expected \(512, 128\)",
        "a tensor less": r"transformer\.h\.2\.mlp\.c_fc\.weight is missing",
    }
    with pytest.raises(ValueError, match=words[damage]):
        run(small(tmp_path, model=str(folder)), Quiet())
    assert not (tmp_path / "out").exists()
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []
