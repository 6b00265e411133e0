"""Checks for models and optimizers that cannot be wrapped, before anything is planned."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import nn

from .config import OffloadConfig
from .engine import engine_of
from .errors import LifecycleError, ModelError
from .movement.accelerators.make import Accelerator
from .optim.joint import JointOptimizer
from .optim.optimizer_base import moments_of
from .params.param_handle import managed
from .planning.models import named_models
from .planning.sections import Sections
from .private import bitsandbytes_private, peft_private, torch_private


def check_model(
    model: nn.Module, optimizer: torch.optim.Optimizer, precision: torch.dtype | None = None
) -> None:
    """Check that a model and its optimizer can be wrapped; ``precision``: dtype of the weights.

    Raises:
        OffloadError: the model is wrapped already, or has parameters of an unsupported kind.
        ValueError: the optimizer has parameters that are not the model's, or cannot be trained.
    """
    engine = engine_of(model)
    if engine is not None and engine.finished:
        raise LifecycleError(
            "the model was wrapped, and its engine is closed, with the weights; build the model "
            "again (overspill.unwrap(model) before close() keeps them)"
        )
    if engine is not None:
        raise LifecycleError("the model is wrapped already; call overspill.unwrap(model) first")
    check_modules(model)
    for name, p in model.named_parameters():
        _check_parameter(name, p)
    _refuse_overlaps(model)
    for name, module in model.named_modules():
        if any(map(torch_private.is_lazy, module.buffers(recurse=False))):
            raise ModelError(
                f"module {name!r} has buffers without a shape yet (a lazy module); run one forward "
                "of the model before wrap"
            )
    own = {id(p) for p in model.parameters()}
    in_groups = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) in in_groups:
            _check_trained(name, p, precision)
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) not in own:
                raise ValueError(
                    f"param group {number} holds a parameter of shape {tuple(p.shape)} that is "
                    "not in the model; build the optimizer from model.parameters(), or wrap all "
                    "models that it trains together: wrap({'a': a, 'b': b}, optimizer)"
                )


def check_sources(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: OffloadConfig
) -> None:
    """Check that none of several models would be used untrained with random weights.

    Raises:
        ModelError: a model is on meta, nothing in it is trained, and no files are given for it.
    """
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, each in named_models(model).items():
        given = config.weights is not None and (
            not isinstance(config.weights, Mapping) or name in config.weights
        )
        params = list(each.parameters())
        if given or config.init is not None or not params:
            continue
        if all(p.is_meta and id(p) not in trained for p in params):
            raise ModelError(
                f"model {name!r} is on meta, is not trained, and has no files, so its weights "
                f"would be random; name its files, weights={{{name!r}: PATH, ...}}, or pass init="
            )


def check_modules(model: nn.Module) -> None:
    """Check that all modules of a model are of a supported kind.

    Raises:
        OffloadError: a module is wrapped already, or is of a kind that is not supported.
    """
    for name, module in model.named_modules():
        if engine_of(module) is not None:
            raise LifecycleError(f"module {name!r} is wrapped already; unwrap it first")
        kind = type(module).__name__
        if kind in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"):
            raise ModelError(
                f"{kind} is not supported inside of a model: overspill trains models under "
                "fully_shard (FSDP2), and models inside of DistributedDataParallel"
            )
    _check_adapted(model)
    for name, wrapper in peft_private.wrappers(model):
        found = peft_private.adapted(wrapper)
        if not isinstance(found, Sections) and found.requires_grad:
            raise ModelError(
                f"module {name!r}: peft's target_parameters adapts {wrapper.parameter_name!r}, "
                "which is trained itself; freeze it, or leave it out"
            )


def _check_adapted(model: nn.Module) -> None:
    """Check that adapters are not missing from stacks of experts that were split before."""
    configs = getattr(model, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        targets = getattr(config, "target_parameters", None) or ()
        found = peft_private.missed(model, targets, Sections)
        if found is not None and not any(True for _ in peft_private.wrappers(model)):
            raise ModelError(
                f"{found} was split into sections before the adapters were added, and peft has not "
                "found it; call get_peft_model before split_experts"
            )


_TRAINED = (torch.float32, torch.bfloat16, torch.float16, torch.complex64)


def _check_parameter(name: str, p: nn.Parameter) -> None:
    if managed(p) is not None:
        raise LifecycleError(
            f"parameter {name!r} belongs to another wrapped model; unwrap that one first"
        )
    if torch_private.is_lazy(p):
        raise ModelError(
            f"parameter {name!r} has no shape yet (a lazy module); run one forward of the model "
            "before wrap"
        )
    if torch_private.is_wrapper(p):
        kinds = f"{type(p).__name__} of {type(p.data).__name__}"
        raise ModelError(
            f"parameter {name!r} is no plain tensor ({kinds}): models that are sharded (FSDP2, "
            "DTensor) or quantised are not supported; wrap the plain model, on one device"
        )
    if p.layout is not torch.strided or p.is_nested or p.is_quantized:
        kind = "quantised" if p.is_quantized else "nested" if p.is_nested else str(p.layout)
        raise ModelError(
            f"parameter {name!r} is a {kind} tensor; overspill holds dense tensors only: replace "
            "it by a dense one (p.to_dense(), p.dequantize()) before wrap"
        )


def _check_trained(name: str, p: nn.Parameter, precision: torch.dtype | None) -> None:
    """Check a parameter that the optimizer is to update.

    Raises:
        OffloadError: several of its elements share one memory location.
        ValueError: weights of its dtype cannot be trained.
    """
    if torch_private.overlaps_itself(p):
        raise ModelError(
            f"several elements of parameter {name!r} share memory (an expanded tensor, strides "
            f"{tuple(p.stride())}), so an optimizer cannot update it in place; make it contiguous, "
            "or train the tensor that it was expanded from"
        )
    dtype = p.dtype if precision is None or p.is_complex() else precision
    if dtype not in _TRAINED:
        remedy = (
            "convert it to torch.complex64" if p.is_complex()
            else "pass precision='fp32', 'bf16' or 'fp16'"
        )  # fmt: skip
        raise ValueError(
            f"parameter {name!r} is {p.dtype}, which cannot be trained; {remedy}, or freeze it "
            "(requires_grad_(False))"
        )


def _refuse_overlaps(model: nn.Module) -> None:
    """Raise if two parameters overlap in memory: the engine would separate them silently."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, p in model.named_parameters():
        if p.is_meta or not p.numel():
            continue
        start = int(p.storage_offset()) * p.element_size()
        last = sum((n - 1) * int(step) for n, step in zip(p.shape, p.stride(), strict=True))
        span = (start, start + (last + 1) * p.element_size(), name)
        spans.setdefault(torch_private.storage_key(p), []).append(span)
    for found in spans.values():
        found.sort()
        for (_, end, one), (start, _, other) in pairwise(found):
            if start < end:
                raise ModelError(
                    f"parameters {one!r} and {other!r} lie over the same memory (tied by .data); "
                    "tie them as one parameter: module.weight = other.weight"
                )


def check_devices(model: nn.Module, accelerator: Accelerator) -> None:
    device = accelerator.device
    allowed = {"cpu", "meta", device.type}
    there = "" if device.type == "cpu" else f" or to {device}"
    for name, p in model.named_parameters():
        if p.device.type not in allowed:
            raise ValueError(
                f"parameter {name!r} is on {p.device}; move the model to the CPU{there} before wrap"
            )


def check_packed(model: nn.Module, accelerator: Accelerator, precision: torch.dtype | None) -> None:
    """Check that weights of bitsandbytes layers are quantised, and stay as they are.

    Raises:
        OffloadError: they are not quantised yet, or their codes are stored as floating-point
            numbers that ``precision`` would convert.
    """
    device = accelerator.device
    for name, p in model.named_parameters():
        theirs = type(p).__module__.partition(".")[0] == "bitsandbytes"
        if not theirs or getattr(p, "has_fp16_weights", False):
            continue
        what = f"parameter {name!r} ({type(p).__name__})"
        if bitsandbytes_private.is_reordered(p):
            raise ModelError(
                f"{what} has codes in an order for CPUs with AVX-512 BF16, which the first forward "
                "in eval mode sets; load the model again, and wrap it before its first forward"
            )
        if not p.is_floating_point():
            continue
        if getattr(p, "quant_state", None) is not None:
            if precision not in (None, p.dtype):
                raise ModelError(
                    f"{what} stores its codes as {p.dtype}, which precision= would convert; load "
                    "the model with bnb_4bit_quant_storage=torch.uint8, or leave precision out"
                )
        else:
            raise ModelError(
                f"{what} is not quantised yet: its class does that when it is moved to a device; "
                f"call model.to({str(device)!r}) before wrap, or load the model unquantised and "
                "pass frozen='nf4'"
            )


def check_moments(optimizer: torch.optim.Optimizer, config: OffloadConfig) -> None:
    if isinstance(optimizer, JointOptimizer):
        for each in optimizer.optimizers:
            check_moments(each, config)
        return
    own = moments_of(optimizer)
    if own not in ("fp32", config.moments):
        raise ValueError(
            f"the optimizer stores its moments as {own!r}, but wrap was told {config.moments!r}; "
            f"pass moments={own!r} to wrap, or leave it out of the optimizer"
        )
