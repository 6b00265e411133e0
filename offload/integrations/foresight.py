"""Prediction of the experts that the next layer will choose, from those of this layer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

USED_FROM = 0.5  # a guess that is right less often costs more than it saves
FADE = 0.95  # of how often guesses were right, at each one that is seen


@dataclass
class _Layer:
    """What is known of one layer: ``follow`` counts how often each of its experts came (column)
    where an expert of the layer before had come (row)."""

    follow: NDArray[np.int32]
    last: frozenset[int] = frozenset()  # what it chose
    guesses: dict[str, frozenset[int]] = field(default_factory=dict)  # by the way to guess


class Foresight:
    """Two ways to guess compete: what most often followed the choice of the layer before, and what
    the layer itself chose the last time.  The first layer comes after the last."""

    def __init__(self, experts: Collection[int]) -> None:
        """``experts``: how many each layer has."""
        self._experts = list(experts)
        before = [*list(experts)[-1:], *list(experts)[:-1]]
        self._layers = [
            _Layer(np.zeros(sizes, np.int32)) for sizes in zip(before, experts, strict=True)
        ]
        self.right = {"layer before": 0.0, "last time": 0.0}  # share of what was guessed

    def __reduce__(self) -> tuple[type[Foresight], tuple[list[int]]]:
        """Make copies start without statistics."""
        return Foresight, (self._experts,)

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self._layers)

    def chose(self, number: int, experts: Collection[int]) -> frozenset[int]:
        """A layer has chosen.

        Returns:
            The experts that the next layer will choose; none where guesses were wrong too often.
        """
        layer, following = self._layers[number], self._layers[(number + 1) % len(self._layers)]
        chosen = frozenset(experts)
        for way, guess in layer.guesses.items():
            if guess:
                share = len(guess & chosen) / len(guess)
                self.right[way] = FADE * self.right[way] + (1 - FADE) * share
        before = self._layers[number - 1].last
        if before and chosen:
            layer.follow[np.ix_(sorted(before), sorted(chosen))] += 1
        layer.last = chosen
        seen = following.follow[sorted(chosen)].sum(axis=0)
        most = [int(e) for e in np.argsort(-seen, kind="stable")[: len(following.last)] if seen[e]]
        following.guesses = {"layer before": frozenset(most), "last time": following.last}
        way = max(self.right, key=lambda each: self.right[each])
        return following.guesses[way] if self.right[way] > USED_FROM else frozenset()
