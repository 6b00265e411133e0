"""What a unit computes and what autograd keeps of it, per token, by the shapes of its matrices."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import NamedTuple

import torch
from torch import nn

from .sections import Section
from .unit_discovery import FoundUnit


class _Product(NamedTuple):
    """What a unit multiplies by: a matrix of ``inputs`` and ``outputs``, or several alike, of which
    a token comes to so many as ``rows`` says, about."""

    p: nn.Parameter
    inputs: int
    outputs: int
    rows: float = 1.0

    @property
    def flops(self) -> float:
        """Per token."""
        return 2 * self.inputs * self.outputs * self.rows


_KEPT_MORE = {
    "NewGELUActivation": 3, "AccurateGELUActivation": 3, "FastGELUActivation": 6,
    "QuickGELUActivation": 1,
}  # fmt: skip


def _products(found: FoundUnit) -> list[_Product]:
    """The products that a unit takes with its weights."""
    module = found.module
    if found.direct_only:
        return []
    if isinstance(module, Section):
        p = module.section
        return [_Product(p, p.shape[2], p.shape[1], module.rows_per_token)]
    return [
        _Product(p, math.prod(p.shape[1:]), p.shape[0])
        for inner in module.modules()
        if not isinstance(inner, (nn.Embedding, nn.EmbeddingBag))
        for p in inner.parameters(recurse=False)
        if p.dim() > 1
    ]


def forward_flops(found: FoundUnit) -> int:
    """FLOPs of the unit's forward per token: two per element of each matrix it multiplies by.

    What takes no product with a weight (look-ups, norms, attention's scores) is not counted.
    """
    return round(sum(each.flops for each in _products(found)))


def backward_flops(found: FoundUnit, trained: Container[nn.Parameter], *, flows: bool) -> int:
    """FLOPs of its backward, per token: a product like forward's for the gradient of each matrix
    that is trained, and one to hand on the gradient, where it ``flows`` to what is before."""
    return round(sum(each.flops * (flows + (each.p in trained)) for each in _products(found)))


def activation_bytes(found: FoundUnit, dtype: torch.dtype | None) -> int:
    """Bytes per token that autograd keeps, about: what goes into and comes out of each matrix.

    What two of them share counts twice, norms and attention's own not at all; in transformers with
    fused attention the one makes up for the other.  Activation functions that are written out keep
    more tensors of the widest product's size than fused ones (counted in transformers 5).
    """
    products = _products(found)

    def nbytes(each: _Product, width: int) -> float:
        return width * each.rows * (dtype or each.p.dtype).itemsize

    written_out = sum(_KEPT_MORE.get(type(inner).__name__, 0) for inner in found.module.modules())
    more = written_out * max((nbytes(each, each.outputs) for each in products), default=0)
    return round(sum(nbytes(each, each.inputs + each.outputs) for each in products) + more)


def logits_bytes(found: FoundUnit, dtype: torch.dtype | None) -> int:
    """Bytes per token of what a head gives out, and of the loss over it: its fp32 logarithms."""
    head = found.module
    if not isinstance(head, nn.Linear) or head.out_features <= head.in_features:
        return 0
    return head.out_features * ((dtype or head.weight.dtype).itemsize + torch.float32.itemsize)


def input_bytes(found: FoundUnit, dtype: torch.dtype | None) -> int:
    """Bytes per token that go into the unit, about: what its first matrix takes."""
    for each in _products(found):
        return round(each.inputs * each.rows * (dtype or each.p.dtype).itemsize)
    return 0
