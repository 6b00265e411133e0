"""Access to private attributes of ``nn.Module``: members, hooks, conversions, compiler marks."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def own_parameters(module: torch.nn.Module) -> Mapping[str, torch.nn.Parameter | None]:
    """Return a live mapping of the parameters that a module holds itself, by name."""
    return module._parameters


def put_parameter(module: torch.nn.Module, name: str, p: torch.nn.Parameter) -> None:
    """Give a module another parameter of a name that it has, without asking anyone's hooks."""
    module._parameters[name] = p


# ``_apply`` and ``__reduce_ex__`` are set by ``conversions`` and ``pickling``.
_OF_MODULES = frozenset(vars(torch.nn.Module())) | {"_apply", "__reduce_ex__"}
_FSDP = "torch.distributed.fsdp._fully_shard."
_COMPOSED = "__composable_api_state_key_"  # of attributes of ``fully_shard`` and its like


def set_apply(module: torch.nn.Module, apply: Callable[..., torch.nn.Module] | None) -> None:
    """Give a module its own ``_apply``, which all conversions call; ``None``: its class's."""
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
    """Return a copy of a module that holds other modules and parameters."""
    made = copy.copy(module)
    made._modules, made._parameters = dict(modules), dict(parameters)
    return made


def put_in_place(module: torch.nn.Module, name: str, other: torch.nn.Module) -> None:
    """Replace a parameter by a module of the same name.

    If an exception comes between the two lines, attribute access still finds the parameter.
    """
    module._modules[name] = other
    del module._parameters[name]


def own_attributes(module: torch.nn.Module) -> Iterator[tuple[str, object]]:
    """Return the attributes of a module that not every module has.

    Parameters, buffers, hooks, the mode and the state of ``fully_shard`` are left out.
    """
    return (
        (name, value) for name, value in vars(module).items()
        if name not in _OF_MODULES and not name.startswith(_COMPOSED)
    )  # fmt: skip


def own_classes(module: torch.nn.Module) -> list[type]:
    """Return the class of a module and its bases, without the class that ``fully_shard`` makes."""
    made, *classes = type(module).__mro__
    if not any(map(_is_of_fsdp, classes)):
        return [made, *classes]
    return [cls for cls in classes if not _is_of_fsdp(cls)]


def _is_of_fsdp(cls: type) -> bool:
    """Return whether a class is ``FSDPModule``, which need not be imported."""
    return (cls.__module__, cls.__name__) == ("torch.distributed.fsdp", "FSDPModule")


def is_sharded(module: torch.nn.Module) -> bool:
    """Return whether a module was given to ``fully_shard``."""
    return type(module) is not own_classes(module)[0]


def calls_as_modules_do(module: torch.nn.Module) -> bool:
    """Return whether only the engine and FSDP2 run code around a module's forward.

    The module has no ``__call__`` of its own, and no other hooks, neither itself nor on all
    modules.
    """
    if type(module).__call__ is not torch.nn.Module.__call__:
        return False
    own = (module._forward_pre_hooks, module._forward_hooks)
    shared = torch.nn.modules.module
    if shared._global_forward_pre_hooks or shared._global_forward_hooks:
        return False
    others = (hook for hooks in map(_of_others, own) for hook in hooks.values())
    return all(str(getattr(hook, "__module__", "")).startswith(_FSDP) for hook in others)


def is_scripted(module: torch.nn.Module) -> bool:
    """Return whether a part of a module runs in TorchScript, which ignores tensor subclasses."""
    return any(isinstance(each, torch.jit.ScriptModule) for each in module.modules())


def persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the module's own buffers that belong in a state dict."""
    skip = module._non_persistent_buffers_set
    return {n: b for n, b in module._buffers.items() if b is not None and n not in skip}


EXTRA = "_extra_state"  # torch's name for extra state in a state dict
_OWN_PACKAGE = __name__.partition(".")[0]


def adds_state(module: torch.nn.Module) -> bool:
    """Return whether a module's state dict may hold more than its own parameters and buffers."""
    kind, base = type(module), torch.nn.Module
    if kind._save_to_state_dict is not base._save_to_state_dict:
        return True
    if kind.get_extra_state is not base.get_extra_state:
        return True
    return bool(_of_others(module._state_dict_hooks))


@torch.no_grad()
def added_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return what a module's state dict holds besides parameters and buffers, by unprefixed name.

    The entries are as ``state_dict`` makes them.
    """
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
    theirs = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}  # renamed tensors
    return {n: v for n, v in found.items() if n not in own and id(v) not in theirs}


def load_added(module: torch.nn.Module, entries: Mapping[str, Any]) -> list[str]:
    """Load entries that ``added_state`` returned; return the names of those not taken.

    Works like ``load_state_dict``, but without the engine's hooks.

    Raises:
        RuntimeError: the module refuses them.
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
    """Return a module's attributes, without the engine's hooks and conversions."""
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


_OF_SECTIONS = f"{_OWN_PACKAGE}.planning.sections"  # its hooks belong to the model


def _of_others(hooks: Mapping[int, Any]) -> OrderedDict[int, Any]:
    """Return the hooks that are not the engine's."""
    return OrderedDict(
        (number, hook)
        for number, hook in hooks.items()
        if _package_of(function := getattr(hook, "hook", hook)) != _OWN_PACKAGE
        or function.__module__ == _OF_SECTIONS
    )


def _package_of(function: object) -> str:
    return str(getattr(function, "__module__", "")).partition(".")[0]


def with_buffers(module: torch.nn.Module, make: Callable[[torch.Tensor], object]) -> dict[str, Any]:
    """Return the attribute for a module's own buffers, with ``make`` applied to each buffer."""
    buffers = module._buffers.items()
    return {"_buffers": {n: None if b is None else make(b) for n, b in buffers}}


def buffer_names(module: torch.nn.Module) -> list[str]:
    """Return the names of a module's own buffers, including ``None`` entries."""
    return list(module._buffers)


def has_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module or a part of it was compiled by ``torch.compile`` or ``compile``."""
    return any(
        hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None) is not None
        for each in module.modules()
    )


def is_persistent(module: torch.nn.Module, buffer: str) -> bool:
    """Return whether ``state_dict`` contains this buffer of the module itself."""
    return buffer not in module._non_persistent_buffers_set
