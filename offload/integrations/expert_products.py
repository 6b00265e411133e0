"""What experts in sections compute, to the bits of transformers' implementations for whole stacks.

A section gets the rows of its experts and gives their products.  All else, such as the gate between
the two stacks, is computed over the same rows as without sections: bits may depend on where in a
tensor an element is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers.integrations import moe

from ..planning.sections import Section, Sections

# What transformers has under names of its own: of experts, and of the module ``moe``.
_GATE, _GROUPED = "_apply_gate", "_grouped_mm"
Chosen = Callable[[Collection[int]], None]  # told the experts that some row goes to


def up_name(experts: Any) -> str:
    """The name of the first of the two stacks."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def eager(
    experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, tell: Chosen
) -> torch.Tensor:
    """One expert after the other, each over its tokens in their order."""
    chosen, at = _by_expert(index)
    tell(chosen)
    up, down = getattr(experts, up_name(experts)), experts.down_proj
    made = _one_by_one(experts, up, chosen, [hidden[token] for token, _ in at])
    if experts.has_bias:
        bias = getattr(experts, f"{up_name(experts)}_bias")
        made = [each + bias[e] for e, each in zip(chosen, made, strict=True)]
    made = _one_by_one(experts, down, chosen, [_activated(experts, each) for each in made])
    if experts.has_bias:
        made = [each + experts.down_proj_bias[e] for e, each in zip(chosen, made, strict=True)]
    out = torch.zeros_like(hidden)
    for each, (token, place) in zip(made, at, strict=True):
        out.index_add_(0, token, (each * weights[token, place, None]).to(out.dtype))
    return _with_untouched(out, chosen, (up, down))


def _by_expert(index: torch.Tensor) -> tuple[list[int], list[tuple[torch.Tensor, torch.Tensor]]]:
    """The experts that were chosen, and for each its tokens, with the place among the choices of
    the token; sorted by place, then token."""
    places = index.detach().T.contiguous()
    chosen: list[int] = torch.unique(places.cpu()).tolist()
    found = []
    for expert in chosen:
        place, token = torch.where(places == expert)
        found.append((token, place))
    return chosen, found


def _one_by_one(
    experts: Any, stack: Sections, chosen: Sequence[int], rows: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The rows of each expert times its matrix, section by section."""
    made: list[torch.Tensor] = []
    for section, mine in _used(stack, chosen):
        first = len(made)
        within = tuple(expert - section.first for expert in mine)
        made += section(
            *rows[first : first + len(mine)], within=within, transposed=experts.is_transposed,
            added=stack.added_to(section),
        )  # fmt: skip
    return made


def _used(stack: Sections, chosen: Sequence[int]) -> Iterator[tuple[Section, Sequence[int]]]:
    """The sections that have some of the experts ``chosen``, in their order, and which."""
    at = 0
    for section in stack:
        first, at = at, bisect_left(chosen, section.experts.stop)
        if first < at:
            yield section, chosen[first:at]


def grouped(
    experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, tell: Chosen
) -> torch.Tensor:
    """Tokens sorted by expert, and one call for all experts of a section."""
    width, choices = hidden.shape[-1], index.shape[-1]
    expert_of, order = torch.sort(index.reshape(-1))
    counts: list[int] = torch.bincount(expert_of.cpu(), minlength=experts.num_experts).tolist()
    chosen = [expert for expert, count in enumerate(counts) if count]
    tell(chosen)
    up, down = getattr(experts, up_name(experts)), experts.down_proj
    ends = torch.tensor(counts, device="cpu").cumsum(0).to(hidden.device, torch.int32)
    made = _in_groups(experts, up, counts, ends, hidden[order // choices])
    if experts.has_bias:
        made = made.add_(getattr(experts, f"{up_name(experts)}_bias")[expert_of])
    made = _in_groups(experts, down, counts, ends, _activated(experts, made))
    if experts.has_bias:
        made = made.add_(experts.down_proj_bias[expert_of])
    if experts.has_post_expert_norm:
        made = experts.post_expert_norm(made)
    made = made * weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    out = made[back].view(-1, choices, width).sum(dim=1).to(hidden.dtype)
    return _with_untouched(out, chosen, (up, down))


def _in_groups(
    experts: Any, stack: Sections, counts: Sequence[int], ends: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """The rows, sorted by expert, times the matrix of each.  ``ends``: where the rows of each
    expert end, on the rows' device: nothing has to go there for a section."""
    sizes = [sum(counts[s.first : s.experts.stop]) for s in stack]
    made, transposed, before = [], experts.is_transposed, 0
    for section, piece in zip(stack, rows.split(sizes), strict=True):
        if len(piece):
            mine = ends[section.first : section.experts.stop] - before
            added = stack.added_to(section)
            made.append(section(piece, mine, within=None, transposed=transposed, added=added))
            before += len(piece)
    return torch.cat(made) if made else rows.new_empty(0, stack.shape[2 if transposed else 1])


def product(
    matrices: torch.Tensor, *rows: torch.Tensor, within: tuple[int, ...] | None, transposed: bool
) -> Any:
    """What a section gives: of the rows of each of its experts ``within``; or, without, of all rows
    at once, with where those of each of its experts end."""
    if within is None:
        multiply = getattr(moe, _GROUPED)  # it knows what torch's own cannot do where
        return multiply(rows[0], matrices if transposed else matrices.mT, rows[1])
    if transposed:
        return [each @ matrices[e] for each, e in zip(rows, within, strict=True)]
    return [functional.linear(each, matrices[e]) for each, e in zip(rows, within, strict=True)]


def _activated(experts: Any, rows: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = (getattr(experts, _GATE) if experts.has_gate else experts.act_fn)(rows)
    return made


def _with_untouched(
    out: torch.Tensor, chosen: Sequence[int], stacks: Iterable[Sections]
) -> torch.Tensor:
    """``out``, in whose backward the sections without a chosen expert get a gradient of zeros: in a
    stack as a whole they have one, and an optimizer steps them."""
    if torch.is_grad_enabled():
        for stack in stacks:
            touched = {section for section, _ in _used(stack, chosen)}
            for section in stack:
                if section not in touched and section.section.requires_grad:
                    out = _Untouched.apply(out, section.section)
    return out


class _Untouched(torch.autograd.Function):
    """Gives a parameter zero gradients in backward.

    One at a time: each is collected before the next is made.
    """

    @staticmethod
    def forward(out: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        p = inputs[1]
        ctx.like = p.shape, p.dtype, p.device

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        shape, dtype, device = ctx.like
        return grad, torch.zeros(shape, dtype=dtype, device=device)
