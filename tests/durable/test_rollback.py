"""Back to the last commit: by the caller's word, and when values are not finite."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from tests.devices import CPU, normal

WIDTH = 64


def wrapped(path: Path, **more: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    options = {"nvme": path, "device": CPU, "host_memory": "400KiB", "rates": overspill.Rates()}
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, overspill.wrap(model, inner, **{**options, **more})


def step(model: nn.Module, optimizer: Any, number: int, factor: float = 1.0) -> None:
    (model(normal(number, 4, WIDTH)).square().mean() * factor).backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


@pytest.mark.parametrize("update", ["step", "next_forward", "backward"])
@pytest.mark.parametrize("host", ["400KiB", "64MiB"])
def test_rollback(tmp_path: Path, update: str, host: str) -> None:
    """All that came after the commit is as if it had never been; so is what follows."""
    model, optimizer = wrapped(
        tmp_path, update=update, host_memory=host, commit_every=100, extra=lambda: {"mark": 7}
    )
    with optimizer:
        for number in range(2):
            step(model, optimizer, number)
        optimizer.commit()
        before = weights(model)
        for number in range(2, 5):
            step(model, optimizer, number)
        after = weights(model)
        assert optimizer.rollback() == {"mark": 7}
        assert optimizer.step_count == 2
        assert_same(weights(model), before)
        for number in range(2, 5):
            step(model, optimizer, number)
        assert_same(weights(model), after)


@pytest.mark.parametrize("update", ["step", "next_forward"])
@pytest.mark.parametrize("answer", ["skip", "rollback"])
def test_gradients_that_are_not_finite(tmp_path: Path, update: str, answer: str) -> None:
    model, optimizer = wrapped(tmp_path, update=update, on_nonfinite=answer)
    with optimizer:
        for number in range(2):
            step(model, optimizer, number)
        before = weights(model)
        step(model, optimizer, 2, float("nan"))
        assert optimizer.step_count == 2
        assert_same(weights(model), before)
        step(model, optimizer, 2)
        assert optimizer.step_count == 3


def test_a_bad_update_is_not_committed(tmp_path: Path) -> None:
    """With updates in backward the harm is done before it is seen: the store knows better."""
    model, optimizer = wrapped(tmp_path, update="backward", on_nonfinite="rollback")
    with optimizer:
        for number in range(2):
            step(model, optimizer, number)
        before = weights(model)
        step(model, optimizer, 2, float("nan"))
        taken = optimizer.step_count  # seen at this step, or by the next one
        step(model, optimizer, 3)
        assert optimizer.step_count == (3 if taken == 2 else 2)
        optimizer.commit()
        assert all(value.isfinite().all() for value in weights(model).values())
        if taken == 3:
            assert_same(weights(model), before)


def test_without_a_store_there_is_nowhere_to_go_back_to() -> None:
    model = nn.Linear(8, 8)
    inner = torch.optim.AdamW(model.parameters())
    with overspill.wrap(model, inner, device=CPU, host_memory="64MiB") as optimizer:
        with pytest.raises(overspill.OffloadError, match="needs a durable store; pass nvme="):
            optimizer.commit()
        with pytest.raises(overspill.OffloadError, match="needs a durable store"):
            optimizer.rollback()


@pytest.mark.parametrize("at", range(4))
def test_a_rollback_that_was_interrupted_is_made_again(at: int, tmp_path: Path) -> None:
    """As its message says; what was not read the first time is read then."""
    model, optimizer = wrapped(tmp_path, host_memory="64MiB")
    with optimizer:
        for number in range(2):
            step(model, optimizer, number)
        optimizer.commit()
        committed = weights(model)
        direct = optimizer._engine.runtime.direct
        real, left = direct.reload, [at]

        def reload(item: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                direct.reload = real
                raise KeyboardInterrupt
            real(item)

        direct.reload = reload
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
        with pytest.raises(KeyboardInterrupt):
            optimizer.rollback()
        with pytest.raises(overspill.OffloadError, match=r"call rollback\(\)"):
            step(model, optimizer, 5)
        optimizer.rollback()
        assert optimizer.step_count == 2
        assert_same(weights(model), committed)


def test_a_commit_that_comes_amid_a_rollback_is_gone_back_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and facts are of one step, also where the disk was slow with the last commit."""
    from overspill.movement.commit_writer import CommitWriter

    real = CommitWriter._commit

    def slow(self: Any, *given: Any) -> None:
        time.sleep(0.5)
        real(self, *given)

    model, optimizer = wrapped(tmp_path, commit_every=2, host_memory="64MiB")
    with optimizer:
        step(model, optimizer, 0)
        step(model, optimizer, 1)
        wanted = weights(model)
        monkeypatch.setattr(CommitWriter, "_commit", slow)
        step(model, optimizer, 2)
        optimizer.rollback()
        assert optimizer.step_count == 2
        assert_same(weights(model), wanted)


@pytest.mark.parametrize("forward", [True, False])
def test_an_edit_after_a_rollback_is_not_durable_by_itself(forward: bool, tmp_path: Path) -> None:
    """Whether a ``commit()`` came just before the rollback makes no difference."""
    model, optimizer = wrapped(tmp_path)
    with optimizer:
        step(model, optimizer, 0)
        optimizer.commit()
        if forward:
            model(normal(1, 4, WIDTH))
        optimizer.rollback()
        before = weights(model)
        with torch.no_grad():
            model[0].bias.add_(1)
        model(normal(2, 4, WIDTH))
        optimizer.rollback()
        assert_same(before, weights(model))
