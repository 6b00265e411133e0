"""Visits: records of state in host memory that go to the device for their update, and come back.

A record takes the gradients and weights of its parameters along.  All three lie in one slot of
device memory; back come state and weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..facts.tier import Tier
from .layout import Layout
from .units import PAGE, Subgroup, align

SLOTS = 3  # one comes, one is updated, one goes


class Visit(NamedTuple):
    """Bytes of what one record takes along, in the order in which they lie in its slot."""

    state: int
    grads: int
    weights: int

    @property
    def grads_offset(self) -> int:
        return align(self.state, PAGE)

    @property
    def weights_offset(self) -> int:
        return self.grads_offset + align(self.grads, PAGE)

    @property
    def slot_bytes(self) -> int:
        return self.weights_offset + align(self.weights, PAGE)

    @property
    def in_bytes(self) -> int:
        return self.state + self.grads + self.weights

    @property
    def out_bytes(self) -> int:
        return self.state + self.weights


def visit_of(subgroup: Subgroup, dtype: torch.dtype, *, converts: bool) -> Visit:
    """What the record takes along; ``converts``: the host keeps its gradients in fp32."""
    grad_size = 4 if converts else dtype.itemsize
    return Visit(subgroup.nbytes, subgroup.count * grad_size, subgroup.count * dtype.itemsize)


def visit_in(layout: Layout, subgroup: Subgroup) -> Visit:
    """``visit_of`` for a subgroup of a layout."""
    dtype = layout.units[subgroup.unit].chunks[subgroup.chunk].dtype
    return visit_of(subgroup, dtype, converts=layout.converts[subgroup.unit])


def visitors(layout: Layout) -> frozenset[int]:
    """The records that are updated so: of the parameters whose state does not live on the device,
    about the share ``layout.visiting``, evenly spread, so that the CPU updates others meanwhile."""
    chosen: list[int] = []
    due = 0.0  # parameters, by which those chosen so far fall short
    for group, home in zip(layout.subgroups, layout.homes, strict=True):
        for subgroup, tier in zip(group, home.state, strict=True):
            if tier is Tier.DEVICE or not layout.visiting:
                continue
            due += layout.visiting * subgroup.count
            if due >= subgroup.count / 2:
                chosen.append(subgroup.index)
                due -= subgroup.count
    return frozenset(chosen)
