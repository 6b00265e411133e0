"""A crash between two optimizers' steps: ``resume`` says that an iteration is half applied."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from tests.devices import CPU, DEVICE, normal


def parts() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).to(DEVICE)
    return model, [torch.optim.AdamW(layer.parameters(), lr=1e-3) for layer in model]


@pytest.mark.parametrize(("first", "second"), [(3, 2), (3, 3), (6, 3)])
def test_resume_tells_of_a_half_iteration(
    first: int, second: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not if one optimizer steps more often by schedule."""
    options: dict[str, Any] = {"device": CPU, "rates": overspill.Rates()}
    model, inner = parts()
    made = overspill.wrap(model, inner, nvme=tmp_path, **options)
    for number in range(max(first, second)):
        model(normal(number, 4, 16)).square().mean().backward()
        for optimizer, count in zip(made, (first, second), strict=True):
            if number < count:
                optimizer.step()
            optimizer.zero_grad()
    made[0].commit()
    made[0].close()
    with caplog.at_level(logging.WARNING):
        model, inner = parts()
        found, _ = overspill.resume(model, tmp_path, inner, **options)
    assert [each.step_count for each in found] == [first, second]
    told = "after some of them" in caplog.text
    assert told == (first - second == 1)
    found[0].close()


def test_whole_iterations_are_committed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As docs/optimizers.md says: nothing of an iteration is resumed that was not committed."""
    options: dict[str, Any] = {"device": CPU, "rates": overspill.Rates(), "commit_every": 10**9}
    model, inner = parts()
    made = overspill.wrap(model, inner, nvme=tmp_path, **options)
    for number in range(3):
        model(normal(number, 4, 16)).square().mean().backward()
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
        made[-1].commit()
    model(normal(3, 4, 16)).square().mean().backward()
    made[0].step()  # the process ends before the other step
    copy = tmp_path.parent / f"{tmp_path.name}-copy"
    shutil.copytree(tmp_path, copy)
    made[0].close()
    with caplog.at_level(logging.WARNING):
        model, inner = parts()
        found, _ = overspill.resume(model, copy, inner, **options)
    assert [each.step_count for each in found] == [3, 3]
    assert "after some of them" not in caplog.text
    found[0].close()
