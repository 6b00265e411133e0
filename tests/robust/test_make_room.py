"""A micro-batch that runs out of memory is repeated: the same bits as without the failure."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import overspill
from tests.devices import CPU, SIM, about_cpu, normal

WIDTH, TOKENS, STEPS = 32, 64, 3
TIGHT = {"device": SIM, "device_memory": "200KiB", "host_memory": "4MiB"}
PLACES: dict[str, dict[str, Any]] = {
    "host": {"device": CPU, "host_memory": "4MiB"},
    "tight": TIGHT,
    "step": {**TIGHT, "update": "step"},
    "clipped": {**TIGHT, "max_grad_norm": 0.1},
    "recompute": {**TIGHT, "activations": "recompute"},
}


Around = Callable[[int, int], TorchDispatchMode | None]


class Failing(TorchDispatchMode):
    """Raises at one operator that allocates its result, counted from 0."""

    def __init__(self, at: int | None) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        allocates = all(argument.alias_info is None for argument in func._schema.arguments)
        number, self.count = self.count, self.count + allocates
        if allocates and number == self.at:
            raise torch.OutOfMemoryError("drawn")
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.dropout(functional.gelu(self.up(self.norm(x))), 0.2, self.training)
        return x + self.down(inner)


class Net(nn.Module):
    """The first and the last block share a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[3].up.weight = self.blocks[0].up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def train(
    options: dict[str, Any], micro_steps: int, around: Around
) -> tuple[list[float], list[torch.Tensor], int]:
    """Losses, weights, and how often a micro-batch was repeated."""
    model = Net()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, tries = list[float](), list[int]()
    with overspill.wrap(model, adamw, accumulate=micro_steps, **options) as optimizer:
        torch.manual_seed(1)
        for step in range(STEPS):
            for micro_step in range(micro_steps):
                x = normal(7 * step + micro_step, TOKENS, WIDTH)
                modes = [around(step, micro_step)]

                def run(x: torch.Tensor = x, modes: list[Any] = modes) -> torch.Tensor:
                    tries.append(1)
                    with (modes.pop() if modes else None) or Failing(None):
                        loss = model(x)
                        loss.backward()
                    return loss.detach()

                losses.append(optimizer.with_room(run).item())
            optimizer.step()
            optimizer.zero_grad()
        overspill.unwrap(model)
    return losses, [t.clone() for t in model.state_dict().values()], len(tries) - len(losses)


def never(_step: int, _micro_step: int) -> None:
    return None


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_a_repeated_micro_batch_gives_the_same_bits(place: str, micro_steps: int) -> None:
    options = PLACES[place]
    counters: list[Failing] = []

    def counting(_step: int, _micro_step: int) -> Failing:
        counters.append(Failing(None))
        return counters[-1]

    losses, weights, _ = train(options, micro_steps, counting)
    assert train(options, micro_steps, never)[0] == losses
    rng = random.Random(place)
    for _ in range(6):
        step, micro_step = rng.randrange(STEPS), rng.randrange(micro_steps)
        at = rng.randrange(counters[step * micro_steps + micro_step].count)

        def failing(s: int, m: int, there: Any = (step, micro_step), at: int = at) -> Any:
            return Failing(at) if (s, m) == there else None

        found = train(options, micro_steps, failing)
        assert found[2] == 1, (step, micro_step, at)
        assert found[0] == losses, (step, micro_step, at)
        assert all(map(torch.equal, found[1], weights)), (step, micro_step, at)


@about_cpu
def test_gradients_of_a_failed_backward_count_once_without_a_repetition_too() -> None:
    """``zero_grad()`` drops them all; what comes next is counted again."""
    model, plain = Net().eval(), Net().eval()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = normal(0, TOKENS, WIDTH)
    with overspill.wrap(model, adamw, **PLACES["host"]) as optimizer:
        with Failing(None) as counting:
            model(x).backward()
        optimizer.zero_grad()
        with pytest.raises(torch.OutOfMemoryError), Failing(counting.count * 3 // 4):
            model(x).backward()
        assert optimizer.make_room()
        optimizer.zero_grad()
        model(x).backward()
        model(2 * x).backward()
        plain(x).backward()
        plain(2 * x).backward()
        for p, own in zip(plain.parameters(), model.parameters(), strict=True):
            assert own.grad is not None and p.grad is not None
            torch.testing.assert_close(own.grad.clone(), p.grad)


@about_cpu
def test_another_backward_ends_the_repetition() -> None:
    model = Net().eval()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = normal(0, TOKENS, WIDTH)
    with overspill.wrap(model, adamw, **PLACES["host"]) as optimizer:
        with Failing(None) as counting:
            model(x).backward()
        once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.zero_grad()
        with pytest.raises(torch.OutOfMemoryError), Failing(counting.count * 3 // 4):
            model(x).backward()
        assert optimizer.make_room()
        for _ in range(3):
            model(x).backward()
        for grad, p in zip(once, model.parameters(), strict=True):
            assert p.grad is not None
            torch.testing.assert_close(p.grad.clone(), 3 * grad)


@about_cpu
def test_a_backward_that_has_updated_weights_is_not_repeated() -> None:
    model = Net()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = normal(0, TOKENS, WIDTH)
    options = {**PLACES["host"], "update": "backward"}
    with overspill.wrap(model, adamw, **options) as optimizer:
        with Failing(None) as counting:
            model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(torch.OutOfMemoryError), Failing(counting.count * 3 // 4):
            model(x).backward()
        assert not optimizer.make_room()
        optimizer.step()  # takes the step as it is
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()


@about_cpu
def test_room_shrinks_and_units_are_recomputed(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(
        *(nn.TransformerEncoderLayer(64, 4, 4096, 0.0, batch_first=True) for _ in range(6))
    )
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = normal(0, 1, 512, 64)  # 8 MiB a tensor of the middle
    options = {"device": "cpu", "host_memory": "400MiB", "rates": overspill.Rates()}
    with overspill.wrap(model, adamw, **options) as optimizer:
        tuner = optimizer._engine._loop.tuner
        assert tuner.saved_offloader is not None
        for _ in range(3):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not tuner.recompute.units
        rooms = []
        while optimizer.make_room() and len(rooms) < 4:
            rooms.append(tuner.saved_offloader.room_bytes)
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert rooms == sorted(rooms, reverse=True) and rooms[0] < 120 << 20
        assert len(tuner.recompute.units) > 1
    assert "overspill: out of memory: from now on at most" in caplog.text


@about_cpu
def test_kept_activations_leave_nothing_to_lower() -> None:
    model = Net()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with overspill.wrap(model, adamw, **PLACES["host"], activations="keep") as optimizer:
        with pytest.raises(torch.OutOfMemoryError), Failing(12):
            model(normal(0, TOKENS, WIDTH))
        assert not optimizer.make_room()


@about_cpu
def test_lost_sums_of_earlier_micro_steps_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = normal(0, TOKENS, WIDTH)
    with overspill.wrap(model, adamw, accumulate=2, **PLACES["host"]) as optimizer:
        model(x).backward()
        with monkeypatch.context() as patch:
            patch.setattr(
                type(optimizer._engine._loop._collector), "_gather", Failing.__torch_dispatch__
            )
            with pytest.raises(Exception, match="_schema"):
                model(x).backward()
        with pytest.raises(overspill.OffloadError, match="repeat all micro-batches"):
            optimizer.make_room()
        optimizer.zero_grad()
        model(x).backward()
        model(x).backward()
        optimizer.step()


def failing_step(model: nn.Module, x: torch.Tensor, at: int) -> None:
    with pytest.raises(torch.OutOfMemoryError), Failing(at):
        model(x).backward()


def counted(model: nn.Module, optimizer: Any, x: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
    """Allocations of a micro-batch, and its gradients."""
    with Failing(None) as counting:
        model(x).backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.zero_grad()
    return counting.count, grads


def all_close(model: nn.Module, grads: list[torch.Tensor], factor: float = 1.0) -> None:
    for grad, p in zip(grads, model.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad.clone(), factor * grad)


@about_cpu
@pytest.mark.parametrize("between", [
    "zero before", "zero after", "evaluation", "grad", "forward", "grad after",
])  # fmt: skip
def test_what_people_do_between(between: str) -> None:
    model = Net().eval()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = normal(0, TOKENS, WIDTH)
    with overspill.wrap(model, adamw, **PLACES["host"]) as optimizer:
        count, grads = counted(model, optimizer, x)
        failing_step(model, x, count * 3 // 4)
        if between == "zero before":
            optimizer.zero_grad(set_to_none=False)
        elif between == "evaluation":
            with torch.no_grad():
                model(2 * x)
        elif between == "grad":
            y = x.clone().requires_grad_()
            torch.autograd.grad(model(y), y)
        elif between == "forward":
            model(x)
        assert optimizer.make_room()
        if between == "zero after":
            optimizer.zero_grad(set_to_none=False)
        elif between == "grad after":
            y = x.clone().requires_grad_()
            torch.autograd.grad(model(y), y)
        model(x).backward()
        all_close(model, grads)


@about_cpu
def test_a_module_used_twice_in_reentrant_checkpoints() -> None:
    class Twice(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in (*self.blocks, *self.blocks):
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
            return x.square().mean()

    model = Twice().eval()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = normal(0, TOKENS, WIDTH).requires_grad_()
    with overspill.wrap(model, adamw, **PLACES["host"]) as optimizer:
        count, grads = counted(model, optimizer, x)
        for at in range(count // 3, count - 6, 9):
            failing_step(model, x, at)
            assert optimizer.make_room()
            model(x).backward()
            all_close(model, grads)
            optimizer.zero_grad()


@about_cpu
def test_a_hook_before_the_engine_s_that_fails() -> None:
    model = Net().eval()
    fails: list[bool] = []

    def hook(_p: torch.Tensor) -> None:
        if fails and fails.pop():
            raise torch.OutOfMemoryError("drawn")

    model.blocks[1].up.weight.register_post_accumulate_grad_hook(hook)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = normal(0, TOKENS, WIDTH)
    with overspill.wrap(model, adamw, **PLACES["host"]) as optimizer:
        _, grads = counted(model, optimizer, x)
        fails.append(True)
        failing_step(model, x, -1)
        assert optimizer.make_room()
        model(x).backward()
        all_close(model, grads)


@about_cpu
def test_all_of_a_repetition_draws_the_same_numbers() -> None:
    model = Net()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = normal(0, TOKENS, WIDTH)

    def run() -> torch.Tensor:
        y = x + torch.rand(())  # drawn by code around the model
        for block in model.blocks:
            y = block(y)
        loss = y.square().mean()
        loss.backward()
        return loss.detach()

    with overspill.wrap(model, adamw, **PLACES["host"]) as optimizer:
        model(x)  # a forward without a backward
        torch.manual_seed(3)
        with Failing(None) as counting:
            expected = run()
        optimizer.zero_grad()
        torch.manual_seed(3)
        failing = [Failing(counting.count * 3 // 4)]

        def first_fails() -> torch.Tensor:
            with failing.pop() if failing else Failing(None):
                return run()

        assert torch.equal(optimizer.with_room(first_fails), expected)


@about_cpu
def test_a_model_that_runs_cannot_be_repeated() -> None:
    model = Net()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with overspill.wrap(model, adamw, **PLACES["host"]) as optimizer:
        model.blocks[1].register_forward_hook(lambda *_: optimizer.make_room() and None)
        with pytest.raises(overspill.OffloadError, match="while the model runs"):
            model(normal(0, TOKENS, WIDTH))


@about_cpu
def test_zero_grad_ends_a_backward_that_failed() -> None:
    model = Net().eval()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = normal(0, TOKENS, WIDTH)
    with overspill.wrap(model, adamw, **PLACES["host"], accumulate=2) as optimizer:
        count, grads = counted(model, optimizer, x)
        first, second = model(x), model(x)
        with pytest.raises(torch.OutOfMemoryError), Failing(count // 3):
            first.backward()
        optimizer.zero_grad()
        second.backward()
        modes = [Failing(count * 3 // 4)]

        def run() -> None:
            with modes.pop() if modes else Failing(None):
                model(x).backward()

        optimizer.with_room(run)
        all_close(model, grads, 2.0)
        assert optimizer._engine.runtime.ledger.micro_steps == 2


@about_cpu
def test_gradients_that_the_user_assigned_stay() -> None:
    model = Net().eval()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = normal(0, TOKENS, WIDTH)
    with overspill.wrap(model, adamw, **PLACES["host"]) as optimizer:
        count, grads = counted(model, optimizer, x)
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad.clone()
        failing_step(model, x, count * 2 // 3)
        assert optimizer.make_room()
        model(x).backward()
        all_close(model, grads, 2.0)


@about_cpu
def test_zero_grad_begins_the_micro_steps_anew() -> None:
    model = Net().eval()
    plain = Net().eval()
    x = normal(0, TOKENS, WIDTH)
    options = {**PLACES["host"], "update": "backward", "accumulate": 2}
    inner = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with overspill.wrap(model, adamw, **options) as optimizer:
        model(3 * x).backward()
        optimizer.zero_grad()
        for each in (model, plain):
            each(x).backward()
            each(2 * x).backward()
        inner.step()
        optimizer.step()
        overspill.unwrap(model)
    for p, own in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own, p)


@about_cpu
def test_a_forward_that_cannot_begin_leaves_no_mode() -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    model = Net()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with overspill.wrap(model, adamw, **PLACES["host"]):
        with (
            torch.autograd.graph.disable_saved_tensors_hooks("none here"),
            pytest.raises(RuntimeError, match="none here"),
        ):
            model.blocks[0](normal(0, TOKENS, WIDTH))
        assert not _get_current_dispatch_mode_stack()
