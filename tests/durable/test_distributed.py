"""Folders of ``torch.distributed.checkpoint`` go in: weights and optimizer state, a few
tensors at a time, and nothing of a stranger's pickle is run."""

from __future__ import annotations

import os
import pickle
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import overspill
from overspill.state.distributed_checkpoint import DistributedFolder
from overspill.state.weight_files import WeightFiles
from tests.devices import CPU
from tests.models import TinyLM, train


@pytest.fixture(scope="module")
def trained() -> tuple[TinyLM, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train(model, optimizer, 2)
    return model, optimizer


def write(content: dict[str, Any], out: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content, checkpoint_id=out, no_dist=True)


def save(trained: tuple[TinyLM, torch.optim.AdamW], form: str, out: Path) -> None:
    model, optimizer = trained
    if form == "by number":
        content: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
        state = get_optimizer_state_dict(model, optimizer, options=options)
        content = {"app": {"model": model.state_dict(), "optim": state}}
    write(content, out)


def empty() -> tuple[TinyLM, torch.optim.AdamW]:
    with overspill.empty_init():
        model = TinyLM()
    return model, torch.optim.AdamW(model.parameters(), lr=1.0)


@pytest.mark.parametrize("form", ["by number", "by name", "flat"])
def test_training_goes_on_from_a_folder(
    trained: tuple[TinyLM, torch.optim.AdamW], form: str, tmp_path: Path
) -> None:
    """The same next steps as torch takes itself, bit for bit as the engine's own."""
    save(trained, form, tmp_path / "dcp")
    by_hand = TinyLM()
    by_hand.load_state_dict(trained[0].state_dict())
    found = []
    for model, source in ((by_hand, trained[1].state_dict()), (empty()[0], tmp_path / "dcp")):
        adamw = torch.optim.AdamW(model.parameters(), lr=1.0)
        weights = {"weights": source} if isinstance(source, Path) else {}
        with overspill.wrap(model, adamw, device=CPU, host_memory="64MiB", **weights) as optimizer:
            optimizer.load_state_dict(source)
            assert optimizer.param_groups[0]["lr"] == 2e-3
            train(model, optimizer, 2)
            found.append({name: value.clone() for name, value in model.state_dict().items()})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


def test_another_model_is_refused(
    trained: tuple[TinyLM, torch.optim.AdamW], tmp_path: Path
) -> None:
    save(trained, "by name", tmp_path / "dcp")
    write({"model": trained[0].state_dict()}, tmp_path / "bare")
    model = torch.nn.Linear(3, 3)
    adamw = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="weight is missing"):
        overspill.wrap(model, adamw, device=CPU, host_memory="64MiB", weights=tmp_path / "dcp")
    with overspill.wrap(model, adamw, device=CPU, host_memory="64MiB") as optimizer:
        with pytest.raises(ValueError, match="does not train"):
            optimizer.load_state_dict(tmp_path / "dcp")
        with pytest.raises(ValueError, match="no optimizer state"):
            optimizer.load_state_dict(tmp_path / "bare")
    again, adamw = empty()  # its weights alone
    with overspill.wrap(again, adamw, device=CPU, weights=tmp_path / "bare") as optimizer:
        assert all(
            torch.equal(v, trained[0].state_dict()[n]) for n, v in again.state_dict().items()
        )
        train(again, optimizer, 1)


class Bad:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_a_strangers_pickle_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Bad()))
    with pytest.raises(ValueError, match="has no place there"):
        DistributedFolder(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("form", ["safetensors", "distributed"])
def test_an_import_holds_a_few_tensors(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model of 40 equal layers no more than four tensors are alive at any time."""
    layers, width = 40, 64
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    adamw = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    adamw.step()
    if form == "distributed":
        content = {"model": model.state_dict(), "optim": adamw.state_dict()}
        write(content, tmp_path)
    else:
        from safetensors.torch import save_file

        save_file(model.state_dict(), tmp_path / "model.safetensors")
    alive, most = [0], [0]

    def counted(real: Any) -> Any:
        def read(self: Any, name: str) -> torch.Tensor:
            tensor: torch.Tensor = real(self, name)
            alive[0] += 1
            most[0] = max(most[0], alive[0])
            weakref.finalize(tensor, lambda: alive.__setitem__(0, alive[0] - 1))
            return tensor

        return read

    monkeypatch.setattr(DistributedFolder, "tensor", counted(DistributedFolder.tensor))
    monkeypatch.setattr(WeightFiles, "read", counted(WeightFiles.read))
    with overspill.empty_init():
        other = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False)
                                      for _ in range(layers)))  # fmt: skip
    with overspill.wrap(
        other, torch.optim.AdamW(other.parameters()), device=CPU, host_memory="64MiB",
        weights=tmp_path,
    ) as optimizer:  # fmt: skip
        if form == "distributed":
            optimizer.load_state_dict(tmp_path)
        assert torch.equal(other.state_dict()["7.weight"], model[7].weight)
    assert 0 < most[0] <= 4
