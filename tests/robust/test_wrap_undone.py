"""A wrap that does not come to its end leaves the model and the optimizer as they were."""

from __future__ import annotations

import copy
import logging
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.errors import OffloadError
from overspill.private import optimizer_private
from overspill.state.contents import Contents
from overspill.state.model_state import StateHooks
from overspill.state.original_weights import OriginalWeights
from tests.devices import CPU, DEVICE, SIM, normal
from tests.models import batch

PLACES: dict[str, dict[str, Any]] = {
    "memory": {"device": CPU},
    "disk": {"device": CPU, "host_memory": "1MiB"},
    "device": {"device": SIM, "device_memory": "400KiB", "host_memory": "2MiB"},
    "bf16": {"device": CPU, "precision": "bf16"},
}


class Net(nn.Module):
    """With buffers, tied weights, and parts in two dtypes."""

    def __init__(self, device: torch.device = DEVICE) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 64, device=device)
        self.blocks = nn.ModuleList(nn.Linear(64, 64, device=device) for _ in range(5))
        self.norm = nn.BatchNorm1d(64, device=device)
        self.head = nn.Linear(64, 50, bias=False, device=device)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).flatten(0, 1)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(self.norm(x)).square().mean()


def made() -> tuple[Net, torch.optim.Optimizer]:
    """Trained for two steps."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(2):
        step(model, optimizer, number)
    return model, optimizer


def step(model: Any, optimizer: Any, number: int) -> float:
    loss = model(batch(number)[0] % 50)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def is_as_it_was(model: Net, optimizer: torch.optim.Optimizer) -> None:
    """It trains on as one that nobody has tried to wrap, and can be wrapped."""
    other, its = made()
    assert type(model.embed.weight) is nn.Parameter and model.head.weight is model.embed.weight
    copy.deepcopy(model)
    for module in model.modules():
        assert not any(hooks for name, hooks in vars(module).items() if name.endswith("_hooks"))
    assert [step(model, optimizer, n) for n in (5, 6)] == [step(other, its, n) for n in (5, 6)]
    for name, value in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert not [t.name for t in threading.enumerate() if t.name.startswith("overspill")]
    overspill.wrap(model, optimizer, device=CPU).close()


class Full(OSError):
    """The disk is full, say."""


def after(calls: int, error: type[BaseException], method: Callable[..., Any]) -> Any:
    """The method, raising ``error`` instead of its last call."""
    left = [calls]

    def failing(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise error("now")
        return method(*args, **kwargs)

    return failing


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("where", ["load", "free", "hooks", "end"])
def test_the_model_is_given_back(
    where: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made()
    with monkeypatch.context() as patched:
        if where == "load":
            patched.setattr(Contents, "load", after(3, Full, Contents.load))
        elif where == "free":
            patched.setattr(
                OriginalWeights, "free", after(3, KeyboardInterrupt, OriginalWeights.free)
            )
        elif where == "hooks":
            patched.setattr(StateHooks, "__init__", after(0, Full, StateHooks.__init__))
        else:
            patched.setattr(
                optimizer_private, "count_step", after(0, Full, optimizer_private.count_step)
            )
        with pytest.raises((Full, KeyboardInterrupt), match="now"):
            overspill.wrap(model, optimizer, nvme=tmp_path, **PLACES[place])
    is_as_it_was(model, optimizer)


@pytest.mark.parametrize("count", [8, pytest.param(40, marks=pytest.mark.soak)])
def test_an_interrupt_anywhere_leaves_the_model_whole(count: int, tmp_path: Path) -> None:
    """At any call that wrap makes from where it takes the first weights on."""

    def interrupted(at: int) -> int:
        folder = tmp_path / str(at)
        folder.mkdir()
        model, optimizer = made()
        seen = 0

        def called(frame: Any, event: str, _: object) -> None:
            nonlocal seen
            if event == "call" and frame.f_globals.get("__name__", "").startswith("overspill."):
                seen += bool(seen or frame.f_code.co_name == "load")
                if seen == at > 0:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        options = {"nvme": folder, "rates": overspill.Rates(), **PLACES["device"]}
        ours = None
        sys.setprofile(called)
        try:
            ours = overspill.wrap(model, optimizer, **options)
        except KeyboardInterrupt:
            assert at > 0
        finally:
            sys.setprofile(None)
        if ours is None:
            is_as_it_was(model, optimizer)
        else:
            ours.close()
        return seen

    calls = interrupted(0)
    assert calls > 500
    draw = random.Random(1)
    hooking = range(calls - calls // 15, calls)  # where hooks are put in, by the dozen
    for at in {*draw.sample(range(1, calls), count), *draw.sample(hooking, count)}:
        interrupted(at)


def test_values_that_are_not_exact_are_not_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Frozen weights are kept as bf16 alone: what had fp32 raises when it is used."""
    model, _ = made()
    model.blocks[0].requires_grad_(False)
    kept = model.blocks[1].weight.detach().clone()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    monkeypatch.setattr(
        optimizer_private, "count_step", after(0, Full, optimizer_private.count_step)
    )
    with pytest.raises(Full):
        overspill.wrap(model, optimizer, device=CPU, precision="bf16", nvme=tmp_path)
    assert torch.equal(model.blocks[1].weight, kept)
    assert model.blocks[0].weight.is_meta and model.blocks[0].weight.shape == (64, 64)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        model(batch(0)[0] % 50)
    assert "the weights of 2 parameters could not be given back" in caplog.text
    assert "build the model again" in caplog.text
    monkeypatch.undo()
    model, optimizer = made()
    with overspill.wrap(model, optimizer, device=CPU, precision="bf16", nvme=tmp_path):
        assert not any(p.is_meta for p in model.parameters())


def test_weights_of_files_are_not_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The model had none of its own that counted: nothing is lost."""
    from safetensors.torch import save_file

    folder = tmp_path / "files"
    folder.mkdir()
    values = {f"{n}.weight": normal(n, 32, 32).cpu() for n in range(3)}
    save_file(values, folder / "model.safetensors")
    with overspill.empty_init():
        model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3)))
    monkeypatch.setattr(Contents, "load", after(2, Full, Contents.load))
    with caplog.at_level(logging.ERROR, "overspill"), pytest.raises(Full):
        optimizer = torch.optim.AdamW(model.parameters())
        overspill.wrap(model, optimizer, device=CPU, weights=folder)
    assert all(p.is_meta for p in model.parameters()) and not caplog.text
    monkeypatch.undo()
    optimizer = torch.optim.AdamW(model.parameters())
    with overspill.wrap(model, optimizer, device=CPU, weights=folder):
        assert torch.equal(model.state_dict()["2.weight"].cpu(), values["2.weight"])


def test_what_weights_of_files_took_the_place_of_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors.torch import save_file

    model, optimizer = made()
    folder = tmp_path / "files"
    folder.mkdir()
    values = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    save_file(values, folder / "model.safetensors")
    monkeypatch.setattr(
        optimizer_private, "count_step", after(0, Full, optimizer_private.count_step)
    )
    with caplog.at_level(logging.ERROR, "overspill"), pytest.raises(Full):
        overspill.wrap(model, optimizer, device=CPU, weights=folder)
    assert all(p.is_meta for p in model.parameters())
    assert f"the weights of {len(values)} parameters could not be given back" in caplog.text


def test_one_unit_that_cannot_be_read_takes_no_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = made()
    exact = Contents.exact

    def unreadable(self: Contents, unit: int) -> Any:
        if unit == 2:
            raise Full("bad sector")
        return exact(self, unit)

    monkeypatch.setattr(Contents, "exact", unreadable)
    monkeypatch.setattr(
        optimizer_private, "count_step", after(0, Full, optimizer_private.count_step)
    )
    with pytest.raises(Full):
        overspill.wrap(model, optimizer, device=CPU, nvme=tmp_path)
    lost = [name for name, p in model.named_parameters() if p.is_meta]
    assert len(lost) == 2 and len({name.rpartition(".")[0] for name in lost}) == 1
    assert "cannot be read back: bad sector" in caplog.text


def test_a_resume_that_fails_leaves_no_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made()
    with overspill.wrap(model, optimizer, device=CPU, nvme=tmp_path) as ours:
        step(model, ours, 7)
        expected = {name: value.clone() for name, value in model.state_dict().items()}
    monkeypatch.setattr(StateHooks, "__init__", after(0, Full, StateHooks.__init__))
    fresh = Net()
    fresh.norm.running_mean.fill_(3)
    mine = torch.optim.AdamW(fresh.parameters(), lr=0.125)
    with pytest.raises(Full):
        overspill.resume(fresh, tmp_path, mine, device=CPU)
    assert all(p.is_meta for p in fresh.parameters())
    assert mine.param_groups[0]["lr"] == 0.125 and bool((fresh.norm.running_mean == 3).all())
    monkeypatch.undo()
    fresh = Net()
    again, _ = overspill.resume(fresh, tmp_path, device=CPU)
    with again:
        for name, value in fresh.state_dict().items():
            assert torch.equal(value, expected[name]), name


def test_an_unwrap_whose_last_commit_fails_is_one(tmp_path: Path) -> None:
    model, optimizer = made()

    broken = []

    def extra() -> Any:
        if broken:
            raise OffloadError("no extra now")
        return 1

    ours = overspill.wrap(model, optimizer, device=CPU, nvme=tmp_path, extra=extra)
    other, its = made()
    assert step(model, ours, 7) == step(other, its, 7)
    broken.append(True)
    with pytest.raises(OffloadError, match="no extra now"):
        overspill.unwrap(model)
    assert type(model.embed.weight) is nn.Parameter
    overspill.wrap(model, torch.optim.SGD(model.parameters()), device=CPU).close()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("where", ["contents", "taken", "cleared"])
def test_an_interrupt_between_the_parts_of_a_wrap_leaves_nothing(
    where: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anybody has what has started threads, and after all is done but to hand it out."""
    model, optimizer = made()

    class Cleared(type(optimizer.state)):  # type: ignore[misc]
        def clear(self) -> None:
            super().clear()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if where == "contents":
            patched.setattr(Contents, "__init__", after(0, KeyboardInterrupt, Contents.__init__))
        elif where == "taken":
            patched.setattr(
                OriginalWeights, "__init__", after(0, KeyboardInterrupt, OriginalWeights.__init__)
            )
        else:
            optimizer.state = Cleared(optimizer.state.default_factory, optimizer.state)  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            overspill.wrap(model, optimizer, nvme=tmp_path, **PLACES[place])
    kept = optimizer.state
    optimizer.state = type(made()[1].state)(dict, kept)
    is_as_it_was(model, optimizer)


def test_a_wrap_that_is_refused_leaves_the_one_before_alone(tmp_path: Path) -> None:
    model, optimizer = made()
    with overspill.wrap(model, optimizer, device=CPU) as first:
        step(model, first, 5)
        with pytest.raises(OffloadError, match="wrapped already"):
            overspill.wrap(model, torch.optim.AdamW(model.parameters()), device=CPU)
        found = step(model, first, 6)
    other, its = made()
    with overspill.wrap(other, its, device=CPU) as second:
        step(other, second, 5)
        assert found == step(other, second, 6)
