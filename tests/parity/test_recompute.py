"""Which units are computed again: those that do not change when they run, as many as the links
cannot carry, and no more than the batch needs."""

from __future__ import annotations

import itertools
import logging
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import overspill
from overspill.planning import simulate
from overspill.training import activations, known_code
from tests.devices import CPU, SIM, about_sim, normal
from tests.models import adamw, weights

RATES = overspill.Rates(
    h2d_bytes_s=1e6, d2h_bytes_s=1e6, dram_bytes_s=20e9, update_params_s=1e9,
    device_flops_s=2e10, disk_read_bytes_s=1e9, disk_write_bytes_s=1e9,
)  # fmt: skip
PURE = known_code._pure
WIDE = 10**4  # of a link on which everything fits in no time


@pytest.fixture(autouse=True)
def small_ones_leave_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (activations, simulate):
        monkeypatch.setattr(module, "LEAST_BYTES", 1 << 10)
    monkeypatch.setattr(known_code, "LIBRARIES", (*known_code.LIBRARIES, __name__))
    monkeypatch.setattr(known_code, "_pure", lambda name: name == __name__ or PURE(name))
    CALLS.clear()


CALLS: list[int] = []  # of blocks, outside of them


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS.append(1)
        return x + torch.tanh(self.out(torch.sigmoid(self.inner(x))))


class Chain(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).pow(2).mean()


def chain(count: int = 8) -> Chain:
    torch.manual_seed(0)
    return Chain([Block() for _ in range(count)])


def step(model: nn.Module, optimizer: Any, seed: int, batch: int = 16) -> float:
    loss = model(normal(seed, batch, 8, 32))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


# -- what changes itself ------------------------------------------------------------------------


class Counting(nn.Module):
    """An attribute, a list, a buffer, batch statistics or random numbers that a forward changes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind, self.count, self.seen = nn.Linear(32, 32), kind, 0, []
        self.register_buffer("steps", torch.zeros(()))
        self.draws, self.numbers = torch.Generator(), np.random.default_rng(0)
        self.own, self.many, self.inside = torch.zeros(()), itertools.count(), {"a": [0]}
        self.norm = nn.BatchNorm1d(32) if kind == "statistics" else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "attribute":
            self.count += 1
        elif self.kind == "list":
            self.seen.append(0)
        elif self.kind == "buffer":
            self.steps += 1
        elif self.kind == "generator":
            x = x + torch.rand((), generator=self.draws, device="cpu").to(x.device)
        elif self.kind == "python":
            x = x + random.random()
        elif self.kind == "numpy":
            x = x + float(np.random.randn())
        elif self.kind == "tensor":
            self.own += 0.1
            x = x + self.own.to(x.device)
        elif self.kind == "numpy generator":
            x = x + self.numbers.random()
        elif self.kind == "iterator":
            x = x + next(self.many)
        elif self.kind == "nested":
            self.inside["a"][0] += 1
        return torch.tanh(self.norm(self.inner(x).flatten(0, 1))).view_as(x)


@pytest.mark.parametrize(
    "kind", ["attribute", "list", "buffer", "statistics", "generator", "python", "numpy", "tensor",
             "numpy generator", "iterator", "nested"],
)  # fmt: skip
def test_what_changes_itself_is_kept(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for policy in ("keep", "recompute"):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = Chain([Counting(kind) for _ in range(3)])
        with overspill.wrap(model, adamw(model), device=CPU, activations=policy) as optimizer:
            losses = [step(model, optimizer, seed) for seed in range(6)]
            block = model.blocks[0]
            buffers = {name: b.clone() for name, b in model.named_buffers()}
            found.append((losses, block.count, len(block.seen), weights(model), buffers))
    kept, again = found
    assert kept[:3] == again[:3]
    for mine, other in zip(kept[3:], again[3:], strict=True):
        for name, value in mine.items():
            assert torch.equal(value, other[name]), name
    told = [r for r in caplog.records if "cannot be computed again" in r.getMessage()]
    assert len(told) == 3


class Noisy(nn.Module):
    """Draws where no checkpoint looks, and is taken for known code."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x) * (1 + random.random()) + float(np.random.randn()))


def test_what_draws_unseen_draws_the_same_again(caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for policy in ("keep", "recompute"):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = Chain([Noisy() for _ in range(3)])
        with overspill.wrap(model, adamw(model), device=CPU, activations=policy) as optimizer:
            losses = [step(model, optimizer, seed) for seed in range(3)]
            found.append((losses, weights(model)))
    assert found[0][0] == found[1][0]
    for name, value in found[0][1].items():
        assert torch.equal(value, found[1][1][name]), name
    assert "random numbers" in caplog.text


class Caching(nn.Module):
    """Fills a table when it first runs, and once more when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table = nn.Linear(32, 32), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS.append(1)
        if self.table is None:
            self.table = torch.arange(32.0, device=x.device)
        return torch.tanh(self.inner(x) + self.table)


def test_what_fills_a_cache_first_is_computed_again_later(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_code, "LIBRARIES", ("torch.nn.",))
    monkeypatch.setattr(known_code, "_pure", PURE)  # what it writes to is seen
    torch.manual_seed(0)
    model = Chain([Caching() for _ in range(3)])
    with overspill.wrap(model, adamw(model), device=CPU, activations="recompute") as optimizer:
        counts = []
        for seed in range(4):
            step(model, optimizer, seed)
            counts.append(len(CALLS))
            CALLS.clear()
        assert counts == [3, 3, 6, 6]
        assert not [r for r in caplog.records if "again" in r.getMessage()]
        model.blocks[1].table = None
        step(model, optimizer, 4)
        assert "has changed table" in caplog.text
        CALLS.clear()
        step(model, optimizer, 5)
        assert len(CALLS) == 5  # that one is watched again


@pytest.mark.parametrize("raised", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("whose", ["recompute", "keep"])
def test_an_interrupt_while_it_is_computed_again(
    whose: str, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the engine, or by a checkpoint of the user's."""
    model = chain(3)
    if whose == "keep":
        model = Checkpointed(list(model.blocks))
    options = {"device": SIM, "device_memory": "150KiB", "host_memory": "64MiB"}
    with overspill.wrap(model, adamw(model), **options, activations=whose) as optimizer:
        for seed in range(2):
            step(model, optimizer, seed)
        loss, plain, drawn = model(normal(3, 16, 8, 32)), torch.sigmoid, []

        def interrupted(x: torch.Tensor) -> torch.Tensor:
            drawn.append(1)
            if len(drawn) == 2:
                raise raised
            return plain(x)

        monkeypatch.setattr(torch, "sigmoid", interrupted)
        with pytest.raises(raised):
            loss.backward()
        monkeypatch.setattr(torch, "sigmoid", plain)
        model.zero_grad()
        assert step(model, optimizer, 3) > 0


class Checkpointed(Chain):
    """Checkpoints of the user's own around all blocks, once they are asked for."""

    asked = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.asked else block(x)
        return self.head(x).pow(2).mean()


class Twice(nn.Module):
    """Asks whether its two inputs are one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x * 2 if x is y else x * 3))


class OfTwice(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, x)
        return self.head(x).pow(2).mean()


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(32, 32), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.drop(self.inner(x)))


@pytest.mark.parametrize("kind", ["one input twice", "eval before backward", "compiled"])
def test_it_runs_again_as_it_ran(kind: str) -> None:
    found = []
    for policy in ("keep", "recompute"):
        torch.manual_seed(0)
        model = OfTwice([Twice() for _ in range(3)]) if "twice" in kind else Chain(
            [Drops() for _ in range(3)]
        )  # fmt: skip
        with overspill.wrap(model, adamw(model), device=CPU, activations=policy) as optimizer:
            run = torch.compile(model, backend="aot_eager") if kind == "compiled" else model
            losses = []
            for seed in range(4):
                torch.manual_seed(seed)
                loss = run(normal(seed, 4, 8, 32))
                if "eval" in kind:
                    model.eval()
                loss.backward()
                model.train()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            found.append((losses, weights(model)))
    assert found[0][0] == found[1][0]
    for name, value in found[0][1].items():
        assert torch.equal(value, found[1][1][name]), name


def test_what_changes_before_backward_is_told() -> None:
    model = chain(3)
    with overspill.wrap(model, adamw(model), device=CPU, activations="recompute") as optimizer:
        for seed in range(2):
            step(model, optimizer, seed)
        loss = model(normal(3, 4, 8, 32))
        model.blocks[1].scale = 2.0
        with pytest.raises(overspill.OffloadError, match="scale has changed"):
            loss.backward()
        model.zero_grad()
        assert step(model, optimizer, 4) > 0


# -- chosen -------------------------------------------------------------------------------------

TIGHT = {"device": SIM, "device_memory": "700KiB", "host_memory": "64MiB"}


@about_sim
def test_auto_computes_again_what_the_link_cannot_carry(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "overspill")
    model = chain()
    with overspill.wrap(model, adamw(model), **TIGHT, rates=RATES) as optimizer:
        step(model, optimizer, 0)
        assert len(CALLS) == 8
        CALLS.clear()
        step(model, optimizer, 1)
        assert len(CALLS) > 8
        assert "computed again" in caplog.text
        CALLS.clear()
        step(model, optimizer, 2, batch=1)  # all of it may stay
        assert len(CALLS) == 8


@about_sim
def test_auto_leaves_modules_alone_of_which_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = chain()
    handle = model.blocks[2].register_forward_pre_hook(lambda _m, args: args)
    with overspill.wrap(model, adamw(model), **TIGHT, rates=RATES) as optimizer:
        for seed in range(2):
            step(model, optimizer, seed)
        chosen = optimizer._engine._loop._adapting.recompute.units
        assert chosen
        assert 2 not in chosen, "a hook of the user's runs around it"
    handle.remove()
    monkeypatch.setattr(known_code, "_pure", PURE)
    monkeypatch.setattr(known_code, "LIBRARIES", ("torch.nn.",))  # what it appends to is seen
    model = chain()
    CALLS.clear()
    with overspill.wrap(model, adamw(model), **TIGHT, rates=RATES) as optimizer:
        for seed in range(3):
            step(model, optimizer, seed)
    assert len(CALLS) == 24


@pytest.mark.skipif(SIM != "sim", reason="compute takes a known time on the simulated device")
def test_what_is_computed_again_counts_once_in_what_a_step_costs() -> None:
    """As long as the model says: what is measured has the forwards of backward within it."""
    model = chain()
    slow = replace(RATES, device_flops_s=3e8, h2d_bytes_s=6e5, d2h_bytes_s=6e5)
    with overspill.wrap(model, adamw(model), **TIGHT, rates=slow) as optimizer:
        engine = optimizer._engine
        for seed in range(6):
            step(model, optimizer, seed)
            CALLS.clear()
        units = engine.machinery.layout.units
        modelled_s = sum(u.flops + u.backward_flops for u in units) * 16 * 8 / 3e8
        again, costs = engine.adapted()
        assert len(again) > 5
        assert costs.compute_s == pytest.approx(modelled_s, rel=0.1)


@about_sim
def test_auto_moves_what_the_link_carries(tmp_path: Path) -> None:
    model = chain()
    fast = overspill.Rates(
        h2d_bytes_s=RATES.h2d_bytes_s * WIDE, d2h_bytes_s=RATES.d2h_bytes_s * WIDE,
        dram_bytes_s=20e9, update_params_s=1e9, device_flops_s=2e9,
        disk_read_bytes_s=1e9, disk_write_bytes_s=1e9,
    )  # fmt: skip
    with overspill.wrap(model, adamw(model), **TIGHT, rates=fast) as optimizer:
        for seed in range(3):
            step(model, optimizer, seed)
        assert len(CALLS) == 24


@about_sim
def test_a_larger_batch_is_another_load() -> None:
    model = chain()
    with overspill.wrap(model, adamw(model), **TIGHT, rates=RATES) as optimizer:
        counts = []
        for seed, batch in enumerate([1, 1, 16, 16, 16, 24, 24, 1]):
            step(model, optimizer, seed, batch)
            counts.append(len(CALLS))
            CALLS.clear()
    assert counts[:3] == [8, 8, 8]
    assert counts[4] > 8  # once it has been seen
    assert counts[6] > 8
    assert counts[7] == 8


@about_sim
def test_nothing_is_decided_anew_within_a_step() -> None:
    """What a checkpoint of the user's computes again saves what it saved before, also where a
    larger batch came in between."""
    model = Checkpointed([Block() for _ in range(8)])
    model.asked = False
    with overspill.wrap(model, adamw(model), **TIGHT, rates=RATES) as optimizer:
        for seed in range(2):
            step(model, optimizer, seed)
        model.asked = True
        line = 16 * optimizer._engine._loop._adapting.recompute.keeps_below
        small = int(line) + 1  # computed again, as it would not be beside the larger one
        (model(normal(1, small, 8, 32)) + model(normal(2, 32, 8, 32))).backward()
        optimizer.step()


@pytest.mark.parametrize("place", ["cpu", "device"])
def test_bits_are_those_of_keep_while_it_adapts(place: str, tmp_path: Path) -> None:
    found = []
    for policy in ("keep", "auto"):
        model = chain()
        options: dict[str, Any] = {"device": CPU, "host_memory": "2MiB", "nvme": tmp_path}
        if place == "device":
            options = {**TIGHT, "device_memory": "700KiB"}
        with overspill.wrap(
            model, adamw(model), **options, rates=RATES, durable=False, activations=policy
        ) as optimizer:
            sizes = [4, 16, 16, 2, 24, 24, 1, 16]
            losses = [step(model, optimizer, i, size) for i, size in enumerate(sizes)]
            found.append((losses, weights(model)))
    assert found[0][0] == found[1][0]
    for name, value in found[0][1].items():
        assert torch.equal(value, found[1][1][name]), name


@about_sim
@pytest.mark.parametrize("told", [{"tokens": 256}, {"activations": "recompute"}], ids=str)
def test_known_units_are_computed_again_from_the_first_step_on(
    told: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Where the load is known, not even the first step is over the budgets; and so it stays."""
    model, alone = chain(), chain()
    alone_optimizer = adamw(alone)
    options = {"device": "sim", "device_memory": "700KiB", "host_memory": "2MiB", "rates": RATES}
    with overspill.wrap(model, adamw(model), **options, **told) as optimizer:
        again = optimizer.plan.detail.layout.saved.recompute
        assert again
        for number in range(4):
            CALLS.clear()
            loss = step(model, optimizer, number, batch=32)
            computed = len(CALLS)
            assert computed > 8, number
            plain = step(alone, alone_optimizer, number, batch=32)
            assert loss == pytest.approx(plain, rel=1e-5)
        held = optimizer.memory["device"]
        assert held.peak_bytes <= held.budget_bytes
    assert not [r for r in caplog.records if "over the budget" in r.getMessage()]


def test_a_plan_that_knows_the_load_chooses_too() -> None:
    model = chain().cpu()
    options = {"device": "sim", "device_memory": "700KiB", "host_memory": "64MiB", "rates": RATES}
    made = overspill.plan(model, adamw(model), **options, tokens=256)
    assert made.detail.layout is not None
    assert made.detail.layout.saved.recompute
    assert "computed again" in str(made)
    few = overspill.plan(model, adamw(model), **options, tokens=8)
    assert few.detail.layout is not None
    assert not few.detail.layout.saved.recompute


@pytest.mark.parametrize("told", [{"activations": "recompute"}, {"tokens": 256}], ids=str)
def test_adapters_named_again_before_backward(told: dict[str, Any]) -> None:
    """As after a forward of a reference adapter: a new list of the same names is no change."""
    peft = pytest.importorskip("peft")
    losses = []
    for policy in ({"activations": "keep"}, told):
        model = peft.get_peft_model(
            chain(4).cpu(), peft.LoraConfig(r=2, target_modules=["inner", "out"])
        )
        trained = [p for p in model.parameters() if p.requires_grad]
        inner = torch.optim.AdamW(trained, lr=1e-2)
        room = {"device_memory": "16MiB" if "activations" in policy else "500KiB"}
        with overspill.wrap(
            model, inner, device=SIM, host_memory="4MiB", rates=RATES, **room, **policy
        ) as optimizer:
            found = []
            for seed in range(3):
                x = normal(seed, 32, 8, 32).to(next(model.parameters()).device)
                loss = model(x)
                with torch.no_grad():
                    model.set_adapter("default")
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(float(loss))
            losses.append(found)
            if policy is told:
                assert optimizer.plan.detail.layout.saved.recompute
    assert losses[1] == losses[0]
