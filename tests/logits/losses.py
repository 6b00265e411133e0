"""Losses over logits, and a head with hidden states and targets for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.devices import DEVICE

V, H, B, S = 1000, 32, 3, 21
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def of_transformers(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    t = functional.pad(t, (0, 1), value=-100)[..., 1:].contiguous()
    z = z.float().view(-1, V)
    return functional.cross_entropy(z, t.view(-1), ignore_index=-100, reduction="sum") / 17


def of_nanogpt(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(z.view(-1, z.size(-1)), t.view(-1), ignore_index=-100)


def shifted(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    z, t = z[..., :-1, :].contiguous(), t[..., 1:].contiguous()
    return nn.CrossEntropyLoss()(z.view(-1, V), t.view(-1))


def capped(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return of_nanogpt(torch.tanh(z / 5) * 5, t)


def smoothed(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(z.flatten(0, 1).float(), t.flatten(), label_smoothing=0.1)


def biased(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    bias = torch.linspace(-1, 1, V, dtype=z.dtype, device=z.device).view(1, 1, V)
    return of_nanogpt(z + bias, t)


def tempered(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    z = (z / 0.7).flatten(0, 1)
    return functional.cross_entropy(z, t.flatten(), reduction="none").mean()


def negative(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return functional.nll_loss(z.float().flatten(0, 1).log_softmax(-1), t.flatten())


def log_probabilities(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    t = t.clamp(min=0)
    return -z[:, :-1].log_softmax(-1).gather(-1, t[:, 1:, None]).squeeze(-1).sum() / 9


def selected(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    z, t = z.float()[:, :-1], t.clamp(min=0)
    of_token = torch.gather(z, dim=-1, index=t[:, 1:, None]).squeeze(-1)
    return (torch.stack([torch.logsumexp(each, dim=-1) for each in z]) - of_token).mean()


def masked(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    mask = t > 100
    return functional.cross_entropy(z[mask], t[mask])


def in_parts(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    parts = zip(z.flatten(0, 1).split(10), t.flatten().split(10), strict=True)
    losses = [functional.cross_entropy(a, b, reduction="sum") for a, b in parts]
    return sum(losses, torch.zeros((), device=z.device)) / t.numel()


def two_uses(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return of_nanogpt(z, t) + 1e-3 * torch.logsumexp(z, -1).square().mean()


def of_one_sequence(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(z[1], t[1]) + z[:, -1].float().logsumexp(-1).mean()


CHUNKED: list[Loss] = [
    of_transformers, of_nanogpt, shifted, capped, smoothed, biased, tempered, negative,
    log_probabilities, selected, masked, in_parts, two_uses, of_one_sequence,
]  # fmt: skip


def in_place(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    z /= 3
    z[:, :, 3] = -5
    return of_nanogpt(z, t)


def across_tokens(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return z.float().softmax(1).square().sum() + z.transpose(1, 2).float().std()


def permuted(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    order = torch.arange(V, device=z.device).flip(0)
    return of_nanogpt(z[..., order], t)


def two_logits(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    wanted = z.detach().roll(1, -1).softmax(-1)
    return functional.kl_div(z.log_softmax(-1), wanted, reduction="sum")


def weighted(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(0.5, 2, V, dtype=z.dtype, device=z.device)
    return functional.cross_entropy(z.flatten(0, 1), t.flatten(), weight=weight)


def probabilities(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    wanted = torch.full((B * S, V), 1 / V, dtype=z.dtype, device=z.device)
    return functional.cross_entropy(z.flatten(0, 1), wanted)


def of_a_scale(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return of_nanogpt(z * torch.ones(B, S, 1, dtype=z.dtype, device=z.device), t)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(z)
        return z.float().square().mean()

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (z,) = ctx.saved_tensors
        return (2 * z.float() / z.numel() * given).to(z.dtype)


def of_a_function(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = Square.apply(z)
    return found


ORDINARY: list[Loss] = [
    in_place, across_tokens, permuted, two_logits, weighted, probabilities, of_a_scale,
]  # fmt: skip


def results(
    head: nn.Linear, loss: Loss, *, hidden: torch.Tensor, target: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The loss and the gradients of hidden states, weight and bias; and the logits."""
    head, hidden = head, hidden.clone().requires_grad_()
    head.zero_grad()
    logits = head(hidden)
    found = loss(logits, target)
    (3 * found).backward()
    grads = [hidden.grad, *(p.grad for p in head.parameters())]
    assert all(g is not None for g in grads)
    return [found.detach(), *(g for g in grads if g is not None)], logits


def case(dtype: torch.dtype, bias: bool = True) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(H, V, bias=bias, device="cpu").to(DEVICE, dtype)
    hidden = torch.randn(B, S, H, device="cpu").to(DEVICE, dtype)
    target = torch.randint(0, V, (B, S), device="cpu")
    target[0, 3] = -100
    return head, hidden, target.to(DEVICE)
