"""Every block of Python on the pages runs: with a small model, a folder of its own, and MiB where
the page says GiB.  What cannot is marked on the page: ``py`` in place of ``python``, which is shown
and no more (others' code, several ranks, models that are not here)."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from tests.tidy.sources import ROOT

PAGES = ["README.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(python|py)\n(.*?)^```$", re.S | re.M)


def blocks(kind: str) -> list[Any]:
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for number, (language, code) in enumerate(BLOCK.findall(text)):
            if language == kind:
                found.append(pytest.param(code, id=f"{page}-{number}"))
    return found


def here(code: str, tmp_path: Path) -> str:
    """A block for this machine, without a device."""
    code = code.replace("GiB", "MiB").replace("device_memory=", 'device="sim", device_memory=')
    code = code.replace('"Llama-3-8B"', "folder").replace('"device_memory": "10MiB", ', "")
    return re.sub(r'"/(scratch[\w/]*|out)"', lambda m: f'"{tmp_path / m.group(1)}"', code)


class Answer:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class Model(nn.Module):
    """Takes a batch as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> Answer:
        y = self.last(torch.tanh(self.first(x.to(self.first.weight.dtype))))
        return Answer(y.float().square().mean())


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the pages take for given."""
    for name in ("scratch/run1", "scratch/a"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = Model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = [{"x": torch.randn(8, 16)} for _ in range(3)]
    given = {
        "torch": torch, "overspill": overspill, "model": model, "inner": inner, "loader": loader,
        "schedule": torch.optim.lr_scheduler.ConstantLR(inner), "validate": lambda m: None,
        "batches_from": lambda step: loader[step:],
    }  # fmt: skip
    yield given
    for kept in list(given.values()):
        while hasattr(kept, "optimizer"):  # a trainer, or what accelerate has made of it
            kept = kept.optimizer
        if isinstance(kept, overspill.OffloadedOptimizer):
            kept.close()


def of_transformers(tmp_path: Path) -> dict[str, Any]:
    """A small Llama, in memory and in a folder, and what trains it."""
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    ids = torch.randint(0, 64, (8, 16))
    data = [{"input_ids": row, "labels": row} for row in ids]
    args = transformers.TrainingArguments(
        str(tmp_path / "trained"), max_steps=2, per_device_train_batch_size=2, report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    return {
        "LlamaForCausalLM": transformers.LlamaForCausalLM, "LlamaConfig": transformers.LlamaConfig,
        "get_peft_model": peft.get_peft_model, "LoraConfig": peft.LoraConfig, "config": config,
        "folder": str(tmp_path / "llama"), "prompt": {"input_ids": ids[:1], "max_new_tokens": 2},
        "model": transformers.LlamaForCausalLM(config), "args": args, "data": data,
        "batch": {"input_ids": ids},
    }  # fmt: skip


def a_committed_run(names: dict[str, Any], tmp_path: Path) -> None:
    """What a block that resumes goes on from; model and optimizer are new ones."""
    optimizer = overspill.wrap(
        names["model"], names["inner"], nvme=tmp_path / "scratch/run1",
        extra=lambda: {"schedule": names["schedule"].state_dict()},
    )  # fmt: skip
    names["model"](**names["loader"][0]).loss.backward()
    optimizer.step()
    optimizer.close()
    names["model"] = Model()
    names["inner"] = torch.optim.AdamW(names["model"].parameters(), lr=1e-3)


@pytest.mark.parametrize("code", blocks("python"))
def test_blocks_run(code: str, names: dict[str, Any], tmp_path: Path) -> None:
    if "Llama" in code or "Trainer(" in code:
        names.update(of_transformers(tmp_path))
    if "accelerator" in code:
        accelerate = pytest.importorskip("accelerate")
        names.update(accelerator=accelerate.Accelerator(cpu=True), optimizer=names.pop("inner"))
        names["loader"] = torch.utils.data.DataLoader(names["loader"], batch_size=None)
    if "lightning." in code:
        names["lightning"] = pytest.importorskip("lightning")
    if "overspill.resume(" in code:
        a_committed_run(names, tmp_path)
    exec(compile(here(code, tmp_path), "block", "exec"), names)


@pytest.mark.parametrize("code", blocks("py"))
def test_what_is_only_shown_is_python_all_the_same(code: str) -> None:
    ast.parse(code)


def test_there_are_blocks() -> None:
    assert len(blocks("python")) >= 8
