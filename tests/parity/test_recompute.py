"""Units that are computed again: how they run once more, and what must not be."""

from __future__ import annotations

import itertools
import random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import overspill
from overspill.activations import known_code
from tests.devices import CPU, DEVICE, SIM, normal
from tests.models import adamw, weights
from tests.parity.chains import (
    CALLS,
    PURE,
    RATES,
    Chain,
    Checkpointed,
    chain,
    known_as_the_libraries_are,
    step,
)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    known_as_the_libraries_are(monkeypatch, __name__)


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


class Swaps(nn.Module):
    """Puts another table in the place of its own, once it is known, and computes with it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = nn.Linear(32, 32), kind
        self.table: Any = [[0.0] * 300] if kind == "long within" else [(1,)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "long within":
            table = [list(self.table[0])]
            table[0][299] += 0.5
            x = x + table[0][299]
        elif self.kind == "another kind within":
            table = [[1]] if isinstance(self.table[0], tuple) else [(1,)]
            x = x * (2 if isinstance(table[0], tuple) else 3)
        else:
            table = [1] if self.table[0] is True else [True]
            x = x * (2 if table[0] is True else 3)
        self.table = table
        return torch.tanh(self.inner(x))


@pytest.mark.parametrize("kind", ["long within", "another kind within", "equal, of another kind"])
def test_another_table_is_a_change(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_code, "LIBRARIES", ("torch.nn.",))
    monkeypatch.setattr(known_code, "_pure", PURE)  # what it writes to is seen
    found = []
    for policy in ("keep", "recompute"):
        torch.manual_seed(0)
        model = Chain([Swaps(kind) for _ in range(3)])
        with overspill.wrap(model, adamw(model), device=CPU, activations=policy) as optimizer:
            losses = [step(model, optimizer, seed) for seed in range(6)]
            found.append((losses, [block.table for block in model.blocks]))
    assert found[0] == found[1]
    assert "changes table" in caplog.text


class Looks(nn.Module):
    """Draws nothing, and notes where Python's random numbers are."""

    seen: ClassVar[list[object]] = []

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Looks.seen.append(random.getstate())
        return torch.tanh(self.inner(x))


def test_what_draws_nothing_leaves_what_others_draw_alone() -> None:
    """Another thread may draw while backward computes again: not the same once more."""
    torch.manual_seed(0)
    model = Chain([Looks() for _ in range(3)])
    with overspill.wrap(model, adamw(model), device=CPU, activations="recompute") as optimizer:
        step(model, optimizer, 0)
        step(model, optimizer, 1)
        loss = model(normal(2, 16, 8, 32))
        random.random()
        now = random.getstate()
        Looks.seen.clear()
        loss.backward()
        assert Looks.seen == [now] * 3
        assert random.getstate() == now
        optimizer.step()


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


@pytest.mark.parametrize("named", [False, True])
def test_a_config_that_a_head_completes_when_it_runs(named: bool) -> None:
    """transformers' classifiers set ``problem_type`` in the config that their layers share."""
    hf = pytest.importorskip("transformers")
    config = hf.BertConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64,
        problem_type="single_label_classification" if named else None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.BertForSequenceClassification(config).to(DEVICE)
    inner = torch.optim.AdamW(model.parameters())
    ids = torch.arange(20, device=DEVICE).view(2, 10)
    with overspill.wrap(model, inner, device=CPU, activations="recompute") as optimizer:
        for _ in range(2):
            model(input_ids=ids, labels=ids[:, 0] % 2).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model.config.problem_type == "single_label_classification"
        assert len(optimizer._engine._loop.tuner.recompute.units) >= 2
