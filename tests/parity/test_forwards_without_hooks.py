"""Untracked forwards of known shapes install no saved-tensor hooks, and are charged as before."""

from __future__ import annotations

import gc
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import overspill
from overspill.activations import untracked_activations
from overspill.activations.untracked_activations import shapes_of
from overspill.private import torch_private
from tests.devices import CPU, NAME, normal
from tests.models import adamw, weights
from tests.parity.test_untracked_activations import ROOM, Block, offloader_of, step

WIDTH = 64


class Net(nn.Module):
    """``how``: what the forward does beside its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.how = "plain"
        self.rows: int | None = None  # of its input that it looks at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[: self.rows]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.how == "checkpoint" else block(x)
            if self.how == "more":
                x = torch.cat([x, x.sin()])[: len(x)]
        return x


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the engine has pushed hooks, in the last entry."""
    count = [0]
    push = torch_private.push_saved_tensor_hooks

    def counting(pack: Any, unpack: Any) -> None:
        count[-1] += 1
        push(pack, unpack)

    monkeypatch.setattr(torch_private, "push_saved_tensor_hooks", counting)
    return count


def wrapped(folder: Path, **options: Any) -> tuple[Net, Any]:
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    model = Net()
    budgets = {"host_memory": "40MiB", f"{ROOM.value}_memory": "40MiB"}
    options = {"device": CPU, **budgets, "durable": False, "nvme": folder, **options}
    return model, overspill.wrap(model, adamw(model), **options)


def steps(
    model: Net, optimizer: Any, pushed: list[int], rows: list[int], first: int = 0
) -> list[int]:
    """Train, and return how often hooks were pushed in each step."""
    found = []
    for seed, each in enumerate(rows, first):
        pushed.append(0)
        step(model, optimizer, seed, each)
        found.append(pushed[-1])
    return found


ALL, ONE = 5, 1  # around the model and its four blocks; around the block that counts first


@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
def test_hooks_go_once_the_shapes_are_known(update: str, pushed: list[int], tmp_path: Path) -> None:
    plain, theirs = wrapped(tmp_path / "plain", activations="keep", update=update)
    rows = [16, 16, 16, 16, 8, 16, 18, 18, 17, 16]
    expected = [step(plain, theirs, seed, each) for seed, each in enumerate(rows)]
    expected_weights = weights(plain)
    theirs.close()
    model, optimizer = wrapped(tmp_path / "auto", update=update)
    pushed.append(0)
    losses, found = [], []
    for seed, each in enumerate(rows):
        pushed[-1] = 0
        losses.append(step(model, optimizer, seed, each))
        found.append(pushed[-1])
    assert losses == expected
    for name, value in expected_weights.items():
        assert torch.equal(value, weights(model)[name]), name
    # The first is tracked and the second counted.  Of 18 rows, one is too, and 17 are not more.
    assert found == [ALL, ALL, ONE, ONE, ONE, ONE, ALL, ONE, ONE, ONE]
    optimizer.close()


def test_they_are_charged_what_the_first_has_saved(pushed: list[int], tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path)
    left = []
    for seed, rows in enumerate([16, 16, 16, 12, 16]):
        loss = model(normal(seed, rows, WIDTH)).square().mean()
        resting = offloader_of(optimizer).resting
        left.append(0 if resting.rest is None else resting.aside_bytes - resting.rest.left)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert 0 == left[0] < left[1] == left[2] == left[3] == left[4]
    optimizer.close()


def test_forwards_add_up_until_all_is_tracked(pushed: list[int], tmp_path: Path) -> None:
    """Several forwards before one backward: the room that is set aside is for one."""
    model, optimizer = wrapped(tmp_path)
    assert steps(model, optimizer, pushed, [16, 16, 16])[-1] == ONE
    pushed.append(0)
    resting = offloader_of(optimizer).resting
    aside = resting.aside_bytes
    total = torch.zeros((), device=CPU)
    for seed in range(6):
        total = total + model(normal(seed, 16, WIDTH)).square().mean()
    assert resting.rest is None and resting.aside_bytes == aside, "too much for what is set aside"
    assert pushed[-1] > 3 * ALL
    total.backward()
    optimizer.step()
    optimizer.zero_grad()
    del total
    gc.collect()
    assert steps(model, optimizer, pushed, [16, 16, 16])[-1] == ONE
    optimizer.close()


@pytest.mark.parametrize("how", ["more", "checkpoint"])
def test_another_graph_is_counted_again(how: str, pushed: list[int], tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path)
    assert steps(model, optimizer, pushed, [16, 16, 16])[-1] == ONE
    model.how = how
    found = steps(model, optimizer, pushed, [16] * 5, 3)
    assert found[0] >= ONE and found[1] >= ALL, "the number of nodes has changed"
    if how == "more":
        assert found[-1] == ONE
    optimizer.close()


def test_more_rows_of_one_shape_are_noticed(pushed: list[int], tmp_path: Path) -> None:
    """As many nodes, and another number of bytes, where lengths are data."""
    model, optimizer = wrapped(tmp_path)
    model.rows = 4
    assert steps(model, optimizer, pushed, [32, 32, 32])[-1] == ONE
    model.rows = 32
    assert steps(model, optimizer, pushed, [32] * 6, 3)[1:] == [ALL, ALL, ONE, ONE, ONE]
    loss = model(normal(9, 32, WIDTH)).square().mean()
    resting = offloader_of(optimizer).resting
    assert resting.aside_bytes - resting.rest.left > 4 * 32 * 5 * WIDTH * 4
    loss.backward()
    optimizer.close()


@pytest.mark.skipif(bool(NAME), reason="torch has no nested tensors for it")
def test_units_may_return_nested_tensors(pushed: list[int], tmp_path: Path) -> None:
    class Packs(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = [super(Packs, self).forward(x[:rows]) for rows in (3, 5)]
            return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    class Packed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.cat(self.packs(x).unbind()))

    torch.manual_seed(0)
    model = Packed()
    model.packs = Packs()
    with overspill.wrap(
        model, adamw(model), device="cpu", host_memory="40MiB", units=["packs"]
    ) as optimizer:
        assert steps(model, optimizer, pushed, [16] * 4)[-1] < ALL


def test_hooks_count_now_and_then(
    pushed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(untracked_activations, "RECOUNT", 4)
    model, optimizer = wrapped(tmp_path)
    found = steps(model, optimizer, pushed, [16] * 14)
    assert found == [ALL, ALL, *(3 * [ONE, ONE, ONE, ALL])]
    optimizer.close()


def test_parts_after_an_interrupt_are_counted(pushed: list[int], tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path)
    assert steps(model, optimizer, pushed, [16, 16, 16])[-1] == ONE

    def interrupts(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.blocks[1].up.register_forward_hook(interrupts)
    with pytest.raises(KeyboardInterrupt):
        model(normal(0, 16, WIDTH))
    handle.remove()
    resting = offloader_of(optimizer).resting
    kept = [model.blocks[0](normal(seed, 16, WIDTH)) for seed in range(40)]
    assert resting.rest is None and resting.passed_bytes > 10 * 16 * 5 * WIDTH * 4
    del kept
    optimizer.zero_grad()
    optimizer.close()


def test_a_kept_graph_is_noticed(pushed: list[int], tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path, update="step")
    assert steps(model, optimizer, pushed, [16, 16, 16])[-1] == ONE
    loss = model(normal(3, 16, WIDTH)).square().mean()
    loss.backward(retain_graph=True)
    resting = offloader_of(optimizer).resting
    assert resting.rest is None and resting.aside_bytes > 0
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    del loss
    gc.collect()
    optimizer.zero_grad()
    assert steps(model, optimizer, pushed, [16, 16, 16], 4)[-1] == ONE
    optimizer.close()


def test_an_exception_in_a_forward_leaves_nothing(pushed: list[int], tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path)
    assert steps(model, optimizer, pushed, [16, 16, 16])[-1] == ONE

    def raises(*_: Any) -> None:
        raise ValueError("here")

    handle = model.blocks[2].up.register_forward_hook(raises)
    for _ in range(2):
        with pytest.raises(ValueError, match="here"):
            model(normal(0, 16, WIDTH))
    handle.remove()
    assert torch_private.top_saved_tensor_hooks() is None
    optimizer.zero_grad()
    assert steps(model, optimizer, pushed, [16, 16, 16], 3)[-1] == ONE
    optimizer.close()


def test_hooks_of_the_user_get_all_tensors(pushed: list[int], tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path)
    assert steps(model, optimizer, pushed, [16, 16, 16])[-1] == ONE
    seen = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        seen.append(t.shape)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(normal(3, 16, WIDTH)).square().mean()
    assert seen.count(torch.Size([16, WIDTH])) >= 4
    loss.backward()
    optimizer.step()
    optimizer.close()


def test_evaluation_between_steps_needs_none(pushed: list[int], tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path)
    assert steps(model, optimizer, pushed, [16, 16, 16])[-1] == ONE
    with torch.no_grad():
        model(normal(0, 16, WIDTH))
        model(normal(0, 16, WIDTH))
    assert steps(model, optimizer, pushed, [16], 3) == [ONE]
    optimizer.close()


@pytest.mark.skipif(bool(NAME), reason="no device: shapes alone")
def test_shapes_are_known_of_usual_inputs_alone() -> None:
    x, ids = torch.zeros(2, 3), torch.zeros(4, dtype=torch.long)
    assert shapes_of((), {}) is None and shapes_of((1, "a"), {}) is None
    one = shapes_of((x,), {"ids": ids, "more": [None, True], "nested": {"y": (x,)}})
    assert one is not None and hash(one) == hash(one)
    assert one != shapes_of((x,), {"ids": ids, "more": [None, False], "nested": {"y": (x,)}})
    assert one != shapes_of((x,), {"ids": ids.int(), "more": [None, True], "nested": {"y": (x,)}})
    assert shapes_of((UserDict(x=x),), {}) is not None
    assert shapes_of((object(), x), {}) is None and shapes_of((x, {x}), {}) is None
    assert shapes_of(([x] * 100,), {}) is None
    assert shapes_of((x.to_sparse(),), {}) is None
    with torch.no_grad():
        assert shapes_of((x,), {}) is not None
        quiet = shapes_of((x,), {})
    assert quiet != shapes_of((x,), {})


class Twice(nn.Module):
    """Uses its weight a second time, detached: backward needs it after its gradient is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.linear(x, self.weight.detach()).tanh()
        return x + nn.functional.linear(inner, self.weight)


def test_updates_wait_for_graphs_that_outlive_the_gradients(pushed: list[int]) -> None:
    losses: list[list[float]] = []
    for wraps in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Twice(), Twice(), Block(), Block())
        optimizer: Any = adamw(model)
        if wraps:
            optimizer = overspill.wrap(
                model, adamw(model), device=CPU, host_memory="40MiB", update="backward"
            )
        losses.append([])
        for number in range(6):
            pushed.append(0)
            loss = model(normal(number, 4, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    optimizer.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert 2 <= pushed[-1] < pushed[7], "hooks stay around the two units alone"
