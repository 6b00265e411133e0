"""Commits, exports and weight files of several models under one engine."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import overspill
from tests.devices import CPU, SIM, about_forks
from tests.forked import CONTEXT
from tests.parity.nets import (
    PLACES,
    WIDTH,
    Net,
    Nets,
    adversarial,
    apart,
    nets,
    one,
    preference,
    two,
    wrapped,
)  # fmt: skip
from tests.remedies.table import same


def test_a_commit_has_all_models(tmp_path: Path) -> None:
    plain, models = nets(), nets()
    its = two(plain, plain=True)
    (tmp_path / "store").mkdir()
    made = wrapped(
        models, two(models, plain=False), nvme=tmp_path / "store", commit_every=100,
        **PLACES["tight"],
    )  # fmt: skip
    for number in range(3):
        apart(models, made, number)
        apart(plain, its, number)
    made[0].save(tmp_path / "saved")
    kept = {name: copy.deepcopy(model.state_dict()) for name, model in plain.items()}
    apart(models, made, 9)
    made[1].rollback()
    for number in range(3, 5):
        apart(models, made, number)
        apart(plain, its, number)
    made[0].close()
    from safetensors.torch import load_file

    for name in plain:
        saved = load_file(tmp_path / "saved" / name / "model.safetensors")
        assert all(torch.equal(saved[key], kept[name][key].cpu()) for key in kept[name])
    again = nets()
    reordered = {"b": again["b"], "a": again["a"]}  # the store knows the order
    made, _ = overspill.resume(  # type: ignore[assignment]
        reordered, tmp_path / "store", two(again, plain=False), rates=overspill.Rates(),
        **PLACES["device"],
    )  # fmt: skip
    for number in range(5, 7):
        apart(again, made, number)
        apart(plain, its, number)
    assert overspill.unwrap(again) is again
    for name in plain:
        same(again[name], plain[name])


@pytest.mark.parametrize("how", ["close", "folder", "unwrap"])
def test_a_step_that_waits_is_taken_at_the_end(how: str, tmp_path: Path) -> None:
    """That of the generator: the discriminator has gradients, too."""
    plain, models = nets(), nets()
    its = two(plain, plain=True)
    made = wrapped(models, two(models, plain=False), nvme=tmp_path, **PLACES["tight"])
    for each, optimizers in ((plain, its), (models, made)):
        adversarial(each, optimizers, 0)
    if how == "unwrap":
        overspill.unwrap(models)
    else:
        if how == "close":
            made[1].close()
        else:
            overspill.unwrap(str(tmp_path))
        models = nets()
        made, _ = overspill.resume(models, tmp_path, two(models, plain=False))  # type: ignore[assignment]
    for name in plain:
        same(models[name], plain[name])
    made[0].close()


def _train_until_killed(folder: Path) -> None:
    models = nets()
    made = wrapped(
        models, two(models, plain=False), nvme=folder / "store", extra=lambda: {"at": at[0]},
        **PLACES["tight"],
    )  # fmt: skip
    at = [0]
    for number in range(100):
        at[0] = number
        if number == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        adversarial(models, made, number)
        made[0].commit()


@about_forks
def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    process = CONTEXT.Process(target=_train_until_killed, args=(tmp_path,))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    plain, models = nets(), nets()
    its = two(plain, plain=True)
    made, extra = overspill.resume(
        models, tmp_path / "store", two(models, plain=False), rates=overspill.Rates(),
        **PLACES["tight"],
    )  # fmt: skip
    assert extra == {"at": 3}
    for number in range(4):
        adversarial(plain, its, number)
    for number in range(4, 6):
        assert all(
            map(torch.equal, adversarial(models, made, number), adversarial(plain, its, number))  # type: ignore[arg-type]
        )
    for name in plain:
        same(models[name], plain[name])
    made[0].close()  # type: ignore[index]


def files(folder: Path, models: Mapping[str, nn.Module]) -> dict[str, Path]:
    from safetensors.torch import save_file

    found = {}
    for name, model in models.items():
        (folder / name).mkdir(parents=True)
        found[name] = folder / name
        tensors = {key: value.cpu() for key, value in model.state_dict().items()}
        save_file(tensors, folder / name / "model.safetensors")
    return found


LARGE = {  # a reader of files has buffers
    "host": {"device": CPU, "host_memory": "64MiB"},
    "device": {"device": SIM, "device_memory": "160KiB", "host_memory": "64MiB"},
}


@pytest.mark.parametrize("place", LARGE)
def test_each_model_has_its_own_files(place: str, tmp_path: Path) -> None:
    """The reference is read in place, and never written; after the files were moved, too."""
    plain = nets()
    paths = files(tmp_path, plain)
    its = one(plain, plain=True)
    (tmp_path / "store").mkdir()
    with overspill.empty_init():
        models = {name: EmptyNet() for name in plain}
    made = wrapped(
        models, one(models, plain=False), nvme=tmp_path / "store", weights=paths, **LARGE[place]
    )
    for number in range(3):
        assert torch.equal(preference(models, made, number)[0], preference(plain, its, number)[0])
    made[0].close()
    moved = tmp_path / "moved"
    paths["b"].rename(moved)
    again = nets()
    made, _ = overspill.resume(  # type: ignore[assignment]
        again, tmp_path / "store", one(again, plain=False)[0], rates=overspill.Rates(),
        weights={**paths, "b": moved}, **LARGE[place],
    )  # fmt: skip
    made = [made]
    for number in range(3, 5):
        assert torch.equal(preference(again, made, number)[0], preference(plain, its, number)[0])
    made[0].close()


class EmptyNet(Net):
    def __init__(self) -> None:
        with torch.device("cpu"):
            nn.Module.__init__(self)
            self.first = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
                for _ in range(3)
            )
            self.last = nn.Linear(WIDTH, WIDTH)


def test_some_models_may_be_in_memory(tmp_path: Path) -> None:
    plain = nets()
    paths = files(tmp_path, {"b": plain["b"]})
    models: Nets = {"a": Net(1), "b": Net(7)}
    made = wrapped(models, one(models, plain=False), weights=paths, **PLACES["roomy"])
    for name in plain:
        same(models[name], plain[name])
    made[0].close()
