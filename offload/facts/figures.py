"""The figures that a run reports: their names, and a line that explains each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Figure(NamedTuple):
    """The name of a figure, and what it means."""

    name: str
    meaning: str


FIGURES: Mapping[str, Figure] = {
    "loss": Figure("loss", "mean cross-entropy in nats per token, of the first and the last step"),
    "training": Figure("memory without offloading",
        "weights, gradients, masters and moments together, without activations"),
    "tokens": Figure("tokens per second", "tokens of a step over the step time"),
    "step": Figure("step time", "median of all steps but the first"),
    "bound": Figure("lower bound",
        "time of the busiest lane: compute, a copy direction, disk reads or writes, or updates; "
        "no schedule of the same work is faster"),
    "stalls": Figure("stalls", "time per step in which compute waited, by the lane it waited for"),
    "peak": Figure("peak memory", "the most that the engine held of a tier's budget"),
    "links": Figure("transfers per step", "bytes over each link"),
    "cpu": Figure("CPU time per step", "all threads together, in core-seconds"),
    "planned": Figure("planned step time", "as simulated, with the measured compute"),
    "process": Figure("process memory",
        "resident memory at its peak: Python, torch, activations and what the engine held"),
    "in_memory": Figure("in plain PyTorch", "the same steps with everything in memory"),
    "loss_difference": Figure("loss difference", "the largest, from plain PyTorch"),
    "weight_difference": Figure("weight difference",
        "root mean square of the difference after the last step, over that of the weights"),
}  # fmt: skip
