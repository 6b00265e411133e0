"""``activations="selective"``: recomputed units keep the outputs of attention, to the same bits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import overspill
from overspill.activations import attention
from overspill.engine import engine_of
from overspill.planning.recompute_choice import Recomputed
from tests.devices import CPU, DEVICE, SIM, about_cpu, normal

HEADS, WIDTH, LENGTH, STEPS = 4, 64, 256, 4


class Block(nn.Module):
    """Attention and two linear layers; ``dropout`` is that of attention."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        seen = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = seen.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, depth: int = 4, **how: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(**how) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        loss: torch.Tensor = self.head(x).square().mean()
        return loss


class Calls(TorchDispatchMode):
    """Counts forward operators of attention; backward ones are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "attention" in name and "backward" not in name:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def made(**how: Any) -> Net:
    torch.manual_seed(0)
    return Net(**how).to(DEVICE)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: Any, steps: int = STEPS) -> list[float]:
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(normal(step, 1, LENGTH, WIDTH))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


TIGHT = {"device": SIM, "device_memory": "4MiB", "host_memory": "32MiB"}
PLACES: dict[str, dict[str, Any]] = {
    "host": {"device": CPU, "host_memory": "32MiB"},
    "tight": TIGHT,
    "step": {**TIGHT, "update": "step"},
    "backward": {**TIGHT, "update": "backward"},
}


def offloaded(activations: str, place: str, **how: Any) -> tuple[list[float], list[torch.Tensor]]:
    model = made(**how)
    options = {**PLACES[place], "activations": activations, "rates": overspill.Rates()}
    with overspill.wrap(model, adamw(model), **options) as optimizer:
        losses = train(model, optimizer)
        overspill.unwrap(model)
    return losses, list(model.state_dict().values())


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("place", PLACES)
def test_bits_are_those_of_kept_activations(place: str, dropout: float) -> None:
    expected, weights = offloaded("keep", "host", dropout=dropout)
    for policy in ("recompute", "selective"):
        losses, mine = offloaded(policy, place, dropout=dropout)
        assert losses == expected, policy
        assert all(map(torch.equal, mine, weights)), policy


@about_cpu
@pytest.mark.parametrize(
    ("policy", "times"), [("keep", 1), ("recompute", 2), ("selective", 1)]
)  # fmt: skip
def test_attention_runs_once_where_its_outputs_are_kept(policy: str, times: int) -> None:
    model = made()
    options = {**PLACES["host"], "activations": policy}
    with overspill.wrap(model, adamw(model), **options) as optimizer:
        train(model, optimizer, 3)  # units are proven first
        with Calls() as calls:
            model(normal(0, 1, LENGTH, WIDTH)).backward()
    assert list(calls.counts.values()) == [times * 4]


@about_cpu
def test_outputs_that_forward_changes_are_computed_again() -> None:
    q = normal(0, 1, HEADS, LENGTH, 16)
    for changes in (False, True):
        kept = attention.KeptAttention(lambda t: t, lambda t: t)
        keeping, taking = kept.contexts()
        with keeping:
            out = functional.scaled_dot_product_attention(q, q, q)
        expected = out.clone()
        if changes:
            out.mul_(2)
        with taking, Calls() as calls:
            again = functional.scaled_dot_product_attention(q, q, q)
        assert torch.equal(again, expected)
        assert (again.data_ptr() == out.data_ptr()) is not changes
        assert calls.counts


@about_cpu
def test_kept_outputs_are_offloaded_and_reloaded() -> None:
    model = made(depth=6)
    options = {
        "device": "sim", "device_memory": "2600KiB", "host_memory": "64MiB",
        "activations": "selective", "rates": overspill.Rates(),
    }  # fmt: skip
    packed = Counter[str]()
    with overspill.wrap(model, adamw(model), **options) as optimizer:
        train(model, optimizer, 2)
        recompute = engine_of(model)._loop.tuner.recompute  # type: ignore[union-attr]
        pack = recompute._pack

        def counted(t: torch.Tensor) -> object:
            found = pack(t)
            packed[type(found).__name__] += 1
            return found

        recompute._pack = counted  # type: ignore[method-assign]
        large = normal(0, 16, LENGTH, WIDTH)  # 1 MiB an output
        model(large).backward()
        assert packed["SavedHandle"] == 6
        optimizer.step()


@about_cpu
def test_a_backward_that_is_repeated_takes_them_again() -> None:
    def grads(policy: str) -> list[torch.Tensor]:
        model = made()
        with overspill.wrap(model, adamw(model), **PLACES["host"], activations=policy) as optimizer:
            train(model, optimizer, 3)
            loss = model(normal(9, 1, LENGTH, WIDTH))
            loss.backward(retain_graph=True)
            loss.backward()
            return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = grads("keep")
    assert len(expected) > 20
    assert all(map(torch.equal, grads("selective"), expected))


@about_cpu
def test_a_forward_that_differs_is_an_error() -> None:
    class Turns(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if calls and calls.pop():
                with torch.no_grad():
                    super().forward(x)
            return super().forward(x)

    calls: list[bool] = []
    model = made()
    model.blocks = nn.ModuleList([Turns() for _ in range(3)])
    options = {**PLACES["host"], "activations": "selective"}
    with overspill.wrap(model, adamw(model), **options) as optimizer:
        train(model, optimizer, 3)
        loss = model(normal(0, 1, LENGTH, WIDTH))
        calls.append(True)
        with pytest.raises(overspill.OffloadError, match="where its forward did not"):
            loss.backward()


@about_cpu
def test_the_simulator_chooses_it_where_attention_is_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tuner measures attention, and keeps its outputs if that is faster."""
    model = made(depth=8)
    options = {
        "device": "cpu", "host_memory": "32MiB", "activations": "auto",
        "rates": overspill.Rates(dram_bytes_s=1e10, update_params_s=1e8),
    }  # fmt: skip
    slow = attention.AttentionMeter.__torch_dispatch__

    def measured(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.nbytes
        result = slow(self, func, types, args, kwargs)
        if self.nbytes > before:
            self.seconds = 1e3  # at most so much of the unit's time
        return result

    monkeypatch.setattr(attention.AttentionMeter, "__torch_dispatch__", measured)
    with overspill.wrap(model, adamw(model), **options) as optimizer:
        for step in range(4):
            model(normal(step, 12, LENGTH, WIDTH)).backward()
            optimizer.step()
            optimizer.zero_grad()
        adapted = engine_of(model)._loop.tuner.adapted()  # type: ignore[union-attr]
    assert adapted is not None
    chosen, costs = adapted
    assert isinstance(chosen, Recomputed) and chosen.units
    assert chosen.keep_attention and chosen.keep_attention <= chosen.units
    assert all(costs.attention_s[i] > 0 and costs.attention_bytes[i] for i in chosen.units)
