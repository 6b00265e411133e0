"""Edits of weights and state that are interrupted, refused or not finite: what is committed is one
whole state, and a rollback undoes all of them."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.errors import OffloadError
from overspill.movement.direct import DirectAccess
from overspill.state.contents import Contents
from overspill.state.param_access import ParamAccess
from tests.devices import normal
from tests.patience import WAIT_S
from tests.resumed import adamw, assert_same, build, options, train, weights


class Interrupted(BaseException):
    """As ``KeyboardInterrupt``."""


def interrupt(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, number: int, edit: Callable[[], object]
) -> None:
    """Makes an edit in which a call of ``where.name`` is interrupted before it does anything."""
    real, calls = getattr(where, name), [0]

    def raising(*args: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            raise Interrupted
        return real(*args, **more)

    monkeypatch.setattr(where, name, raising)
    with pytest.raises(Interrupted):
        edit()
    monkeypatch.undo()


def resumed(path: Path) -> tuple[nn.Module, Any]:
    model, given = build(), options("", host_memory="64MiB")
    del given["nvme"]
    return model, overspill.resume(model, path, adamw(model), **given)[0]


def fill(p: torch.Tensor, value: float) -> None:
    with torch.no_grad():
        p.fill_(value)


@pytest.mark.parametrize("host", ["700KiB", "64MiB"])
def test_a_rollback_undoes_an_edit_that_was_interrupted(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its last write: what lives in memory has been changed already, and nothing told of it."""
    model = build()
    with overspill.wrap(model, adamw(model), **options(tmp_path, host_memory=host)) as optimizer:
        train(model, optimizer, 2)
        optimizer.commit()
        wanted = weights(model), optimizer.state_dict()
        other = {name: value + 1 for name, value in wanted[0].items()}
        interrupt(monkeypatch, DirectAccess, "store", 1, lambda: model.load_state_dict(other))
        optimizer.rollback()
        assert_same((weights(model), optimizer.state_dict()), wanted)
        loaded = optimizer.state_dict()
        for entry in loaded["state"].values():
            entry["exp_avg"].fill_(5.0)
        edit = lambda: optimizer.load_state_dict(loaded)  # noqa: E731
        interrupt(monkeypatch, DirectAccess, "store", 1, edit)
        optimizer.rollback()
        assert_same((weights(model), optimizer.state_dict()), wanted)


def test_a_rollback_undoes_what_a_module_has_changed(tmp_path: Path) -> None:
    model = build()
    with overspill.wrap(model, adamw(model), **options(tmp_path, host_memory="64MiB")) as optimizer:
        train(model, optimizer, 2)
        optimizer.commit()
        wanted = weights(model)
        handle = model[1][0].register_forward_pre_hook(lambda m, _: m.weight.data.fill_(2.0))
        with torch.no_grad():
            model(normal(0, 4, 96))
        handle.remove()
        assert torch.equal(model[1][0].weight.detach(), torch.full((96, 96), 2.0))
        optimizer.rollback()
        assert_same(weights(model), wanted)


def test_an_edit_of_another_part_does_not_end_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    with overspill.wrap(model, adamw(model), **options(tmp_path)) as optimizer:
        train(model, optimizer, 2)
        layer = model[0][0]
        edit = lambda: fill(layer.weight, float("nan"))  # noqa: E731
        interrupt(monkeypatch, DirectAccess, "store", 1, edit)
        fill(layer.bias, 0.0)
        with pytest.raises(OffloadError, match="was interrupted"):
            optimizer.commit()
        edit()  # whole, and not finite
        with pytest.raises(OffloadError, match="not finite"):
            optimizer.commit()
        fill(layer.weight, 0.5)
        optimizer.commit()
        state = optimizer.state_dict()
        edit = lambda: optimizer.load_state_dict(state)  # noqa: E731
        interrupt(monkeypatch, Contents, "load", 3, edit)
        model.load_state_dict(weights(model))
        with pytest.raises(OffloadError, match="was interrupted"):
            optimizer.commit()
        edit()
        optimizer.commit()


def test_a_state_dict_is_loaded_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted between two modules, it is not committed at the end."""
    model = build()
    with overspill.wrap(model, adamw(model), **options(tmp_path)) as optimizer:
        train(model, optimizer, 2)
        optimizer.commit()
        wanted = weights(model)
        other = {name: torch.ones_like(value) for name, value in wanted.items()}
        interrupt(monkeypatch, Contents, "load", 4, lambda: model.load_state_dict(other))
        with pytest.raises(OffloadError, match="was interrupted"):
            optimizer.commit()
    again, optimizer = resumed(tmp_path)
    with optimizer:
        assert_same(weights(again), wanted)
        again.load_state_dict(other)
        optimizer.commit()
        again[0].load_state_dict({"0.weight": torch.zeros(96, 96)}, strict=False)
        optimizer.commit()
        # A load that was interrupted is no frame for what comes after a rollback.
        interrupt(monkeypatch, Contents, "load", 4, lambda: again.load_state_dict(other))
        optimizer.rollback()
        part = {name: torch.ones_like(value) for name, value in again[1].state_dict().items()}
        interrupt(monkeypatch, ParamAccess, "write", 2, lambda: again[1].load_state_dict(part))
        with pytest.raises(OffloadError, match="was interrupted"):
            optimizer.commit()
        again[1].load_state_dict(part)
        optimizer.commit()


def test_state_is_not_loaded_between_backward_and_its_step(tmp_path: Path) -> None:
    model = build()
    with overspill.wrap(
        model, adamw(model), **options(tmp_path, host_memory="64MiB", update="backward")
    ) as optimizer:
        train(model, optimizer, 2)
        state = optimizer.state_dict()
        model(torch.ones(1, 96)).sum().backward()
        with pytest.raises(OffloadError, match="cannot be changed now"):
            optimizer.load_state_dict(state)
        optimizer.step()


# -- what is not finite --------------------------------------------------------------------------


class Masked(nn.Module):
    """A frozen mask of -inf, and a frozen weight that torch cannot compute with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(96, 96)
        mask = torch.zeros(96, 96).masked_fill(torch.ones(96, 96).triu(1) > 0, float("-inf"))
        self.mask = nn.Parameter(mask, requires_grad=False)
        small = torch.ones(96, 96).to(torch.float8_e4m3fn)
        self.small = nn.Parameter(small, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) @ self.mask.exp() + self.small.float().sum() * 0


def test_a_frozen_mask_holds_no_commit_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = Masked()
    inner = torch.optim.AdamW(model.layer.parameters())
    with overspill.wrap(model, inner, **options(tmp_path)) as optimizer:
        train(model, optimizer, 1)
        model.load_state_dict(model.state_dict())
        train(model, optimizer, 3)
        optimizer.commit()
    assert "not finite" not in caplog.text


def test_it_is_said_at_once_that_nothing_is_committed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build()
    with overspill.wrap(model, adamw(model), **options(tmp_path)) as optimizer, \
            caplog.at_level(logging.WARNING):  # fmt: skip
        fill(model[0][0].weight, float("inf"))
        assert "'0' was given values that are not finite" in caplog.text.replace("'0.0'", "'0'")
        with pytest.raises(OffloadError, match="there is no commit to go back to"):
            optimizer.rollback()
        fill(model[0][0].weight, 0.5)
        train(model, optimizer, 1)
        optimizer.commit()


def test_a_model_that_is_not_finite_is_not_committed(tmp_path: Path) -> None:
    model = build()
    fill(model[2][0].weight, float("nan"))
    with overspill.wrap(model, adamw(model), **options(tmp_path)) as optimizer, \
            pytest.raises(OffloadError, match="not finite"):  # fmt: skip
        optimizer.commit()
    assert not any(tmp_path.iterdir())


# -- masters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_outlive_edits_that_change_nothing(dtype: torch.dtype, tmp_path: Path) -> None:
    """And loads of states that lack them; what is changed has the master it was given."""
    model = build().to(dtype)
    with overspill.wrap(model, adamw(model), **options(tmp_path, host_memory="64MiB")) as optimizer:
        train(model, optimizer, 4)
        state = optimizer.state_dict()
        exact = {n: entry["master"].clone() for n, entry in state["state"].items()}
        assert any(not torch.equal(v, v.to(dtype).float()) for v in exact.values())
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-100, 100)
        model.load_state_dict(model.state_dict())
        masters = {n: entry["master"] for n, entry in optimizer.state_dict()["state"].items()}
        assert_same(masters, exact)
        del state["state"][0]["master"]
        optimizer.load_state_dict(state)
        masters = {n: entry["master"] for n, entry in optimizer.state_dict()["state"].items()}
        assert_same(masters, exact)
        with torch.no_grad():
            model[0][0].weight[0] = 0.25
        master = optimizer.state_dict()["state"][0]["master"]
        assert (master[0] == 0.25).all() and torch.equal(master[1:], exact[0][1:])


# -- ways out ------------------------------------------------------------------------------------

LEAVING = """
import sys, torch
from tests.resumed import build, adamw, options, train
import overspill
model = build()
optimizer = overspill.wrap(model, adamw(model), **options(sys.argv[1]))
train(model, optimizer, 3)
kept = model[0][0].weight.data
kept.zero_()
"""


def test_an_edit_just_before_the_end_is_committed(tmp_path: Path) -> None:
    """When the interpreter ends, pools of threads take no work any more."""
    done = subprocess.run(
        [sys.executable, "-c", LEAVING, str(tmp_path)], capture_output=True, text=True,
        timeout=WAIT_S, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
    model, optimizer = resumed(tmp_path)
    with optimizer:
        assert optimizer.step_count == 3
        assert not model[0][0].weight.any()


def test_closing_amid_the_engines_own_work_hangs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a handler of SIGTERM does that comes while the training thread holds a lock."""
    model = build()
    optimizer = overspill.wrap(model, adamw(model), **options(tmp_path))
    train(model, optimizer, 2)
    armed = [True]

    class Armed(list[bool]):
        """What the engine looks at while it holds its lock."""

        def __getitem__(self, index: Any) -> Any:
            if armed.pop() if armed else False:
                signal.raise_signal(signal.SIGTERM)
            return super().__getitem__(index)

    def handler(*_: Any) -> None:
        optimizer.close()
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, handler)
    try:
        engine_port = optimizer._engine.runtime.executor.engine_port
        monkeypatch.setattr(engine_port, "_at_home", Armed(engine_port._at_home))
        with pytest.raises((SystemExit, OffloadError)):
            train(model, optimizer, 3)
    finally:
        signal.signal(signal.SIGTERM, before)
        monkeypatch.undo()
    again = None
    for _ in range(WAIT_S):
        try:
            again, resumed_one = resumed(tmp_path)
            break
        except overspill.IoError:  # it still closes, on a thread of its own
            time.sleep(1)
    assert again is not None
    with resumed_one:
        assert resumed_one.step_count == 2
