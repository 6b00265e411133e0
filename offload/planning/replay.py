"""Replay of a run in the simulator: compute as measured, moves and updates at the plan's rates."""

from __future__ import annotations

from ..facts.trace import Trace
from .coarse import coarsen
from .costs import Costs, Profile, inputs_of
from .plan import Plan
from .recompute_choice import NOTHING, with_recompute
from .steady import Simulated, simulate


def replay(plan: Plan, trace: Trace) -> Simulated | None:
    """Simulate a step of the run in ``trace`` as if every lane had kept its rate.

    The remaining part of the measured time is due to lanes that were slower than their rates.

    Returns:
        The steady state; ``None`` if there are no rates or no steps.
    """
    if plan.detail.layout is None or plan.detail.rates is None or not trace.steps:
        return None
    planned = plan.detail.layout
    layout = coarsen(with_recompute(planned, NOTHING))  # measured times include recomputation
    profile = Profile.from_trace(trace, plan.detail.accumulate)
    costs = Costs.from_profile(layout, plan.detail.rates, profile, shared=False)
    if (sizes := plan.detail.saved_bytes) is not None:
        inputs = inputs_of(layout, sizes)
        again = planned.saved.recompute
        kept = [inputs[i] if i in again else n for i, n in enumerate(sizes)]
        for i in planned.saved.keep_attention:
            unit = layout.units[i]
            kept[i] += sizes[i] * unit.attention_bytes // max(1, unit.activation_bytes)
        costs = costs.keeping(kept, inputs)
    return simulate(layout, costs, micro_steps=plan.detail.accumulate, update=plan.detail.update)
