"""The work of updates that are not kernels: counted by operator, without memory of their size."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import pytest
import torch
from torch import nn

import overspill
from overspill.optim import StepScalars
from overspill.optim.averaged import AveragedRule
from overspill.optim.joint import JointOptimizer
from overspill.optim.muon import MuonRule
from overspill.optim.registry import rules_for
from overspill.optim.streamed import RECORD, share_scratch
from overspill.optim.update_cost import _shrunk, update_cost
from overspill.planning.bounds import device_update_flops, updated_on_device
from tests.devices import CPU, SIM, about_cpu, normal, plainly

from .test_muon import matrices, train


def test_the_work_of_an_update() -> None:
    """Five iterations of four m x m x n and one m x m x m product, each of 2 FLOPs."""
    rows, columns = 64, 256
    inner = torch.optim.Muon([nn.Parameter(torch.zeros(rows, columns))])
    group = inner.param_groups[0]
    cost = update_cost(MuonRule(), group, (rows, columns), torch.float32)
    assert cost.flops == 5 * (4 * rows**2 * columns + 2 * rows**3)
    assert cost.dtype == torch.bfloat16
    again = update_cost(MuonRule(), group, (columns, rows), torch.float32)
    assert again.flops == cost.flops
    assert update_cost(MuonRule(), group, (0, rows), torch.float32).flops == 0
    elements = rows * columns
    # At least gradient, momentum and weight are read, and the latter two written.
    assert 5 * 4 * elements < cost.moved_bytes < 200 * elements
    assert 4 * elements < cost.temporary_bytes < 24 * elements


class Asks(torch.optim.Optimizer):
    """Needs values: a product of as many columns as the weight has negative elements."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for g in self.param_groups for p in g["params"] if p.grad is not None):
            columns = p.grad[:, (p.grad != 0).any(0).nonzero()[:, 0]]
            p.sub_(0.01 * columns @ (columns.T @ p))


def test_the_work_of_an_update_that_needs_values() -> None:
    """It is scaled from a small parameter."""
    inner = Asks([nn.Parameter(torch.zeros(256, 256))])
    rule: Any = rules_for(inner)[0]
    cost = update_cost(rule, inner.param_groups[0], (256, 256), torch.float32)
    assert cost.flops == pytest.approx(4 * 256**3, rel=0.01)
    assert cost.moved_bytes > 256 * 256 * 12


class Scratch:
    """A rule that keeps a tensor from one update to the next, and runs for some widths only."""

    name, moments, whole = "scratch", (), True

    def __init__(self) -> None:
        self.kept: dict[int, torch.Tensor] = {}

    def state_fields(self, dtype: Any, master: Any, moments: Any, shape: Any = ()) -> tuple[()]:
        return ()

    def steps_taken(self, state: Any) -> int:
        return 0

    def initial(self, group: Any) -> dict[str, float]:
        return {}

    def scalars(self, group: Any, step: int, grad_scale: float = 1.0) -> StepScalars:
        return StepScalars(step, (grad_scale, group["lr"]), 0)

    def update(self, grad: Any, weight: Any, state: Any, scalars: Any, position: int = 0) -> bool:
        if weight.shape[1] == 7:
            raise RuntimeError("not of this width")
        kept = self.kept.setdefault(weight.numel(), torch.empty_like(grad))
        scale, lr = scalars.coefficients
        weight.sub_(kept.copy_(grad).mul_(scale), alpha=lr)
        return bool(torch.isfinite(weight).all())


class Halves(torch.optim.Optimizer):
    """Loops until a value is small, which a tensor without values never is."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for g in self.param_groups for p in g["params"] if p.grad is not None):
            update = p.grad.clone()
            while update.norm().item() > 0.5:
                update = update / 2
            p.sub_(update, alpha=0.1)


@pytest.mark.timeout(120)
def test_a_step_that_loops_until_a_value_is_small() -> None:
    plain, model = matrices(), matrices()
    its = plainly(Halves, plain.parameters())
    inner = Halves(model.parameters())
    with overspill.wrap(
        model, inner, device=CPU, host_memory="4MiB", rates=overspill.Rates()
    ) as optimizer:
        assert train(model, optimizer, range(3)) == train(plain, its, range(3))


class ByAddress(Scratch):
    """Could write to its tensors' addresses, as a native kernel does."""

    devices: ClassVar[set[str]] = set()

    def update(self, grad: Any, weight: Any, state: Any, scalars: Any, position: int = 0) -> bool:
        self.devices.update((grad.device.type, weight.device.type))
        weight.sub_(grad)
        return True


def test_a_rule_of_others_gets_tensors_with_memory() -> None:
    for rule in (ByAddress(), AveragedRule(ByAddress())):
        group = {"lr": 0.1, "average_decay": 0.9}
        cost = update_cost(rule, group, (512, 64), torch.float32)
        assert cost.moved_bytes >= 12 * 512 * 64 * 0.8, "counted, and scaled"
        assert cost.temporary_bytes < 64 * 512 * 64
    assert ByAddress.devices == {"cpu"}, "a tensor on meta has no address"


class Slow(Halves):
    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        type(self).steps += 1
        super().step()


def test_counting_does_not_take_long() -> None:
    """Of many shapes, few steps of each are counted; plan and run count alike."""
    inner = Slow([nn.Parameter(torch.zeros(64, 64))])
    rule: Any = rules_for(inner)[0]
    taken = []
    for number in range(10):
        before = Slow.steps
        cost = update_cost(rule, inner.param_groups[0], (64, 64 + number), torch.float32)
        assert cost.moved_bytes >= 12 * 64 * (64 + number)
        taken.append(Slow.steps - before)
    assert min(taken[:8]) >= 11 and max(taken[8:]) <= 4
    before = Slow.steps
    update_cost(rule, inner.param_groups[0], (64, 64), torch.float32)
    assert Slow.steps == before, "known"


class Now(torch.optim.Optimizer):
    """Multiplies in every tenth step only, as a projection is refreshed."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for g in self.param_groups for p in g["params"] if p.grad is not None):
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            update = p.grad
            if state["step"] % 10 == 0:
                for _ in range(40):
                    update = p.grad @ (p.grad.T @ update)
            p.sub_(update, alpha=0.01)


def test_work_now_and_then_is_counted_of_every_shape() -> None:
    inner = Now([nn.Parameter(torch.zeros(64, 64))])
    rule: Any = rules_for(inner)[0]
    first, *_, last = (
        update_cost(rule, inner.param_groups[0], (256, 240 + n), torch.float32) for n in range(12)
    )
    assert first.flops > 0 and first.dtype == torch.float32
    assert last.flops == pytest.approx(first.flops, rel=0.1) and last.dtype == first.dtype
    assert last.temporary_bytes == pytest.approx(first.temporary_bytes, rel=0.1)
    bias = update_cost(rule, inner.param_groups[0], (251,), torch.float32)
    assert not bias.flops, "a vector is not scaled from matrices"


class Scaled(nn.Module):
    """Has a trained number, as the temperature of CLIP is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(16, 16), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.linear(x) * self.scale)


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adafactor])
def test_a_parameter_without_dimensions(kind: Any) -> None:
    plain, model = Scaled(), Scaled()
    model.load_state_dict(plain.state_dict())
    its = plainly(kind, plain.parameters(), lr=0.01)
    inner = kind(model.parameters(), lr=0.01)
    with overspill.wrap(model, inner, device=CPU, host_memory="4MiB", rates=overspill.Rates()) as o:
        for number in range(3):
            for net, optimizer in ((plain, its), (model, o)):
                net(normal(number, 4, 16)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert all(torch.equal(v, plain.state_dict()[n]) for n, v in model.state_dict().items())


@about_cpu
def test_few_products_do_not_keep_state_from_the_device() -> None:
    """Adafactor multiplies a row by a column, which the CPU need not do."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    inner = torch.optim.Adafactor(model.parameters())
    plan = overspill.plan(
        model, inner, device=SIM, device_memory="8MiB", host_memory="512KiB", durable=False,
        rates=overspill.Rates(),
    )  # fmt: skip
    layout = plan.detail.layout
    assert plan.fits and layout is not None
    assert any(record.flops for record in layout.records)
    assert updated_on_device(layout) == {record.index for record in layout.records}


def test_a_small_tensor_has_the_proportions_of_the_large_one() -> None:
    thin = (1, 10**9)
    shapes = ((128256, 4096), (4096, 14336), (512, 512, 3, 3), (10_000_000,), (7, 5), thin, ())
    for shape in shapes:
        small = _shrunk(shape)
        assert small == shape or torch.Size(small).numel() < 2**15
        if len(shape) == 2 and shape != thin:
            assert small[0] / small[1] == pytest.approx(shape[0] / shape[1], rel=0.05)


def test_param_groups_share_one_copy_of_a_gradient() -> None:
    """What the plan counts, once."""
    params = [nn.Parameter(torch.ones(64, 64 + n, dtype=torch.bfloat16)) for n in range(3)]
    lists = [torch.optim.RMSprop([{"params": [p]} for p in params[:2]]),
             torch.optim.NAdam(params[2:])]  # fmt: skip
    rules: Any = rules_for(JointOptimizer(lists))
    share_scratch(rules_for(lists[0]))
    assert rules[0]._scratch is rules[1]._scratch, "of one engine"
    assert rules[0]._scratch is not rules[2]._scratch, "of none, though they were planned together"
    share_scratch(rules)
    for rule, p in zip(rules, params, strict=True):
        shape = tuple(p.shape)
        state = {"master_lo": torch.zeros(shape, dtype=torch.int16), RECORD: rule.stored({}, shape)}
        weight = p.detach().clone()
        rule.update(torch.ones_like(weight), weight, state, rule.scalars({**rule.options}, 1))
        assert not torch.equal(weight, p.detach())
    (scratch,) = {id(rule._scratch): rule._scratch for rule in rules}.values()
    assert sum(t.numel() for t in scratch.values()) == 64 * 66


class Coupling(torch.optim.Optimizer):
    """Scales all updates by one norm, after many products of each."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = sum(float(p.grad.square().sum()) for p in params) ** 0.5
        for p in params:
            update = p.grad
            for _ in range(20):
                update = p.grad @ (p.grad.T @ update) / (norm**2 + 1)
            p.sub_(p.grad / (norm + 1) + update, alpha=self.param_groups[0]["lr"])


@about_cpu
@pytest.mark.parametrize("beside", [False, True])
def test_coupled_optimizers_do_not_visit(beside: bool) -> None:
    """They step in host memory, and so is their work planned, beside Muon too."""
    model = matrices()
    params = list(model.parameters())
    coupled: Any = Coupling(params[:2] if beside else params)
    inner = [torch.optim.Muon(params[2:], lr=0.02), coupled] if beside else coupled
    plan = overspill.plan(
        model, inner, device=SIM, device_memory="4MiB", host_memory="8MiB", durable=False,
        rates=overspill.Rates(),
    )  # fmt: skip
    layout = plan.detail.layout
    assert plan.fits and layout is not None
    there = updated_on_device(layout)
    for record in layout.records:
        (spec,) = layout.units[record.unit].chunks[record.chunk].params
        muon = beside and spec.shape == (48, 48)
        assert record.flops and record.matrix == muon and (record.index in there) == muon


@about_cpu
def test_without_room_for_temporaries_nothing_is_multiplied_on_the_device() -> None:
    """Also where state would live there, without a durable store."""
    model = matrices()
    inner = torch.optim.Muon(model.parameters(), lr=0.02)
    given: dict[str, Any] = {"device": SIM, "host_memory": "8MiB", "rates": overspill.Rates()}
    seen = set()
    for kib in range(60, 700, 20):
        plan = overspill.plan(model, inner, device_memory=f"{kib}KiB", **given)
        if not plan.fits:
            continue
        layout = plan.detail.layout
        assert layout is not None and (device_update_flops(layout) > 0) == layout.matrices_visit
        told = "for lack of device memory" in str(plan)
        assert told != layout.matrices_visit == ("of the update" in str(plan) and not told)
        seen.add(layout.matrices_visit)
    assert seen == {False, True}


def test_a_rule_is_counted_apart_from_its_use() -> None:
    rule, group = Scratch(), {"lr": 0.1}
    cost = update_cost(rule, group, (8, 8), torch.float32)
    assert not rule.kept, "another one kept a tensor without memory"
    assert cost.flops == 0 and cost.moved_bytes >= 4 * 4 * 64
    guess = update_cost(rule, group, (8, 7), torch.float32)
    assert guess.moved_bytes == 12 * 56 and guess.flops == 0
