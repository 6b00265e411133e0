"""Costs of work: a machine's rates, and the seconds that each unit computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..facts.rates import Rates
from ..facts.trace import Trace
from ..schedule.layout import Layout, SavedRoom
from .bounds import least_seconds
from .save_timing import EVENLY, Burst

REST = ""  # name for the seconds and bytes outside all units


@dataclass(frozen=True)
class Profile:
    """Measurements of one micro-step, by name of the unit; ``REST`` is the time outside all units.

    Attributes:
        forward_s, backward_s: seconds of compute; empty for a model that was only traced.
        activation_bytes: bytes that autograd kept until backward, without weights.
    """

    forward_s: Mapping[str, float]
    backward_s: Mapping[str, float]
    activation_bytes: Mapping[str, int]

    @classmethod
    def from_trace(cls, trace: Trace, micro_steps: int, after: int = 0) -> Profile:
        """Return the mean micro-step of a run, over the later half of its steps.

        Recomputation counts as backward.  Forward begins with the span named ``model``.  Backward
        begins with the span named ``backward``, or when a unit runs again after others.

        Args:
            after: use only steps with a higher index.
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
    """Costs of work: the machine's rates, and seconds of compute by unit for one micro-step.

    Attributes:
        shared: whether, without a device, updates and moves slow compute down; ``False`` if its
            seconds were measured while they ran.
        saved_bytes: by unit, bytes that autograd keeps until its backward; empty if unknown.
        input_bytes: the same for a unit that is recomputed.
        bursts: by unit, when these bytes are saved, as far as it was measured.
        attention_s: by unit, the part of ``forward_s`` in attention; empty if unknown.
        attention_bytes: by unit, the outputs of attention.
    """

    rates: Rates
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    shared: bool = True
    saved_bytes: Sequence[int] = ()
    input_bytes: Sequence[int] = ()
    bursts: Mapping[int, tuple[Burst, ...]] = field(default_factory=dict)
    attention_s: Sequence[float] = ()
    attention_bytes: Sequence[int] = ()

    @property
    def compute_s(self) -> float:
        """Seconds of compute of one micro-step."""
        return sum(self.forward_s) + sum(self.backward_s)

    def recompute_s(self, unit: int, saved: SavedRoom) -> float:
        """Return the seconds of a recomputation of a unit."""
        kept = self.attention_s[unit] if unit in saved.keep_attention and self.attention_s else 0.0
        return self.forward_s[unit] - kept

    def kept_bytes(self, unit: int, saved: SavedRoom) -> int:
        """Return the bytes of the outputs of attention that a recomputed unit keeps."""
        kept = unit in saved.keep_attention and self.attention_bytes
        return self.attention_bytes[unit] if kept else 0

    def keeping(
        self, saved_bytes: Sequence[int], input_bytes: Sequence[int],
        bursts: Mapping[int, tuple[Burst, ...]] | None = None,
    ) -> Costs:  # fmt: skip
        """Return these costs with the bytes that autograd keeps."""
        return replace(self, saved_bytes=saved_bytes, input_bytes=input_bytes, bursts=bursts or {})

    def waiting_for(self, received: Sequence[tuple[int, int]]) -> Costs:
        """Return these costs with units that take as long as what arrives for them.

        FSDP2 gathers a module's weights, and reduces its gradients, while others compute.

        Args:
            received: by unit, the bytes in a forward and in a backward; empty: none.
        """
        rate = self.rates.wire_bytes_s
        if not received or not rate:
            return self
        forward = [max(s, n / rate) for s, (n, _) in zip(self.forward_s, received, strict=True)]
        backward = [max(s, n / rate) for s, (_, n) in zip(self.backward_s, received, strict=True)]
        return replace(self, forward_s=forward, backward_s=backward)

    def bursts_of(self, unit: int) -> tuple[Burst, ...]:
        """Return when a unit saves what autograd keeps; evenly spread if it was not measured."""
        return self.bursts.get(unit, EVENLY)

    @classmethod
    def from_flops(cls, layout: Layout, rates: Rates, tokens: int) -> Costs:
        """Return costs with compute by FLOPs, for the ``tokens`` of one micro-step.

        Compute takes no time if its rate is not known.
        """
        per_flop = tokens / rates.device_flops_s if rates.device_flops_s else 0.0
        forward = [unit.flops * per_flop for unit in layout.units]
        backward = [unit.backward_flops * per_flop for unit in layout.units]
        return cls(
            rates, forward, backward,
            attention_s=[unit.attention_flops * per_flop for unit in layout.units],
            attention_bytes=[unit.attention_bytes * tokens for unit in layout.units],
        )  # fmt: skip

    @classmethod
    def balanced(
        cls, layout: Layout, rates: Rates, total_s: float | None = None,
        again: Mapping[int, float] | None = None,
    ) -> Costs:  # fmt: skip
        """Return costs for an unknown number of tokens.

        Args:
            total_s: seconds of compute; ``None``: about as long as the slowest of the moves, as if
                the batch were chosen for this.
            again: by unit, how many recomputations of its forward ``total_s`` includes.
        """
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
        """Return costs with compute as measured.

        Time outside all units counts, by FLOPs, for the units without measurements (resident ones,
        in a run).  If there are none, it counts for the last unit, which has the loss.
        """

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
    """Return about the bytes of each unit's input: the share of ``saved_bytes`` that its shapes
    give."""
    found = []
    for unit, nbytes in zip(layout.units, saved_bytes, strict=False):
        kept = unit.activation_bytes
        found.append(nbytes * unit.input_bytes // kept if kept else nbytes)
    return found
