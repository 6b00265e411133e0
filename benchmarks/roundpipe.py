"""The benchmark's Llama under RoundPipe, which needs a GPU.  Written against version 0.1.1.

As its own benchmark does: fp32 parameters for the optimizer in host memory, its CPU Adam, which
runs during the next step, so that a step computes with weights that are one update old.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .model import Llama, turns_of


class _Block(nn.Module):
    """A block with rotations of its own: layers pass one tensor."""

    def __init__(self, block: nn.Module, size: int) -> None:
        super().__init__()
        self.block, self.size = block, size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.block(x, turns_of(x, self.size))
        return made


def layers_of(model: Llama) -> nn.Sequential:
    """The model as layers, from tokens (batch, tokens) to logits."""
    blocks = (_Block(block, model.size) for block in model.blocks)
    return nn.Sequential(model.tokens, *blocks, nn.Sequential(model.norm, model.head))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Engine:
    """RoundPipe's model and optimizer; ``step`` does all three parts of a step."""

    def __init__(self, model: Llama, *, rate: float) -> None:
        from roundpipe import RoundPipe, RoundPipeRunConfig
        from roundpipe.optim import Adam

        self.model: Any = RoundPipe(
            layers_of(model), optim_dtype=torch.float32,
            model_run_config=RoundPipeRunConfig(num_microbatch=1),
        )  # fmt: skip
        self.optimizer = Adam(
            self.model.optim_parameters(), lr=rate, weight_decay=0.01, decoupled_weight_decay=True
        )

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens``: (batch, tokens + 1), int64, on the host."""
        loss: torch.Tensor = self.model.forward_backward(
            input_args=(tokens[:, :-1].contiguous(),), label=tokens[:, 1:].contiguous(),
            loss_fn=loss_of,
        )  # fmt: skip
        self.model.step(self._update)
        return loss

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
