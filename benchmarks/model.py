"""The models that every training arm trains, in plain PyTorch: a GPT, a Llama, LoRA over them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, and of its batches in sequences and tokens.

    ``kv_heads`` and ``inner``, the width of the feed-forward layer, make it a Llama; ``recompute``
    keeps no more of a block for the backward pass than its input; ``on_cpu`` is torch's
    ``save_on_cpu``.  ``chunked``: head and loss in chunks, by torch's own op.  ``lora_rank``: of
    LoRA beside every matrix of the blocks; nothing else is trained then.  ``own_mlp``: a GPT's
    feed-forward layers are modules of their own.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    tokens: int
    kv_heads: int = 0
    inner: int = 0
    recompute: bool = False
    on_cpu: bool = False
    chunked: bool = False
    lora_rank: int = 0
    own_mlp: bool = False

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.tokens


class FeedForward(nn.Module):
    """Two matrices with GELU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: (..., width)."""
        made: torch.Tensor = self.down(functional.gelu(self.up(x)))
        return made


class Block(nn.Module):
    """Attention and feed-forward, each behind its norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp: FeedForward | None = None
        if shape.own_mlp:
            self.mlp = FeedForward(width)
        else:
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: (batch, tokens, width)."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        seen = self.norm2(x)
        if self.mlp is not None:
            return x + self.mlp(seen)
        return x + self.down(functional.gelu(self.up(seen)))


def _table(rows: int, width: int) -> nn.Embedding:
    """Its values are drawn only where it has memory: on ``meta`` that loads torch's compiler."""
    values = torch.empty(rows, width)
    if not values.is_meta:
        nn.init.normal_(values)
    return nn.Embedding.from_pretrained(values, freeze=False)


class Gpt(nn.Module):
    """Returns the loss of predicting each token from those before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.recompute, self.on_cpu = shape.recompute, shape.on_cpu
        self.chunked = shape.chunked
        self.tokens = _table(shape.vocabulary, shape.width)
        self.places = _table(shape.tokens, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens``: (batch, tokens + 1), int64."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(inputs) + self.places(torch.arange(inputs.shape[1], device=tokens.device))
        with torch.autograd.graph.save_on_cpu() if self.on_cpu else nullcontext():
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return _loss(self.head, self.norm(x), targets, chunked=self.chunked)


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotated places, and a gated feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.size = shape.width, shape.width // shape.heads
        kv = shape.kv_heads * self.size
        self.norm1, self.norm2 = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.q, self.k, self.v, self.out = (
            nn.Linear(*sizes, bias=False)
            for sizes in ((width, width), (width, kv), (width, kv), (width, width))
        )
        self.gate, self.up = (nn.Linear(width, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, width, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """``x``: (batch, tokens, width); ``turns``: cosines and sines (2, tokens, head size)."""
        batch, tokens, width = x.shape
        seen = self.norm1(x)
        q, k, v = (
            project(seen).view(batch, tokens, -1, self.size).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(
            _turned(q, turns), _turned(k, turns), v, is_causal=True, enable_gqa=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        seen = self.norm2(x)
        return x + self.down(functional.silu(self.gate(seen)) * self.up(seen))


class Llama(nn.Module):
    """Returns the loss of predicting each token from those before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.recompute, self.chunked = shape.recompute, shape.chunked
        self.size = shape.width // shape.heads
        self.tokens = _table(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, 1e-5)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens``: (batch, tokens + 1), int64."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(inputs)
        turns = turns_of(x, self.size)
        for block in self.blocks:
            x = (
                checkpoint(block, x, turns, use_reentrant=False)
                if self.recompute
                else block(x, turns)
            )
        return _loss(self.head, self.norm(x), targets, chunked=self.chunked)


def turns_of(x: torch.Tensor, size: int) -> torch.Tensor:
    """Cosines and sines, (2, tokens, size), that turn heads of ``size`` of x (batch, tokens, _)."""
    half = torch.arange(0, size, 2, device=x.device) / size
    angles = torch.outer(torch.arange(x.shape[1], device=x.device), 1e4**-half)
    return torch.stack((angles.cos(), angles.sin())).repeat(1, 1, 2).to(x.dtype)


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Pairs of ``x`` (batch, heads, tokens, size), halves apart, turned by their places."""
    first, second = x.chunk(2, -1)
    return x * turns[0] + torch.cat((-second, first), -1) * turns[1]


def _loss(
    head: nn.Linear, x: torch.Tensor, targets: torch.Tensor, *, chunked: bool
) -> torch.Tensor:
    if not chunked:
        return functional.cross_entropy(head(x).flatten(0, 1).float(), targets.flatten())
    loss: torch.Tensor = functional.linear_cross_entropy(
        x.flatten(0, 1), head.weight, targets.flatten(), options=nn.LinearCrossEntropyOptions()
    )
    return loss


class Lora(nn.Module):
    """A matrix that is not trained, and a product of two thin ones beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: (..., inputs)."""
        made: torch.Tensor = self.base(x) + self.up(self.down(x))
        return made


def _add_lora(model: Gpt | Llama, rank: int) -> None:
    model.requires_grad_(False)
    for block in model.blocks:
        for name, part in list(block.named_children()):
            if isinstance(part, nn.Linear):
                setattr(block, name, Lora(part, rank))


def build(shape: Shape, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model without memory; ``fill`` gives each module's parameters their first values."""
    with torch.device("meta"):
        model = Llama(shape) if shape.inner else Gpt(shape)
        if shape.lora_rank:
            _add_lora(model, shape.lora_rank)
        model.to(dtype)
    for number, module in enumerate(model.modules()):
        module.__dict__["seed"] = number
    return model


@torch.no_grad()
def fill(module: nn.Module) -> None:
    """First values of the parameters that are the module's own: the same in every arm, whichever
    part comes first and wherever it lies."""
    device = "cuda" if torch.cuda.is_available() else "cpu"  # as arms differ in where they build
    for p in module.parameters(recurse=False):
        if p.ndim == 1:
            p.fill_(float(not isinstance(module, nn.Linear) and p is module.weight))
            continue
        generator = torch.Generator(device).manual_seed(module.__dict__["seed"])
        values = torch.empty(p.shape, device=device).normal_(0.0, 0.02, generator=generator)
        p.copy_(values)


def batch_of(shape: Shape, step: int) -> torch.Tensor:
    """The tokens of one step, the same for every arm: pseudo-random runs that can be learned."""
    generator = torch.Generator().manual_seed(step)
    size = (shape.batch, 1)
    start = torch.randint(0, shape.vocabulary, size, generator=generator, device="cpu")
    stride = torch.randint(1, 8, size, generator=generator, device="cpu")
    steps = torch.arange(shape.tokens + 1, device="cpu")
    return (start + stride * steps) % shape.vocabulary
