"""Compute and activations of a unit per token, estimated from the shapes of its matrices."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import NamedTuple

import torch
from torch import nn

from .sections import Section
from .unit_discovery import FoundUnit


class _Product(NamedTuple):
    """A product with a matrix of ``inputs`` x ``outputs``, or with several of this shape.

    ``rows`` is about the number of matrices that a token is multiplied by.
    """

    p: nn.Parameter
    inputs: int
    outputs: int
    rows: float = 1.0

    @property
    def flops(self) -> float:
        """FLOPs per token."""
        return 2 * self.inputs * self.outputs * self.rows


# By class, the extra tensors that activation functions written out in Python keep.
_KEPT_MORE = {
    "NewGELUActivation": 3, "AccurateGELUActivation": 3, "FastGELUActivation": 6,
    "QuickGELUActivation": 1,
}  # fmt: skip


def _products(found: FoundUnit) -> list[_Product]:
    """Return the products of a unit with its weights."""
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
    """Return the FLOPs of the unit's forward per token: two per element of each matrix product.

    Operations that are not products with a weight (look-ups, norms, attention scores) do not count.
    """
    return round(sum(each.flops for each in _products(found)))


def backward_flops(found: FoundUnit, trained: Container[nn.Parameter], *, flows: bool) -> int:
    """Return the FLOPs of the unit's backward per token.

    Each trained matrix takes a product like the one in forward for its gradient.  Each matrix takes
    another one for the gradient of its input, if the gradient ``flows`` to earlier modules.
    """
    return round(sum(each.flops * (flows + (each.p in trained)) for each in _products(found)))


def activation_bytes(found: FoundUnit, dtype: torch.dtype | None) -> int:
    """Return about the bytes per token that autograd keeps: the input and output of each product.

    Tensors shared by two products count twice, and norms and attention internals do not count.  In
    transformers with fused attention, these errors about cancel.  Activation functions that are
    written out in Python keep more tensors of the widest product's size than fused ones (counted in
    transformers 5).
    """
    products = _products(found)

    def nbytes(each: _Product, width: int) -> float:
        return width * each.rows * (dtype or each.p.dtype).itemsize

    written_out = sum(_KEPT_MORE.get(type(inner).__name__, 0) for inner in found.module.modules())
    more = written_out * max((nbytes(each, each.outputs) for each in products), default=0)
    return round(sum(nbytes(each, each.inputs + each.outputs) for each in products) + more)


def logits_bytes(found: FoundUnit, dtype: torch.dtype | None) -> int:
    """Return the bytes per token of a head's logits, and of the fp32 log-probabilities in the loss.

    0 if the module is not a head.
    """
    head = found.module
    if not isinstance(head, nn.Linear) or head.out_features <= head.in_features:
        return 0
    return head.out_features * ((dtype or head.weight.dtype).itemsize + torch.float32.itemsize)


def input_bytes(found: FoundUnit, dtype: torch.dtype | None) -> int:
    """Return about the bytes per token of the unit's input: the input of its first product."""
    for each in _products(found):
        return round(each.inputs * each.rows * (dtype or each.p.dtype).itemsize)
    return 0
