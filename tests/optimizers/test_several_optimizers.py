"""A list of optimizers over one model: each with its own parameters, one step and one commit."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.step import stepping
from tests.devices import CPU, about_cpu, normal, plainly
from tests.remedies.table import says
from tests.robust.test_interrupted_anywhere import Interrupted, Tripwire

from .test_streamed_optimizers import TIGHT, WIDTH, ScheduleFree, build, same


def pair(model: nn.Module, *, plain: bool = False) -> list[Any]:
    """Muon for matrices, and AdamW, in two groups, for the rest."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    biases = [p for n, p in model.named_parameters() if p.dim() == 1 and n.endswith("bias")]
    norms = [p for n, p in model.named_parameters() if p.dim() == 1 and not n.endswith("bias")]
    groups = [{"params": biases, "weight_decay": 0.0}, {"params": norms}]
    if not plain:
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(groups, lr=0.01)]
    return [
        plainly(torch.optim.Muon, matrices, lr=0.02),
        plainly(overspill.optim.AdamW, groups, lr=0.01),
    ]


def schedules(optimizers: list[Any]) -> list[Any]:
    return [
        torch.optim.lr_scheduler.StepLR(each, 2, gamma)
        for each, gamma in zip(optimizers, (0.5, 0.9), strict=True)
    ]


def step(model: nn.Module, optimizers: list[Any], number: int, after: list[Any] = ()) -> None:  # type: ignore[assignment]
    model(normal(number, 4, WIDTH)).square().mean().backward()
    for each in optimizers if number % 2 else reversed(optimizers):
        each.step()
    for each in after:
        each.step()
    for each in optimizers:
        each.zero_grad()


@pytest.mark.parametrize("place", TIGHT)
@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
@about_cpu
def test_each_updates_its_own_parameters(update: str, place: str, tmp_path: Path) -> None:
    plain, model = build(), build()
    its = pair(plain, plain=True)
    then = schedules(its)
    made = overspill.wrap(
        model, pair(model), nvme=tmp_path, update=update, rates=overspill.Rates(), **TIGHT[place]
    )
    assert len(made) == 2 and [len(o.param_groups) for o in made] == [1, 2]
    mine = schedules(made)
    for number in range(6):
        step(plain, its, number, then)
        step(model, made, number, mine)
    same(model, plain)
    assert [o.step_count for o in made] == [6, 6]
    assert sorted(made[0].state[model[0][0].weight]) == ["momentum_buffer", "step"]  # type: ignore[index]
    assert len(made[0].state) == 4 and len(made[1].state) == 12
    made[0].close()


@about_cpu
@pytest.mark.parametrize("back", ["resume", "rollback", "state dicts"])
def test_one_commit_has_the_state_of_all(back: str, tmp_path: Path) -> None:
    plain, model = build(), build()
    its = pair(plain, plain=True)
    for number in range(7):
        step(plain, its, number)
    options = {"rates": overspill.Rates(), "commit_every": 100, **TIGHT["tight"]}
    (tmp_path / "other").mkdir()
    made = overspill.wrap(model, pair(model), nvme=tmp_path, **options)
    for number in range(4):
        step(model, made, number)
    if back == "rollback":
        made[1].commit()
        step(model, made, 4)
        made[0].rollback()
    elif back == "resume":
        made[0].close()
        model = build()
        made, _ = overspill.resume(model, tmp_path, pair(model), **options)  # type: ignore[assignment]
    else:
        states = [copy.deepcopy(each.state_dict()) for each in made]
        for each, theirs in zip(states, pair(build()), strict=True):  # as torch has them
            theirs.load_state_dict(each)
        model = overspill.unwrap(model)  # type: ignore[assignment]
        made = overspill.wrap(model, pair(model), nvme=tmp_path / "other", **options)
        for each, state in zip(made, states, strict=True):
            each.load_state_dict(state)
    for number in range(4, 7):
        step(model, made, number)
    same(model, plain)
    made[0].close()


@about_cpu
def test_one_norm_clips_all(tmp_path: Path) -> None:
    plain, model = build(), build()
    its = pair(plain, plain=True)
    made = overspill.wrap(
        model, pair(model), nvme=tmp_path, rates=overspill.Rates(), **TIGHT["tight"]
    )
    for number in range(3):
        for each in (plain, model):
            each(normal(number, 4, WIDTH)).square().mean().backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        assert total > 0.01
        for p in plain.parameters():
            assert p.grad is not None
            p.grad.mul_(torch.clamp(0.01 / (total + 1e-6), max=1.0))
        for optimizers in (its, made):
            for each in optimizers:
                each.step()
                each.zero_grad()  # each after its own step
        assert all(p.grad is None for p in model.parameters())
    same(model, plain)
    made[0].close()


def wrapped(model: nn.Module, **more: Any) -> list[overspill.OffloadedOptimizer]:
    return overspill.wrap(
        model, pair(model), device=CPU, host_memory="4MiB", rates=overspill.Rates(), **more
    )


def scale_grad(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.mul_(0.5)  # type: ignore[union-attr]


def clip(model: nn.Module) -> None:
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.125, torch.tensor(1.0))


def halve(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(0.5)


def let_go(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


BETWEEN: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda model: model(normal(7, 4, WIDTH)),
    "without grad": torch.no_grad()(lambda model: model(normal(7, 4, WIDTH))),
    "a module": lambda model: model[1](normal(7, 4, WIDTH)),
    "zero_grad": nn.Module.zero_grad,
    "grads dropped": let_go,
    "grads scaled": scale_grad,
    "grads zeroed": lambda model: model.zero_grad(set_to_none=False),
    "clipped": clip,
    "weights changed": halve,
    "weights read": lambda model: [p.sum().item() for p in model.parameters()],
    "state dict": lambda model: {n: t.clone() for n, t in model.state_dict().items()},
    "loaded": lambda model: model.load_state_dict(
        {n: t.clone().fill_(0.25) for n, t in model.state_dict().items()}
    ),
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("update", ["step", "next_forward"])
def test_what_happens_between_the_steps_is_as_in_torch(update: str, between: str) -> None:
    """An optimizer that was stepped alone has changed its weights, and only these."""
    plain, model = build(), build()
    its, made = pair(plain, plain=True), wrapped(model, update=update)
    for number in range(3):
        for each, optimizers in ((plain, its), (model, made)):
            each(normal(number, 4, WIDTH)).square().mean().backward()
            optimizers[number % 2].step()
        seen = [BETWEEN[between](each) for each in (plain, model)]
        assert_equal(*seen)
        for optimizers in (its, made):
            if between not in ("zero_grad", "grads dropped"):
                optimizers[1 - number % 2].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    same(model, plain)
    made[0].close()


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        assert_equal(list(one.values()), list(other.values()))
    elif isinstance(one, list):
        for mine, its in zip(one, other, strict=True):
            assert_equal(mine, its)
    else:
        assert one == other or not isinstance(one, float)


def test_an_optimizer_may_be_stepped_alone(tmp_path: Path) -> None:
    """Gradients of the other one stay; state, commits and ``step_count`` are those since."""
    plain, model = build(), build()
    its, made = pair(plain, plain=True), wrapped(model, nvme=tmp_path)
    for number in range(4):
        for each, optimizers in ((plain, its), (model, made)):
            each(normal(number, 4, WIDTH)).square().mean().backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            if number % 2:
                optimizers[1].step()
                optimizers[1].zero_grad()
    assert made[0].step_count == 4
    made[0].step()
    made[0].commit()
    same(model, plain)
    state = made[1].state_dict()["state"]
    assert {float(each["step"]) for each in state.values()} == {2.0}
    made[0].close()


def test_steps_apart_are_refused_where_backward_updates() -> None:
    model = build()
    muon, adamw = wrapped(model, update="backward")
    x = normal(0, 4, WIDTH)
    model(x).sum().backward()
    muon.step()
    with says("Call step() of all optimizers before you use the model or their state"):
        model(x)
    assert muon.step_count == 0
    for each in (muon, adamw):
        each.step()
    assert muon.step_count == 1
    muon.close()


@pytest.mark.parametrize("update", ["step", "next_forward"])
def test_what_was_taken_before_shows_each_step(update: str) -> None:
    """Tensors over weights and state, gradients that are dropped, and norms of what is left."""
    plain, model = build(), build()
    its, made = pair(plain, plain=True), wrapped(model, update=update)
    seen: list[list[torch.Tensor]] = []
    for each, optimizers in ((plain, its), (model, made)):
        found, views = [], [p.data for p in each.parameters()]
        for number in range(3):
            each(normal(number, 4, WIDTH)).square().mean().backward()
            optimizers[0].step()
            found += [view.clone() for view in views]
            optimizers[0].zero_grad()
            left = [p.grad for p in each.parameters() if p.grad is not None]
            found += [grad.clone() for grad in left]
            optimizers[1].step()
            optimizers[1].zero_grad(set_to_none=False)
        seen.append(found)
    assert_equal(*seen)
    made[0].close()


@pytest.mark.parametrize("update", ["step", "next_forward"])
def test_backwards_may_lie_between_the_steps(update: str) -> None:
    """Of graphs that share no weights, as those of an actor and a critic."""
    plain, model = build(), build()
    its, made = pair(plain, plain=True), wrapped(model, update=update)
    for each, (_, other) in ((plain, its), (model, made)):
        own = list(other.param_groups[0]["params"])
        for number in range(3):
            loss = each(normal(number, 4, WIDTH)).square().mean()
            grads = torch.autograd.grad(loss, own)
            for p, grad in zip(own, grads, strict=True):
                p.grad = grad
            other.step()
            other.zero_grad()
    same(model, plain)
    made[0].close()


def test_another_thread_that_reads_takes_no_step() -> None:
    """It is told so, and the loop goes on."""
    model = build()
    made = wrapped(model, update="backward")
    model(normal(0, 4, WIDTH)).sum().backward()
    made[0].step()
    errors: list[str] = []

    def read() -> None:
        try:
            model[0][0].weight.sum().item()
        except overspill.OffloadError as error:
            errors.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert errors and "another one trains it" in errors[0]
    made[1].step()
    assert made[0].step_count == 1
    made[0].close()


def test_a_refused_use_loses_no_step(tmp_path: Path) -> None:
    """With ``update="backward"``, a loop that catches the error, or an interrupt, goes on."""
    plain, model = build(), build()
    its, made = pair(plain, plain=True), wrapped(model, update="backward", nvme=tmp_path)
    for number in range(4):
        for each in (plain, model):
            each(normal(number, 4, WIDTH)).square().mean().backward()
        made[0].step()
        made[0].zero_grad()
        if number == 1:
            with says("Call step() of all optimizers"):
                model[0][0].weight.sum().item()
        if number == 2:
            with Tripwire(3, str(stepping.__file__)), contextlib.suppress(Interrupted):
                made[1].step()
        if made[0].step_count == number:
            made[1].step()
        made[1].zero_grad()
        for optimizer in its:
            optimizer.step()
            optimizer.zero_grad()
        assert [each.step_count for each in made] == [number + 1] * 2
        same(model, plain)
    model(normal(0, 4, WIDTH)).sum().backward()
    made[0].step()
    made[1].rollback()  # and with it the step that waits
    assert [each.step_count for each in made] == [4, 4]
    same(model, plain)
    made[0].close()


def test_schedulers_of_frozen_parts_may_run_later() -> None:
    """One part learns, then the other, then both schedulers step, with ``update="backward"``."""
    plain, model = build(), build()
    its, made = pair(plain, plain=True), wrapped(model, update="backward")
    for each, optimizers in ((plain, its), (model, made)):
        then = schedules(optimizers)
        for number in range(4):
            for mine, other in (optimizers, optimizers[::-1]):
                for group in other.param_groups:
                    for p in group["params"]:
                        p.requires_grad_(False)
                each(normal(number, 4, WIDTH)).square().mean().backward()
                mine.step()
                mine.zero_grad()
                for group in other.param_groups:
                    for p in group["params"]:
                        p.requires_grad_(True)
            for schedule in then:
                schedule.step()
    same(model, plain)
    made[0].close()


def test_an_export_is_loaded_by_each(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    model = build()
    made = wrapped(model, nvme=tmp_path / "store")
    step(model, made, 0)
    made[0].save(tmp_path / "out")
    kept = [each.state_dict() for each in made]
    made[0].close()
    again = build()
    made = wrapped(again)
    for each, state in zip(made, kept, strict=True):
        each.load_state_dict(tmp_path / "out/optimizer.pt")
        found = each.state_dict()["state"]
        assert found.keys() == state["state"].keys()
        for number, values in state["state"].items():
            assert all(torch.equal(torch.as_tensor(found[number][n]), torch.as_tensor(v))
                       for n, v in values.items())  # fmt: skip
    made[0].close()


@pytest.mark.parametrize("update", ["step", "next_forward"])
def test_schedulers_may_run_between_the_steps(update: str) -> None:
    """And changes of weights and gradients just before the first."""
    plain, model = build(), build()
    its, made = pair(plain, plain=True), wrapped(model, update=update)
    for each, optimizers in ((plain, its), (model, made)):
        then = schedules(optimizers)
        for number in range(5):
            each(normal(number, 4, WIDTH)).square().mean().backward()
            with torch.no_grad():
                each[0][0].weight.mul_(0.9)
                each[1][0].weight.grad.mul_(0.5)
            for optimizer, schedule in zip(optimizers, then, strict=True):
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    same(model, plain)
    assert made[0].param_groups[0]["lr"] == its[0].param_groups[0]["lr"] < 0.02
    made[0].close()


def test_one_of_them_may_have_no_gradients(tmp_path: Path) -> None:
    """As after an overflow in one, or where they take turns; ``close`` applies the last one."""
    plain, model = build(), build()
    its, made = pair(plain, plain=True), wrapped(model, nvme=tmp_path)
    for each, optimizers in ((plain, its), (model, made)):
        for number in range(5):
            each(normal(number, 4, WIDTH)).square().mean().backward()
            optimizers[1 - number % 2].zero_grad()
            optimizers[number % 2].step()
            optimizers[number % 2].zero_grad()
    made[0].close()
    model = build()
    made = overspill.resume(model, tmp_path, pair(model), rates=overspill.Rates())
    assert [each.step_count for each in made[0]] == [3, 2]
    same(model, plain)
    made[0][0].close()


def test_gradients_are_dropped_though_the_step_raises() -> None:
    """A loop that catches the error goes on as without overspill."""
    model = build()
    made = wrapped(model, on_nonfinite="raise", update="next_forward")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(normal(0, 4, WIDTH) * float("nan")).sum().backward()
    for each in made:
        with says("gradients are not finite"):
            each.step()
        each.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    step(model, made, 1)
    made[0].close()


def test_lists_that_make_no_sense_are_refused() -> None:
    model = build()
    with says("the list of optimizers is empty", ValueError):
        overspill.wrap(model, [], device=CPU)
    both = [torch.optim.AdamW(model.parameters()), torch.optim.SGD(model[0].parameters(), lr=0.1)]
    with says("is in optimizers 0 and 1 of the list; leave it to one of them", ValueError):
        overspill.wrap(model, both, device=CPU)
    both[1] = torch.optim.SGD(model[1].parameters(), lr=0.1)
    both[0] = torch.optim.AdamW(model[0].parameters())
    overspill.wrap(model, both, device=CPU, host_memory="4MiB")[0].close()
    model = build()
    overspill.wrap(model, None, device=CPU, host_memory="4MiB").close()
    model = build()
    with says("got str", TypeError):
        overspill.wrap(model, [both[0], "adamw"], device=CPU)  # type: ignore[list-item]
    named = torch.optim.AdamW(list(model[0].named_parameters()))
    unnamed = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with says("build all of them in the same way", ValueError):
        overspill.wrap(model, [named, unnamed], device=CPU)
    both = [named, torch.optim.SGD(list(model[1].named_parameters()), lr=0.1)]
    made = overspill.wrap(model, both, device=CPU, host_memory="4MiB")
    p = model[0][0].weight
    model(normal(0, 4, WIDTH)).sum().backward()
    for each in made:
        each.step()
    assert p in made[0].state and p not in made[1].state
    for use in (lambda s: s[p], lambda s: s.__setitem__(p, {}), lambda s: s.pop(p)):
        with pytest.raises(KeyError):
            use(made[1].state)
    made[0].close()


@about_cpu
@pytest.mark.parametrize("update", ["step", "next_forward"])
def test_one_of_them_may_be_schedule_free(update: str, tmp_path: Path) -> None:
    """Its ``train()`` and ``eval()`` move its own weights only."""

    def both(model: nn.Module, kind: Any) -> list[Any]:
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        return [kind(others, lr=0.01), ScheduleFree(matrices)]

    plain, model = build(), build()
    its = both(plain, overspill.optim.AdamW)
    options = {"update": update, "rates": overspill.Rates(), **TIGHT["tight"]}
    made = overspill.wrap(model, both(model, torch.optim.AdamW), nvme=tmp_path, **options)
    assert not hasattr(made[0], "train")
    for number in range(5):
        for optimizers in (its, made):
            optimizers[1].train()
        step(plain, its, number)
        step(model, made, number)
        if number % 2:
            for optimizers in (its, made):
                optimizers[1].eval()
            same(model, plain)
    made[1].close()
