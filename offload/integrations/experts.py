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

import copy
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn
from transformers.integrations import moe

from ..config import parse_size
from ..engine import engine_of
from ..errors import ModelError
from ..params.param_handle import managed
from ..planning.sections import Sections, has_sections, split_in, stacks_of
from ..private import peft_private
from ..private.compile_private import not_compiled
from ..private.module_private import put_in_place, with_members
from ..private.torch_private import become
from .expert_products import eager, grouped, product, up_name
from .foresight import Foresight

NAME = "overspill"  # of the implementation, in transformers' registry
Arithmetic = Literal["eager", "grouped_mm"]
M = TypeVar("M", bound=nn.Module)
_ARITHMETIC: dict[str, Callable[..., torch.Tensor]] = {"eager": eager, "grouped_mm": grouped}
# What transformers has under names of its own: of a config, and of experts.
_CHOSEN, _SPREAD = "_experts_implementation_internal", "_is_expert_parallel"

# What ``generate`` makes of the one on a device, while it decodes.
_DECODING = "grouped_mm", "batched_mm"


class _Sectioned(NamedTuple):
    """What experts in sections know: the implementation whose bits they give, the config that they
    had, which others may have too, with the implementation it named, and their number in the order
    of the layers."""

    arithmetic: str
    config: Any
    before: str | None
    number: int
    foresight: Foresight
    order: tuple[str, ...]  # of its parameters


def split_experts(
    model: M, section: int | str = "64MiB", arithmetic: Arithmetic | None = None
) -> M:
    """Cuts the stacks of all experts in ``model`` into sections, in place; those of one layer at a
    time are in memory twice.  Before the optimizer is made, since sections are its parameters then.

    State dicts, ``save_pretrained`` and exports have whole stacks as before; the optimizer's state
    is by section.  A store is resumed with sections of the same size.

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
    _require_same_bits(found, chosen)
    foresight = Foresight([module.num_experts for module in found.values()])
    peft_private.prepare(managed, Sections)
    for number, (name, module) in enumerate(found.items()):
        order = tuple(each for each, _ in module.named_parameters(recurse=False))
        own = copy.copy(module.config)  # that of the model may be others' too
        mine = _Sectioned(
            chosen[name], module.config, getattr(own, _CHOSEN), number, foresight, order
        )
        setattr(own, _CHOSEN, NAME)
        stacks = {each: _in_sections(module, each, most) for each in _stacks(module)}
        module.sectioned, module.config = mine, own
        for each, sections in stacks.items():
            put_in_place(module, each, sections)
    for module in model.modules():
        if has_sections(module):
            module.register_load_state_dict_pre_hook(split_in)
    return model


def join_experts(model: M) -> M:
    """Makes whole stacks of all sections again, in place; of a model that is not wrapped.  A stack
    is trained if one of its sections is.

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
            whole = own.joined() if isinstance(own, Sections) else own
            delattr(module, name)
            module.register_parameter(name, whole)
        module.config = module.sectioned.config
        del module.sectioned
    return model


# -- what can be split ----------------------------------------------------------------------------


def _is_experts(module: nn.Module) -> bool:
    """Return whether transformers computes a module by the name of an experts implementation."""
    known = ("has_gate", "is_transposed", "has_bias", "num_experts", "config")
    return all(name in vars(module) for name in known) and bool(_stacks(module))


def _stacks(module: Any) -> list[str]:
    """The names of its stacks of matrices."""
    return [
        name for name in (up_name(module), "down_proj")
        if isinstance(stack := getattr(module, name, None), nn.Parameter)
        and stack.dim() == 3 and len(stack) == module.num_experts
    ]  # fmt: skip


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
    for path, wrapper in peft_private.wrappers(model):
        if wrapper.get_base_layer() in found.values() and wrapper.merged:
            raise ValueError(f"split_experts: the adapter {path} is merged; unmerge it first")
        if wrapper.get_base_layer() in found.values() and wrapper.num_experts == 1:
            raise ValueError(f"split_experts: {path} adapts a stack of one expert; leave it whole")
    for path, module in found.items():
        if not {"original_module", "modules_to_save"}.isdisjoint(path.split(".")):
            raise ValueError(
                f"split_experts: peft saves a copy of {path}; split the model before peft has it, "
                "or leave them out"
            )
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
    return chosen


def _require_same_bits(found: dict[str, Any], chosen: dict[str, str]) -> None:
    """Tries each kind of experts, in small: some compute otherwise than most.

    Raises:
        ValueError: sections would give other bits.
    """
    tried = {(type(module), chosen[name]): (name, module) for name, module in found.items()}
    for (kind, arithmetic), (name, module) in tried.items():
        try:
            with torch.inference_mode(False), torch.enable_grad():
                same = _same_bits(module, arithmetic)
        except Exception as error:
            raise ValueError(
                f"split_experts: {name} ({kind.__name__}) cannot be tried in small: {error}"
            ) from error
        if not same:
            others = " or ".join(repr(each) for each in _ARITHMETIC if each != arithmetic)
            raise ValueError(
                f"split_experts: {arithmetic!r} of {name} ({kind.__name__}) computes otherwise "
                f"than sections do; try arithmetic={others}"
            )


def _same_bits(module: Any, arithmetic: str) -> bool:
    """Whether a few experts of the same class, in sections of one, give the same output and
    gradients as they do by transformers' own code, on the CPU."""
    draw = torch.Generator("cpu").manual_seed(0)
    experts, inner, tokens = 4, 8, 6
    width = getattr(module, up_name(module)).shape[1 if module.is_transposed else 2]

    def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        made = torch.randn(shape, generator=draw, device="cpu").to(dtype)
        return made.requires_grad_()

    def shape_of(rows: int, columns: int) -> tuple[int, ...]:
        return (experts, columns, rows) if module.is_transposed else (experts, rows, columns)

    up = inner * (2 if module.has_gate else 1)
    stacks = {up_name(module): shape_of(up, width), "down_proj": shape_of(width, inner)}
    shapes = {
        **stacks,
        f"{up_name(module)}_bias": (experts, up),
        "down_proj_bias": (experts, width),
    }
    names = [name for name in shapes if name in dict(module.named_parameters(recurse=False))]
    values = {name: nn.Parameter(drawn(*shapes[name])) for name in names}
    hidden, weights = drawn(tokens, width), drawn(tokens, 2, dtype=torch.float32)
    index = torch.stack(
        [torch.randperm(3, generator=draw, device="cpu")[:2] for _ in range(tokens)]
    )
    inner_modules = {name: _on_cpu(each) for name, each in module.named_children()}
    found = []
    for in_sections in (False, True):
        tried: Any = with_members(module, inner_modules, values)
        tried.num_experts, tried.config = experts, copy.copy(module.config)
        setattr(tried.config, _CHOSEN, arithmetic)
        if in_sections:
            parts = {name: _in_sections(tried, name, 1) for name in stacks}
            for name, each in parts.items():
                for section in each:  # under empty_init() they would have no memory
                    rows = slice(section.first, section.experts.stop)
                    become(section.section, values[name].detach()[rows].clone())
                put_in_place(tried, name, each)
            out = _ARITHMETIC[arithmetic](tried, hidden, index, weights, lambda _: None)
            own = [p for each in parts.values() for p in each.parameters()]
        else:
            out = tried.forward(hidden, index, weights)  # without hooks of the user's
            own = [values[name] for name in stacks]
        grads = torch.autograd.grad(out.float().square().sum(), [hidden, weights, *own])
        count = len(own) // len(stacks)
        whole = [torch.cat(grads[2 + i * count : 2 + (i + 1) * count]) for i in range(len(stacks))]
        found.append([out, *grads[:2], *whole])
    return all(map(torch.equal, *found))


def _on_cpu(module: nn.Module) -> nn.Module:
    """A copy of a part of experts, with any weights if it has none."""
    made = copy.deepcopy(module)
    if not any(p.is_meta for p in made.parameters()):
        return made.to("cpu")
    made.to_empty(device="cpu")
    for p in made.parameters():
        nn.init.ones_(p)
    return made


def _in_sections(module: Any, name: str, most: int) -> Sections:
    stack = getattr(module, name)
    experts = max(1, most // max(1, stack[0].numel() * stack.element_size()))
    return Sections(stack, experts, _used_by_a_token(module.config), product)


def _used_by_a_token(config: Any) -> float:
    """How many experts each token goes to, about: configs may say so by layer."""
    for name in ("num_experts_per_tok", "top_k", "moe_topk", "top_k_experts"):
        used = getattr(config, name, None)
        if isinstance(used, (list, tuple)) and used:
            return float(sum(used) / len(used))
        if isinstance(used, int):
            return used
    return 1.0


# -- what is computed -----------------------------------------------------------------------------


@not_compiled
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
    mine: _Sectioned = experts.sectioned
    now = getattr(mine.config, _CHOSEN)
    if now != mine.before and (mine.before, now) != _DECODING:
        raise ModelError(
            f"split_experts was called for experts_implementation={mine.arithmetic!r}, and the "
            f"config now has {now!r}; call join_experts(model) before you change it"
        )
    compute = _ARITHMETIC[mine.arithmetic]
    return compute(experts, hidden_states, top_k_index, top_k_weights, partial(_announce, experts))


def _announce(experts: Any, chosen: Collection[int]) -> None:
    """Tells which experts are used now, and which the next layer is likely to use."""
    mine, announce = experts.sectioned, experts.down_proj.announce
    if announce is None:
        return
    guess: Collection[int] | None = mine.foresight.chose(mine.number, chosen)
    if torch.is_grad_enabled() and mine.number + 1 == mine.foresight.layers:
        guess = None  # backward comes to the first layer before the next forward does
    announce(experts, chosen, guess)


moe.ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)
