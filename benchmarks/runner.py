"""Runs arms side by side: A B A B, so that what the machine does meanwhile hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from .machine import OtherWork


@dataclass(frozen=True)
class Sample:
    """One timed run of an arm: its seconds, and what else was seen of it."""

    seconds: float
    seen: Mapping[str, Any] = field(default_factory=dict)


class Arm(Protocol):
    """One way of doing the work.  The first arm of a comparison is what the others are held to."""

    @property
    def name(self) -> str: ...

    def start(self) -> Mapping[str, Any]:
        """Sets up and warms up, unmeasured; returns facts about the arm."""
        ...

    def sample(self) -> Sample: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Call:
    """An arm of this process: ``run`` does the work once and returns its seconds."""

    name: str
    run: Callable[[], float]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def start(self) -> Mapping[str, Any]:
        self.run()
        return self.facts

    def sample(self) -> Sample:
        with OtherWork() as others:
            seconds = self.run()
        return Sample(seconds, {"others": others.share})

    def close(self) -> None:
        return None


@dataclass(frozen=True)
class Row:
    """What came of an arm.  ``ratio``: median of its time over the first arm's, round by round.

    ``ratio_low`` and ``ratio_high`` are the least and the greatest of these.  An arm that failed
    has its ``error`` and the samples from before.
    """

    name: str
    facts: Mapping[str, Any]
    samples: tuple[Sample, ...]
    error: str | None = None
    median_s: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class _Running:
    """An arm on its way: its facts, samples and error."""

    def __init__(self, arm: Arm) -> None:
        self.arm = arm
        self.samples: list[Sample] = []
        self.error: str | None = None
        self.facts: Mapping[str, Any] = {}
        self._try(self._start)

    def _start(self) -> None:
        self.facts = self.arm.start()

    def _sample(self) -> None:
        self.samples.append(self.arm.sample())

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # an arm that fails is a row with its error, not left out
            self.error = f"{type(error).__name__}: {error}"

    def round(self) -> None:
        if self.error is None:
            self._try(self._sample)

    def begin_again(self) -> None:
        """After it was closed."""
        if self.error is None:
            self._try(self._start)


def run_interleaved(arms: Sequence[Arm], rounds: int, budget_s: float = float("inf")) -> list[Row]:
    """Starts all arms, then samples each once a round; returns a row for each, in order.

    After the first, a round is left out that would end more than ``budget_s`` after the start.
    """
    running: list[_Running] = []
    started, longest_s = time.monotonic(), 0.0
    try:
        for arm in arms:
            running.append(_Running(arm))
        for done in range(rounds):
            begun = time.monotonic()
            if done and begun - started + longest_s > budget_s:
                break
            for each in running:
                each.round()
            longest_s = max(longest_s, time.monotonic() - begun)
    finally:
        for each in running:
            each.arm.close()
    return [_row(each, running[0]) for each in running]


def run_in_turn(arms: Sequence[Arm], rounds: int) -> list[Row]:
    """As ``run_interleaved``, for arms that have no room beside each other: each is started anew
    for every sample, and closed after it."""
    running: list[_Running] = []
    for done in range(rounds):
        for number, arm in enumerate(arms):
            try:
                if done:
                    running[number].begin_again()
                else:
                    running.append(_Running(arm))
                running[number].round()
            finally:
                arm.close()
    return [_row(each, running[0]) for each in running]


def _row(each: _Running, first: _Running) -> Row:
    pairs = zip(each.samples, first.samples, strict=False)
    ratios = [mine.seconds / theirs.seconds for mine, theirs in pairs]
    return Row(
        name=each.arm.name,
        facts=each.facts,
        samples=tuple(each.samples),
        error=each.error,
        median_s=statistics.median(s.seconds for s in each.samples) if each.samples else None,
        ratio=statistics.median(ratios) if ratios else None,
        ratio_low=min(ratios, default=None),
        ratio_high=max(ratios, default=None),
    )
