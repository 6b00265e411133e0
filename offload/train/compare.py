"""The same training without offloading: plain PyTorch, everything in the device's memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..optim import split_master
from .loop import StepRecord


@dataclass(frozen=True)
class Comparison:
    """The in-memory run beside the offloaded one.

    Attributes:
        records: the in-memory steps.
        loss_difference: largest difference of the loss over all steps.
        weight_difference: largest difference of any weight at the end.
    """

    records: tuple[StepRecord, ...]
    loss_difference: float
    weight_difference: float


class InMemoryAdamW:
    """``torch.optim.AdamW``; low-precision weights get fp32 masters, as in the offloaded run.

    bf16 weights follow their masters by the engine's own rounding, so that a difference between
    the two runs is one of arithmetic and not of formats.
    """

    def __init__(self, params: list[nn.Parameter], masters: list[torch.Tensor], lr: float) -> None:
        """``masters``: exact fp32 values of ``params``, which take their rounded values here."""
        self._params = params
        self._masters = [
            p if p.dtype == torch.float32 else nn.Parameter(m.clone())
            for p, m in zip(params, masters, strict=True)
        ]
        with torch.no_grad():
            for p, m in zip(params, masters, strict=True):
                p.copy_(rounded(m, p.dtype))
        self._inner = torch.optim.AdamW(self._masters, lr=lr)

    @torch.no_grad()
    def step(self) -> None:
        """Updates every parameter that has a gradient."""
        for p, m in zip(self._params, self._masters, strict=True):
            if m is not p:
                m.grad = None if p.grad is None else p.grad.float()
        self._inner.step()
        for p, m in zip(self._params, self._masters, strict=True):
            if m is not p and p.grad is not None:
                p.copy_(rounded(m, p.dtype))

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for p, m in zip(self._params, self._masters, strict=True):
            p.grad = m.grad = None


def rounded(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight of type ``dtype`` that belongs to an fp32 master."""
    if dtype != torch.bfloat16:
        return master.detach().to(dtype)
    flat = master.detach().contiguous().reshape(-1)
    return split_master(flat.cpu())[0].to(master.device).reshape(master.shape)


def load_in_memory(
    model: nn.Module, initial: Path, dtypes: dict[str, torch.dtype], device: torch.device, lr: float
) -> InMemoryAdamW:
    """Fills a meta ``model`` from the file ``initial`` of exact values, and makes its optimizer.

    ``dtypes``: by name, the type of each parameter in the offloaded run.
    """
    from safetensors import safe_open

    params, masters = [], []
    with safe_open(str(initial), framework="pt", device="cpu") as file:
        buffers = dict(model.named_buffers())
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            if name in buffers:
                buffers[name].copy_(file.get_tensor(name))
        for name, p in model.named_parameters():
            value = file.get_tensor(name).to(device)
            # A meta parameter takes no data of another device; its payload can be swapped.
            full = nn.Parameter(value.to(dtypes[name], copy=True), requires_grad=p.requires_grad)
            torch.utils.swap_tensors(p, full)
            if p.requires_grad:
                params.append(p)
                masters.append(value)
    model.to(device)
    return InMemoryAdamW(params, masters, lr)


def weight_difference(model: nn.Module, path: Path) -> float:
    """Largest difference between a model's weights and those in a safetensors file."""
    from safetensors import safe_open

    largest = 0.0
    with safe_open(str(path), framework="pt", device="cpu") as file:
        for name, p in model.named_parameters():
            other: Any = file.get_tensor(name)
            difference = (p.detach().cpu().float() - other.float()).abs().max()
            largest = max(largest, float(difference))
    return largest
