"""Figures of a step: time, bound, and per lane bytes moved, busy time and stalls it caused; and
the names of a run's figures, each with a line that explains it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .trace import LANES, StepMark, Trace, length, union


@dataclass(frozen=True)
class LaneStats:
    """One lane during one step.  ``stall_s`` is how long compute waited for it."""

    bytes: int = 0
    busy_s: float = 0.0
    stall_s: float = 0.0


@dataclass(frozen=True)
class MemoryStats:
    """The engine's memory in one tier: its budget, the bytes held, and their peak.

    ``workspace_bytes``: the process's peak on a device beyond what the engine had within its
    budget, that is, what a unit needs while it runs.  ``None`` if it is not counted, or if more was
    allocated before ``wrap``.
    """

    budget_bytes: int
    held_bytes: int
    peak_bytes: int
    workspace_bytes: int | None = None


LEAST_OUTSIDE = 0.05  # of a step, to be shown
LEAST_WAIT = 0.15  # of a step, for advice to be given
_HELPS = {
    "read": "more host_memory, moments='int8' or a faster or additional disk in nvme=",
    "write": "more host_memory, moments='int8' or a faster or additional disk in nvme=",
    "copy_in": "more device_memory",
    "copy_out": "more device_memory",
    "update": "more CPU cores",
}


@dataclass(frozen=True)
class Stats:
    """The last step: measured ``step_s``, its lower bound ``bound_s``, and the lanes.

    ``tokens``: the number of input tokens, if nothing is trained and a step is one forward of the
    model.  ``cpu_s``: processor time of the whole process in this step, summed over all threads:
    two processors that are busy for a second make 2.  ``None`` if not counted.

    The bound is the busiest lane: no schedule of the same work on the same machine is faster than
    its slowest part.  If rates are known, a lane counts with its bytes over its rate (the slower of
    reads and writes at the rate of disks that do both at once), or with the time it was busy if it
    was faster than that.
    """

    step_s: float
    bound_s: float
    lanes: Mapping[str, LaneStats] = field(
        default_factory=lambda: dict.fromkeys(LANES, LaneStats())
    )
    tokens: int | None = None
    cpu_s: float | None = None

    @property
    def tokens_s(self) -> float | None:
        """Tokens per second; ``None`` where they are not counted."""
        return self.tokens / self.step_s if self.tokens is not None and self.step_s else None

    @property
    def over_bound(self) -> float | None:
        """Step time over its bound: 1 is perfect; ``None`` where nothing was done."""
        return self.step_s / self.bound_s if self.bound_s else None

    def per_step(self, steps: int) -> Stats:
        """Figures that were taken over ``steps`` of them, of one on average."""
        lanes = {
            name: LaneStats(lane.bytes // steps, lane.busy_s / steps, lane.stall_s / steps)
            for name, lane in self.lanes.items()
        }
        return Stats(self.step_s / steps, self.bound_s / steps, lanes)

    def explain(self) -> str:
        """One line: how far above the bound, which lanes compute waited for, and, if it is much,
        the time in which the model did not run: the loop's own, and that of ``step()``."""
        ratio = self.over_bound
        stalls = sorted(((lane.stall_s, name) for name, lane in self.lanes.items()), reverse=True)
        named = [f"{name} {seconds:.2g} s" for seconds, name in stalls if seconds > 0]
        above = "no bound known" if ratio is None else f"{ratio:.2f} times the bound"
        waited = f"{above}; compute waited for {', '.join(named) or 'nothing'}"
        outside_s = self.step_s - self.compute.busy_s - sum(seconds for seconds, _ in stalls)
        if outside_s <= LEAST_OUTSIDE * self.step_s:
            return waited
        return f"{waited}; {outside_s:.2g} s outside of the model's forward and backward"

    def advice(self) -> str | None:
        """Return what would help, if compute waits for other lanes for much of the step."""
        waits = {name: self.lanes[name].stall_s for name in _HELPS}
        if not self.step_s or sum(waits.values()) < LEAST_WAIT * self.step_s:
            return None
        most = max(waits, key=lambda name: waits[name])
        # Updates wait for their state: if their lane was hardly busy, it was the disks.
        disks = most == "update" and 2 * self.update.busy_s < waits[most]
        lane, helps = (f"{most}, with its disks", "read") if disks else (most, most)
        return (
            f"compute waits for other lanes in {sum(waits.values()) / self.step_s:.0%} of a step, "
            f"mostly for {lane}; weights and state move as often for a small micro-batch as for a "
            "large one: first try larger micro-batches (instead of accumulation), then "
            f"{_HELPS[helps]}"
        )

    @property
    def compute(self) -> LaneStats:
        return self.lanes["compute"]

    @property
    def copy_in(self) -> LaneStats:
        return self.lanes["copy_in"]

    @property
    def copy_out(self) -> LaneStats:
        return self.lanes["copy_out"]

    @property
    def read(self) -> LaneStats:
        return self.lanes["read"]

    @property
    def write(self) -> LaneStats:
        return self.lanes["write"]

    @property
    def update(self) -> LaneStats:
        return self.lanes["update"]


def step_stats(trace: Trace, mark: StepMark, seconds_at_rate: Mapping[str, float]) -> Stats:
    """The figures of one step.

    ``seconds_at_rate``: what lanes need for a step's bytes at the machine's rates; the other
    lanes count with the time they were busy.
    """
    spans = trace.spans(mark.started_ns, mark.finished_ns)
    stalls = trace.stalls(mark.started_ns, mark.finished_ns)
    lanes: dict[str, LaneStats] = {}
    for lane in LANES:
        mine = [s for s in spans if s.lane == lane]
        busy = length(union((s.started_ns, s.finished_ns) for s in mine))
        stall = sum(s.finished_ns - s.started_ns for s in stalls if s.lane == lane)
        lanes[lane] = LaneStats(sum(s.nbytes for s in mine), busy / 1e9, stall / 1e9)
    needed = [min(seconds_at_rate.get(lane, math.inf), lanes[lane].busy_s) for lane in LANES]
    step_s = (mark.finished_ns - mark.started_ns) / 1e9
    return Stats(step_s, min(step_s, max(needed)), lanes)


class Figure(NamedTuple):
    """The name of a figure, and what it means."""

    name: str
    meaning: str


FIGURES: Mapping[str, Figure] = {
    "loss": Figure("loss", "mean cross-entropy in nats per token, of the first and the last step"),
    "training": Figure("memory without offloading",
        "weights, gradients, masters and moments together, without activations"),
    "tokens": Figure("tokens per second", "tokens per step, divided by the step time"),
    "step": Figure("step time", "median of all steps but the first"),
    "bound": Figure("lower bound",
        "time of the busiest lane: compute, a copy direction, disk reads or writes, or updates; "
        "no schedule of the same work is faster"),
    "stalls": Figure("stalls", "time per step that compute waited, by the lane it waited for"),
    "peak": Figure("peak memory", "the most memory of a tier that the engine held, and its budget"),
    "links": Figure("transfers per step", "bytes read, written and copied, by direction"),
    "cpu": Figure("CPU time per step", "all threads together, in core-seconds"),
    "planned": Figure("planned step time", "what the simulator predicts from the measured compute"),
    "process": Figure("process memory",
        "resident memory at its peak: Python, torch, activations and what the engine held"),
    "in_memory": Figure("in plain PyTorch",
        "the same steps with everything in memory, and with fp32 masters if weights are bf16"),
    "loss_difference": Figure("loss difference", "the largest, from plain PyTorch"),
    "weight_difference": Figure("weight difference",
        "relative RMS difference of the weights after the last step"),
}  # fmt: skip
