"""Visits: state records from host memory that are copied to the device for their update, and back.

The record is copied with the gradients and weights of its parameters, all three into one slot of
device memory.  State and weights are copied back.
"""

# Note [Device updates of matrices]
# Optimizers such as Muon, SOAP and Shampoo compute products of whole matrices.  On a CPU these can
# take longer than the whole step; a device computes them in a fraction of the time that their
# record takes on the link.  So records with many products (``Subgroup.matrix``) are updated on
# the device whenever it has room for a slot and for the temporaries of the update.  For other
# records, the CPU is often as fast as the link, and the planner simulates which share is worth it.

from __future__ import annotations

from typing import NamedTuple

import torch

from ..facts.tier import Tier
from .layout import Layout
from .units import PAGE, Subgroup, align

SLOTS = 3  # one is copied in, one updated, one copied out
# FLOPs per element above which a record is a matrix.  A visit moves about 16 bytes per element,
# so that a CPU of 0.5 TFLOP/s and a link of 16 GB/s take the same time.
MATRIX_FLOPS = 512


class Visit(NamedTuple):
    """The bytes of one record's state, gradients and weights, in their order in the slot."""

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
    """Return the sizes of a subgroup's visit.

    Args:
        dtype: of its weights.
        converts: whether the host keeps its gradients in fp32.
    """
    grad_size = 4 if converts else dtype.itemsize
    return Visit(subgroup.nbytes, subgroup.count * grad_size, subgroup.count * dtype.itemsize)


def visit_in(layout: Layout, subgroup: Subgroup) -> Visit:
    """Return ``visit_of`` for a subgroup of a layout."""
    dtype = layout.units[subgroup.unit].chunks[subgroup.chunk].dtype
    return visit_of(subgroup, dtype, converts=layout.converts[subgroup.unit])


def visitors(layout: Layout) -> frozenset[int]:
    """Return the records that are copied to the device for their update.

    These are the matrices (see ``Subgroup``) if ``layout.matrices_visit``.  Others have about the
    share ``layout.visiting`` of the parameters whose state does not live on the device, apart from
    parameters that are updated as a whole.  They are evenly spread, so that the CPU updates other
    records meanwhile.
    """
    chosen: list[int] = []
    due = 0.0  # parameters still to choose to reach the share so far
    for group, home in zip(layout.subgroups, layout.homes, strict=True):
        for subgroup, tier in zip(group, home.state, strict=True):
            if tier is Tier.DEVICE or not (layout.visiting or layout.matrices_visit):
                continue
            if subgroup.moved_bytes:  # of a whole parameter
                if layout.matrices_visit and subgroup.matrix:
                    chosen.append(subgroup.index)
                continue
            due += layout.visiting * subgroup.count
            if due >= subgroup.count / 2:
                chosen.append(subgroup.index)
                due -= subgroup.count
    return frozenset(chosen)
