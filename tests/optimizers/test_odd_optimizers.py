"""Optimizers that do what few do: each trains as in torch, or is refused with the reason."""

from __future__ import annotations

import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import overspill
from overspill.optim import state_record
from tests.devices import CPU, about_cpu, normal
from tests.remedies.table import says

from .test_streamed_optimizers import TIGHT, WIDTH, build, same

pytestmark = about_cpu


class Base(torch.optim.Optimizer):
    """Calls ``update`` for every parameter with a gradient."""

    def __init__(self, params: Any, lr: float = 0.01, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                if p.grad is not None:
                    self.update(group, p, self.state[p])

    def begin(self, group: dict[str, Any]) -> None:
        pass

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        p.sub_(p.grad, alpha=group["lr"])


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    (model(normal(number, 4, WIDTH)).square().mean() * 100).backward()
    optimizer.step()
    optimizer.zero_grad()


def wrapped(model: nn.Module, inner: torch.optim.Optimizer, path: Path) -> Any:
    return overspill.wrap(model, inner, nvme=path, rates=overspill.Rates(), **TIGHT["tight"])


class Narrows(Base):
    """Replaces state by a view of itself, with other strides, in the middle of training."""

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        if not state:
            state.update(t=0, m=torch.zeros_like(p))
        state["t"] += 1
        if state["t"] == 4 and p.dim() == 2:
            state["m"] = state["m"][:, ::2]
        m, grad = state["m"], p.grad
        assert grad is not None
        target = p if m.shape == p.shape else p[:, ::2]
        m.mul_(0.9).add_(grad if m.shape == p.shape else grad[:, ::2])
        target.sub_(m, alpha=group["lr"])


class Halves(Base):
    """Keeps state in bf16, next to one named as the engine's own."""

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        if not state:
            state.update(m=torch.zeros_like(p, dtype=torch.bfloat16), master=p * 0)
        assert p.grad is not None
        state["m"].mul_(0.9).add_(p.grad.bfloat16())
        state["master"].mul_(0.5).add_(state["m"].float())
        p.sub_(state["master"], alpha=group["lr"])


class Asks(Base):
    """Asks for ``requires_grad``, keeps numbers of NumPy, and a NaN and a list in its group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, unset=float("nan"), rates=[])

    def begin(self, group: dict[str, Any]) -> None:
        group["rates"].append(group["lr"])

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        assert p.requires_grad
        state["n"] = np.float64(state.get("n", 0.0)) + 0.5
        state["seen"] = np.append(state.get("seen", np.zeros(0)), len(group["rates"]))[-3:]
        p.sub_(p.grad, alpha=group["lr"] / float(state["n"] + state["seen"][-1]))


class Nested(Base):
    """Keeps numbers and tensors in containers."""

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        if not state:
            state.update(scale={"a": 1.0}, m=[torch.zeros_like(p)])
        state["m"][0].mul_(0.9).add_(p.grad)
        p.sub_(state["m"][0], alpha=group["lr"] * state["scale"]["a"])


class Clips(Base):
    """Couples parameters, but only where their gradients are large."""

    def begin(self, group: dict[str, Any]) -> None:
        grads = [p.grad for p in group["params"] if p.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        for grad in grads:
            grad.mul_((8.0 / norm).clamp(max=1.0))


TRAINED = {"clips": Clips, "narrows": Narrows, "halves": Halves, "asks": Asks, "nested": Nested}


@pytest.mark.parametrize("name", TRAINED)
def test_bits_are_those_of_the_optimizer(name: str, tmp_path: Path) -> None:
    plain, model = build(), build()
    its = TRAINED[name](plain.parameters())
    inner = TRAINED[name](model.parameters())
    with wrapped(model, inner, tmp_path) as optimizer:
        assert inner.param_groups[0].get("rates", []) == [], "a trial leaves no traces"
        for number in range(6):
            step(plain, its, number)
            step(model, optimizer, number)
            if number == 3:
                optimizer.load_state_dict(optimizer.state_dict())
        same(model, plain)
        assert inner.param_groups[0].get("rates") == its.param_groups[0].get("rates")


def test_edits_inside_containers_of_state(tmp_path: Path) -> None:
    plain, model = build(), build()
    its = Nested(plain.parameters())
    with wrapped(model, Nested(model.parameters()), tmp_path) as optimizer:
        for number in range(5):
            step(plain, its, number)
            step(model, optimizer, number)
            for each, o in ((model, optimizer), (plain, its)):
                p = each[1][0].weight  # type: ignore[index,union-attr]
                if number == 1:
                    o.state[p]["scale"]["a"] = 3.0
                if number == 2:
                    o.state[p]["m"][0] = torch.ones(WIDTH, WIDTH)
        same(model, plain)


def test_attributes_that_are_set_later_are_used(tmp_path: Path) -> None:
    class Factor(Base):
        factor = 1.0

        def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
            p.sub_(p.grad, alpha=group["lr"] * self.factor)

    plain, model = build(), build()
    its, inner = Factor(plain.parameters()), Factor(model.parameters())
    its.factor = inner.factor = 2.0
    overspill.plan(model, inner, **TIGHT["tight"], nvme=tmp_path, rates=overspill.Rates())
    its.factor = inner.factor = 3.0
    with wrapped(model, inner, tmp_path) as optimizer:
        for number in range(4):
            step(plain, its, number)
            step(model, optimizer, number)
            if number == 1:
                its.factor = inner.factor = 0.5
        same(model, plain)


@pytest.mark.parametrize("wide", [False, True])
def test_eight_bit_state_of_bitsandbytes(wide: bool, tmp_path: Path) -> None:
    """Also of parameters so large that their state is found without memory."""
    bnb = pytest.importorskip("bitsandbytes")
    width = 300 if wide else 72

    def stack() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(2)))

    plain, model = stack(), stack()
    its = bnb.optim.AdamW8bit(plain.parameters(), lr=0.01)
    inner = bnb.optim.AdamW8bit(model.parameters(), lr=0.01)
    options = {"device": CPU, "host_memory": "8MiB", "rates": overspill.Rates()}
    with overspill.wrap(model, inner, nvme=tmp_path, **options) as optimizer:
        for number in range(3):
            for each, o in ((plain, its), (model, optimizer)):
                each(normal(number, 4, width)).square().mean().backward()
                o.step()
                o.zero_grad()
        same(model, plain)


class Decays(Base):
    """Changes parameters without a gradient, too."""

    def begin(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            p.mul_(1 - group["lr"])


class Counts(Base):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count = 0

    def begin(self, group: dict[str, Any]) -> None:
        self.count += 1

    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        p.sub_(p.grad, alpha=group["lr"] * (0.5 if self.count > 32 else 1))


class Shared(Base):
    """Keeps a count in its state that is not that of a parameter."""

    def begin(self, group: dict[str, Any]) -> None:
        count = self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[call-overload]
        for p in group["params"]:
            p.mul_(1 - 0.1 / count if p.grad is not None else 1.0)


class Bound(Base):
    """Keeps its own ``step``: a copy of it would step the original."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.run = super().step

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.run()


class Coded(torch.Tensor):
    """A tensor of a class of its own, as those that keep codes and scales."""


class Subclass(Base):
    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        state.setdefault("codes", torch.zeros_like(p).as_subclass(Coded))
        super().update(group, p, state)


class Torchaos(Base):
    pass


Torchaos.__module__ = "torchao.optim.adam"


def replaced(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.NAdam(params)
    optimizer.step = types.MethodType(lambda self: None, optimizer)  # type: ignore[method-assign]
    return optimizer


REFUSED: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "decays": (Decays, "it changes parameters without a gradient"),
    "shared": (Shared, "it keeps state that belongs to no parameter, under 'steps'"),
    "counts": (Counts, "in its attribute 'count'"),
    "subclass": (Subclass, "in tensors of its own class tests.optimizers.test_odd_optimizers.Cod"),
    "torchao": (Torchaos, "Use torch.optim.AdamW, with moments='int8' for state of about the same"),
    "bound": (Bound, "its attribute 'run' refers to parameters, a model or an optimizer"),
    "replaced": (replaced, "its step was replaced on the instance"),
    "still": (lambda ps: Base(ps, lr=float("1e-300")), "its step changes no weights"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_and_left_alone(name: str, tmp_path: Path) -> None:
    make, reason = REFUSED[name]
    model = build()
    inner = make(model.parameters())
    model(normal(0, 4, WIDTH)).sum().backward()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = {k: v for k, v in vars(inner).items() if isinstance(v, int)}
    with says(reason, TypeError):
        wrapped(model, inner, tmp_path)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert {k: v for k, v in vars(inner).items() if isinstance(v, int)} == attributes


def test_instead_of_torchaos(tmp_path: Path) -> None:
    model = build()
    with says("Use torch.optim.AdamW, with moments='int8' for state of about the same", TypeError):
        wrapped(model, Torchaos(model.parameters()), tmp_path)
    inner = torch.optim.AdamW(model.parameters())
    with overspill.wrap(model, inner, device=CPU, host_memory="4MiB", moments="int8") as optimizer:
        step(model, optimizer, 0)


def test_a_warm_up_from_zero_hides_nothing(tmp_path: Path) -> None:
    model = build()
    inner = Clips(model.parameters())
    torch.optim.lr_scheduler.LambdaLR(inner, lambda number: number / 10)
    assert inner.param_groups[0]["lr"] == 0
    plan = overspill.plan(model, inner, device=CPU, host_memory="4MiB", rates=overspill.Rates())
    assert "Clips steps all parameters at once" in str(plan)
    model = build()
    inner = Base(model.parameters())  # type: ignore[assignment]
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda number: number / 10)
    with wrapped(model, inner, tmp_path) as optimizer:
        step(model, optimizer, 0)
        schedule.step()
        step(model, optimizer, 1)


def _text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


@pytest.mark.parametrize("kind", ["dtype", "small", "tensor"])
def test_a_record_from_elsewhere_runs_no_code(kind: str) -> None:
    evil = (
        b"\x80\x04}" + _text("x") + b"(" + _text(kind) + _text("_import_dotted_name")
        + b"tQ" + _text("os.getpid") + b"\x85R)Rs."
    )  # fmt: skip
    with pytest.raises((KeyError, ValueError, pickle.UnpicklingError)):
        state_record.structure(evil, lambda slot: None)
    plain = pickle.dumps({"x": print})
    with pytest.raises(pickle.UnpicklingError, match="holds an object of builtins"):
        state_record.structure(plain, lambda slot: None)


def test_an_export_of_a_generator_is_refused(tmp_path: Path) -> None:
    class Draws(Base):
        def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
            draw = state.setdefault("draw", torch.Generator().manual_seed(1))
            p.sub_(p.grad, alpha=group["lr"] * float(torch.rand(1, generator=draw)))

    model = build()
    (tmp_path / "store").mkdir()
    with wrapped(model, Draws(model.parameters()), tmp_path / "store") as optimizer:
        step(model, optimizer, 0)
        with says("the state holds a torch.Generator, which an export cannot read"):
            optimizer.save(tmp_path / "out")


class Buffered(Base):
    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        update = p.grad
        state["n"] = state.get("n", 0) + 1
        if group["beta"]:
            update = state.setdefault("m", torch.zeros_like(p)).mul_(group["beta"]).add_(p.grad)
        p.sub_(update, alpha=group["lr"])


def test_state_that_grows_ends_the_run_and_is_resumed(tmp_path: Path) -> None:
    """An option that is changed after ``wrap`` asks for state that has no room."""
    plain, model = build(), build()
    its = Buffered(plain.parameters(), beta=0.0)
    for name in ("store", "other", "third"):
        (tmp_path / name).mkdir()
    optimizer = wrapped(model, Buffered(model.parameters(), beta=0.0), tmp_path / "store")
    for number in range(3):
        step(plain, its, number)
        step(model, optimizer, number)
    optimizer.commit()
    optimizer.param_groups[0]["beta"] = 0.9
    with says("has grown to"):
        step(model, optimizer, 3)
        model(normal(0, 1, WIDTH))
        optimizer.commit()
    optimizer.close()
    options = {"rates": overspill.Rates(), **TIGHT["tight"]}
    model = build()
    inner = Buffered(model.parameters(), beta=0.9)
    with says("nvme= in other directories recuts it"):
        overspill.resume(model, tmp_path / "store", inner, **options)
    inner = Buffered(model.parameters(), beta=0.9)
    optimizer, _ = overspill.resume(
        model, tmp_path / "store", inner, nvme=tmp_path / "other", **options
    )
    with optimizer:
        assert optimizer.step_count == 3
        for each in (optimizer, its):
            each.param_groups[0]["beta"] = 0.9
        for number in range(3, 5):
            step(plain, its, number)
            step(model, optimizer, number)
        same(model, plain)
    model = build()
    inner = Buffered(model.parameters(), beta=0.0)
    with says("pass one with the options of the run before"):
        overspill.resume(model, tmp_path / "other", inner, nvme=tmp_path / "third", **options)
    inner = Buffered(model.parameters(), beta=0.9)
    optimizer, _ = overspill.resume(
        model, tmp_path / "other", inner, nvme=tmp_path / "third", **options
    )
    with optimizer:
        same(model, plain)


def test_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    plain, model = build(), build()
    its = torch.optim.RMSprop(plain.parameters(), momentum=0.9, centered=True)
    with wrapped(model, torch.optim.RMSprop(model.parameters()), tmp_path) as optimizer:
        step(plain, its, 0)
        step(model, optimizer, 0)
        with says("give the state of an optimizer of the same class", ValueError):
            optimizer.load_state_dict(its.state_dict())
        before = {name: value.clone() for name, value in model.state_dict().items()}
        its = torch.optim.RMSprop(plain.parameters())
        step(plain, its, 1)
        optimizer.load_state_dict(its.state_dict())
        assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
        model.load_state_dict(plain.state_dict())
        step(plain, its, 2)
        step(model, optimizer, 2)
        same(model, plain)


class Mark:
    pass


class Marks(Base):
    def update(self, group: dict[str, Any], p: torch.Tensor, state: dict[str, Any]) -> None:
        state["steps"] = state.get("steps", 0) + 1
        if group["marks"]:
            state["mark"] = Mark()
        super().update(group, p, state)


def test_objects_that_come_later_end_the_run_and_are_resumed(tmp_path: Path) -> None:
    """A record with an object of a class that no trial has seen could not be read again."""
    plain, model = build(), build()
    its = Marks(plain.parameters(), marks=False)
    optimizer = wrapped(model, Marks(model.parameters(), marks=False), tmp_path)
    step(plain, its, 0)
    step(model, optimizer, 0)
    optimizer.commit()
    optimizer.param_groups[0]["marks"] = True
    with says("now has an object of tests.optimizers.test_odd_optimizers.Mark"):
        step(model, optimizer, 1)
        model(normal(0, 1, WIDTH))
        optimizer.commit()
    optimizer.close()
    model = build()
    options = {"rates": overspill.Rates(), **TIGHT["tight"]}
    inner = Marks(model.parameters(), marks=True)
    optimizer, _ = overspill.resume(model, tmp_path, inner, **options)
    with optimizer:
        optimizer.param_groups[0]["marks"] = True
        assert optimizer.step_count == 1
        step(plain, its, 1)
        step(model, optimizer, 1)
        same(model, plain)
        assert isinstance(optimizer.state[model[0][0].weight]["mark"], Mark)
