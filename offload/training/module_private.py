"""Access to private attributes of ``nn.Module``: members, hooks, conversions, compiler marks."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def own_parameters(module: torch.nn.Module) -> Mapping[str, torch.nn.Parameter | None]:
    """The parameters that a module holds itself, by their names there; it follows changes."""
    return module._parameters


# ``_apply`` and ``__reduce_ex__`` are set by ``conversions`` and ``pickling``.
_OF_MODULES = frozenset(vars(torch.nn.Module())) | {"_apply", "__reduce_ex__"}


def set_apply(module: torch.nn.Module, apply: Callable[..., torch.nn.Module] | None) -> None:
    """Give a module an ``_apply`` of its own, through which all its conversions go; ``None``: the
    one of its class."""
    if apply is None:
        module.__dict__.pop("_apply", None)
    else:
        module.__dict__["_apply"] = apply


def apply_of_class(
    module: torch.nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool
) -> torch.nn.Module:
    """Convert a module as its class does."""
    found: torch.nn.Module = type(module)._apply(module, convert, recurse)
    return found


def with_members(
    module: torch.nn.Module, modules: Mapping[str, torch.nn.Module | None],
    parameters: Mapping[str, torch.nn.Parameter | None],
) -> torch.nn.Module:  # fmt: skip
    """A module like this one, that holds others."""
    made = copy.copy(module)
    made._modules, made._parameters = dict(modules), dict(parameters)
    return made


def put_in_place(module: torch.nn.Module, name: str, other: torch.nn.Module) -> None:
    """A module takes the place of a parameter of that name.  An exception between the lines leaves
    the parameter."""
    module._modules[name] = other
    del module._parameters[name]


def own_attributes(module: torch.nn.Module) -> Iterator[tuple[str, object]]:
    """What a module has beside what every module has (parameters, buffers, hooks, its mode)."""
    return ((name, value) for name, value in vars(module).items() if name not in _OF_MODULES)


def calls_as_modules_do(module: torch.nn.Module) -> bool:
    """Whether nothing but the engine runs around a module's forward: no ``__call__`` of its own, no
    hooks of others, on it or on all modules."""
    if type(module).__call__ is not torch.nn.Module.__call__:
        return False
    own = (module._forward_pre_hooks, module._forward_hooks)
    shared = torch.nn.modules.module
    if shared._global_forward_pre_hooks or shared._global_forward_hooks:
        return False
    return not any(map(_of_others, own))


def is_scripted(module: torch.nn.Module) -> bool:
    """Whether a part of a module runs in TorchScript, which asks no tensor's class."""
    return any(isinstance(each, torch.jit.ScriptModule) for each in module.modules())


def persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The module's own buffers that belong into a state dict."""
    skip = module._non_persistent_buffers_set
    return {n: b for n, b in module._buffers.items() if b is not None and n not in skip}


EXTRA = "_extra_state"  # torch's name for extra state in a state dict
_OWN_PACKAGE = __name__.partition(".")[0]


def adds_state(module: torch.nn.Module) -> bool:
    """Whether a module's state dict may have more than its own parameters and buffers."""
    kind, base = type(module), torch.nn.Module
    if kind._save_to_state_dict is not base._save_to_state_dict:
        return True
    if kind.get_extra_state is not base.get_extra_state:
        return True
    return bool(_of_others(module._state_dict_hooks))


@torch.no_grad()
def added_state(module: torch.nn.Module) -> dict[str, Any]:
    """What a module's state dict has beside parameters and buffers, as ``state_dict`` makes it, by
    name without a prefix."""
    metadata = {"version": module._version}
    found: dict[str, Any] = OrderedDict()
    found._metadata = OrderedDict({"": metadata})  # type: ignore[attr-defined]
    for hook in _of_others(module._state_dict_pre_hooks).values():
        hook(module, "", True)
    module._save_to_state_dict(found, "", True)
    for hook in _of_others(module._state_dict_hooks).values():
        made = hook(module, found, "", metadata)
        found = found if made is None else made
    own = {*module._parameters, *module._buffers}
    theirs = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}  # renamed ones
    return {n: v for n, v in found.items() if n not in own and id(v) not in theirs}


def load_added(module: torch.nn.Module, entries: Mapping[str, Any]) -> list[str]:
    """Have a module load such entries, as ``load_state_dict`` does but without the engine's hooks;
    return the names of those that it did not take.

    Raises:
        RuntimeError: it refuses them.
    """
    state, hooks = dict(entries), module._load_state_dict_pre_hooks
    metadata = {"version": module._version}
    unexpected, errors = list[str](), list[str]()
    module._load_state_dict_pre_hooks = _of_others(hooks)
    try:
        module._load_from_state_dict(state, "", metadata, True, [], unexpected, errors)
    finally:
        module._load_state_dict_pre_hooks = hooks
    if errors:
        raise RuntimeError(f"{type(module).__name__}: {'; '.join(errors)}")
    inner = [name for name in state if name.partition(".")[0] in module._modules]  # not reported
    return [name for name in (*unexpected, *inner) if name in entries]


_HOOKS = (
    "_forward_pre_hooks", "_forward_hooks", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


_OF_HOOKS = (
    "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)  # fmt: skip


def without_hooks(module: torch.nn.Module) -> dict[str, Any]:
    """A module's attributes, without the engine's hooks and conversions."""
    state = dict(vars(module))
    if _package_of(type(state.get("_apply"))) == _OWN_PACKAGE:
        del state["_apply"]
    gone: set[int] = set()
    for name in _HOOKS:
        kept = _of_others(state[name])
        gone.update(state[name].keys() - kept.keys())
        state[name] = kept
    for name in _OF_HOOKS:
        state[name] = type(state[name])(
            (number, value) for number, value in state[name].items() if number not in gone
        )
    return state


def _of_others(hooks: Mapping[int, Any]) -> OrderedDict[int, Any]:
    """Hooks that are not this package's."""
    return OrderedDict(
        (number, hook)
        for number, hook in hooks.items()
        if _package_of(getattr(hook, "hook", hook)) != _OWN_PACKAGE
    )


def _package_of(function: object) -> str:
    return str(getattr(function, "__module__", "")).partition(".")[0]


def with_buffers(module: torch.nn.Module, make: Callable[[torch.Tensor], object]) -> dict[str, Any]:
    """The attribute that holds a module's own buffers, with what ``make`` gives for each."""
    buffers = module._buffers.items()
    return {"_buffers": {n: None if b is None else make(b) for n, b in buffers}}


def buffer_names(module: torch.nn.Module) -> list[str]:
    """The names of a module's own buffers, those that are ``None`` included."""
    return list(module._buffers)


def has_compiled(module: torch.nn.Module) -> bool:
    """Whether a part of it, or all, was compiled: by ``torch.compile`` or its own ``compile``."""
    return any(
        hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None) is not None
        for each in module.modules()
    )


def is_persistent(module: torch.nn.Module, buffer: str) -> bool:
    """Whether ``state_dict`` has this buffer of the module's own."""
    return buffer not in module._non_persistent_buffers_set
