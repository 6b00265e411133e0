"""Small chunks, so that few tokens make several, and heads that defer their logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from torch import nn

from overspill.logits import rows
from overspill.logits.heads import DeferredHeads

from .losses import H, V


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "CHUNK_BYTES", 8 * 4 * V)
    monkeypatch.setattr(rows, "LEAST_TOKENS", 8)
    monkeypatch.setattr(rows, "SLICE_BYTES", 300 * 4 * H)


@pytest.fixture
def deferred() -> Iterator[Callable[[nn.Linear], nn.Linear]]:
    """A head that defers, until the end of the test."""
    made: list[DeferredHeads] = []

    def defer(head: nn.Linear) -> nn.Linear:
        made.append(DeferredHeads([(head, lambda: 0)]))
        return head

    yield defer
    for each in made:
        each.remove()
