"""Saved storages larger than the host memory on their way to disk move in parts, and the log
reports the whole step."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.activations import offloader
from overspill.facts.tier import Tier
from tests.devices import CPU, NAME, SIM, normal
from tests.models import adamw, weights

WORDS, WIDTH, ROWS, TOKENS = 1024, 16, 4, 64
LOGITS = ROWS * TOKENS * WORDS * 4  # bytes: 1 MiB
WIDE = 2  # times as many rows: each of the large tensors is larger than all that is left
MIB = 1 << 20


@pytest.fixture(autouse=True)
def small_ones_leave_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloader, "LEAST_BYTES", 1 << 10)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return y


class Policy(nn.Module):
    """A language model; given advantages, it returns the loss of GRPO with a bonus for entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(
        self, ids: torch.Tensor, old: torch.Tensor | None = None, chain: int = 0
    ) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        if old is None:
            return logits
        for _ in range(chain):  # each needs one of the large tensors in backward
            logits = torch.sin(logits)
        logp = torch.log_softmax(logits, -1)
        new = logp.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        ratio, advantage = (new - old).exp(), old.detach() - old.mean()
        entropy = -(logp.exp() * logp).sum(-1)
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return -gain.mean() - 0.01 * entropy.mean()


PLACES: dict[str, dict[str, Any]] = {"device": {"device": SIM}}
if not NAME:
    PLACES["cpu"] = {"device": CPU}


def budgets(place: str, left: int) -> dict[str, Any]:
    """Budgets that leave so many bytes to activations where compute is; little of host memory on a
    device, so that most of them must go on to disk."""
    model = Policy()
    bare = overspill.plan(
        model, adamw(model), activations="keep", durable=False, rates=overspill.Rates(),
        host_memory="1GiB", **PLACES[place],
    )  # fmt: skip
    layout = bare.detail.layout
    assert layout is not None
    regions = layout.regions
    if place == "cpu":
        return {"host_memory": regions.host_bytes + left}
    return {"device_memory": regions.device_bytes + left, "host_memory": MIB}


def run(
    folder: Path, place: str, left: int, *, steps: int = 3, chain: int = 0, rows: int = ROWS,
    **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor], Any]:  # fmt: skip
    """Steps of GRPO: rollouts without gradients, then a training forward with a large loss."""
    torch.manual_seed(0)
    model = Policy()
    folder.mkdir()
    given = {**PLACES[place], **budgets(place, left), "nvme": folder, "durable": False, **options}
    optimizer = overspill.wrap(model, adamw(model), **given)
    ids = (normal(7, rows, TOKENS).abs() * 1000).long() % WORDS
    losses = []
    for _ in range(steps):
        with torch.no_grad():
            for _ in range(3):
                ids = torch.cat([ids[:, 1:], model(ids)[:, -1:].argmax(-1)], 1)
            old = torch.log_softmax(model(ids), -1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        loss = model(ids, old, chain)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        del loss
    seen = optimizer.memory, optimizer._engine.trace.spans(), optimizer.plan.detail.layout
    found = weights(model)
    optimizer.close()
    return losses, found, seen


def written(seen: Any) -> int:
    """Bytes of what autograd saved that went to disk."""
    return sum(s.nbytes for s in seen[1] if s.lane == "write" and s.name.startswith("saved"))


@pytest.mark.parametrize("place", PLACES)
def test_the_budget_holds_where_two_large_tensors_fit(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The product in the entropy needs both in backward: with them, staging, and no more."""
    left = 3 * LOGITS
    kept = run(tmp_path / "keep", place, 40 * LOGITS, activations="keep", chain=4)
    moving = run(tmp_path / "auto", place, left, chain=4)
    assert moving[0] == kept[0]
    for name, value in kept[1].items():
        assert torch.equal(value, moving[1][name]), name
    stats = moving[2][0][Tier.HOST if place == "cpu" else Tier.DEVICE]
    told = left // offloader.TELL_SHARE  # so much may be saved before anyone is told of it
    assert stats.peak_bytes <= stats.budget_bytes + told
    assert written(moving[2]) > 3 * LOGITS
    assert "over the budget" not in caplog.text


@pytest.mark.parametrize("policy", ["auto", "nvme"])
@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_larger_than_all_that_is_left_leaves_all_the_same(
    tmp_path: Path, place: str, policy: str
) -> None:
    """Compute must have what it computes with, but nothing else stays beside that."""
    size = WIDE * LOGITS
    kept = run(tmp_path / "keep", place, 40 * size, activations="keep", chain=4, rows=WIDE * ROWS)
    moving = run(tmp_path / "moving", place, LOGITS, activations=policy, chain=4, rows=WIDE * ROWS)
    assert moving[0] == kept[0]
    for name, value in kept[1].items():
        assert torch.equal(value, moving[1][name]), name
    memory, _, layout = moving[2]
    assert size > layout.saved.compute and size > layout.saved.host, "in no tier at once but disk"
    stats = memory[Tier.HOST if place == "cpu" else Tier.DEVICE]
    assert written(moving[2]) > 4 * size
    assert stats.peak_bytes <= stats.budget_bytes + 2 * size, "of seven that are saved"


@pytest.mark.parametrize("place", PLACES)
def test_the_log_has_the_figures_of_the_whole_step(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, at the end of a step, with the most that was there at once."""
    caplog.set_level(logging.WARNING, "overspill")
    *_, (memory, _, layout) = run(
        tmp_path / "auto", place, LOGITS, chain=4, rows=WIDE * ROWS, steps=4
    )
    told = [r.getMessage() for r in caplog.records if "a step kept up to" in r.getMessage()]
    assert len(told) == 1
    tier = Tier.HOST if place == "cpu" else Tier.DEVICE
    found = re.search(
        r"kept up to ([\d.]+) MiB .* in (\w+) memory at once, ([\d.]+) MiB more than the", told[0]
    )
    assert found is not None and found[2] == tier.value
    fixed = (
        layout.regions.host_bytes + layout.saved.host
        if place == "cpu"
        else layout.regions.device_bytes
    )
    most = memory[tier].peak_bytes - fixed
    assert float(found[1]) == pytest.approx(most / MIB, abs=1)
    assert float(found[3]) == pytest.approx((most - layout.saved.compute) / MIB, abs=1)
