"""Public optimizers give the bits of the optimizer itself, also after a kill, or are refused."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.optim import Rule
from overspill.optim.registry import rules_for
from overspill.optim.streamed import StreamedRule
from tests.devices import CPU, about_cpu, normal
from tests.forked import CONTEXT
from tests.patience import WAIT_S

from .table import (
    BEGIN,
    END,
    NATIVE,
    NOT_BUILT,
    PAGE,
    RESIDENT,
    STREAMED,
    USABLE,
    Public,
    all_of_them,
    listing,
)

STEPS, KILLED_AFTER, WIDTH = 30, 13, 24
PLACES: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu", "host_memory": "400KiB"},
    "sim": {"device": "sim", "device_memory": "200KiB", "host_memory": "400KiB"},
}
ALL = all_of_them()
# A trial takes a second: some of each kind are tried every day, and all in the soak.
DAILY = {
    "galore_torch.GaLoreAdamW", "pytorch_optimizer.adan", "pytorch_optimizer.came",
    "pytorch_optimizer.gravity", "prodigyopt.Prodigy", "schedulefree.AdamWScheduleFree",
    "torch.optim.LBFGS", "torch.optim.Muon",
}  # fmt: skip


def cases(which: list[Public]) -> list[Any]:
    return [
        pytest.param(p, id=p.key, marks=() if p.key in DAILY else pytest.mark.soak) for p in which
    ]


def kind_of(rule: Rule) -> str:
    if not isinstance(rule, StreamedRule):
        return NATIVE
    return RESIDENT if rule.coupled else STREAMED


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(3)]
    return nn.Sequential(*layers)


def gradients(model: nn.Module, number: int) -> None:
    model.zero_grad()
    ((model(normal(number, 4, WIDTH).cpu()) - 0.3).square().mean() * 10).backward()


def whole_run(public: Public) -> tuple[nn.Module, list[float]]:
    """Train with the optimizer itself; return the model and the norms before clipping."""
    model = build()
    optimizer, norms = public.build(model), []
    if public.expected == NATIVE:  # rounds otherwise than torch's own: see tests/conformance
        kind = getattr(overspill.optim, type(optimizer).__name__, None)
        if kind is not None:
            optimizer = kind(model.parameters(), **dict(public.options))
    for number in range(STEPS):
        gradients(model, number)
        squares = [float(p.grad.double().square().sum())
                   for p in model.parameters() if p.grad is not None]  # fmt: skip
        norms.append(sum(squares) ** 0.5)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(min(1.0, 0.5 / (norms[-1] + 1e-6)))
        optimizer.step()
    return model, norms


def train(model: nn.Module, optimizer: Any, steps: int, norms: list[float]) -> None:
    """Clip by the norms of the plain run, since the last bit of a norm depends on its order."""
    while optimizer.step_count < steps:
        number = optimizer.step_count
        gradients(model, number)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(min(1.0, 0.5 / (norms[number] + 1e-6)))
        optimizer.step()


def killed(public: Public, folder: str, options: dict[str, Any], norms: list[float]) -> None:
    """Train in a process of its own, which ends by SIGKILL, in the middle of a step."""
    model = build()
    inner = public.build(model)
    optimizer = overspill.wrap(model, inner, nvme=folder, rates=overspill.Rates(), **options)
    train(model, optimizer, KILLED_AFTER, norms)
    gradients(model, KILLED_AFTER)
    os.kill(os.getpid(), signal.SIGKILL)


@about_cpu
@pytest.mark.parametrize("public", cases([p for p in ALL if p.expected in USABLE]))
def test_bits_are_those_of_the_optimizer_itself(public: Public, tmp_path: Path) -> None:
    rng = random.Random(public.key)
    update = "step" if public.expected == RESIDENT else rng.choice(("step", "next_forward"))
    options = {**PLACES[rng.choice(list(PLACES))], "update": update}
    if public.name == "kron":  # products of all rows with all columns
        options["host_memory"] = "4MiB"
    plain, norms = whole_run(public)
    run = CONTEXT.Process(target=killed, args=(public, str(tmp_path), options, norms))
    run.start()
    run.join(WAIT_S)
    assert run.exitcode == -signal.SIGKILL
    model = build()
    inner = public.build(model)
    rules = rules_for(inner)
    assert {kind_of(rule) for rule in rules} == {public.expected}
    optimizer, _ = overspill.resume(model, tmp_path, inner, rates=overspill.Rates(), **options)
    with optimizer:
        assert KILLED_AFTER - 2 <= optimizer.step_count <= KILLED_AFTER
        train(model, optimizer, STEPS, norms)
        for name, value in plain.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name


@about_cpu
@pytest.mark.parametrize("public", cases([p for p in ALL if p.expected not in USABLE]))
def test_others_are_refused_with_the_reason(public: Public) -> None:
    model = build()
    inner = public.build(model)
    with pytest.raises(TypeError) as caught:
        overspill.wrap(model, inner, device=CPU, host_memory="4MiB")
    assert public.expected in str(caught.value), str(caught.value)
    assert "such as torch.optim." in str(caught.value)


def test_at_least_a_hundred_can_be_used() -> None:
    """And those that are not tried take something else than parameters."""
    assert sum(p.expected in USABLE for p in ALL) >= 100
    assert set(NOT_BUILT.values()) == {"a model", "a process group"}


def test_the_page_lists_what_was_tried() -> None:
    """``python -m tests.optimizers.table`` writes the list."""
    text = PAGE.read_text(encoding="utf-8")
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == listing()
