"""``overspill.offloading``: trainers that a library creates by itself take the options."""

from __future__ import annotations

import asyncio
import copy
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Trainer

import overspill
from overspill.engine import engine_of
from overspill.facts.tier import Tier
from overspill.integrations.defaults import default_options
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


@about_cpu
def test_what_a_trainer_takes_can_be_seen_as_before(tmp_path: Path) -> None:
    """In a process in which no block was entered yet: libraries look for ``processing_class``."""
    script = (
        "import inspect, overspill\n"
        "from transformers import Trainer\n"
        "class Other(Trainer): pass\n"
        "def seen(): return [str(inspect.signature(each)) for each in (Trainer, Other)]\n"
        "before = seen()\n"
        "assert 'processing_class' in before[1]\n"
        "with overspill.offloading(device='cpu'):\n"
        "    assert seen() == before, seen()\n"
        "assert seen() == before\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@about_cpu
def test_a_copy_made_inside_is_what_was_copied(tmp_path: Path) -> None:
    class Plain(Trainer):
        pass

    trainer = Plain(llama(), arguments(tmp_path, eval_strategy="no"), train_dataset=Rows())
    with overspill.offloading(**AMPLE):
        assert type(copy.copy(trainer)) is Plain


def test_options_are_kept_as_they_are_parsed() -> None:
    """Iterators can be read once, numbers may be NumPy's, and a dict may change later."""
    left: dict[str, Any] = {"host": "1GiB"}
    options = {"resident": (n for n in ["a"]), "tokens": np.int64(5), "leave": left}
    block = overspill.offloading(**options)
    for _ in range(2):
        with block:
            left["host"] = "nonsense"
            found = default_options()
            assert found == {"resident": ("a",), "tokens": 5, "leave": {"host": "1GiB"}}
            assert type(found["tokens"]) is int
    assert default_options() is None


def test_blocks_made_elsewhere_are_nested_where_they_are_entered() -> None:
    outer, inner = overspill.offloading(threads=1, device="cpu"), overspill.offloading(tokens=5)
    with outer:
        with inner:
            assert default_options() == {"threads": 1, "device": "cpu", "tokens": 5}
        assert default_options() == {"threads": 1, "device": "cpu"}
    with inner:
        assert default_options() == {"tokens": 5}
    with outer, pytest.raises(ValueError, match="device='cpu' has one"):
        overspill.offloading(device_memory="1GiB").__enter__()


def test_tasks_share_a_block() -> None:
    block = overspill.offloading(threads=1)

    async def job(number: int) -> None:
        with block:
            await asyncio.sleep(0.01 * number)
            assert default_options() == {"threads": 1}
        assert default_options() is None

    async def jobs() -> None:
        await asyncio.gather(job(1), job(2))

    asyncio.run(jobs())


def test_options_are_checked_when_the_block_begins() -> None:
    with pytest.raises(TypeError, match="unknown option 'host_memry'"):
        overspill.offloading(host_memry="1GiB").__enter__()
    with (
        overspill.offloading(device="cpu"),
        pytest.raises(ValueError, match="device='cpu' has one"),
        overspill.offloading(device_memory="1GiB"),
    ):
        raise AssertionError("not reached")
