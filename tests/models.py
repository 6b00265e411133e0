"""Small models and data for the tests, with the shapes that make offloading hard."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.devices import DEVICE

VOCABULARY = 500


class Block(nn.Module):
    """A residual block with a norm and two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TinyLM(nn.Module):
    """Embedding, like blocks, norm and head; takes tokens and targets, returns the loss.

    ``tied`` shares embedding and head, ``checkpointed`` recomputes blocks in backward (``"yes"``
    or ``"reentrant"``), ``twice`` runs the first block a second time, ``unused`` adds a block
    that never runs, ``position`` adds a parameter that the model itself owns.
    """

    def __init__(
        self, width: int = 64, depth: int = 4, *, tied: bool = False, checkpointed: str = "",
        twice: bool = False, unused: bool = False, position: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.spare = Block(width) if unused else None
        self.position = nn.Parameter(torch.zeros(width)) if position else None
        self.checkpointed, self.twice = checkpointed, twice

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.position is not None:
            x = x + self.position
        for block in [*self.blocks, *([self.blocks[0]] if self.twice else [])]:
            if self.checkpointed:
                reentrant = self.checkpointed == "reentrant"
                x = checkpoint(block, x, use_reentrant=reentrant)
            else:
                x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def batch(
    seed: int, rows: int = 2, length: int = 16, device: torch.device = DEVICE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, length + 1), generator=generator, device="cpu")
    ids = ids.to(device)
    return ids[:, :-1], ids[:, 1:]


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, micro_steps: int = 1,
    between: Callable[[], None] | None = None,
) -> list[float]:  # fmt: skip
    """A plain loop; returns the loss of every step's last micro-step."""
    losses = []
    there = next(model.parameters()).device  # which wrap may have changed
    for step in range(steps):
        for micro in range(micro_steps):
            loss = model(*(each.to(there) for each in batch(step * micro_steps + micro)))
            loss.backward()
        if between is not None:
            between()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adamw(model: nn.Module, lr: float = 3e-3) -> torch.optim.AdamW:
    """AdamW with two groups: matrices decay, vectors do not."""
    params = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=lr,
    )


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the state dict."""
    return {name: value.clone() for name, value in model.state_dict().items()}
