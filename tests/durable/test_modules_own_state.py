"""What modules add to their state dicts by themselves is committed, saved, exported and resumed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import overspill
from overspill.durable.export import export_store
from tests.devices import CPU, DEVICE, normal


class Counting(nn.Linear):
    """Its extra state is a dict; it may keep a tensor that is neither buffer nor parameter too."""

    def __init__(self, *, scaled: bool = False) -> None:
        super().__init__(8, 8)
        self.rows, self.note = 0, [1]
        self.scale = torch.ones(3, device=DEVICE) if scaled else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += len(x)
        if self.scale is not None:
            self.scale.add_(1)
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return {"rows": self.rows, "note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.rows, self.note = state["rows"], state["note"]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.scale is not None:
            destination[prefix + "scale"] = self.scale if keep_vars else self.scale.detach()


class Tallying(nn.Linear):
    """Its extra state is a tensor."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.rows = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += len(x)
        return super().forward(x)

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([self.rows], device="cpu")

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.rows = int(state)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Counting(scaled=True), Tallying(), Counting())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for number in range(steps):
        model(normal(number, 4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def states(model: Any) -> tuple[Any, ...]:
    first, second, third = model
    return first.rows, first.note, first.scale.tolist(), second.rows, third.rows


def test_it_is_resumed(tmp_path: Path) -> None:
    model = build()
    with overspill.wrap(model, adamw(model), nvme=tmp_path, device=CPU) as optimizer:
        model[0].note = [1, "two"]
        train(model, optimizer, 3)
    assert states(model) == (12, [1, "two"], [4.0] * 3, 12, 12)
    again = build()
    optimizer, _ = overspill.resume(again, tmp_path, adamw(again), device=CPU)
    assert states(again) == states(model)
    optimizer.close()


def test_a_resume_that_fails_changes_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    with overspill.wrap(model, adamw(model), nvme=tmp_path, device=CPU) as optimizer:
        train(model, optimizer, 3)
    again = build()
    before = states(again)
    monkeypatch.setattr(overspill.engine.Engine, "restart", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        overspill.resume(again, tmp_path, adamw(again), device=CPU)
    monkeypatch.setattr(Tallying, "set_extra_state", lambda self, state: 1 / 0)
    monkeypatch.undo()
    assert states(again) == before


def test_a_model_without_it_is_refused(tmp_path: Path) -> None:
    model = build()
    with overspill.wrap(model, adamw(model), nvme=tmp_path, device=CPU) as optimizer:
        train(model, optimizer, 1)
    other = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    with pytest.raises(overspill.OffloadError, match=r"the commit holds '0\.scale'"):
        overspill.resume(other, tmp_path, adamw(other), device=CPU)
    longer = build()
    longer[0].scale = torch.ones(4, device=DEVICE)
    with pytest.raises(overspill.OffloadError, match=r"'0.scale'.* has shape .*build the model"):
        overspill.resume(longer, tmp_path, adamw(longer), device=CPU)


def test_tensors_of_it_are_in_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = tmp_path / "store"
    store.mkdir()
    model = build()
    with overspill.wrap(model, adamw(model), nvme=store, device=CPU) as optimizer:
        train(model, optimizer, 2)
        optimizer.save(tmp_path / "saved")
        assert "not written, since safetensors files hold tensors alone: 0._extra" in caplog.text
        names = set(model.state_dict())
        torch.save(model[0].get_extra_state(), tmp_path / "state.pt")  # the remedy
    caplog.clear()
    export_store(store, tmp_path / "exported")
    assert "not written, since safetensors files hold tensors alone: 0._extra" in caplog.text
    for out in ("saved", "exported"):
        file = load_file(tmp_path / out / "model.safetensors")
        assert file["0.scale"].tolist() == [3.0] * 3
        assert file["1._extra_state"].tolist() == [8]
        assert names - set(file) == {"0._extra_state", "2._extra_state"}
        again = build()
        with overspill.wrap(
            again, adamw(again), device=CPU, weights=tmp_path / out / "model.safetensors"
        ):
            again[0].set_extra_state(torch.load(tmp_path / "state.pt"))
            assert again[0].rows == again[1].rows == 8 and again[0].scale.tolist() == [3.0] * 3


def test_what_cannot_be_read_back_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build()
    model[0].note = [Path("a")]
    with overspill.wrap(model, adamw(model), nvme=tmp_path, device=CPU) as optimizer:
        train(model, optimizer, 3)
    (told,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "commits do not hold 0._extra_state" in told.getMessage()
    again = build()
    optimizer, _ = overspill.resume(again, tmp_path, adamw(again), device=CPU)
    assert again[0].rows == 0 and again[2].rows == 12
    optimizer.close()
