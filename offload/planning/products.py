"""Compute and activations of a unit per token, estimated from the shapes of its matrices."""

from __future__ import annotations

import math
import weakref
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
    factor: str = ""  # of an adapter: "lora_A" or "lora_B"

    @property
    def flops(self) -> float:
        """FLOPs per token."""
        return 2 * self.inputs * self.outputs * self.rows

    def kept(self, *, cast: bool) -> float:
        """Return the elements that autograd keeps per token: the input and the output.

        The factors of an adapter share the wide one with the matrix that they adapt, unless the
        input is ``cast`` to the dtype of the adapter.
        """
        if not self.factor or (self.factor == "lora_A" and cast):
            return (self.inputs + self.outputs) * self.rows
        return min(self.inputs, self.outputs) * self.rows


CONV1D = "Conv1D"  # a class of transformers: a linear layer with a transposed weight
# Layers that run in tiles: they keep only their input, and backward computes them again.
TILED = weakref.WeakSet[nn.Module]()

# By class, the extra tensors that activation functions written out in Python keep.
_KEPT_MORE = {
    "NewGELUActivation": 3, "AccurateGELUActivation": 3, "FastGELUActivation": 6,
    "QuickGELUActivation": 1,
}  # fmt: skip


def _factor(name: str) -> str:
    return next((part for part in name.split(".") if part in ("lora_A", "lora_B")), "")


def _products(found: FoundUnit) -> list[_Product]:
    """Return the products of a unit with its weights."""
    module = found.module
    if found.direct_only and not found.computes_with:
        return []
    if isinstance(module, Section):
        p = module.section
        return [_Product(p, p.shape[2], p.shape[1], module.rows_per_token)]
    return [
        _Product(p, math.prod(p.shape[1:]), p.shape[0], factor=_factor(name))
        for name, inner in module.named_modules()
        if not isinstance(inner, (nn.Embedding, nn.EmbeddingBag))
        for p in inner.parameters(recurse=False)
        if p.dim() > 1 and (not found.direct_only or p in found.computes_with)
    ]


# Attribute of a module: the FLOPs per token of its attention scores and of their product with the
# values, in forward, and the width of the result.  See ``set_sequence``.
_ATTENTION = "_overspill_attention"
# The products of a fused attention's backward, per product in forward: it computes the scores
# again, and four gradients instead of two results (FlashAttention-2, Dao 2023).
BACKWARD_ATTENTION = 2.5


def set_sequence(model: nn.Module, length: int) -> None:
    """Make plans of a model count causal attention over sequences of ``length`` tokens.

    A token attends to half of the sequence on average.
    """
    for module in model.modules():
        projections = dict(module.named_children())
        out = projections.get("o_proj", projections.get("c_proj"))
        if out is not None and {"q_proj", "c_attn"} & set(projections):
            width = next(p for p in out.parameters() if p.dim() == 2).shape
            inputs = width[1] if isinstance(out, nn.Linear) else width[0]
            module.__dict__[_ATTENTION] = 2 * 2 * inputs * length / 2, inputs


def attention(found: FoundUnit, dtype: torch.dtype | None) -> tuple[int, int]:
    """Return the FLOPs per token of a unit's attention, and the bytes of its result."""
    if found.direct_only:
        return 0, 0
    counted = [inner.__dict__[_ATTENTION] for inner in found.module.modules()
               if _ATTENTION in inner.__dict__]  # fmt: skip
    p = next(iter(found.module.parameters()), None)
    size = (dtype or (torch.float32 if p is None else p.dtype)).itemsize
    return round(sum(flops for flops, _ in counted)), sum(width for _, width in counted) * size


def forward_flops(found: FoundUnit) -> int:
    """Return the FLOPs of the unit's forward per token: two per element of each matrix product.

    Operations that are not products with a weight (look-ups, norms) do not count, nor do attention
    scores unless ``set_sequence`` was called.
    """
    return round(sum(each.flops for each in _products(found)) + attention(found, None)[0])


def backward_flops(found: FoundUnit, trained: Container[nn.Parameter], *, flows: bool) -> int:
    """Return the FLOPs of the unit's backward per token.

    Each trained matrix takes a product like the one in forward for its gradient.  Each matrix takes
    another one for the gradient of its input, if the gradient ``flows`` to earlier modules.
    """
    products, tiled = _products(found), _tiled(found)
    needed = flows or any(each.p in trained for each in products)
    scores = BACKWARD_ATTENTION * attention(found, None)[0] * needed
    again = sum(each.flops for each in products if each.p in tiled) * needed
    own = sum(each.flops * (flows + (each.p in trained)) for each in products)
    return round(own + scores + again)


def _tiled(found: FoundUnit) -> set[nn.Parameter]:
    """Return the parameters of the layers of a unit that run in tiles."""
    layers = (inner for inner in found.module.modules() if inner in TILED)
    return {p for layer in layers for p in layer.parameters()}


def activation_bytes(found: FoundUnit, dtype: torch.dtype | None) -> int:
    """Return about the bytes per token that autograd keeps: the input and output of each product.

    Tensors shared by two products count twice, and norms and attention internals do not count.  In
    transformers with fused attention, these errors about cancel.  Activation functions that are
    written out in Python keep more tensors of the widest product's size than fused ones (counted in
    transformers 5).  A layer that runs in tiles keeps its input.
    """
    tiled = _tiled(found)
    whole = _products(found)
    products = [each for each in whole if each.p not in tiled]
    adapted = next((each.p.dtype for each in products if not each.factor), torch.float32)

    def nbytes(each: _Product, elements: float) -> float:
        return elements * (dtype or each.p.dtype).itemsize

    modules = [] if found.direct_only else list(found.module.modules())
    layers = [inner for inner in modules if whole and inner in TILED]
    inside = {each for layer in layers for each in layer.modules()}
    written_out = sum(
        _KEPT_MORE.get(type(inner).__name__, 0)
        for inner in modules if inner not in inside
    )  # fmt: skip
    widest = max((nbytes(each, each.outputs * each.rows) for each in products), default=0)
    kept = sum(
        nbytes(each, each.kept(cast=dtype is None and each.p.dtype != adapted)) for each in products
    )
    for layer in layers:
        first = next(each for each in whole if each.p in set(layer.parameters()))
        kept += nbytes(first, min(first.inputs, first.outputs))
    return round(kept + written_out * widest)


def logits_bytes(found: FoundUnit, dtype: torch.dtype | None) -> int:
    """Return the bytes per token of a head's logits, and of the fp32 log-probabilities in the loss.

    0 if the module is not a head, and has none among what it computes with.
    """
    head = found.module
    for inner in head.modules():
        if isinstance(inner, nn.Linear) and inner.weight in found.computes_with:
            head = inner
    if not isinstance(head, nn.Linear) or head.out_features <= head.in_features:
        return 0
    return head.out_features * ((dtype or head.weight.dtype).itemsize + torch.float32.itemsize)


def input_bytes(found: FoundUnit, dtype: torch.dtype | None) -> int:
    """Return about the bytes per token of the unit's input: the input of its first product."""
    for each in _products(found):
        return round(each.inputs * each.rows * (dtype or each.p.dtype).itemsize)
    return 0
