"""``overspill.offloading``: trainers that a library creates by itself take the options."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

import overspill
from overspill.engine import engine_of
from overspill.facts.tier import Tier
from overspill.integrations.transformers import offloaded
from tests.devices import about_cpu
from tests.integrations.test_transformers import AMPLE, Rows, arguments, llama, logged

TIGHT = {"device": AMPLE["device"], "host_memory": "1200KiB", "rates": overspill.Rates()}


class LibraryTrainer(Trainer):
    """As libraries have them: with arguments of its own, and a ``__new__``."""

    def __new__(cls, *args: Any, weight: float = 1.0, **more: Any) -> LibraryTrainer:
        made: LibraryTrainer = super().__new__(cls)
        made.made_with = weight
        return made

    def __init__(self, *args: Any, weight: float = 1.0, **more: Any) -> None:
        super().__init__(*args, **more)
        self.weight = weight

    def compute_loss(self, *args: Any, **more: Any) -> Any:
        return self.weight * super().compute_loss(*args, **more)


def finetune(model: Any, out: Path, **more: Any) -> Trainer:
    """A library's function, which knows nothing of overspill."""
    given = arguments(out, max_steps=4, eval_strategy="no", save_strategy="no")
    trainer = LibraryTrainer(model, given, train_dataset=Rows(), weight=0.5, **more)
    trainer.train()
    return trainer


@about_cpu
def test_a_trainer_created_by_a_library(tmp_path: Path) -> None:
    plain, model = llama(), llama()
    expected = finetune(plain, tmp_path / "plain")
    assert type(expected) is LibraryTrainer
    (tmp_path / "store").mkdir()
    with overspill.offloading(**TIGHT, nvme=tmp_path / "store"):
        found = finetune(model, tmp_path / "ours")
    assert isinstance(found, LibraryTrainer) and type(found) is offloaded(LibraryTrainer)
    assert (found.weight, found.made_with) == (0.5, 0.5)
    assert [step[:2] for step in logged(found)] == [step[:2] for step in logged(expected)]
    engine = engine_of(model)
    assert engine is not None and engine.memory[Tier.HOST].budget_bytes == 1200 << 10
    with found.optimizer.optimizer as optimizer:
        assert optimizer.stats.lanes["read"].bytes > 0, "from the disk: 1200 KiB are too few"


@about_cpu
def test_it_ends_with_the_block(tmp_path: Path) -> None:
    with pytest.raises(KeyError), overspill.offloading(**AMPLE):
        raise KeyError
    model = llama()
    trainer = Trainer(model, arguments(tmp_path, eval_strategy="no"), train_dataset=Rows())
    assert type(trainer) is Trainer and type(copy.copy(trainer)) is Trainer
    with pytest.raises(TypeError, match="unexpected keyword argument 'overspill'"):
        Trainer(model, arguments(tmp_path, eval_strategy="no"), overspill=AMPLE)
    assert engine_of(model) is None


@about_cpu
def test_blocks_are_nested_and_a_trainers_own_options_come_first(tmp_path: Path) -> None:
    with overspill.offloading(**AMPLE, threads=1, tokens=5):
        with overspill.offloading(threads=2):
            inner = offloaded(Trainer)(
                llama(),
                arguments(tmp_path, eval_strategy="no"),
                train_dataset=Rows(),
                overspill={"tokens": 7},
            )
        outer: Any = Trainer(llama(), arguments(tmp_path, eval_strategy="no"), train_dataset=Rows())
    assert inner._options == {**AMPLE, "threads": 2, "tokens": 7}
    assert outer._options == {**AMPLE, "threads": 1, "tokens": 5}


@about_cpu
def test_other_threads_are_not_concerned(tmp_path: Path) -> None:
    found = []
    with overspill.offloading(**AMPLE):
        thread = threading.Thread(
            target=lambda: found.append(
                type(
                    Trainer(llama(), arguments(tmp_path, eval_strategy="no"), train_dataset=Rows())
                )
            )
        )
        thread.start()
        thread.join()
    assert found == [Trainer]


def test_options_are_checked_when_the_block_begins() -> None:
    with pytest.raises(TypeError, match="unknown option 'host_memry'"):
        overspill.offloading(host_memry="1GiB").__enter__()
    with (
        overspill.offloading(device="cpu"),
        pytest.raises(ValueError, match="device='cpu' has one"),
        overspill.offloading(device_memory="1GiB"),
    ):
        raise AssertionError("not reached")
