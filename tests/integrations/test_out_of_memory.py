"""Training that runs out of memory now and then goes on: the losses of a run that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.engine_handle import MOST_TRIES, EngineHandle
from overspill.train.job import run
from tests.devices import about_cpu
from tests.unit.test_train_job import Quiet, small

pytest.importorskip("transformers")


class Fails:
    """A hook on a module: its forward, or the backward through it, runs out of memory at some
    calls."""

    def __init__(self, calls: set[int], *, backward: bool) -> None:
        self.calls, self.backward, self.count = calls, backward, 0

    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self.count += 1
        fails = self.count in self.calls
        if fails and not self.backward:
            raise torch.OutOfMemoryError("drawn")
        made = output if isinstance(output, torch.Tensor) else output[0]

        def hook(_grad: torch.Tensor) -> None:
            if fails:
                raise torch.OutOfMemoryError("drawn")

        made.register_hook(hook)


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What each ``make_room`` of the test has returned."""
    made: list[bool] = []
    make_room = EngineHandle.make_room

    def noted(self: EngineHandle) -> bool:
        made.append(make_room(self))
        return made[-1]

    monkeypatch.setattr(EngineHandle, "make_room", noted)
    return made


def failing() -> list[Fails | None]:
    return [None, Fails({3, 7}, backward=False), Fails({3, 8}, backward=True)]


@about_cpu
def test_trainer(tmp_path: Path, rooms: list[bool]) -> None:
    from overspill.integrations.transformers import OverspillTrainer
    from tests.integrations.test_transformers import AMPLE, llama, logged, train

    found = []
    for number, fails in enumerate(failing()):
        model = llama()
        if fails is not None:
            model.model.layers[1].register_forward_hook(fails)
        made = train(OverspillTrainer, model, tmp_path / str(number), AMPLE)
        found.append(logged(made))
        overspill.unwrap(model)
    assert rooms == [True] * 4
    assert found[1] == found[0] and found[2] == found[0]


@about_cpu
def test_overspill_train(
    tmp_path: Path, rooms: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    from overspill.train import job as module

    build = module._model
    found = []
    for number, fails in enumerate(failing()):

        def with_hook(*args: Any, fails: Any = fails) -> Any:
            model, trained = build(*args)
            if fails is not None:
                model.transformer.h[0].register_forward_hook(fails)
            return model, trained

        monkeypatch.setattr(module, "_model", with_hook)
        watch, folder = Quiet(), tmp_path / str(number)
        folder.mkdir()
        run(small(folder, accumulate=2, steps=5), watch)
        found.append([record.loss for record in watch.steps])
    assert rooms == [True] * 4
    assert found[1] == found[0] and found[2] == found[0]


@about_cpu
def test_lightning(tmp_path: Path, rooms: list[bool]) -> None:
    pytest.importorskip("lightning")
    from tests.integrations.test_lightning import OTHER, Module, end, fit

    def losses(fails: Any, place: Path) -> dict[int, list[float]]:
        init = Module.__init__

        def with_hook(self: Any, seed: int = 0) -> None:
            init(self, seed)
            if fails is not None:
                self.model.register_forward_hook(fails)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Module, "__init__", with_hook)
            module = fit(place, OTHER)
        end(module)
        return {step: each[-1:] for step, each in module.losses.items()}

    whole = losses(None, tmp_path / "whole")
    # The second micro-batch of a step is the one that Lightning hands to the optimizer.
    assert losses(Fails({4}, backward=True), tmp_path / "fails") == whole
    assert rooms == [True]


@about_cpu
def test_what_never_fits_ends_with_the_error(rooms: list[bool]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    adamw = torch.optim.AdamW(model.parameters())
    tries = []

    def fails() -> None:
        tries.append(1)
        raise torch.OutOfMemoryError("never")

    with overspill.wrap(model, adamw, device="cpu", host_memory="64MiB") as optimizer:
        with pytest.raises(torch.OutOfMemoryError, match="never"):
            optimizer.with_room(fails)
        assert len(tries) == MOST_TRIES
