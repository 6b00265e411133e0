"""What work costs: a machine's rates, and the seconds that each unit computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..facts.rates import Rates
from ..facts.trace import Trace
from ..schedule.layout import Layout
from .bounds import least_seconds
from .save_timing import EVENLY, Burst

REST = ""  # what runs in no unit: its seconds and bytes are kept under this name


@dataclass(frozen=True)
class Profile:
    """One micro-step as it was measured, by the name of the unit; without a name, all the rest.

    Attributes:
        forward_s, backward_s: seconds of compute; empty for a model that was only traced.
        activation_bytes: that autograd kept until backward, weights left out.
    """

    forward_s: Mapping[str, float]
    backward_s: Mapping[str, float]
    activation_bytes: Mapping[str, int]

    @classmethod
    def from_trace(cls, trace: Trace, micro_steps: int, after: int = 0) -> Profile:
        """Compute as it was in a run: the mean micro-step of its later half, or of that of the
        steps ``after`` one.  What is computed again is a part of backward.

        Forward begins with the span named ``model``; backward with the one named ``backward``, or
        where a unit comes back after others.
        """
        steps = [mark for mark in trace.steps if mark.index > after]
        steps = steps[len(steps) // 2 :]
        forward, backward = Counter[str](), Counter[str]()
        if not steps:
            return cls({}, {}, {})
        spans = trace.spans(steps[0].started_ns, steps[-1].finished_ns)
        way, seen, last = forward, set[str](), ""
        for span in sorted(spans, key=lambda s: s.started_ns):
            if span.lane != "compute":
                continue
            if span.name == "model":
                way, seen = forward, set()
            elif span.name == "backward" or (span.name in seen and span.name != last):
                way = backward
            seen.add(span.name)
            last = span.name
            way[REST if last in ("model", "backward") else last] += (
                span.finished_ns - span.started_ns
            )
        count = 1e9 * len(steps) * micro_steps
        forward_s, backward_s = (
            {name: ns / count for name, ns in each.items()} for each in (forward, backward)
        )
        return cls(forward_s, backward_s, {})

    @property
    def compute_s(self) -> float:
        """Seconds of the whole micro-step."""
        return sum(self.forward_s.values()) + sum(self.backward_s.values())


@dataclass(frozen=True)
class Costs:
    """What work costs: the machine's rates, and seconds of compute by unit (one micro-step).

    ``shared``: without a device, compute shares the processors with updates and moves; not where
    its seconds were measured beside them.  ``saved_bytes``: what autograd keeps of each unit until
    its backward, and ``input_bytes``: of one that is computed again; empty where nothing is known.
    ``bursts``: by unit, when that is saved, as far as it was measured.
    """

    rates: Rates
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    shared: bool = True
    saved_bytes: Sequence[int] = ()
    input_bytes: Sequence[int] = ()
    bursts: Mapping[int, tuple[Burst, ...]] = field(default_factory=dict)

    @property
    def compute_s(self) -> float:
        """Seconds of compute of one micro-step."""
        return sum(self.forward_s) + sum(self.backward_s)

    def keeping(
        self, saved_bytes: Sequence[int], input_bytes: Sequence[int],
        bursts: Mapping[int, tuple[Burst, ...]] | None = None,
    ) -> Costs:  # fmt: skip
        """The same where autograd keeps so much."""
        return replace(self, saved_bytes=saved_bytes, input_bytes=input_bytes, bursts=bursts or {})

    def bursts_of(self, unit: int) -> tuple[Burst, ...]:
        """When a unit saves what autograd keeps of it."""
        return self.bursts.get(unit, EVENLY)

    @classmethod
    def from_flops(cls, layout: Layout, rates: Rates, tokens: int) -> Costs:
        """Compute from FLOPs: ``tokens`` of one micro-step; free where the rate is not known."""
        per_flop = tokens / rates.device_flops_s if rates.device_flops_s else 0.0
        forward = [unit.flops * per_flop for unit in layout.units]
        backward = [unit.backward_flops * per_flop for unit in layout.units]
        return cls(rates, forward, backward)

    @classmethod
    def balanced(
        cls, layout: Layout, rates: Rates, total_s: float | None = None,
        again: Mapping[int, float] | None = None,
    ) -> Costs:  # fmt: skip
        """Where tokens are not known: compute lasts ``total_s``, else about as long as the slowest
        of the moves, as with a batch chosen for it.  ``again``: of ``total_s`` so many forwards, by
        unit, were those of units that were computed again."""
        total_s = total_s or least_seconds(layout, rates) or 1.0
        forward = [max(unit.flops, 1) for unit in layout.units]
        backward = [max(unit.backward_flops, unit.trainable) for unit in layout.units]
        more = sum(forward[unit] * count for unit, count in (again or {}).items())
        per_flop = total_s / max(1, sum(forward) + sum(backward) + more)
        return cls(rates, [n * per_flop for n in forward], [n * per_flop for n in backward])

    @classmethod
    def from_profile(
        cls, layout: Layout, rates: Rates, profile: Profile, *, shared: bool = True
    ) -> Costs:
        """Compute as measured.  What ran in no unit counts, by FLOPs, with the units that were not
        seen (those that stay are not, in a run), else with the last one, where the loss is."""

        def by_unit(seconds: Mapping[str, float]) -> list[float]:
            found = [seconds.get(unit.name, 0.0) for unit in layout.units]
            rest = sum(seconds.values()) - sum(found)
            unseen = [0 if unit.name in seconds else unit.flops for unit in layout.units]
            if not sum(unseen):
                unseen[-1] = 1
            return [s + rest * u / sum(unseen) for s, u in zip(found, unseen, strict=True)]

        forward, backward = by_unit(profile.forward_s), by_unit(profile.backward_s)
        return cls(rates, forward, backward, shared)


def inputs_of(layout: Layout, saved_bytes: Sequence[int]) -> list[int]:
    """About what goes into each unit, by the share that its shapes say it has of what is kept."""
    found = []
    for unit, nbytes in zip(layout.units, saved_bytes, strict=False):
        kept = unit.activation_bytes
        found.append(nbytes * unit.input_bytes // kept if kept else nbytes)
    return found
