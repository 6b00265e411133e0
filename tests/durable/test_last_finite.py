"""The last commit is the last state that was finite, whatever the way out."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.errors import OffloadError
from overspill.movement.commit_writer import CommitWriter
from tests.devices import CPU, SIM, normal
from tests.patience import WAIT_S

WIDTH = 32


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3)]
    )


def wrapped(path: Path, model: nn.Module, **more: Any) -> Any:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"device": CPU, "host_memory": "64MiB", "rates": overspill.Rates(), **more}
    return overspill.wrap(model, inner, nvme=path, **given)


def step(model: nn.Module, optimizer: Any, number: int, factor: float = 1.0) -> None:
    loss = model(normal(number, 4, WIDTH) * factor).square().mean()
    (loss * factor).backward()
    optimizer.step()
    optimizer.zero_grad()


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def reopened(path: Path) -> tuple[int, dict[str, torch.Tensor]]:
    model = build()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer, _ = overspill.resume(
        model, path, inner, device=CPU, host_memory="64MiB", rates=overspill.Rates()
    )
    with optimizer:
        return optimizer.step_count, state(model)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, right[name]) for name, value in left.items())


def overflow(optimizer: Any) -> None:
    """Finite gradients, and weights that are not: the norm says nothing."""
    for group in optimizer.param_groups:
        group["lr"] = 1e38


WAYS = ["close", "raise and close", "commit", "more steps"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("update", ["step", "next_forward", "backward"])
def test_an_update_that_overflows_is_never_committed(
    tmp_path: Path, update: str, every: int, way: str
) -> None:
    model = build()
    optimizer = wrapped(tmp_path, model, update=update, commit_every=every)
    states = [state(model)]
    for number in range(4):
        step(model, optimizer, number)
        states.append(state(model))
    overflow(optimizer)
    told = 0
    for number in range(4, 4 + (1 if way == "close" else 2 if way == "raise and close" else 4)):
        try:
            step(model, optimizer, number, 1e3)
        except OffloadError as error:
            again = told > 0 and update == "backward" and "rollback()" in str(error)
            assert "not finite" in str(error) or again
            told += 1
            with contextlib.suppress(OffloadError):  # of an update in backward it says so once
                optimizer.zero_grad()
            optimizer.zero_grad()
    if way == "commit":
        with pytest.raises(OffloadError, match=r"not finite|part of the model"):
            optimizer.commit()
        told += 1
    assert told or way == "close"
    optimizer.close()
    count, found = reopened(tmp_path)
    assert all(value.isfinite().all() for value in found.values()), (count, way)
    assert count == 4 - 4 % every  # no later one was asked for
    assert same(found, states[count])


@pytest.mark.parametrize("update", ["step", "next_forward", "backward"])
def test_a_batch_of_nans_leaves_the_last_good_state(tmp_path: Path, update: str) -> None:
    """Its forward has spoiled running statistics; what is committed at the end is from before."""
    model = build()
    optimizer = wrapped(tmp_path, model, update=update, commit_every=100)
    for number in range(3):
        step(model, optimizer, number)
    good = state(model)
    with pytest.raises(OffloadError, match="not finite"):
        for number in range(3, 6):
            step(model, optimizer, number, float("nan"))
    optimizer.close()
    count, found = reopened(tmp_path)
    assert all(value.isfinite().all() for value in found.values())
    if update == "next_forward":  # no weight was changed
        assert count == 3 and same(found, good)
    else:
        assert count == 0


def test_commits_go_on_when_finite_weights_were_loaded(tmp_path: Path) -> None:
    model = build()
    optimizer = wrapped(tmp_path, model, update="step")
    step(model, optimizer, 0)
    good = state(model)
    rate = optimizer.param_groups[0]["lr"]
    overflow(optimizer)
    with pytest.raises(OffloadError, match="not finite"):
        step(model, optimizer, 1, 1e3)
    optimizer.zero_grad()
    with pytest.raises(OffloadError, match="values are not finite in"):
        optimizer.commit()
    model.load_state_dict(good)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.commit()
    step(model, optimizer, 2)
    wanted = state(model)
    optimizer.close()
    count, found = reopened(tmp_path)
    assert count == 3 and same(found, wanted)


def test_backward_mode_raises_what_it_has_seen_before_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``on_nonfinite="raise"`` means it, with a store and without; the very first commit may still
    be under way when values that are not finite come, where the first forward waits for nothing."""
    seen, real = threading.Event(), CommitWriter._commit

    def commit(writer: CommitWriter, *args: Any) -> None:
        assert seen.wait(WAIT_S)
        time.sleep(0.1)
        real(writer, *args)

    monkeypatch.setattr(CommitWriter, "_commit", commit)
    for given in ({"nvme": tmp_path}, {}):
        model = build()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with overspill.wrap(
            model, inner, device=SIM, device_memory="64MiB", host_memory="64MiB",
            update="backward", rates=overspill.Rates(), **given,
        ) as optimizer:  # fmt: skip
            (model(torch.randn(4, WIDTH)).sum() * float("nan")).backward()
            runtime = optimizer._engine.runtime
            while not runtime.ledger.nonfinite:  # the worker sees it first
                pass
            seen.set()
            with pytest.raises(OffloadError, match="the update produced non-finite values"):
                optimizer.step()
            assert optimizer.step_count == 0
            if given:
                optimizer.rollback()
                step(model, optimizer, 0)
                assert optimizer.step_count == 1
