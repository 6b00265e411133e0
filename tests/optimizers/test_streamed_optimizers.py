"""Optimizers without a rule of ours: their own step runs on one parameter at a time, or on all."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.optim.formats import round_to_upper
from tests.devices import CPU, DEVICE, SIM, about_cpu, normal, plainly
from tests.remedies.table import says

TIGHT: dict[str, dict[str, Any]] = {
    "roomy": {"device": CPU, "host_memory": "4MiB"},
    "tight": {"device": CPU, "host_memory": "300KiB"},
    "device": {"device": SIM, "device_memory": "120KiB", "host_memory": "300KiB"},
}
WIDTH = 32


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(4)]
    return nn.Sequential(*layers).to(DEVICE)


class Projector:
    """An object that an optimizer keeps in its state, as GaLore does."""

    def __init__(self, every: int) -> None:
        self.every, self.basis = every, None

    def project(self, grad: torch.Tensor, step: int) -> torch.Tensor:
        if self.basis is None or step % self.every == 0:
            self.basis = torch.linalg.qr(grad)[0][:, :4].contiguous()
        return self.basis.T @ grad


class Kept(torch.optim.Optimizer):
    """Keeps all kinds of things: a count in the group, numbers, lists, objects, a generator."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group["sum"] = group.get("sum", 0.0) + group["lr"] ** 2
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["moments"] = [torch.zeros_like(p), torch.zeros_like(p)]
                    state["seen"] = {"largest": 0.0, "name": "p"}
                    state["draw"] = torch.Generator("cpu").manual_seed(p.numel())
                    if p.dim() == 2:
                        state["projector"] = Projector(3)
                first, second = state["moments"]
                first.mul_(0.9).add_(p.grad, alpha=0.1)
                state["moments"][1] = second * 0.99 + p.grad.square() * 0.01
                state["seen"]["largest"] = max(state["seen"]["largest"], float(p.grad.abs().max()))
                noise = torch.rand(1, generator=state["draw"], device="cpu").to(p.device)
                update = first / (state["moments"][1].sqrt() + state["seen"]["largest"] + 1e-8)
                if p.dim() == 2:
                    low = state["projector"].project(p.grad, group["steps"])
                    update = update + 0.1 * state["projector"].basis @ low
                p.add_(update, alpha=-group["lr"] / math.sqrt(group["sum"]) * 0.01)
                p.mul_(1 - 0.001 * noise)


class Clipped(torch.optim.AdamW):
    """A subclass that steps differently: it is not its base."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.clamp_(-0.01, 0.01)
        return super().step(closure)


class Coupled(torch.optim.Optimizer):
    """Estimates one step size over all parameters of all groups, as Prodigy does."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "size": 1e-6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        given = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        size, total = self.param_groups[0]["size"], 0.0
        for group, p in given:
            state = self.state[p]
            if not state:
                state.update(first=p.clone(), m=torch.zeros_like(p), steps=0)
            state["steps"] += 1
            state["m"].lerp_(p.grad, 0.1)
            total += float((state["first"] - p).abs().sum()) * group["lr"]
            total += float(state["m"].norm())
        for group in self.param_groups:
            group["size"] = size + total
        for group, p in given:
            p.sub_(self.state[p]["m"], alpha=group["lr"] * size)


Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.9),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
    "clipped": lambda ps: Clipped(ps, lr=0.01),
    "kept": Kept,
    "coupled": Coupled,
}


def groups_of(model: nn.Module, make: Make) -> torch.optim.Optimizer:
    """Biases and norms in a group of their own, with another learning rate."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return make([{"params": matrices, "lr": 0.01}, {"params": others, "lr": 0.003}])  # type: ignore[list-item]


def step(model: nn.Module, optimizer: Any, number: int, schedule: Any = None) -> None:
    for part in range(2):
        x = normal(10 * number + part, 4, WIDTH).to(next(model.parameters()).dtype)
        model(x).square().mean().backward()
    optimizer.step()
    if schedule is not None:
        schedule.step()
    optimizer.zero_grad()


def same(model: nn.Module, plain: nn.Module) -> None:
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def plain_pair(make: Make) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model with the optimizer itself, whose updates run on the CPU."""
    model = build()
    optimizer = groups_of(model, partial(plainly, make))
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


@pytest.mark.parametrize("place", TIGHT)
@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
# Updates that run on a device multiply matrices there, which gives other bits than a CPU.
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=about_cpu) if n == "kept" else n for n in OPTIMIZERS]
)
def test_training_gives_the_bits_of_the_optimizer_itself(
    name: str, update: str, place: str, tmp_path: Path
) -> None:
    """With accumulation, a schedule, two groups, and an evaluation in between."""
    make = OPTIMIZERS[name]
    update = "step" if name == "coupled" else update
    plain, its, schedule = plain_pair(make)
    model = build()
    inner = groups_of(model, make)
    options = {**TIGHT[place], "accumulate": 2} if update == "backward" else TIGHT[place]
    with overspill.wrap(
        model, inner, nvme=tmp_path, update=update, rates=overspill.Rates(), **options
    ) as optimizer:
        mine = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for number in range(7):
            step(plain, its, number, schedule)
            step(model, optimizer, number, mine)
            if number == 3:
                with torch.no_grad():
                    assert torch.equal(model(normal(1, 2, WIDTH)), plain(normal(1, 2, WIDTH)))
        same(model, plain)
        groups = its.state_dict()["param_groups"]
        for own, theirs in zip(optimizer.param_groups, groups, strict=True):
            options = {k: v for k, v in theirs.items() if k not in ("params", "lr")}
            assert {k: own[k] for k in options} == options
        tensors_equal(optimizer.state_dict()["state"], its.state_dict()["state"])


def tensors_equal(one: Any, other: Any) -> None:
    """Compare two trees; objects by their attributes."""
    if isinstance(other, torch.Tensor):
        assert torch.equal(one, other) and one.dtype == other.dtype
    elif isinstance(other, dict):
        assert one.keys() == other.keys()
        for key, value in other.items():
            tensors_equal(one[key], value)
    elif isinstance(other, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            tensors_equal(a, b)
    elif isinstance(other, torch.Generator):
        assert torch.equal(one.get_state(), other.get_state())
    elif isinstance(other, Projector):
        tensors_equal(vars(one), vars(other))
    else:
        assert one == other


@about_cpu
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clipping(name: str, tmp_path: Path) -> None:
    make = OPTIMIZERS[name]
    plain, its, _ = plain_pair(make)
    model = build()
    with overspill.wrap(
        model, groups_of(model, make), nvme=tmp_path, rates=overspill.Rates(), **TIGHT["tight"]
    ) as optimizer:
        for number in range(4):
            for each in (plain, model):
                each(normal(number, 4, WIDTH)).square().mean().backward()
            total = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            for p in plain.parameters():
                p.grad.mul_(torch.clamp(0.01 / (total + 1e-6), max=1.0))
            for steps in (its, optimizer):
                steps.step()
                steps.zero_grad()
        same(model, plain)


@about_cpu
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("back", ["resume", "rollback"])
def test_commits_have_all_state(name: str, back: str, tmp_path: Path) -> None:
    """A run that returns to its commit gives the bits of one that was never cut."""
    make = OPTIMIZERS[name]
    plain, its, _ = plain_pair(make)
    for number in range(8):
        step(plain, its, number)
    model = build()
    options = {"rates": overspill.Rates(), **TIGHT["tight"]}
    optimizer = overspill.wrap(
        model, groups_of(model, make), nvme=tmp_path, commit_every=100, **options
    )
    for number in range(4):
        step(model, optimizer, number)
    optimizer.commit()
    if back == "rollback":
        for number in range(4, 6):
            step(model, optimizer, number)
        optimizer.rollback()
    else:
        optimizer.close()
        with pytest.raises(overspill.OffloadError, match="build that optimizer and pass it"):
            overspill.resume(build(), tmp_path, **options)
        model = build()
        optimizer, _ = overspill.resume(model, tmp_path, groups_of(model, make), **options)
    with optimizer:
        for number in range(4, 8):
            step(model, optimizer, number)
        same(model, plain)


@about_cpu
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_dicts_are_those_of_the_optimizer(name: str, tmp_path: Path) -> None:
    """They go from the plain optimizer to the wrapped one and back; wrap takes state over."""
    make = OPTIMIZERS[name]
    plain, its, _ = plain_pair(make)
    for number in range(3):
        step(plain, its, number)
    for way in ("load", "wrap"):
        model = build()
        model.load_state_dict(plain.state_dict())
        inner = groups_of(model, make)
        if way == "wrap":
            inner.load_state_dict(copy.deepcopy(its.state_dict()))
        options = {"rates": overspill.Rates(), **TIGHT["tight"]}
        path = tmp_path / way
        path.mkdir()
        with overspill.wrap(model, inner, nvme=path, **options) as optimizer:
            if way == "load":
                optimizer.load_state_dict(copy.deepcopy(its.state_dict()))
            other = build()
            other.load_state_dict(plain.state_dict())
            theirs = groups_of(other, make)
            theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            for number in range(3, 5):
                step(other, theirs, number)
                step(model, optimizer, number)
            same(model, other)


@about_cpu
@pytest.mark.parametrize("name", ["nadam", "adafactor"])
def test_an_export_has_the_state(name: str, tmp_path: Path) -> None:
    make = OPTIMIZERS[name]
    model = build()
    options = {"rates": overspill.Rates(), **TIGHT["tight"]}
    (tmp_path / "store").mkdir()
    with overspill.wrap(
        model, groups_of(model, make), nvme=tmp_path / "store", **options
    ) as optimizer:
        for number in range(3):
            step(model, optimizer, number)
        expected = copy.deepcopy(optimizer.state_dict()["state"])
        optimizer.save(tmp_path / "out")
    found = torch.load(tmp_path / "out" / "optimizer.pt", mmap=True)
    tensors_equal(found["state"], expected)
    plain = build()
    its = groups_of(plain, make)
    its.load_state_dict(found)


@about_cpu
def test_an_export_of_objects_is_refused(tmp_path: Path) -> None:
    model = build()
    options = {"rates": overspill.Rates(), **TIGHT["tight"]}
    (tmp_path / "store").mkdir()
    with overspill.wrap(model, groups_of(model, Kept), nvme=tmp_path / "store", **options) as o:
        step(model, o, 0)
        with says("an export cannot read; resume the store with its optimizer"):
            o.save(tmp_path / "out")
    again = build()
    found, _ = overspill.resume(again, tmp_path / "store", groups_of(again, Kept), **options)
    with found:
        torch.save(found.state_dict(), tmp_path / "state.pt")
        kept = torch.load(tmp_path / "state.pt", weights_only=False)
        tensors_equal(kept["state"], found.state_dict()["state"])


@about_cpu
def test_edits_of_state(tmp_path: Path) -> None:
    plain, its, _ = plain_pair(Kept)
    model = build()
    options = {"rates": overspill.Rates(), **TIGHT["tight"]}
    with overspill.wrap(model, groups_of(model, Kept), nvme=tmp_path, **options) as optimizer:
        for number in range(6):
            step(plain, its, number)
            step(model, optimizer, number)
            for each, o in ((model, optimizer), (plain, its)):
                p = each[1][0].weight  # type: ignore[index,union-attr]
                if number == 1:
                    o.state[p]["moments"][0].zero_()
                if number == 2:
                    state = o.state_dict()["state"][1]
                    state["moments"][1].mul_(2)
                    state["projector"].basis.mul_(-1)
                if number == 3:
                    p.data[3] *= 0.5
                    o.state[p]["moments"][0][3] = 0.0
                if number == 4:
                    o.state[p]["moments"] = [torch.full((WIDTH, WIDTH), 0.1) for _ in range(2)]
        same(model, plain)


@about_cpu
@pytest.mark.parametrize("master", ["split", "fp32"])
@pytest.mark.parametrize("name", ["nadam", "adafactor", "kept"])
def test_the_optimizer_updates_masters_of_bf16_weights(
    name: str, master: Any, tmp_path: Path
) -> None:
    """It sees fp32 masters and gradients, and the bits are those of such a loop in torch."""
    make = OPTIMIZERS[name]
    plain, its, _ = plain_pair(make)
    computing, model = build().bfloat16(), build()
    options = {"rates": overspill.Rates(), **TIGHT["tight"], "precision": "bf16", "master": master}
    with overspill.wrap(model, groups_of(model, make), nvme=tmp_path, **options) as optimizer:
        for number in range(6):
            x = normal(number, 8, WIDTH).bfloat16()
            with torch.no_grad():
                for p, exact in zip(computing.parameters(), plain.parameters(), strict=True):
                    p.copy_(round_to_upper(exact))
            for each in (computing, model):
                (each(x) - 1).float().square().mean().backward()
            for p, exact in zip(computing.parameters(), plain.parameters(), strict=True):
                assert p.grad is not None
                exact.grad, p.grad = p.grad.float(), None
            its.step()
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()
        names = (name for group in state["param_names"] for name in group)
        found = {name: state["state"][k]["overspill.master"] for k, name in enumerate(names)}
        for key, exact in plain.named_parameters():
            assert torch.equal(found[key], exact), key
            assert torch.equal(model.state_dict()[key], round_to_upper(exact)), key


class Remembering(torch.optim.SGD):
    """Keeps a count in itself."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.count = getattr(self, "count", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(1 - 0.01 / self.count)
        return super().step(closure)


REFUSED: dict[str, tuple[Make, str]] = {
    "list of parameters": (torch.optim.LBFGS, "refers to parameters, a model or an optimizer"),
    "attributes": (Remembering, "keeps state outside of its state and param_groups"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_stepped_alone_is_refused_with_the_reason(case: str) -> None:
    make, reason = REFUSED[case]
    model = build()
    before = torch.get_rng_state()
    with says(reason, TypeError):
        overspill.wrap(model, make(model.parameters()), device=CPU, host_memory="4MiB")
    assert torch.equal(torch.get_rng_state(), before)
    assert all(not p.is_meta for p in model.parameters())
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    with overspill.wrap(model, inner, device=CPU, host_memory="4MiB") as optimizer:
        step(model, optimizer, 0)


def test_options_that_a_streamed_optimizer_does_not_have_are_refused() -> None:
    model = build()
    with says("leave moments out", ValueError):
        overspill.wrap(model, torch.optim.NAdam(model.parameters()), device=CPU, moments="int8")
    with overspill.wrap(model, torch.optim.NAdam(model.parameters()), device=CPU) as optimizer:
        step(model, optimizer, 0)
    model = build()
    with says("overspill.ema is not possible with", TypeError):
        averaged = overspill.ema(torch.optim.NAdam(model.parameters()), 0.9)
        overspill.wrap(model, averaged, device=CPU)


class ScheduleFree(torch.optim.Optimizer):
    """Gradients are taken at one place, and the average of the steps is evaluated."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "train_mode": False, "k": 0})

    def _to(self, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        weight = 1 - 0.9 if train else 1 - 1 / 0.9
                        p.data.lerp_(self.state[p]["z"], weight)
                group["train_mode"] = train

    def train(self) -> None:
        self._to(train=True)

    def eval(self) -> None:
        self._to(train=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call optimizer.train() first")
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.detach().clone())
                    p.lerp_(z, 1 / group["k"])
                    p.add_(p.grad, alpha=-0.1 * group["lr"])
                    z.sub_(p.grad, alpha=group["lr"])


@about_cpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("update", ["step", "next_forward"])
def test_train_and_eval_of_an_optimizer_change_the_weights(
    update: str, precision: str, tmp_path: Path
) -> None:
    plain, its, _ = plain_pair(ScheduleFree)
    model = build()
    options = {**TIGHT["tight"], "update": update, "precision": precision}
    with overspill.wrap(
        model, groups_of(model, ScheduleFree), nvme=tmp_path, rates=overspill.Rates(), **options
    ) as optimizer:
        with pytest.raises(RuntimeError, match=r"call optimizer\.train"):
            step(model, optimizer, 0)
        optimizer.zero_grad()
        optimizer.train()
        its.train()  # type: ignore[attr-defined]
        for number in range(5):
            step(plain, its, number)
            step(model, optimizer, number)
            if number == 2:
                its.eval()  # type: ignore[attr-defined]
                optimizer.eval()
                if precision == "fp32":
                    same(model, plain)
                its.train()  # type: ignore[attr-defined]
                optimizer.train()
        if precision == "fp32":
            same(model, plain)
        for name, value in plain.state_dict().items():
            assert torch.allclose(model.state_dict()[name].float(), value, atol=0.05), name
    assert not hasattr(overspill.wrap(build(), device=CPU), "train")
