"""Initial values for parameters of models on ``meta``, and their initialisers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from ..errors import ModelError
from ..planning.models import by_model
from ..planning.partition import Partition
from ..planning.sections import Section, stacks_of
from ..planning.unit_discovery import FoundUnit
from ..private import module_private, torch_private
from ..schedule.units import ParamSpec


@contextlib.contextmanager
def empty_init() -> Iterator[None]:
    """Build models without memory for their parameters, which stay on ``meta`` until ``wrap``.

    Buffers are built as usual.  Example::

        with overspill.empty_init():
            model = LlamaForCausalLM(config)
        optimizer = overspill.wrap(model, AdamW(model.parameters()), weights=PATH)
    """
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            empty = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            empty.__dict__.update(param.__dict__)
            param = empty
        register(module, name, param)

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def default_init(model: nn.Module) -> Callable[[nn.Module], None]:
    """Return the initialiser of a meta model.

    It is the model's own ``_init_weights``, else each module's ``reset_parameters``.
    """
    own: Any = getattr(model, "_init_weights", None)

    def reset(module: nn.Module) -> None:
        if own is not None:
            own(module)
        elif hasattr(module, "reset_parameters"):
            cast(Any, module).reset_parameters()
        elif any(True for _ in module.parameters(recurse=False)):
            raise ModelError(
                f"{type(module).__name__} has parameters on meta and no reset_parameters; "
                "pass init=, a callable (module) -> None, or weights="
            )

    return reset


def initialiser(
    model: nn.Module, given: Callable[[nn.Module], None] | None
) -> Callable[[nn.Module], None]:
    """Return the function that initialises a module of a meta model, or of several models."""
    if given is not None:
        return on_whole_stacks(model, given)
    by_module: dict[nn.Module, Callable[[nn.Module], None]] = {}
    for each in by_model(model).values():
        by_module |= dict.fromkeys(each.modules(), on_whole_stacks(each, default_init(each)))
    return lambda module: by_module[module](module)


def on_whole_stacks(
    model: nn.Module, init: Callable[[nn.Module], None]
) -> Callable[[nn.Module], None]:
    """Adapt an initialiser that expects whole stacks of experts to a model with split stacks.

    A section is passed to it as the module that holds its stack, with the experts of this section
    and no other parameters.  The holder itself is passed with empty stacks.
    """
    where = {
        section: (holder, name)
        for holder in model.modules()
        for name, stack in stacks_of(holder).items()
        for section in stack
    }  # fmt: skip

    def shown(module: nn.Module) -> nn.Module:
        holder, stack = where[module] if isinstance(module, Section) else (module, None)
        stacks = stacks_of(holder)
        if not stacks:
            return module
        own = dict(module_private.own_parameters(holder))
        if stack is not None:
            own = {name: p if p is None else _none_of(p) for name, p in own.items()}
        own |= {name: _none_of(next(iter(each)).section) for name, each in stacks.items()}
        if isinstance(module, Section) and stack is not None:
            own[stack] = module.section
        others = {name: m for name, m in holder.named_children() if name not in stacks}
        return module_private.with_members(holder, others, own)

    return lambda module: init(shown(module))


def _none_of(p: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty((0, *p.shape[1:]), dtype=p.dtype, device="cpu"))


def initialise(
    found: FoundUnit, specs: Mapping[int, ParamSpec], parts: Partition,
    init: Callable[[nn.Module], None],
) -> dict[int, torch.Tensor]:  # fmt: skip
    """Allocate the meta parameters of one unit, initialise them, and return their values.

    Only their own memory is allocated; the caller stores the values and frees it.  Modules that
    share no parameter with them are not touched, because their weights may be elsewhere by now.
    """
    values: dict[int, torch.Tensor] = {}
    for index in specs:
        p = parts.parameters[index]
        _, _, shape, stride = specs[index].as_parameter(torch.float32)
        values[index] = torch.empty_strided(shape, stride, dtype=p.dtype, device="cpu")
        torch_private.become(p, values[index])
    mine = {id(parts.parameters[index]) for index in specs}
    modules = [found.module] if found.direct_only else list(reversed(list(found.module.modules())))
    for module in modules:  # a module comes after its submodules
        within = [id(p) in mine for p in module.parameters()]
        direct = [id(p) in mine for p in module.parameters(recurse=False)]
        if any(direct) or found.direct_only or (within and all(within)):
            init(module)
    return values
