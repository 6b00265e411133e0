"""Our optimizers against torch's own, element by element, and against the same run in double.

A unit is fp32's epsilon of the largest value that the weight had on the way.  One step from equal
states differs by at most 2 units of what is added up: the weight before and after, and for Adam its
step of size lr (a quotient of noisy moments).  Over many steps the roundings of both add up at
random: at most one unit per square root of a step, so 10 after 100 steps (8 were seen), where torch
itself is up to 24 units away from the run in double; and ours is never more than twice as far from
that run as torch is.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

import overspill.optim as ours
from overspill.optim.formats import join_master
from tests.devices import about_cpu
from tests.optim_jobs import ODD_SIZES

pytestmark = about_cpu

EPS = torch.finfo(torch.float32).eps
STEPS = 100
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {"lr": 1e-3, "weight_decay": 0.1}),
    "adamw-fast": ("AdamW", {"lr": 0.1, "betas": (0.5, 0.7), "eps": 1e-3, "weight_decay": 0.0}),
    "adamw-amsgrad": ("AdamW", {"lr": 1e-3, "amsgrad": True}),
    "adam": ("Adam", {"lr": 1e-3}),
    "adam-l2": ("Adam", {"lr": 1e-3, "weight_decay": 0.1, "maximize": True}),
    "sgd": ("SGD", {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd-momentum": ("SGD", {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "sgd-nesterov": ("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "adagrad": (
        "Adagrad",
        {"lr": 1e-2, "lr_decay": 0.01, "weight_decay": 0.1, "initial_accumulator_value": 0.1},
    ),
}


class Trainer:
    """One parameter with its optimizer and a stream of gradients that is the same for all."""

    def __init__(self, home: Any, case: str, numel: int, dtype: torch.dtype, **formats: Any):
        name, options = CASES[case]
        start = torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 0.02
        self.param = torch.nn.Parameter(start.bfloat16().to(dtype))
        self.optimizer = getattr(home, name)([self.param], **options, **formats)
        self.largest = self.param.detach().float().abs()
        self.longest = torch.zeros(numel)
        self.generator = torch.Generator().manual_seed(1)
        self.decade = 10 ** torch.empty(numel).uniform_(-4, 0, generator=self.generator)

    def step(self) -> None:
        grad = torch.randn(self.param.numel(), generator=self.generator) * self.decade
        self.param.grad = grad.bfloat16().to(self.param.dtype)
        before = self.param.detach().float().clone()
        self.optimizer.step()
        after = self.param.detach().float()
        self.largest = torch.maximum(self.largest, after.abs())
        self.longest = torch.maximum(self.longest, (after - before).abs())

    def run(self, steps: int = STEPS) -> Trainer:
        for _ in range(steps):
            self.step()
        return self

    def value(self) -> torch.Tensor:
        """The weight, or its master, in double."""
        state = self.optimizer.state[self.param]
        weight = self.param.detach()
        if "master_lo" in state:
            weight = join_master(weight, state["master_lo"])
        return state.get("master", weight).double()


def torch_trainer(case: str, numel: int, dtype: torch.dtype = torch.float32) -> Trainer:
    return Trainer(torch.optim, case, numel, dtype, foreach=False)


def assert_close(mine: Trainer, case: str, numel: int) -> None:
    theirs = torch_trainer(case, numel).run()
    exact = torch_trainer(case, numel, torch.float64).run().value()
    ulp = EPS * theirs.largest.double().clamp_min(1e-30)
    apart = (mine.value() - theirs.value()).abs() / ulp
    assert float(apart.max()) <= math.sqrt(STEPS)
    error, their_error = ((x.value() - exact).abs() / ulp for x in (mine, theirs))
    assert float(error.max()) <= 2 * float(their_error.max()) + 2


@pytest.mark.parametrize("case", CASES)
def test_hundred_steps(case: str) -> None:
    for numel in [*ODD_SIZES, 4099]:
        assert_close(Trainer(ours, case, numel, torch.float32).run(), case, numel)


def assert_close_when_large(case: str, steps: int) -> None:
    numel = 2**20 + 3
    mine, theirs = Trainer(ours, case, numel, torch.float32), torch_trainer(case, numel)
    for trainer in (mine, theirs):
        trainer.run(steps)
    step_size = CASES[case][1]["lr"] if case.startswith("adam") else 0.0
    ulp = EPS * (theirs.largest + theirs.longest + step_size).double()
    # Among a million elements some have more bad luck than among four thousand.
    apart = (mine.value() - theirs.value()).abs() / ulp
    if case == "adam-l2":  # decay cancels some gradients almost: a quotient of two such is noise
        apart = apart.sort().values[: -numel // 10_000]
    assert float(apart.max()) <= 2 * math.sqrt(steps)


@pytest.mark.parametrize("case", CASES)
def test_large_odd_size(case: str) -> None:
    assert_close_when_large(case, 3)


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_large_odd_size_for_long(case: str) -> None:
    assert_close_when_large(case, STEPS)


@pytest.mark.parametrize("case", CASES)
def test_one_step_from_equal_states(case: str) -> None:
    numel = 4099
    theirs = torch_trainer(case, numel).run(20)
    mine = Trainer(ours, case, numel, torch.float32)
    mine.param.data.copy_(theirs.param.data)
    mine.optimizer.load_state_dict(copy.deepcopy(theirs.optimizer.state_dict()))
    mine.generator.set_state(theirs.generator.get_state())
    before = theirs.param.detach().clone()
    theirs.step()
    mine.step()
    assert not torch.equal(theirs.param, before)
    step_size = CASES[case][1]["lr"] if case.startswith("adam") else 0.0
    ulp = EPS * (before.abs() + theirs.param.detach().abs() + step_size).double()
    assert float(((mine.value() - theirs.value()).abs() / ulp).max()) <= 2


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "dtype, master",
    [(torch.bfloat16, "split"), (torch.bfloat16, "fp32"), (torch.float16, "fp32")],
)
def test_master_follows_the_fp32_run(case: str, dtype: torch.dtype, master: str) -> None:
    """With a master, low-precision weights lose nothing: gradients are the same here."""
    if dtype is torch.float16:
        # Half floats cannot hold the gradients of the fp32 run: only that training moves.
        mine = Trainer(ours, case, 300, dtype, master=master)
        mine.run(3)
        assert torch.isfinite(mine.value()).all()
        assert torch.equal(mine.param.detach(), mine.value().half())
        return
    mine = Trainer(ours, case, 1025, dtype, master=master).run()
    assert_close(mine, case, 1025)


@pytest.mark.parametrize("case", CASES)
def test_split_master_is_the_plain_master(case: str) -> None:
    split = Trainer(ours, case, 1025, torch.bfloat16, master="split").run()
    plain = Trainer(ours, case, 1025, torch.bfloat16, master="fp32").run()
    assert torch.equal(split.value(), plain.value())
    assert torch.equal(split.param, plain.param)


@pytest.mark.parametrize("moments", ["bf16", "int8"])
@pytest.mark.parametrize("case", ["adamw", "adam", "sgd-momentum"])
def test_compact_moments_stay_near(case: str, moments: str) -> None:
    """Rounding of the moments is noise on the step, not drift."""
    numel = 4096
    exact = Trainer(ours, case, numel, torch.float32).run()
    mine = Trainer(ours, case, numel, torch.float32, moments=moments).run()
    start = Trainer(ours, case, numel, torch.float32).value()
    moved = (exact.value() - start).norm()
    off = (mine.value() - exact.value()).norm()
    assert float(off / moved) < (0.02 if moments == "bf16" else 0.15)
    drift = ((mine.value() - exact.value()) * (exact.value() - start)).sum() / moved**2
    assert abs(float(drift)) < 0.02


def test_lion_against_its_formula() -> None:
    param = torch.nn.Parameter(torch.linspace(-1, 1, 33))
    weight, momentum = param.detach().double().clone(), torch.zeros(33, dtype=torch.float64)
    optimizer = ours.Lion([param], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        param.grad = torch.randn(33, generator=generator)
        grad = param.grad.double()
        weight *= 1 - 1e-2 * 0.1
        weight -= 1e-2 * torch.sign(0.9 * momentum + 0.1 * grad)
        momentum = 0.99 * momentum + 0.01 * grad
        optimizer.step()
    torch.testing.assert_close(param.detach().double(), weight, rtol=1e-5, atol=1e-6)
