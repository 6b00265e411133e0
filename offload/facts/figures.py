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
