"""The model that every arm of the step suite trains: a GPT in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT, and of its batches in sequences and tokens."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    tokens: int

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.tokens


class Block(nn.Module):
    """Attention and feed-forward, each behind its norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: (batch, tokens, width)."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        x = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return x


class Gpt(nn.Module):
    """Returns the loss of predicting each token from those before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.tokens, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens``: (batch, tokens + 1), int64."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(inputs) + self.places(torch.arange(inputs.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        return functional.cross_entropy(logits, targets.flatten())


def batch_of(shape: Shape, step: int) -> torch.Tensor:
    """The tokens of one step, the same for every arm: pseudo-random runs that can be learned."""
    generator = torch.Generator().manual_seed(step)
    size = (shape.batch, 1)
    start = torch.randint(0, shape.vocabulary, size, generator=generator)
    stride = torch.randint(1, 8, size, generator=generator)
    return (start + stride * torch.arange(shape.tokens + 1)) % shape.vocabulary
