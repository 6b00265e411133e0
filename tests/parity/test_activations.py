"""What autograd saves may leave and come back, or be computed again: bits never change, and nothing
is left of it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import overspill
from overspill.activations import offloader
from overspill.errors import BudgetError
from overspill.facts.tier import Tier
from overspill.private import torch_private
from tests.devices import CPU, DEVICE, SIM, about_cpu, about_sim, forget_races, normal
from tests.models import adamw, train, weights
from tests.parity.twins import make
from tests.patience import WAIT_S

POLICIES = ["auto", "host", "nvme", "recompute"]
PLACES: dict[str, dict[str, Any]] = {
    "cpu": {"device": CPU, "host_memory": "8MiB"},
    "device": {"device": SIM, "device_memory": "1200KiB", "host_memory": "16MiB"},
}
STEPS = 20
KEPT: dict[tuple[str, str], Any] = {}  # what runs gave whose activations stayed


@pytest.fixture(autouse=True)
def small_ones_leave_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloader, "LEAST_BYTES", 1 << 10)


def moved(optimizer: Any) -> int:
    """Bytes of what autograd saved that have left."""
    spans = optimizer._engine.trace.spans()
    return sum(s.nbytes for s in spans if s.lane == "copy_out" and s.name.startswith("saved"))


def nothing_left(optimizer: Any) -> None:
    """No item, and no byte in any tier, once what still moves has ended."""
    # Torch keeps the graph of a backward that raised until the next one.
    torch.ones((), requires_grad=True).backward()
    gc.collect()
    executor = optimizer._engine.runtime.executor
    until_s = time.monotonic() + WAIT_S
    executor.engine_port.catch_up()  # what was told last may not have been heard yet
    while executor.saved.here_bytes or executor.saved.away_bytes:
        assert time.monotonic() < until_s, "something is left"
        time.sleep(0.01)
        executor.engine_port.catch_up()
    assert not len(executor.saved)
    assert not [i for i in executor._machine.items.all() if i.key.kind.value == "saved"]


class Mixed(nn.Module):
    """Several outputs, views, a mask that all share, dropout, an output saved by its own node."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = torch.softmax(q @ k.transpose(-1, -2) / 6 + mask, dim=-1)
        y = self.drop(self.out(scores @ v))
        return x + torch.tanh(y), y.exp()


class Net(nn.Module):
    def __init__(self, checkpointed: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixed() for _ in range(4))
        self.head = nn.Linear(32, 7)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask, sides = x.new_zeros(x.shape[1], x.shape[1]).tril(), []
        for block in [*self.blocks, self.blocks[0]]:
            if self.checkpointed:
                reentrant = self.checkpointed == "reentrant"
                x, side = checkpoint(block, x, mask, use_reentrant=reentrant)
            else:
                x, side = block(x, mask=mask)
            sides.append(side.mean())
        return F.cross_entropy(self.head(x).flatten(0, 1), torch.arange(
            x.shape[0] * x.shape[1], device=x.device) % 7) + torch.stack(sides).sum()  # fmt: skip


def fit(
    folder: Path, place: str, steps: int = STEPS, micro_steps: int = 1, autocast: bool = False,
    checkpointed: str = "", **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor], int]:  # fmt: skip
    torch.manual_seed(0)
    model = Net(checkpointed)
    folder.mkdir(exist_ok=True)
    options = {**PLACES[place], "nvme": folder, "durable": False, **options}
    optimizer = overspill.wrap(model, adamw(model), **options)
    torch.manual_seed(1)
    losses = []
    for step in range(steps):
        for micro in range(micro_steps):
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
                x = normal(step * 7 + micro, 4, 24, 32)
                loss = model(x.to(next(model.parameters()).dtype))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    del loss
    nothing_left(optimizer)
    left = moved(optimizer)
    found = weights(model)
    optimizer.close()
    return losses, found, left


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert one[0] == other[0]
    for name, value in one[1].items():
        assert torch.equal(value, other[1][name]), name


@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("policy", POLICIES)
def test_losses_and_weights_are_those_of_keep(
    tmp_path: Path, policy: str, place: str, update: str
) -> None:
    if (place, update) not in KEPT:
        KEPT[place, update] = fit(tmp_path / "keep", place, activations="keep", update=update)
    kept = KEPT[place, update]
    moving = fit(tmp_path / "moving", place, activations=policy, update=update)
    same(kept, moving)
    assert kept[2] == 0
    if place == "device" and policy in ("host", "nvme"):
        assert moving[2] > 0, "nothing has left"


@pytest.mark.parametrize("options", [
    {"micro_steps": 3}, {"autocast": True}, {"checkpointed": "yes"}, {"checkpointed": "reentrant"},
    {"precision": "bf16"}, {"durable": True}, {"max_grad_norm": 0.5},
], ids=lambda o: "-".join(f"{k}_{v}" for k, v in o.items()))  # fmt: skip
@pytest.mark.parametrize("policy", POLICIES)
def test_so_they_are_in_other_loops(tmp_path: Path, policy: str, options: dict[str, Any]) -> None:
    kept = fit(tmp_path / "keep", "device", 6, activations="keep", **options)
    same(kept, fit(tmp_path / "moving", "device", 6, activations=policy, **options))


# -- pressure -----------------------------------------------------------------------------------


def test_the_room_is_kept(tmp_path: Path) -> None:
    """What is saved would pass the budget by far; what leaves keeps it."""
    torch.manual_seed(0)
    model = make(depth=6)
    optimizer = overspill.wrap(
        model, adamw(model), device=SIM, device_memory="1400KiB", host_memory="16MiB"
    )
    train(model, optimizer, 3)
    stats = optimizer.memory[Tier.DEVICE]
    assert stats.peak_bytes <= stats.budget_bytes + 64 * 1024
    optimizer.close()


@pytest.fixture
def tight(tmp_path: Path) -> Any:
    """A wrapped model whose activations have room nowhere."""
    closers: list[Callable[[], None]] = []

    def make_one(policy: str) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = Net()
        optimizer = overspill.wrap(
            model, adamw(model), device=SIM, device_memory="60KiB", host_memory="360KiB",
            activations=policy,
        )  # fmt: skip
        closers.append(optimizer.close)
        return model, optimizer

    yield make_one
    for close in closers:
        close()


def test_without_room_anywhere_they_stay_and_it_is_said_once(
    tight: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = tight("auto")
    for step in range(2):
        model(normal(step, 16, 64, 32)).backward()
        optimizer.step()
        optimizer.zero_grad()
    told = [r for r in caplog.records if "fit in no tier" in r.getMessage()]
    assert len(told) == 1
    stats = optimizer.memory[Tier.DEVICE]
    assert stats.peak_bytes > stats.budget_bytes


def test_a_named_policy_raises_instead(tight: Any) -> None:
    model, _ = tight("host")
    with pytest.raises(BudgetError, match="the activations\\) in unit 'blocks"):
        model(normal(0, 16, 64, 32))


def test_after_a_refusal_a_smaller_batch_trains(tight: Any) -> None:
    """Nothing of the forward that was refused waits for the collector."""
    model, _ = tight("host")
    gc.disable()
    try:
        with pytest.raises(BudgetError):
            model(normal(0, 16, 64, 32))
        model(normal(0, 1, 4, 32)).backward()
    finally:
        gc.enable()


class Pieces(nn.Module):
    """Saves an eighth of a storage at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 512), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.zeros((), device=x.device)
        for piece in self.first(x).chunk(8, dim=-1):
            found = found + piece * piece
        return x + self.last(torch.tanh(found))


@about_sim
def test_pieces_that_make_up_a_storage_leave_with_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Pieces() for _ in range(4)), nn.Linear(32, 1))
    with overspill.wrap(
        model, adamw(model), device=SIM, device_memory="2MiB", host_memory="64MiB",
        activations="host",
    ) as optimizer:  # fmt: skip
        model(normal(0, 64, 8, 32)).sum().backward()
        assert moved(optimizer) > 3 * 64 * 8 * 512 * 4


# -- graphs -------------------------------------------------------------------------------------


@pytest.fixture(params=[(place, policy) for place in PLACES for policy in POLICIES],
                ids=lambda p: "-".join(p))  # fmt: skip
def wrapped(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    place, policy = request.param
    torch.manual_seed(0)
    model = Net()
    optimizer = overspill.wrap(
        model, adamw(model), nvme=tmp_path, durable=False, activations=policy, **PLACES[place]
    )
    yield model, optimizer
    nothing_left(optimizer)
    optimizer.close()


def plain() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def test_a_graph_may_be_kept(wrapped: Any) -> None:
    model, _ = wrapped
    twin = plain()
    x = normal(3, 4, 24, 32).requires_grad_()
    loss = model.eval()(x)
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    (expected,) = torch.autograd.grad(twin(x), x)
    assert torch.equal(first, second)
    assert torch.equal(first, expected)


def test_gradients_of_gradients(wrapped: Any) -> None:
    model, _ = wrapped
    twin = plain()

    def penalty(net: nn.Module) -> torch.Tensor:
        x = normal(3, 4, 24, 32).requires_grad_()
        (g,) = torch.autograd.grad(net(x), x, create_graph=True)
        g.square().sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.allclose(penalty(model.eval()), penalty(twin), rtol=1e-5, atol=1e-8)
    model.zero_grad()


def test_two_graphs_at_once(wrapped: Any) -> None:
    model, _ = wrapped
    twin = plain()
    inputs = [normal(n, 4, 24, 32).requires_grad_() for n in (1, 2)]
    losses = [model.eval()(x) for x in inputs]
    losses[0].backward()
    losses[1].backward()
    for x in inputs:
        y = x.detach().clone().requires_grad_()
        twin(y).backward()
        assert torch.equal(x.grad, y.grad)
    model.zero_grad()


def test_what_was_changed_in_place_raises_as_ever(wrapped: Any) -> None:
    model, _ = wrapped
    seen: list[torch.Tensor] = []
    hook = model.blocks[1].register_forward_hook(lambda _m, _a, out: seen.append(out[0]))
    loss = model(normal(3, 4, 24, 32))
    hook.remove()
    with torch.no_grad():
        seen[0].add_(1)
    with pytest.raises(RuntimeError, match=r"inplace|in-place|recomputed"):
        loss.backward()
    del loss
    seen.clear()
    model.zero_grad()
    forget_races()  # the change came while it was copied; nobody takes what was copied


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_nothing_is_left(wrapped: Any, where: str) -> None:
    model, optimizer = wrapped

    def fail(*_: Any) -> None:
        raise KeyError("on purpose")

    if where == "forward":
        hook = model.blocks[2].register_forward_pre_hook(fail)
        with pytest.raises(KeyError):
            model(normal(3, 4, 24, 32))
        hook.remove()
    else:

        def spoil(_m: nn.Module, _a: Any, out: Any) -> None:
            out[0].register_hook(fail)

        hook = model.blocks[1].register_forward_hook(spoil)
        loss = model(normal(3, 4, 24, 32))
        with pytest.raises(KeyError):
            loss.backward()
        del loss
        hook.remove()
    nothing_left(optimizer)
    optimizer.zero_grad()
    model(normal(3, 4, 24, 32)).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_nothing_is_left_on_the_thread_of_an_interrupted_run() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = overspill.wrap(model, adamw(model), device=CPU, activations="auto")
    handle = model.head.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(normal(0, 2, 4, 32))
    handle.remove()
    optimizer.close()
    assert torch_private.top_saved_tensor_hooks() is None


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_evaluation_and_dropped_graphs_leave_nothing(wrapped: Any) -> None:
    model, optimizer = wrapped
    with torch.no_grad():
        model(normal(3, 4, 24, 32))
    nothing_left(optimizer)
    model(normal(3, 4, 24, 32))  # a graph that nobody runs backward
    nothing_left(optimizer)
    with torch.inference_mode():
        model(normal(3, 4, 24, 32))


@about_cpu
def test_units_are_computed_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    calls: list[int] = []
    for block in model.blocks:
        block.qkv.register_forward_hook(lambda *_: calls.append(1))
    with overspill.wrap(model, adamw(model), device="cpu", activations="recompute") as optimizer:
        for again in (0, 5):  # the first step is watched
            calls.clear()
            loss = model(normal(3, 4, 24, 32))
            assert len(calls) == 5
            loss.backward()
            assert len(calls) == 5 + again
            optimizer.step()


def test_a_cache_is_not_filled_twice(caplog: pytest.LogCaptureFixture) -> None:
    """What a unit may change when it is computed again keeps it from being so."""

    class Cache:
        seen = 0

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor, cache: Cache | None) -> torch.Tensor:
            if cache is not None:
                cache.seen += 1
            return torch.tanh(self.inner(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Caching() for _ in range(3))
            self.head = nn.Linear(32, 1)

        def forward(self, x: torch.Tensor, cache: Cache | None) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, cache)
            return self.head(x).sum()

    model, cache = Model(), Cache()
    with overspill.wrap(model, adamw(model), device=CPU, activations="recompute") as optimizer:
        for _ in range(2):
            model(normal(3, 8, 32), cache).backward()
            optimizer.step()
    assert cache.seen == 6
    assert caplog.text.count("use_cache = False") == 1  # not for each unit
    caplog.clear()
    model = Model()
    with overspill.wrap(model, adamw(model), device=CPU, activations="recompute"):
        model(normal(3, 8, 32), None).backward()
    assert "computed again" not in caplog.text


@pytest.mark.parametrize("policy", ["keep", "host", "auto"])
def test_a_graph_that_outlives_the_engine_says_so(policy: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    before = nn.Linear(32, 32).to(DEVICE)
    optimizer = overspill.wrap(
        model, adamw(model), device=SIM, device_memory="500KiB", host_memory="8MiB",
        activations=policy,
    )  # fmt: skip
    loss = model(before(normal(0, 64, 32))).sum()
    overspill.unwrap(model)
    if policy == "keep":
        loss.backward()
    else:
        with pytest.raises(overspill.OffloadError, match="close"):
            loss.backward()
    optimizer.close()


@about_cpu
@pytest.mark.parametrize("policy", ["auto", "host"])
def test_what_has_no_plain_memory_stays(policy: str) -> None:
    """Sparse tensors, nested ones, and those of forward-mode differentiation."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x))
                x = x + torch.sparse.mm(torch.eye(32).to_sparse(), x.t()).t()
                x = x + torch.sparse.mm(torch.eye(32).to_sparse_csr(), x.t()).t()
            parts = torch.nested.as_nested_tensor([x[:4], x[4:]])
            return torch.nested.to_padded_tensor(parts * parts, 0.0).sum()

    found = []
    for each in ("keep", policy):
        torch.manual_seed(0)
        model = Net()
        with overspill.wrap(
            model, adamw(model), device=CPU, host_memory="1MiB", activations=each
        ) as optimizer:
            losses = []
            for seed in range(3):
                loss = model(normal(seed, 64, 32))
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            found.append(losses)
    assert found[0] == found[1]
