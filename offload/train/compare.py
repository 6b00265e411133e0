"""The same training without offloading: plain PyTorch, everything in the device's memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..optim.formats import split_master
from .training_loop import StepRecord


@dataclass(frozen=True)
class Comparison:
    """The in-memory run beside the offloaded one.

    Attributes:
        records: the in-memory steps.
        loss_difference: largest difference of the loss over all steps.
        weight_difference: of the weights at the end, relative, as root mean squares.
    """

    records: tuple[StepRecord, ...]
    loss_difference: float
    weight_difference: float


def load_in_memory(
    model: nn.Module, initial: Path, dtypes: Mapping[str, torch.dtype], device: torch.device
) -> dict[nn.Parameter, torch.Tensor]:
    """Fills a meta ``model`` from the file ``initial`` of exact values, and moves it to ``device``.

    ``dtypes``: by name, the type of each parameter in the offloaded run.  Returns the exact fp32
    values by trained parameter.
    """
    from safetensors import safe_open

    masters: dict[nn.Parameter, torch.Tensor] = {}
    with safe_open(str(initial), framework="pt", device="cpu") as file:
        buffers = dict(model.named_buffers())
        for name in set(file.keys()) & set(buffers):
            buffers[name].copy_(file.get_tensor(name))
        for name, p in model.named_parameters():
            exact = file.get_tensor(name).to(device)
            value = rounded(exact, dtypes[name]).clone()
            # A meta parameter takes no data of another device; its payload can be swapped.
            torch.utils.swap_tensors(p, nn.Parameter(value, requires_grad=p.requires_grad))
            if p.requires_grad:
                masters[p] = exact
    model.to(device)
    return masters


def in_memory_adamw(masters: Mapping[nn.Parameter, torch.Tensor], lr: float) -> torch.optim.AdamW:
    """``torch.optim.AdamW``, with fp32 masters where the weights are of a smaller type.

    Gradients add up in their masters, and weights follow their masters by the engine's own
    rounding, so that a difference between the two runs is one of arithmetic and not of formats.
    """
    pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
    trained: list[nn.Parameter] = []
    for p, exact in masters.items():
        if p.dtype == torch.float32:
            trained.append(p)
            continue
        master = nn.Parameter(exact.float())
        pairs.append((p, master))
        trained.append(master)
        p.register_post_accumulate_grad_hook(_into(master))
    optimizer = torch.optim.AdamW(trained, lr=lr)

    def follow(*_: Any) -> None:
        with torch.no_grad():
            for p, master in pairs:
                p.copy_(rounded(master, p.dtype))

    optimizer.register_step_post_hook(follow)
    return optimizer


def _into(master: nn.Parameter) -> Any:
    def move(p: torch.Tensor) -> None:
        assert p.grad is not None
        grad = p.grad.float()
        master.grad = grad if master.grad is None else master.grad + grad
        p.grad = None

    return move


def rounded(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight of type ``dtype`` that belongs to an fp32 master."""
    if dtype != torch.bfloat16 or master.dtype != torch.float32:
        return master.detach().to(dtype)
    flat = master.detach().contiguous().reshape(-1)
    return split_master(flat.cpu())[0].to(master.device).reshape(master.shape)


def weight_difference(model: nn.Module, path: Path) -> float:
    """Return the relative difference of a model's weights from those in a safetensors file.

    This is the root of the summed squared differences over that of the squared weights.

    The largest difference would say little: where a gradient is zero except for rounding (the bias
    of attention keys), AdamW makes full steps in the direction of the noise.
    """
    from safetensors import safe_open

    differences = sizes = 0.0
    with safe_open(str(path), framework="pt", device="cpu") as file:
        for name, p in model.named_parameters():
            mine, other = p.detach().cpu().double(), file.get_tensor(name).double()
            differences += float((mine - other).square().sum())
            sizes += float(other.square().sum())
    return math.sqrt(differences / sizes) if sizes else math.sqrt(differences)
