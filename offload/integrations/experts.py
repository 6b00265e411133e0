"""Experts of transformers in sections, for layers that have no room on the device as a whole.

transformers holds the experts of a layer in stacks, one parameter each.  ``split_experts`` cuts
these into sections, before the optimizer is made::

    from overspill.integrations.experts import split_experts

    split_experts(model, "64MiB")
    optimizer = overspill.wrap(model, torch.optim.AdamW(model.parameters()), device_memory="8GiB")

Each section is a unit: it comes when the router has chosen one of its experts, and makes room for
the next one, in forward and in backward.  What is computed has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations import moe

from ..config import parse_size
from ..engine import engine_of
from ..planning.sections import Section, Sections, Stack, has_sections, split_in, stacks_of
from .foresight import Foresight

NAME = "overspill"  # of the implementation, in transformers' registry
Arithmetic = Literal["eager", "grouped_mm"]
M = TypeVar("M", bound=nn.Module)
# What transformers has under names of its own: of a config, of experts, and of the module ``moe``.
_CHOSEN, _SPREAD, _GATE = "_experts_implementation", "_is_expert_parallel", "_apply_gate"
_GROUPED = "_grouped_mm"


class _Sectioned(NamedTuple):
    """What experts in sections know: the implementation whose bits they give, that which they had
    ``before``, and their number in the order of the layers."""

    arithmetic: str
    before: str | None
    number: int
    foresight: Foresight
    order: tuple[str, ...]  # of its parameters


def split_experts(
    model: M, section: int | str = "64MiB", arithmetic: Arithmetic | None = None
) -> M:
    """Cuts the stacks of all experts in ``model`` into sections, in place; one stack at a time is
    in memory twice.  Before the optimizer is made, since sections are its parameters then.

    State dicts, ``save_pretrained`` and exports have whole stacks as before.  A store is resumed
    with sections of the same size.

    Args:
        section: the most bytes of one, if it has several experts: ``"64MiB"``, or a number.
        arithmetic: the implementation of transformers whose bits the experts give: ``"eager"`` or
            ``"grouped_mm"``; ``None``: the one that the model has.

    Returns:
        The model.

    Raises:
        ValueError: the model has no experts in stacks, they are in sections already, share a stack,
            or cannot be computed so; nothing was changed.
    """
    found = {name: module for name, module in model.named_modules() if _is_experts(module)}
    _require_splittable(model, found)
    most = parse_size(section, "section").nbytes
    if most is None:
        raise ValueError(f"section must be a number of bytes, got {section!r}")
    chosen = {name: _arithmetic_of(name, module, arithmetic) for name, module in found.items()}
    before = {name: getattr(module.config, _CHOSEN) for name, module in found.items()}  # one config
    foresight = Foresight([module.num_experts for module in found.values()])
    for number, (name, module) in enumerate(found.items()):
        order = tuple(each for each, _ in module.named_parameters(recurse=False))
        _split(module, most)
        module.sectioned = _Sectioned(chosen[name], before[name], number, foresight, order)
        setattr(module.config, _CHOSEN, NAME)
    for module in model.modules():
        if has_sections(module):
            module.register_load_state_dict_pre_hook(split_in)
    return model


def join_experts(model: M) -> M:
    """Makes whole stacks of all sections again, in place; of a model that is not wrapped.

    Raises:
        ValueError: the model is wrapped, or has no sections.
    """
    if engine_of(model) is not None:
        raise ValueError("the model is wrapped; overspill.unwrap(model) first")
    holders: list[Any] = [module for module in model.modules() if stacks_of(module)]
    if not holders:
        raise ValueError("the model has no experts in sections")
    for module in holders:
        for name in module.sectioned.order:  # optimizers count parameters
            own = getattr(module, name)
            delattr(module, name)
            module.register_parameter(name, own.joined() if isinstance(own, Sections) else own)
        setattr(module.config, _CHOSEN, module.sectioned.before)
        del module.sectioned
    return model


# -- what can be split ----------------------------------------------------------------------------


def _is_experts(module: nn.Module) -> bool:
    """Whether it is one of those that transformers computes by the name of an implementation."""
    known = ("has_gate", "is_transposed", "has_bias", "num_experts", "config")
    return all(hasattr(module, name) for name in known) and bool(_stacks(module))


def _stacks(module: Any) -> list[str]:
    """The names of its stacks of matrices."""
    return [
        name for name in (_up_name(module), "down_proj")
        if isinstance(stack := getattr(module, name, None), nn.Parameter)
        and stack.dim() == 3 and len(stack) == module.num_experts
    ]  # fmt: skip


def _up_name(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _require_splittable(model: nn.Module, found: dict[str, Any]) -> None:
    """
    Raises:
        ValueError: experts cannot be split.
    """
    if engine_of(model) is not None:
        raise ValueError("split_experts: the model is wrapped already; call it before wrap")
    if has_sections(model):
        raise ValueError("split_experts: the model's experts are in sections already")
    if not found:
        raise ValueError(
            f"split_experts: {type(model).__name__} has no experts in stacks, as transformers 5 "
            "has them"
        )
    names: dict[int, str] = {}
    for path, p in model.named_parameters(remove_duplicate=False):
        if id(p) in names and path.rpartition(".")[0] in found:
            raise ValueError(f"split_experts: {path} and {names[id(p)]} are the same parameter")
        names.setdefault(id(p), path)
    for path, module in found.items():
        if path.endswith("base_layer"):
            raise ValueError(f"split_experts: peft adapts the stacks of {path}; leave them out")
        if len(_stacks(module)) != 2:
            raise ValueError(f"split_experts: {path} has only one of its stacks as a parameter")
        if getattr(module, _SPREAD, False):
            raise ValueError(f"split_experts: the experts of {path} are spread over ranks")


def _arithmetic_of(name: str, module: Any, asked: str | None) -> str:
    """
    Raises:
        ValueError: there is no such implementation in sections.
    """
    chosen = asked or getattr(module.config, _CHOSEN) or "grouped_mm"
    if chosen == NAME:
        chosen = "grouped_mm"
    if chosen not in _ARITHMETIC:
        raise ValueError(
            f"split_experts: {name} computes by {chosen!r}; in sections there are "
            f"{' and '.join(map(repr, _ARITHMETIC))} (arithmetic=)"
        )
    if chosen == "eager" and module.has_post_expert_norm:
        raise ValueError(f"split_experts: {name} has a norm behind each expert; take 'grouped_mm'")
    return chosen


def _split(module: Any, most: int) -> None:
    config = module.config
    used = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k", None) or 1
    for name in _stacks(module):
        stack = getattr(module, name)
        experts = max(1, most // (stack[0].numel() * stack.element_size()))
        delattr(module, name)
        setattr(module, name, Sections(stack, experts, used, Stack(module, name)))


# -- what is computed -----------------------------------------------------------------------------


def _forward(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The implementation under ``NAME``.

    Args:
        hidden_states: (tokens, width).
        top_k_index: (tokens, experts of each), whole numbers.
        top_k_weights: what the output of each counts for, of the same shape.
    """
    if not stacks_of(experts):
        return moe.grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
    compute = _ARITHMETIC[experts.sectioned.arithmetic]
    return compute(experts, hidden_states, top_k_index, top_k_weights)


def _eager(
    experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """One expert after the other, each over its tokens in their order."""
    chosen, at = _by_expert(index)
    up, down = getattr(experts, _up_name(experts)), experts.down_proj
    _announce(experts, chosen)
    hidden = _with_untouched(hidden, chosen, (up, down))
    product = partial(_one_by_one, transposed=experts.is_transposed)
    made = _through(up, chosen, [hidden[token] for token, _ in at], product)
    if experts.has_bias:
        bias = getattr(experts, f"{_up_name(experts)}_bias")
        made = [each + bias[e] for e, each in zip(chosen, made, strict=True)]
    made = [_activated(experts, each) for each in made]
    made = _through(down, chosen, made, product)
    if experts.has_bias:
        made = [m + experts.down_proj_bias[e] for e, m in zip(chosen, made, strict=True)]
    out = torch.zeros_like(hidden)
    for each, (token, place) in zip(made, at, strict=True):
        out.index_add_(0, token, (each * weights[token, place, None]).to(out.dtype))
    return out


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


def _through(
    stack: Sections, chosen: Sequence[int], rows: Sequence[torch.Tensor],
    product: Callable[..., Sequence[torch.Tensor]],
) -> list[torch.Tensor]:  # fmt: skip
    """The rows of each expert times its matrix, section by section."""
    made: list[torch.Tensor] = []
    for section, mine in _used(stack, chosen):
        first = len(made)
        within = [expert - section.first for expert in mine]
        made += section(partial(product, within=within), *rows[first : first + len(mine)])
    return made


def _used(stack: Sections, chosen: Iterable[int]) -> Iterator[tuple[Section, list[int]]]:
    """The sections that have some of the experts ``chosen``, and which."""
    for section in stack:
        mine = [expert for expert in chosen if expert in section.experts]
        if mine:
            yield section, mine


def _one_by_one(
    matrices: torch.Tensor, *rows: torch.Tensor, within: Sequence[int], transposed: bool
) -> list[torch.Tensor]:
    if transposed:
        return [each @ matrices[e] for each, e in zip(rows, within, strict=True)]
    return [functional.linear(each, matrices[e]) for each, e in zip(rows, within, strict=True)]


def _grouped(
    experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Tokens sorted by expert, and one call for all experts of a section."""
    width, choices = hidden.shape[-1], index.shape[-1]
    expert_of, order = torch.sort(index.reshape(-1))
    counts: list[int] = torch.bincount(expert_of.cpu(), minlength=experts.num_experts).tolist()
    up, down = getattr(experts, _up_name(experts)), experts.down_proj
    chosen = [expert for expert, count in enumerate(counts) if count]
    _announce(experts, chosen)
    hidden = _with_untouched(hidden, chosen, (up, down))
    made = _through_rows(up, counts, hidden[order // choices], experts.is_transposed)
    if experts.has_bias:
        made = made.add_(getattr(experts, f"{_up_name(experts)}_bias")[expert_of])
    made = _activated(experts, made)
    made = _through_rows(down, counts, made, experts.is_transposed)
    if experts.has_bias:
        made = made.add_(experts.down_proj_bias[expert_of])
    if experts.has_post_expert_norm:
        made = experts.post_expert_norm(made)
    made = made * weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return made[back].view(-1, choices, width).sum(dim=1).to(hidden.dtype)


def _through_rows(
    stack: Sections, counts: Sequence[int], rows: torch.Tensor, transposed: bool
) -> torch.Tensor:
    """The rows, sorted by expert, times the matrix of each."""
    of_sections = [counts[s.first : s.experts.stop] for s in stack]
    pieces = rows.split([sum(each) for each in of_sections])
    made = []
    for section, each, piece in zip(stack, of_sections, pieces, strict=True):
        if len(piece):
            ends = torch.tensor(each, device="cpu").cumsum(0).to(rows.device, torch.int32)
            made.append(section(partial(_in_groups, transposed=transposed), piece, ends))
    return torch.cat(made) if made else rows.new_empty(0, stack.shape[2 if transposed else 1])


def _in_groups(
    matrices: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, *, transposed: bool
) -> torch.Tensor:
    multiply = getattr(moe, _GROUPED)  # it knows what torch's own cannot do where
    made: torch.Tensor = multiply(rows, matrices if transposed else matrices.mT, ends)
    return made


def _activated(experts: Any, rows: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = (getattr(experts, _GATE) if experts.has_gate else experts.act_fn)(rows)
    return made


_ARITHMETIC: dict[str, Callable[..., torch.Tensor]] = {"eager": _eager, "grouped_mm": _grouped}


# -- what is told beforehand ----------------------------------------------------------------------


def _announce(experts: Any, chosen: Collection[int]) -> None:
    """Tells which experts are used now, and which the next layer is likely to use."""
    mine: _Sectioned = experts.sectioned
    guess: Collection[int] | None = mine.foresight.chose(mine.number, chosen)
    if torch.is_grad_enabled() and mine.number + 1 == mine.foresight.layers:
        guess = None  # backward comes to the first layer before the next forward does
    announce = experts.down_proj.announce
    if announce is not None:
        announce(experts, chosen, guess)


# -- sections that no token has come to -----------------------------------------------------------


def _with_untouched(
    hidden: torch.Tensor, chosen: Iterable[int], stacks: Iterable[Sections]
) -> torch.Tensor:
    """``hidden``, in whose backward the sections without a chosen expert get a gradient of zeros:
    in a stack as a whole they have one, and an optimizer steps them."""
    if torch.is_grad_enabled():
        for stack in stacks:
            touched = {section for section, _ in _used(stack, chosen)}
            for section in stack:
                if section not in touched and section.section.requires_grad:
                    hidden = _Untouched.apply(hidden, section.section)
    return hidden


class _Untouched(torch.autograd.Function):
    """Gives a parameter zeros where backward comes by.  One at a time: what takes gradients away
    has taken them before the next are made."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        ctx.like = p.shape, p.dtype, p.device
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        shape, dtype, device = ctx.like
        return grad, torch.zeros(shape, dtype=dtype, device=device)


moe.ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)
