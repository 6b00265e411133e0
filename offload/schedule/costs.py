"""What work costs: a machine's rates, and the seconds that each unit computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..observe.rates import Rates
from .bounds import FORWARD_SHARE, least_seconds
from .layout import Layout

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

    @property
    def compute_s(self) -> float:
        """Seconds of the whole micro-step."""
        return sum(self.forward_s.values()) + sum(self.backward_s.values())


@dataclass(frozen=True)
class Costs:
    """What work costs: the machine's rates, and seconds of compute by unit (one micro-step)."""

    rates: Rates
    forward_s: Sequence[float]
    backward_s: Sequence[float]

    @property
    def compute_s(self) -> float:
        """Seconds of compute of one micro-step."""
        return sum(self.forward_s) + sum(self.backward_s)

    @classmethod
    def from_flops(cls, layout: Layout, rates: Rates, tokens: int) -> Costs:
        """Compute from FLOPs: ``tokens`` of one micro-step; free where the rate is not known."""
        per_flop = tokens / rates.device_flops_s if rates.device_flops_s else 0.0
        forward = [unit.flops * per_flop for unit in layout.units]
        return cls(rates, forward, [s * (1 / FORWARD_SHARE - 1) for s in forward])

    @classmethod
    def balanced(cls, layout: Layout, rates: Rates, total_s: float | None = None) -> Costs:
        """Where tokens are not known: compute lasts ``total_s``, else about as long as the slowest
        of the moves, as with a batch chosen for it."""
        total_s = total_s or least_seconds(layout, rates) or 1.0
        sizes = [max(unit.flops, 1) for unit in layout.units]
        forward = [total_s * FORWARD_SHARE * size / sum(sizes) for size in sizes]
        return cls(rates, forward, [s * (1 / FORWARD_SHARE - 1) for s in forward])

    @classmethod
    def from_profile(cls, layout: Layout, rates: Rates, profile: Profile) -> Costs:
        """Compute as measured; what ran in no unit lies between forward and backward, where the
        loss is: it counts with the last unit."""

        def by_unit(seconds: Mapping[str, float]) -> list[float]:
            found = [seconds.get(unit.name, 0.0) for unit in layout.units]
            found[-1] += sum(seconds.values()) - sum(found)
            return found

        return cls(rates, by_unit(profile.forward_s), by_unit(profile.backward_s))
