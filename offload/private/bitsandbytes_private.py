"""Layers of bitsandbytes, whose quantised weights an engine moves as they are.

Their products keep the codes for backward where autograd's hooks do not see them, and an 8-bit
layer keeps a second reference to its codes.  Either would keep every layer on the device.  So the
products of managed weights keep what they need by ``save_for_backward``, and 8-bit layers get their
codes from the parameter.
"""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from typing import Any

import torch
from torch import nn

_NAME = "bitsandbytes"


def layers(model: nn.Module) -> list[Any]:
    """Return the 4- and 8-bit layers of a model whose weights are quantised already."""
    if _NAME not in sys.modules:
        return []
    theirs = importlib.import_module(f"{_NAME}.nn")
    found: list[Any] = []
    for module in model.modules():
        weight = getattr(module, "weight", None)
        four = isinstance(module, theirs.Linear4bit) and getattr(weight, "quant_state", None)
        eight = isinstance(module, theirs.Linear8bitLt) and not module.state.has_fp16_weights
        if four or (eight and weight is not None and weight.dtype == torch.int8):
            found.append(module)
    return found


def prepare(model: nn.Module, device: torch.device) -> None:
    """Prepare the layers of a model for weights that move, and move their scales to ``device``.

    Except for the scales it need not be undone: the layers compute the same afterwards.
    """
    found = layers(model)
    if found:
        _keep_codes_by_autograd()
    for module in found:
        if _quant_state(module) is not None:
            # It would replace the codes by those in another order, for AVX-512 with bf16.
            module.support_avx512bf16_for_cpu = False
            continue
        weight, state = module.weight, module.state
        state.CB = weight.CB = None
        # Its first forward would take the scales from the weight, where load_state_dict needs them.
        state.SCB = weight.SCB = state.SCB if weight.SCB is None else weight.SCB
    move_scales(model, device)


def move_scales(model: nn.Module, device: torch.device | None = None) -> None:
    """Move the scales of all layers to ``device``; ``None``: to where their weights are."""
    for module in layers(model):
        to = module.weight.device if device is None else device
        if to.type == "meta":
            continue
        if (state := _quant_state(module)) is not None:
            state.to(to)
        elif module.state.SCB is not None:
            module.state.SCB = module.weight.SCB = module.state.SCB.to(to)


def _quant_state(module: Any) -> Any:
    return getattr(module.weight, "quant_state", None)


@functools.cache
def _keep_codes_by_autograd() -> None:
    functions: Any = importlib.import_module(f"{_NAME}.autograd._functions")
    functions.MatMul4Bit = _four_bit(functions.MatMul4Bit)
    for name in ("MatMul8bitLt", "MatMul8bitFp"):
        setattr(functions, name, _eight_bit(getattr(functions, name)))


def _four_bit(product: Any) -> Any:
    """Return a 4-bit product that keeps its codes by ``save_for_backward``."""

    class MatMul4Bit(product):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, *args: Any, **more: Any) -> Any:
            result = product.forward(ctx, *args, **more)
            if not ctx.is_empty and ctx.tensors[1] is not None:
                ctx.save_for_backward(ctx.tensors[1])
                ctx.tensors = None
            return result

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            if not ctx.is_empty:
                ctx.tensors = (None, *(ctx.saved_tensors or (None,)))
            try:
                return product.backward(ctx, gradient)
            finally:
                ctx.tensors = None

    return MatMul4Bit


def _eight_bit(product: Any) -> Any:
    """Return an 8-bit product whose codes are those of the weight, if its state has none.

    A state has none if ``prepare`` has removed them.
    """

    class Product(product):  # type: ignore[misc]
        @staticmethod
        def forward(
            ctx: Any, given: torch.Tensor, weight: torch.Tensor, out: Any = None, bias: Any = None,
            state: Any = None,
        ) -> Any:  # fmt: skip
            from_weight = (
                state is not None and state.CB is None and state.SCB is not None
                and weight.dtype == torch.int8
            )  # fmt: skip
            if not from_weight:
                ctx.from_weight = False
                return product.forward(ctx, given, weight, out, bias, state)
            own = copy.copy(state)  # of this product alone; the layer's stays without codes
            own.CB = weight.detach()
            result = product.forward(ctx, given, weight, out, bias, own)
            own.CB = None
            ctx.from_weight = ctx.needs_input_grad[0] and not getattr(ctx, "is_empty", False)
            if ctx.from_weight:
                ctx.save_for_backward(weight.view(weight.shape))  # a tensor, not the parameter
            return result

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            if not ctx.from_weight:
                return product.backward(ctx, gradient)
            (ctx.state.CB,) = ctx.saved_tensors
            try:
                return product.backward(ctx, gradient)
            finally:
                ctx.state.CB = None

    Product.__name__ = Product.__qualname__ = product.__name__
    return Product
