"""Tensors that a loop has over weights and gradients: they see and change what the engine holds, as
in plain PyTorch, or the loop is told."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.errors import OffloadError
from tests.devices import CPU, SIM, plainly
from tests.models import TinyLM, adamw, batch, train
from tests.parity.test_readers import PLACES, same

Loop = Callable[[Any, Any], object]


def one(model: Any, optimizer: Any, number: int = 0) -> None:
    model(*batch(number)).backward()
    optimizer.step()
    optimizer.zero_grad()


# -- weights -------------------------------------------------------------------------------------


def clamp_by_kept_tensors(model: Any, optimizer: Any) -> None:
    kept = [p.data for p in model.parameters()]
    for number in range(3):
        one(model, optimizer, number)
        for data in kept:
            data.clamp_(-0.3, 0.3)


def kept_tensors_see_updates(model: Any, optimizer: Any) -> Any:
    kept = model.head.weight.detach()
    one(model, optimizer)
    return kept.clone()


def two_slices(model: Any, optimizer: Any) -> None:
    first, second = model.head.weight.data[:10], model.head.weight.data[10:20]
    first.zero_()
    second.fill_(0.5)


def a_kept_one_and_the_parameter(model: Any, optimizer: Any) -> None:
    kept = model.head.weight.detach()
    with torch.no_grad():
        model.head.weight.mul_(2)
        kept.add_(1)
        model.head.weight[3].zero_()


def a_slice_in_grad_mode(model: Any, optimizer: Any) -> None:
    model.head.weight[4:8].data.fill_(1.0)


def a_part_sees_it(model: Any, optimizer: Any) -> Any:
    model.head.weight.data.mul_(100)
    return model.head(torch.ones(1, 64)).detach()


def a_state_dict_sees_it(model: Any, optimizer: Any) -> Any:
    model.norm.weight.detach().mul_(3)
    return model.state_dict()["norm.weight"].clone()


def init_again(model: Any, optimizer: Any) -> None:
    torch.manual_seed(3)
    nn.init.normal_(model.head.weight)
    nn.init.kaiming_uniform_(model.blocks[1].up.weight)
    model.blocks[2].down.reset_parameters()


def average_into_what_had_no_gradient(model: Any, optimizer: Any) -> None:
    model(*batch(0)).backward()
    model.norm.weight.grad = model.blocks[3].up.weight.grad = None
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model.norm.weight.mul_(0.9).add_(0.1)
        model.blocks[3].up.weight.mul_(0.5)


def load_after_a_forward(model: Any, optimizer: Any) -> None:
    kept = copy.deepcopy(model.state_dict())
    one(model, optimizer)
    loss = model(*batch(2))  # diverged, say
    del loss
    model.load_state_dict(kept)


def load_own_parameters_swapped(model: Any, optimizer: Any) -> None:
    own = dict(model.named_parameters())
    own["blocks.0.up.weight"], own["blocks.1.up.weight"] = (
        own["blocks.1.up.weight"], own["blocks.0.up.weight"],
    )  # fmt: skip
    model.load_state_dict({name: p.detach().clone() for name, p in own.items()})


def gradients_of_autograd(model: Any, optimizer: Any) -> None:
    params = list(model.parameters())
    found = torch.autograd.grad(model(*batch(1)), params, allow_unused=True)
    for p, grad in zip(params, found, strict=True):
        p.grad = grad


def channels_last(model: Any, optimizer: Any) -> None:
    model.to(memory_format=torch.channels_last)


# -- gradients -----------------------------------------------------------------------------------


def backward(model: Any) -> None:
    model(*batch(1)).backward()


def freeze_rows(model: Any, optimizer: Any) -> None:
    backward(model)
    model.embed.weight.grad[:250] = 0
    model.head.weight.grad[3].zero_()
    model.head.weight.grad.view(-1)[:64].mul_(0.5)


def into_the_gradient(model: Any, optimizer: Any) -> None:
    backward(model)
    for p in model.parameters():
        torch.clamp(p.grad, -1e-3, 1e-3, out=p.grad)


def add_a_number(model: Any, optimizer: Any) -> None:
    backward(model)
    for p in model.parameters():
        p.grad += 1e-3
        p.grad.add_(1e-4)


def give_data(model: Any, optimizer: Any) -> None:
    backward(model)
    model.norm.weight.grad.data = torch.ones(64)


def views_and_another_backward(model: Any, optimizer: Any) -> Any:
    backward(model)
    row = model.head.weight.grad[5]
    row.fill_(1.0)
    backward(model)
    row.mul_(2.0)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return row.clone()


def look_at_gradients(model: Any, optimizer: Any) -> Any:
    backward(model)
    grad = model.norm.bias.grad
    file = io.BytesIO()
    torch.save(grad, file)
    file.seek(0)
    return torch.stack(
        [
            torch.from_numpy(grad.cpu().numpy().copy()).to(grad.device),
            torch.tensor(grad.tolist()), copy.deepcopy(grad), torch.load(file).to(grad.device),
        ]
    )  # fmt: skip


def look_at_state(model: Any, optimizer: Any) -> Any:
    return optimizer.state[model.head.weight]["exp_avg"].clone()


def change_by_one_from_between(model: Any, optimizer: Any) -> None:
    """A tensor that was made between backward and step, written to after the step."""
    model(*batch(0)).backward()
    kept = [model.norm.weight.detach(), *(p.data for p in model.blocks.parameters())]
    optimizer.step()
    for each in kept:
        each.clamp_(-0.02, 0.02)
    one(model, optimizer)
    one(model, optimizer)


def kept_from_between_see_updates(model: Any, optimizer: Any) -> Any:
    backward(model)
    kept = [p.data for p in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack([each.norm() for each in kept])


def average_by_data(model: Any, optimizer: Any) -> None:
    """The usual EMA: its weights in, a forward, the model's own weights back."""
    average = {name: p.detach() * 0.5 for name, p in model.named_parameters()}
    backup = {}
    for name, p in model.named_parameters():
        backup[name], p.data = p.data, average[name]
    with torch.no_grad():
        model(*batch(2))
    for name, p in model.named_parameters():
        p.data = backup[name]
    backward(model)


def swap_data(model: Any, optimizer: Any) -> None:
    one, other = model.blocks[0].up.weight, model.blocks[1].up.weight
    one.data, other.data = other.data, one.data
    backward(model)


def one_flat_memory(model: Any, optimizer: Any) -> None:
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(flat, model.parameters())
    flat.mul_(0.5)
    backward(model)


def a_graph_over_what_was_not_updated(model: Any, optimizer: Any) -> Any:
    x = torch.ones(2, 64, requires_grad=True)
    y = model.norm(x * torch.arange(64)).square().sum()
    model.head(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return torch.autograd.grad(y, x)[0]


def an_edit_after_a_forward(model: Any, optimizer: Any) -> None:
    model(*batch(1))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    backward(model)


LOOPS: list[Loop] = [
    change_by_one_from_between, kept_from_between_see_updates, average_by_data, swap_data,
    one_flat_memory, a_graph_over_what_was_not_updated, an_edit_after_a_forward,
    clamp_by_kept_tensors, kept_tensors_see_updates, two_slices, a_kept_one_and_the_parameter,
    a_slice_in_grad_mode, a_part_sees_it, a_state_dict_sees_it, init_again,
    average_into_what_had_no_gradient, load_after_a_forward, load_own_parameters_swapped,
    gradients_of_autograd, channels_last, freeze_rows, into_the_gradient, add_a_number, give_data,
    views_and_another_backward, look_at_gradients, look_at_state,
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_it_is_as_in_memory(loop: Loop, place: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, plain = TinyLM(), TinyLM()
    plain.load_state_dict(model.state_dict())
    theirs = plainly(overspill.optim.AdamW, adamw(plain).param_groups)
    train(plain, theirs, 2)
    wanted = loop(plain, theirs)
    theirs.step()
    theirs.zero_grad()
    with overspill.wrap(
        model, adamw(model), nvme=tmp_path, rates=overspill.Rates(), **PLACES[place]
    ) as optimizer:
        train(model, optimizer, 2)
        found = loop(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(wanted, torch.Tensor):
            assert isinstance(found, torch.Tensor)
            torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], atol=1e-6, rtol=1e-5)
        train(model, optimizer, 1)


# -- what is refused -----------------------------------------------------------------------------


def other_memory(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        model.norm.bias.set_(torch.ones(64))


def a_kept_gradient(model: Any, optimizer: Any) -> None:
    backward(model)
    kept = model.head.weight.grad
    optimizer.zero_grad()
    backward(model)
    kept.norm().item()


def another_gradient(model: Any, optimizer: Any) -> None:
    backward(model)
    first, second = model.blocks[0].up.weight, model.blocks[1].up.weight
    first.grad, second.grad = second.grad, first.grad
    optimizer.step()


REFUSED: dict[Loop, str] = {
    other_memory: "other memory",
    a_kept_gradient: "was dropped from p.grad",
    another_gradient: "belongs to another parameter",
}


@pytest.mark.parametrize("loop", REFUSED, ids=lambda loop: loop.__name__)
def test_it_is_refused(loop: Loop) -> None:
    torch.manual_seed(0)
    model = TinyLM()
    with overspill.wrap(
        model, adamw(model), device=SIM, device_memory="1GiB", host_memory="64MiB",
        rates=overspill.Rates(),
    ) as optimizer:  # fmt: skip
        train(model, optimizer, 1)
        with pytest.raises(OffloadError, match=REFUSED[loop]):
            loop(model, optimizer)


def test_what_backward_has_applied_cannot_be_dropped_or_changed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TinyLM()
    with overspill.wrap(
        model, adamw(model), device=CPU, nvme=tmp_path, update="backward",
        rates=overspill.Rates(),
    ) as optimizer:  # fmt: skip
        train(model, optimizer, 1)
        backward(model)
        with pytest.raises(OffloadError, match="cannot be changed now"):
            model.load_state_dict(model.state_dict())
        with pytest.raises(OffloadError, match="head, so they cannot be dropped"):
            model.head.weight.grad = None
        optimizer.step()
        assert optimizer.step_count == 2


def test_parameters_over_the_same_memory_are_refused() -> None:
    model = TinyLM()
    model.head.weight.data = model.embed.weight.data
    with pytest.raises(OffloadError, match="lie over the same memory"):
        overspill.wrap(model, adamw(model), device=CPU)
    flat = torch.randn(128)
    apart = nn.ParameterList([nn.Parameter(flat[:64]), nn.Parameter(flat[64:])])
    overspill.wrap(apart, torch.optim.SGD(apart.parameters(), 0.1), device=CPU).close()


def test_a_backward_that_gives_no_gradient_is_no_micro_step(tmp_path: Path) -> None:
    """As for forces, or a penalty on the gradient of the input."""
    torch.manual_seed(0)
    model, plain = nn.Linear(8, 1), nn.Linear(8, 1)
    plain.load_state_dict(model.state_dict())
    theirs = plainly(overspill.optim.AdamW, torch.optim.AdamW(plain.parameters()).param_groups)

    def steps(model: Any, optimizer: Any) -> None:
        for number in range(4):
            x = torch.full((2, 8), 1.0 + number, requires_grad=True)
            y = model(x).sum()
            (force,) = torch.autograd.grad(y, x, create_graph=True)
            (y + force.square().sum()).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()

    steps(plain, theirs)
    with overspill.wrap(
        model, torch.optim.AdamW(model.parameters()), device=CPU, nvme=tmp_path,
        update="backward", accumulate=2, rates=overspill.Rates(),
    ) as optimizer:  # fmt: skip
        steps(model, optimizer)
        same(model, plain)


def test_what_would_be_replaced_unseen_is_refused() -> None:
    model = TinyLM()
    with overspill.wrap(model, adamw(model), device=CPU) as optimizer:
        train(model, optimizer, 1)
        state = {model.head.weight: {}}
        for name, value in (("state", state), ("param_groups", list(optimizer.param_groups))):
            with pytest.raises(OffloadError, match=f"optimizer.{name} cannot be replaced"):
                setattr(optimizer, name, value)
        optimizer.param_groups = optimizer.param_groups


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_fused_optimizer_beside(kind: Any) -> None:
    """It changes weights, and torch counts no version of them."""
    ends = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = TinyLM()
        rest = [p for p in model.parameters() if p is not model.head.weight]
        optimizer = overspill.wrap(model, torch.optim.AdamW(rest), device=CPU)
        beside = kind([model.head.weight], lr=0.05, fused=fused)
        with optimizer:
            for number in range(3):
                model(*batch(number)).backward()
                for each in (optimizer, beside):
                    each.step()
                    each.zero_grad()
            ends.append(model.state_dict()["head.weight"])
    torch.testing.assert_close(ends[0], ends[1])


class Around(nn.Module):
    """A trained layer before a frozen one, and a copy beside that follows the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.target = (nn.Linear(8, 8) for _ in range(3))
        for p in (*self.frozen.parameters(), *self.target.parameters()):
            p.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            aim = self.target(x)
        return (self.frozen(self.first(x)) - aim).square().mean()


@pytest.mark.parametrize("place", PLACES)
def test_graphs_see_edits_of_what_they_saved_alone(place: str, tmp_path: Path) -> None:
    ends = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = Around()
        optimizer: Any = plainly(overspill.optim.AdamW, model.first.parameters(), lr=0.01)
        if wrapped:
            inner = torch.optim.AdamW(model.first.parameters(), lr=0.01)
            optimizer = overspill.wrap(
                model, inner, nvme=tmp_path, rates=overspill.Rates(), **PLACES[place]
            )
        x = torch.ones(2, 8)
        for _ in range(2):
            loss = model(x)
            kept = [p.data for p in model.target.parameters()]
            for each, p in zip(kept, model.first.parameters(), strict=True):
                each.lerp_(p.detach(), 0.1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        loss = model(x)
        with torch.no_grad():
            model.frozen.weight.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified"):
            loss.backward()
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
        ends.append({name: value.clone() for name, value in model.state_dict().items()})
        if wrapped:
            optimizer.close()
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, atol=1e-6, rtol=1e-5)


def test_two_parameters_over_one_memory_are_told_at_the_step() -> None:
    model = TinyLM()
    with overspill.wrap(model, adamw(model), device=CPU) as optimizer:
        train(model, optimizer, 1)
        one, other = model.blocks[0].up.weight, model.blocks[1].up.weight
        one.data = other.data
        backward(model)
        with pytest.raises(OffloadError, match="lies over the same memory"):
            optimizer.step()


def test_a_change_in_a_part_of_a_state_dict_is_one_of_the_weights() -> None:
    model = TinyLM()
    with overspill.wrap(model, adamw(model), device=CPU) as optimizer:
        train(model, optimizer, 1)
        first = model.head.state_dict()["weight"]
        first.zero_()
        assert not model.head.state_dict()["weight"].any()
        assert not model.head.weight.any()


def test_weights_changed_between_forward_and_backward_are_told() -> None:
    model = TinyLM()
    with overspill.wrap(model, adamw(model), device=CPU) as optimizer:
        train(model, optimizer, 1)
        loss = model(*batch(1))
        model.norm.weight.data.mul_(0.5)
        with pytest.raises((OffloadError, RuntimeError), match=r"changed in place|modified by"):
            kept = model.norm.weight.data
            kept.mul_(0.5)
            loss.backward()
        train(model, optimizer, 1)
