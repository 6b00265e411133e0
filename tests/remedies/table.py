"""Maps each message with a remedy to the test that executes the remedy."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

import overspill
from overspill.errors import OffloadError
from tests.devices import CPU, normal, plainly
from tests.patience import WAIT_S

Test = TypeVar("Test", bound=Callable[..., None])
WIDTH = 16

TRIED: list[tuple[str, str]] = []  # file and a part of the message


def tries(file: str, *parts: str) -> Callable[[Test], Test]:
    """Enter a test in the table: it provokes messages of ``file`` that contain these ``parts``, and
    executes their remedy."""
    TRIED.extend((file, part) for part in parts)
    return lambda test: test


@contextmanager
def says(part: str, kind: type[BaseException] | tuple[type[BaseException], ...] = Exception,
         ) -> Iterator[None]:  # fmt: skip
    """Require that an error is raised inside whose message contains ``part``."""
    with pytest.raises(kind) as caught:
        yield
    assert isinstance(caught.value, (OffloadError, ValueError, TypeError, RuntimeError))
    assert part in str(caught.value), str(caught.value)


def logged(caplog: pytest.LogCaptureFixture, part: str) -> bool:
    """Whether a warning that contains ``part`` was logged; what was logged is forgotten."""
    found = any(
        part in record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING
    )
    caplog.clear()
    return found


def net(*, depth: int = 3, seed: int = 0) -> nn.Sequential:
    """A small model, the same for the same seed."""
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 4))


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """AdamW over what is trained."""
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(params, **{"lr": 0.01, **options})


def wrapped(model: nn.Module, optimizer: Any = None, **options: Any) -> Any:
    """``wrap`` on the device of the tests."""
    inner = adamw(model) if optimizer is None else optimizer
    return overspill.wrap(model, inner, **{"device": CPU, "rates": overspill.Rates(), **options})


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    """One step of a plain loop; its batch comes from its number."""
    *_, there = model.parameters()
    x = normal(number, 5, WIDTH).to(there.device, there.dtype)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trains(model: nn.Module, optimizer: Any, first: int = 0, steps: int = 2) -> None:
    """Require that training goes on: every trained parameter changes, and none is not finite."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    for number in range(first, first + steps):
        step(model, optimizer, number)
    for name, value in model.state_dict().items():
        assert torch.isfinite(value.float()).all(), name
        assert name not in trained or not torch.equal(value, before[name]), name


def same(model: nn.Module, other: nn.Module) -> None:
    """Require that two models have the same weights, bit for bit."""
    theirs = other.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), theirs[name].cpu()), name


def plain_run(steps: int, model: nn.Module | None = None) -> nn.Module:
    """What a model is after so many steps that nothing happened to."""
    model = net() if model is None else model
    optimizer = plainly(overspill.optim.AdamW, model.parameters(), lr=0.01)
    for number in range(steps):
        step(model, optimizer, number)
    return model


def run_script(script: str) -> None:
    """Run a program that must end well."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
