"""Choice of the units to recompute, made while training runs from what autograd keeps of each."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from statistics import median

from torch import nn

from ..errors import format_bytes
from ..facts.rates import Rates
from ..facts.tier import Tier
from ..movement.runtime import Runtime
from ..params.backward import Backward
from ..planning.choose import recomputing
from ..planning.costs import Costs, Profile
from ..planning.products import BACKWARD_ATTENTION
from ..planning.recompute_choice import NOTHING, Recomputed
from ..planning.save_timing import Burst, UnitForward, bursts_of
from .offloader import make_saved_offloader
from .recompute import Recompute

log = logging.getLogger("overspill")

LESS_ROOM = 0.75  # of the activations that stayed when memory ran out
MOST_ATTENTION = 0.9  # of the time of a unit: the first forward of a process is slow
_LATER = 2  # steps until a review: the first one is slower than the others
_MOST_LOOKS = 4  # reviews of the choice for one load, as long as it changes
_MORE = 1.1  # if so much more is kept, it is another load


class ActivationTuner:
    """The choice of units to recompute, adapted to the load under ``activations="auto"``.

    Attributes:
        saved_offloader: offloads what autograd saves, or ``None``.
        recompute: recomputes units, those chosen here or by the plan.
    """

    def __init__(self, runtime: Runtime, model: nn.Module, backward: Backward) -> None:
        accelerator, policy = runtime.accelerator, runtime.config.activations
        self._blueprint, self._trace = runtime.blueprint, runtime.trace
        self._memory, self._ledger = runtime.memory, runtime.ledger
        # Whether forwards run synchronously, so that their time is known.
        self._waits = accelerator.stream() is None
        self._saved_bytes: list[int] = []
        self._forwards: list[UnitForward] = []  # the last ones, if their time is known
        self._bursts: dict[tuple[int, int], tuple[Burst, ...]] = {}  # by FLOPs and bytes of a unit
        self._stale = False  # the choice was made for another load
        self._grown = 1.0  # factor by which that load is larger, if units are recomputed
        self._supposed = 0  # choices made with unmeasured sizes of units
        self._again = 0  # steps until the choice is reviewed, with measurements of its units
        self._looks = 0  # reviews left for this load
        self._most_room = runtime.layout.saved.compute  # bytes; less after ``make_room``
        self._unwatched = False  # the load has changed, and is not known by unit
        self._since = 0  # the last step before the current choice
        self._steps = 0  # steps under the current choice
        # Per micro-step: seconds of compute, and by unit the number of recomputed forwards.
        self._took: tuple[float, dict[int, float]] = 0.0, {}
        self._attention = [0.0] * len(self._blueprint.layout.units)  # its share of a forward
        self.saved_offloader = make_saved_offloader(runtime.executor, accelerator, model, backward)
        self.recompute = Recompute(
            runtime.parts, _planned(runtime), accelerator.device,
            watching=policy == "auto" and self.saved_offloader is not None,
            exclude=self._blueprint.head_units, saved_offloader=self.saved_offloader,
        )  # fmt: skip
        if self.recompute.watching:
            backward.when_begun(self._backward_begins)

    def _backward_begins(self) -> None:
        """Record what autograd keeps of a micro-step, which is complete when backward begins."""
        assert self.saved_offloader is not None
        sizes, grown = self.saved_offloader.unit_bytes(), self.recompute.grown
        self._forwards = self.saved_offloader.forwards() if self._waits else []
        if self.recompute.watching:
            self._saved_bytes, self._stale = self._whole(sizes), True
        elif not self.recompute.units:
            self._unwatched = sum(sizes) > _MORE * sum(self._saved_bytes)
        elif grown > 1.0:
            self._grown, self._stale = grown, True

    def _whole(self, sizes: list[int]) -> list[int]:
        """Return what each unit keeps if it is not recomputed.

        For a recomputed unit this is what the largest similar unit keeps that is not recomputed, or
        else the planned size. It is at least what the unit has kept all the same.
        """
        planned, again = self._blueprint.needs.saved_bytes, self.recompute.units
        if not again or planned is None:
            return sizes
        seen: dict[tuple[int, int], int] = {}
        pairs = list(zip(self._blueprint.layout.units, sizes, strict=True))
        for u, n in pairs:
            if n and u.index not in again:
                like = u.flops, u.input_bytes
                seen[like] = max(n, seen.get(like, 0))
        return [
            max(n, seen.get((u.flops, u.input_bytes), planned[u.index])) if u.index in again else n
            for u, n in pairs
        ]

    def stepped(self) -> None:
        """Choose again after a step, if the load has changed or a review is due."""
        self._steps += 1
        self.recompute.stepped()
        self._leave_workspace()
        self._again -= 1
        if self._unwatched:
            self._unwatched = False
            self.recompute.watch()
        elif self._stale or not self._again:
            if self._grown > 1.0:
                self._saved_bytes = [int(n * self._grown) for n in self._saved_bytes]
                self.recompute.grow()
                self._grown = 1.0
            supposed = bool(self.recompute.units) and self.recompute.watching
            changed = self._choose()
            if supposed and changed and self._supposed < _MOST_LOOKS:
                self._supposed += 1
                self.recompute.watch()  # to measure units that are not recomputed any more
            self._looks = _MOST_LOOKS if self._stale else self._looks - 1
            self._again = _LATER if self._looks and (changed or self._stale) else 0
            self._stale = False

    def adapted(self) -> tuple[Recomputed, Costs] | None:
        """Return the recomputed units, and the cost of a step that this choice is based on.

        ``None``: nothing is known of the load.
        """
        if not sum(self._saved_bytes) or (costs := self._costs()) is None:
            return None
        return self.recompute.chosen, costs

    def make_room(self) -> bool:
        """Keep fewer activations with compute from now on, after it has run out of memory.

        Returns whether that is possible.
        """
        saved_offloader, recompute = self.saved_offloader, self.recompute
        if saved_offloader is None:
            return False
        kept = sum(saved_offloader.unit_bytes()) or sum(self._saved_bytes)
        before, chosen = saved_offloader.room_bytes, recompute.chosen
        self._most_room = int(LESS_ROOM * min(before, kept or before))
        saved_offloader.room_bytes = self._most_room
        if self._blueprint.config.activations == "auto":
            if sum(self._saved_bytes):
                self._choose()
            else:  # not even one forward was measured
                able = recompute.known(self._blueprint.needs.recomputable)
                recompute.chosen, recompute.watching = Recomputed(able), False
        log.warning(
            "overspill: out of memory: from now on at most %s of activations stay with compute "
            "(before: %s), and %d of %d units are computed again (before: %d)",
            format_bytes(self._most_room), format_bytes(before), len(recompute.units),
            len(self._blueprint.layout.units), len(chosen.units),
        )  # fmt: skip
        return self._most_room < before or recompute.chosen != chosen

    def _leave_workspace(self) -> None:
        """Reduce the room for activations if running units need more workspace than was left free.

        Applies to ``device_memory="auto"`` only.
        """
        budgets, saved_offloader = self._blueprint.budgets, self.saved_offloader
        auto = self._blueprint.config.device_memory == "auto"
        if (
            saved_offloader is None
            or not auto
            or budgets.device is None
            or budgets.compute_bytes is None
        ):
            return
        needed = self._memory.stats()[Tier.DEVICE].workspace_bytes
        if needed is not None:
            over = max(0, needed - (budgets.compute_bytes - budgets.device))
            room = max(0, self._blueprint.layout.saved.compute - over)
            saved_offloader.room_bytes = min(room, self._most_room)

    def _choose(self) -> bool:
        """Choose the units to recompute, and return whether the choice has changed."""
        recompute, kept = self.recompute, sum(self._saved_bytes)
        layout, needs = self._blueprint.layout, self._blueprint.needs
        assert self.saved_offloader is not None
        room = self.saved_offloader.room_bytes
        chosen = NOTHING
        if kept > room and (costs := self._costs()) is not None:
            may = recompute.known(needs.recomputable)  # includes what was found while running
            here = replace(layout, saved=layout.saved._replace(compute=room))
            chosen = recomputing(here, costs, replace(needs, recomputable=may), recompute.chosen)
        recompute.watching = False
        recompute.keeps_below = min(1.0, room / max(kept, 1)) if chosen.units else 0.0
        changed = chosen != recompute.chosen
        if changed:
            recompute.chosen = chosen
            self._since, self._steps = self._ledger.count, 0
            recompute.computed.clear()
            log.info(
                "overspill: autograd keeps %s of a micro-step, %s may stay: %d of %d units are "
                "computed again, %d of them without their attention", format_bytes(kept),
                format_bytes(room), len(chosen.units), len(layout.units),
                len(chosen.keep_attention),
            )  # fmt: skip
        return changed

    def _costs(self) -> Costs | None:
        """Return the cost of a step, as far as it is known."""
        layout, rates = self._blueprint.layout, self._blueprint.config.rates
        if rates is None:
            return None
        inputs = self.recompute.input_bytes
        tokens = [n // u.input_bytes for n, u in zip(inputs, layout.units, strict=True)
                  if n and u.input_bytes]  # fmt: skip
        if self._waits and self._trace.steps:
            costs = Costs.balanced(layout, rates, *self._compute())
        elif tokens:
            costs = Costs.from_flops(layout, rates, int(median(tokens)))
        else:
            return None
        known = [given or size for given, size in zip(inputs, self._saved_bytes, strict=True)]
        costs = costs.keeping(self._saved_bytes, known, self._when_saved())
        return self._with_attention(costs, rates)

    def _with_attention(self, costs: Costs, rates: Rates) -> Costs:
        """Return costs with the attention of each unit, as far as it was measured."""
        meters = self.recompute.attention
        nbytes = [meter.nbytes for meter in meters]
        if self._waits:
            seconds = [
                min(meter.seconds, MOST_ATTENTION * whole)
                for meter, whole in zip(meters, costs.forward_s, strict=True)
            ]
            pairs = zip(seconds, costs.forward_s, strict=True)
            self._attention = [part / whole if whole else 0.0 for part, whole in pairs]
            return replace(costs, attention_s=seconds, attention_bytes=nbytes)
        flops_s = rates.device_flops_s or math.inf  # products with weights alone count so far
        seconds = [meter.flops / flops_s for meter in meters]
        forward = [a + b for a, b in zip(costs.forward_s, seconds, strict=True)]
        backward = [
            a + BACKWARD_ATTENTION * b for a, b in zip(costs.backward_s, seconds, strict=True)
        ]
        return replace(
            costs, forward_s=forward, backward_s=backward, attention_s=seconds,
            attention_bytes=nbytes,
        )  # fmt: skip

    def _when_saved(self) -> dict[int, tuple[Burst, ...]]:
        """Return when each unit saves what is kept of it.

        Units of one shape save at the same times. The last measurement of one that was not
        recomputed is used, because the first one of a process is slower.
        """
        shapes = {
            u.index: (u.flops, nbytes)
            for u, nbytes in zip(self._blueprint.layout.units, self._saved_bytes, strict=True)
        }
        forwards, self._forwards = self._forwards, []
        if forwards:
            stalls = self._trace.stalls(forwards[0].began_ns, forwards[-1].began_ns)
            found = bursts_of(forwards, [(s.started_ns, s.finished_ns) for s in stalls])
            for unit in sorted(found.keys() & shapes.keys() - self.recompute.units):
                self._bursts[shapes[unit]] = found[unit]
        return {u: self._bursts[shape] for u, shape in shapes.items() if shape in self._bursts}

    def _compute(self) -> tuple[float, dict[int, float]]:
        """Return the compute time of a micro-step, and its recomputed forwards by unit.

        They were measured under the current choice, or, before its first step, under the previous
        one.
        """
        micro_steps = self._blueprint.config.accumulate
        profile = Profile.from_trace(self._trace, micro_steps, after=self._since)
        if profile.compute_s:
            count = self._steps * micro_steps
            without = self.recompute.chosen.keep_attention
            again = {
                unit: (1.0 - self._attention[unit] * (unit in without)) * n / count
                for unit, n in self.recompute.computed.items()
            }
            self._took = profile.compute_s, again
        return self._took


def _planned(runtime: Runtime) -> Recomputed:
    """Return the units that the plan recomputes."""
    saved = runtime.layout.saved
    return Recomputed(saved.recompute, saved.keep_attention)
