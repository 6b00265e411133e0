"""The plugin against axolotl's interface: what its loader and its builder of trainers ask for.

axolotl pins other releases of transformers and torch, so it is not installed here: its base class
and its trainer's place are stood in for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

import overspill
from tests.devices import about_sim
from tests.integrations.test_transformers import Rows, llama

pytestmark = about_sim
PLUGIN = "overspill.integrations.axolotl.OverspillPlugin"


class AxolotlTrainer(transformers.Trainer):
    """As axolotl's builder calls it."""

    def __init__(self, *args: Any, bench_data_collator: Any = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self.bench_data_collator = bench_data_collator


class BasePlugin:
    """Those of its methods that a trainer's making asks for."""

    def get_input_args(self) -> str | None: ...

    def get_trainer_cls(self, cfg: Any) -> type | None: ...


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Loaded by its dotted name."""
    given = {
        "axolotl": {}, "axolotl.integrations": {}, "axolotl.core": {},
        "axolotl.integrations.base": {"BasePlugin": BasePlugin},
        "axolotl.core.trainers": {"AxolotlTrainer": AxolotlTrainer},
    }  # fmt: skip
    for name, members in given.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, PLUGIN.rpartition(".")[0], raising=False)
    module_name, _, class_name = PLUGIN.rpartition(".")
    yield getattr(importlib.import_module(module_name), class_name)()
    sys.modules.pop(module_name, None)


def train(kind: type, folder: Path) -> tuple[list[float], Any]:
    args = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=6,
        logging_steps=1, learning_rate=1e-2, report_to=[], save_strategy="no", use_cpu=True,
    )  # fmt: skip
    trainer: Any = kind(
        model=llama(), args=args, train_dataset=Rows(), data_collator=None, callbacks=[],
        bench_data_collator=list,
    )  # fmt: skip
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each], trainer


def test_it_trains_as_axolotls_own(plugin: Any, tmp_path: Path) -> None:
    options = {
        "device": "sim", "device_memory": "1MiB", "host_memory": "4MiB", "durable": False,
        "rates": overspill.Rates(),
    }  # fmt: skip
    kind = plugin.get_trainer_cls({"overspill": options, "rl": None})
    assert issubclass(kind, AxolotlTrainer)
    losses, trainer = train(kind, tmp_path / "ours")
    expected, _ = train(AxolotlTrainer, tmp_path / "theirs")
    torch.testing.assert_close(losses, expected, rtol=2e-4, atol=0)
    assert trainer.bench_data_collator is list
    assert isinstance(trainer.optimizer.optimizer, overspill.OffloadedOptimizer)
    trainer.optimizer.optimizer.close()


def test_its_part_of_a_configuration_is_checked(plugin: Any, tmp_path: Path) -> None:
    name = plugin.get_input_args()
    module, _, kind = name.rpartition(".")
    schema: Any = getattr(importlib.import_module(module), kind)
    assert schema(overspill={"host_memory": "1GiB"}).overspill == {"host_memory": "1GiB"}
    assert schema().overspill is None
    with pytest.raises(ValueError, match="valid dictionary"):
        schema(overspill="1GiB")
    unknown = plugin.get_trainer_cls({"overspill": {"host_memry": "1GiB"}})
    with pytest.raises(TypeError, match="host_memry"):
        train(unknown, tmp_path)


@pytest.mark.parametrize(
    "asked",
    [{"rl": "dpo"}, {"reward_model": True}, {"model_config_type": "mamba"}, {"trainer_cls": "a.B"}],
)
def test_other_trainers_are_refused(plugin: Any, asked: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"does not go together with {next(iter(asked))}"):
        plugin.get_trainer_cls(asked)
