"""Layers of bitsandbytes, whose quantised weights an engine moves as they are.

Their products keep the codes for backward where autograd's hooks do not see them, and an 8-bit
layer keeps a second reference to its codes.  Either would keep every layer on the device.  So the
products of managed weights keep what they need by ``save_for_backward``, and 8-bit layers get their
codes from the parameter.  Layers also convert their biases for good; managed ones are converted for
each forward instead.  ``to`` returns another parameter even if nothing changes; managed ones stay.
"""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_NAME = "bitsandbytes"
_REORDER, _REORDERS = "support_avx512bf16_for_cpu", "_overspill_reorders"
IsManaged = Callable[[Any], object]


def layers(model: nn.Module) -> list[Any]:
    """Return the 4- and 8-bit layers and embeddings whose weights are quantised already."""
    if _NAME not in sys.modules:
        return []
    found = (module for module in model.modules() if _is_four_bit(module) or _is_eight_bit(module))
    return list(found)


def _is_four_bit(module: Any) -> bool:
    return getattr(getattr(module, "weight", None), "quant_state", None) is not None


def _is_eight_bit(module: Any) -> bool:
    weight: Any = getattr(module, "weight", None)
    theirs = type(weight).__module__.partition(".")[0] == _NAME
    return theirs and hasattr(weight, "SCB") and weight.dtype == torch.int8


def is_reordered(parameter: Any) -> bool:
    """Return whether the codes of a weight were reordered for AVX-512 with bf16."""
    state = getattr(parameter, "quant_state", None)
    return bool(getattr(state, "packing_format_for_cpu", False))


def prepare(model: nn.Module, device: torch.device, is_managed: IsManaged) -> None:
    """Prepare the layers of a model for weights that move, and move their scales to ``device``.

    ``give_back`` undoes it.
    """
    found = layers(model)
    if found:
        _keep_codes_by_autograd()
        _convert_biases_per_forward(is_managed)
        _keep_parameters(is_managed)
    for module in found:
        if _is_four_bit(module):
            # It would replace the codes by those in another order, for AVX-512 with bf16.
            module.__dict__.setdefault(_REORDERS, getattr(module, _REORDER, False))
            setattr(module, _REORDER, False)
            continue
        weight, state = module.weight, getattr(module, "state", None)
        weight.CB = None
        if state is not None:
            # Its first forward would take the scales from the weight, but load_state_dict needs
            # them there.
            weight.SCB = state.SCB if weight.SCB is None else weight.SCB
            state.CB, state.SCB = None, weight.SCB
    _move_scales(found, device)


def give_back(model: nn.Module) -> None:
    """Prepare the layers of a model for weights that are in memory again, as bitsandbytes does."""
    found = layers(model)
    for module in found:
        if _is_four_bit(module):
            if _REORDERS in vars(module):
                setattr(module, _REORDER, module.__dict__.pop(_REORDERS))
        elif not module.weight.is_meta:
            module.weight.CB = module.weight.data
    _move_scales(found, None)


def _move_scales(found: list[Any], device: torch.device | None) -> None:
    """Move the scales of layers to ``device``; ``None``: to where their weights are."""
    for module in found:
        to = module.weight.device if device is None else device
        if to.type == "meta":
            continue
        if _is_four_bit(module):
            module.weight.quant_state.to(to)
            continue
        if module.weight.SCB is not None:
            module.weight.SCB = module.weight.SCB.to(to)
        if getattr(module, "state", None) is not None:
            module.state.SCB = module.weight.SCB


@functools.cache
def _convert_biases_per_forward(is_managed: IsManaged) -> None:
    theirs: Any = importlib.import_module(f"{_NAME}.nn")
    for kind in (theirs.Linear4bit, theirs.Linear8bitLt):
        kind.forward = _with_own_bias(kind.forward, is_managed)


def _with_own_bias(forward: Callable[..., Any], is_managed: IsManaged) -> Callable[..., Any]:
    """Return a forward that finds a managed bias in the dtype of its product.

    The converted bias is an attribute of the layer, which Python finds before the parameter.
    """

    @functools.wraps(forward)
    def run(self: Any, x: torch.Tensor) -> Any:
        bias = self._parameters.get("bias")
        if bias is None or not is_managed(bias):
            return forward(self, x)
        if hasattr(self, "compute_type_is_set") and not self.compute_type_is_set:
            self.set_compute_type(x)
            self.compute_type_is_set = True
        self.__dict__["bias"] = bias.to(getattr(self, "compute_dtype", None) or x.dtype)
        try:
            return forward(self, x)
        finally:
            self.__dict__.pop("bias", None)

    return run


@functools.cache
def _keep_parameters(is_managed: IsManaged) -> None:
    """Let ``to`` return a managed weight itself if it is there, as for other tensors: DoRA of peft
    assigns the result to the layer."""
    theirs: Any = importlib.import_module(f"{_NAME}.nn")
    for kind in (theirs.Params4bit, theirs.Int8Params):
        kind.to = _unless_there(kind.to, is_managed)


def _unless_there(to: Callable[..., Any], is_managed: IsManaged) -> Callable[..., Any]:
    @functools.wraps(to)
    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_managed(self) and not kwargs and args == (self.device,):
            return self
        return to(self, *args, **kwargs)

    return moved


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
