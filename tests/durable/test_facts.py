"""What a commit keeps besides weights can be read back, and is that of its step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import overspill
from overspill.errors import OffloadError
from tests.devices import normal
from tests.resumed import adamw, assert_same, build, options, train, weights


def resumed(path: Path) -> tuple[nn.Module, Any]:
    model, given = build(), options("")
    del given["nvme"]
    return model, overspill.resume(model, path, adamw(model), **given)[0]


def test_numbers_of_numpy_in_param_groups(tmp_path: Path) -> None:
    """As a schedule makes them that is written with numpy."""
    model = build()
    with overspill.wrap(model, adamw(model), **options(tmp_path)) as optimizer:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: np.cos(n / 10))
        train(model, optimizer, 3, schedule)
        assert isinstance(optimizer.param_groups[0]["lr"], np.floating)
        optimizer.rollback()
        wanted = weights(model)
    model, optimizer = resumed(tmp_path)
    with optimizer:
        assert_same(weights(model), wanted)
        assert type(optimizer.param_groups[0]["lr"]) is float


def test_what_cannot_be_read_back_is_told_at_once(tmp_path: Path) -> None:
    """Also when it was well the first times; the last commit stays."""
    model, best = build(), [None]
    optimizer = overspill.wrap(
        model, adamw(model), **options(tmp_path, extra=lambda: {"best": best[0]})
    )
    train(model, optimizer, 2)
    best[0] = np.float64(0.5)  # type: ignore[call-overload]
    with pytest.raises(OffloadError, match="extra returned something that cannot be read back"):
        train(model, optimizer, 4)
    best[0] = None
    optimizer.close()
    model, optimizer = resumed(tmp_path)
    with optimizer:
        assert optimizer.step_count >= 2


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32))
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


@pytest.mark.parametrize("memory", ["64MiB", "60KiB"])
@pytest.mark.parametrize("how", ["whole", "parts", "forward"])
def test_buffers_are_those_of_the_step_however_the_model_is_called(
    how: str, memory: str, tmp_path: Path
) -> None:
    """What an engine that dies then finds: its statistics are not a forward ahead."""

    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        if how == "whole":
            return model(x)  # type: ignore[no-any-return]
        return model.head(model.body(x)) if how == "parts" else model.forward(x)

    model = Parts()
    given = options(tmp_path, host_memory=memory, update="step")
    optimizer = overspill.wrap(model, torch.optim.SGD(model.parameters(), 0.1), **given)
    seen: list[dict[str, torch.Tensor]] = [weights(model)]
    for number in range(3):
        x = normal(number, 8, 32)
        run(model, x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(weights(model))
    run(model, x)  # one forward more; then it ends without a word
    optimizer._engine.runtime.executor.protocol.wait(overspill.schedule.messages.Until.DURABLE)
    optimizer._engine._loop.end = lambda _: None
    optimizer.close()
    again, given = Parts(), options("", host_memory="64MiB")
    del given["nvme"]
    inner = torch.optim.SGD(again.parameters(), 0.1)
    optimizer, _ = overspill.resume(again, tmp_path, inner, **given)
    with optimizer:
        assert optimizer.step_count == 3
        assert_same(weights(again), seen[3])


def _normed(width: int | None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Identity())
    model[1].register_buffer("seen", None if width is None else torch.zeros(width))
    return model


def _store_of(model: nn.Module, folder: Path) -> dict[str, Any]:
    """Train a step; returns the options to resume with."""
    given = options(folder)
    with overspill.wrap(model, torch.optim.SGD(model.parameters(), 0.1), **given) as optimizer:
        model(torch.ones(2, 8)).sum().backward()
        model[1].seen = torch.arange(float(model[1].seen.numel()))
        optimizer.step()
    del given["nvme"]
    return given


def test_a_model_without_a_buffer_is_refused_and_stays_as_it_was(tmp_path: Path) -> None:
    given = _store_of(_normed(4), tmp_path)
    other = nn.Sequential(nn.Linear(8, 8), nn.Identity())
    before = other[0].weight.detach().clone()
    with pytest.raises(OffloadError, match=r"the commit holds '1\.seen', of shape \(4,\), and"):
        overspill.resume(other, tmp_path, torch.optim.SGD(other.parameters(), 0.1), **given)
    assert torch.equal(other[0].weight, before), "nothing was freed"


@pytest.mark.parametrize("width", [5, 0, None])
def test_a_buffer_of_another_size_becomes_that_of_the_commit(
    width: int | None, tmp_path: Path
) -> None:
    """As with modules that size their buffers when they first run."""
    given = _store_of(_normed(4), tmp_path)
    other = _normed(width)
    inner = torch.optim.SGD(other.parameters(), 0.1)
    optimizer, _ = overspill.resume(other, tmp_path, inner, **given)
    with optimizer:
        assert torch.equal(other[1].seen, torch.arange(4.0))
        assert torch.equal(other.state_dict()["1.seen"], torch.arange(4.0))


def test_a_resume_that_fails_later_gives_back_buffers_of_another_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = _store_of(_normed(4), tmp_path)
    other = _normed(5)
    other[1].seen.fill_(7.0)
    before = {name: value.clone() for name, value in other.state_dict().items()}

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("later")

    monkeypatch.setattr("overspill.wrapping.Engine.open", broken)
    with pytest.raises(RuntimeError, match="later"):
        overspill.resume(other, tmp_path, torch.optim.SGD(other.parameters(), 0.1), **given)
    assert_same({k: v for k, v in other.state_dict().items() if "1." in k},
                {k: v for k, v in before.items() if "1." in k})  # fmt: skip


def test_an_export_is_that_of_this_run_wherever_it_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store was given by a relative path, and there is another one of that name."""
    for name, steps in (("here", 1), ("there", 3)):
        (tmp_path / name / "store").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / name)
        model = build()
        optimizer = overspill.wrap(model, adamw(model), **options(Path("store")))
        train(model, optimizer, steps)
        if name == "here":
            optimizer.close()
    monkeypatch.chdir(tmp_path / "here")
    with optimizer:
        wanted = weights(model)
        optimizer.save(tmp_path / "out")
    assert not os.path.exists(tmp_path / "here" / "out")
    from safetensors.torch import load_file

    found = load_file(tmp_path / "out" / "model.safetensors")
    assert_same(found, {name: value.cpu() for name, value in wanted.items()})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_edits_that_are_not_finite_are_not_committed(value: float, tmp_path: Path) -> None:
    model = build()
    optimizer = overspill.wrap(model, adamw(model), **options(tmp_path))
    train(model, optimizer, 2)
    optimizer.commit()
    wanted = weights(model)
    with torch.no_grad():
        model[0][0].weight[0, 0] = value
    with pytest.raises(OffloadError, match="not finite in 0"):
        optimizer.commit()
    optimizer.close()
    model, optimizer = resumed(tmp_path)
    with optimizer:
        assert_same(weights(model), wanted)


def test_a_buffer_that_modules_share_is_found_again(tmp_path: Path) -> None:
    model, mask = build(), torch.arange(4.0)
    for layer in list(model)[:2]:
        layer.register_buffer("mask", mask)
    with overspill.wrap(model, adamw(model), **options(tmp_path)) as optimizer:
        train(model, optimizer, 1)
        optimizer.commit()
        mask.add_(1)
        optimizer.rollback()
        assert torch.equal(mask, torch.arange(4.0))


class Kind(torch.Tensor):
    """A user's own."""


def test_tensors_of_other_kinds_are_read_back_or_told(tmp_path: Path) -> None:
    odd = torch.ones(2)
    odd.name_of_mine = object()  # type: ignore[attr-defined]
    model = build()
    model.register_buffer("own", torch.ones(3).as_subclass(Kind))
    with overspill.wrap(
        model, adamw(model), **options(tmp_path, extra=lambda: {"odd": odd})
    ) as optimizer:
        with pytest.raises(OffloadError, match="cannot be read back"):
            train(model, optimizer, 1)
        del odd.name_of_mine  # type: ignore[attr-defined]
        train(model, optimizer, 1)
        optimizer.commit()
        optimizer.rollback()


def test_another_generator_of_numpy_is_left_alone(tmp_path: Path) -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        model = build()
        with overspill.wrap(model, adamw(model), **options(tmp_path)) as optimizer:
            train(model, optimizer, 2)
        np.random.random(5)
        kept = np.random.get_bit_generator().state
        _, optimizer = resumed(tmp_path)
        optimizer.close()
        now = np.random.get_bit_generator().state
        assert now["bit_generator"] == "PCG64" and now == kept
    finally:
        np.random.set_bit_generator(before)


def test_what_follows_a_commit_is_in_the_next_one(tmp_path: Path) -> None:
    """A schedule that goes on after ``commit()``: at the next forward its step is sealed."""
    model = build()
    optimizer = overspill.wrap(model, adamw(model), **options(tmp_path))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(model, optimizer, 2)
    optimizer.commit()
    schedule.step()
    wanted = optimizer.param_groups[0]["lr"]
    model(torch.ones(2, 96)).sum().backward()
    optimizer.close()
    model, optimizer = resumed(tmp_path)
    with optimizer:
        assert optimizer.param_groups[0]["lr"] == wanted


def test_a_loader_that_leaves_a_weight_out_is_no_half_edit(tmp_path: Path) -> None:
    """As loaders do that call the modules' own methods, without the hooks that follow."""
    model = build()
    with overspill.wrap(model, adamw(model), **options(tmp_path)) as optimizer:
        train(model, optimizer, 1)
        before = {name: value.clone() for name, value in weights(model).items()}
        state = {name: value + 1 for name, value in before.items()}
        state["5.weight"] = torch.zeros(3, 3)  # of another shape

        def load(module: nn.Module, prefix: str = "") -> None:
            module._load_from_state_dict(state, prefix, {}, False, [], [], [])
            for name, child in module.named_children():
                load(child, f"{prefix}{name}.")

        given = dict(state)
        load(model)
        assert all(state[name] is value for name, value in given.items()), "it is the loader's own"
        optimizer.commit()
    again, optimizer = resumed(tmp_path)
    with optimizer:
        assert_same(weights(again), {**state, "5.weight": before["5.weight"]})


def test_steps_that_change_their_count_alone_are_committed_at_the_end(tmp_path: Path) -> None:
    model = build()
    with overspill.wrap(model, adamw(model), **options(tmp_path, commit_every=4)) as optimizer:
        train(model, optimizer, 4)
        optimizer.step()
        optimizer.step()
        optimizer.commit()
        optimizer.param_groups[0]["lr"] = 0.125
    model, optimizer = resumed(tmp_path)
    with optimizer:
        assert optimizer.step_count == 6 and optimizer.param_groups[0]["lr"] == 0.125
