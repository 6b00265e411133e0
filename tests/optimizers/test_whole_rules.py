"""Rules for whole matrices, which others register."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.optim import Field, StepScalars, registry
from overspill.optim.formats import WholeField, moment_fields
from tests.devices import about_cpu, normal
from tests.remedies.table import says

from .test_streamed_optimizers import TIGHT, WIDTH, build, same


class Matrices(torch.optim.Optimizer):
    """Has a native rule for whole matrices, which also steps plain tensors."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        rule = MatrixRule()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state.update(
                            momentum=torch.zeros_like(p.detach()), rows=torch.zeros(len(p))
                        )
                    rule.update(p.grad, p.detach(), state, rule.scalars(group, 1))


class MatrixRule:
    """Orthogonalises the momentum, and keeps one value per row."""

    name, moments, whole = "matrices", ("momentum",), True

    def state_fields(
        self, weight_dtype: torch.dtype, master: Any, moments: Any, shape: tuple[int, ...] = ()
    ) -> tuple[Field, ...]:
        rows = WholeField("rows", torch.float32, shape=shape[:1])
        return (*moment_fields("momentum", moments), rows)

    def steps_taken(self, state: Any) -> int:
        return int("momentum" in state)

    def initial(self, group: Any) -> dict[str, float]:
        return {}

    def scalars(self, group: Any, step: int, grad_scale: float = 1.0) -> StepScalars:
        return StepScalars(step, (grad_scale, group["lr"]), 0)

    def update(
        self, grad: torch.Tensor, weight: torch.Tensor, state: Any, scalars: StepScalars,
        position: int = 0,
    ) -> bool:  # fmt: skip
        scale, lr = scalars.coefficients
        assert grad.shape == weight.shape == state["momentum"].shape
        total = state["momentum"].mul_(0.9).add_(grad, alpha=scale)
        state["rows"].add_(total.square().mean(1))
        weight.sub_(torch.linalg.qr(total)[0] / (1 + state["rows"][:, None]), alpha=lr)
        return bool(torch.isfinite(weight).all())


@about_cpu
@pytest.mark.parametrize("place", TIGHT)
@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
def test_a_rule_for_whole_matrices(update: str, place: str, tmp_path: Path) -> None:
    """Shapes reach the rule, and so do values that are not as large as the weight."""
    if Matrices not in registry.MAKERS:
        overspill.optim.register(Matrices, lambda group: MatrixRule())

    def stack() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5)))

    plain, model = stack(), stack()
    its = Matrices(plain.parameters())
    options = {"update": update, "rates": overspill.Rates(), "commit_every": 100, **TIGHT[place]}
    with overspill.wrap(model, Matrices(model.parameters()), nvme=tmp_path, **options) as optimizer:
        for number in range(5):
            step_once(plain, its, number)
            step_once(model, optimizer, number)
        optimizer.commit()
        for number in range(5, 7):
            step_once(model, optimizer, number)
        optimizer.rollback()
        for number in range(5, 8):
            step_once(plain, its, number)
            step_once(model, optimizer, number)
        same(model, plain)


@about_cpu
def test_a_store_of_muon_is_resumed_without_an_optimizer(tmp_path: Path) -> None:
    def stack() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))

    plain, model = stack(), stack()
    its = torch.optim.Muon(plain.parameters(), lr=0.03, nesterov=False)
    inner = torch.optim.Muon(model.parameters(), lr=0.03, nesterov=False)
    options = {"rates": overspill.Rates(), **TIGHT["roomy"]}
    with overspill.wrap(model, inner, nvme=tmp_path, **options) as optimizer:
        for number in range(3):
            step_once(model, optimizer, number)
    again = stack()
    optimizer, _ = overspill.resume(again, tmp_path, **options)
    assert optimizer.param_groups[0]["nesterov"] is False and optimizer.step_count == 3
    step_once(again, optimizer, 3)
    for number in range(4):
        step_once(plain, its, number)
    same(again, plain)
    optimizer.close()


@about_cpu
def test_a_store_of_several_optimizers_is_resumed_with_a_list(tmp_path: Path) -> None:
    model = build()
    options = {"rates": overspill.Rates(), **TIGHT["roomy"]}

    def pair(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        return [torch.optim.Muon(matrices), torch.optim.AdamW(others)]

    made: Any = overspill.wrap(model, pair(model), nvme=tmp_path, **options)
    model(normal(0, 4, WIDTH)).square().mean().backward()
    for each in made:
        each.step()
    made[0].close()
    with says("trained with several optimizers; build them and pass a list to resume"):
        overspill.resume(build(), tmp_path, **options)
    again = build()
    made, _ = overspill.resume(again, tmp_path, pair(again), **options)
    assert len(made) == 2
    made[0].close()


def step_once(model: nn.Module, optimizer: Any, number: int) -> None:
    model(normal(number, 4, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
