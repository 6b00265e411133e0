"""Models with adapters of peft's: what their base is called in its files, and how adapters begin.

peft puts every layer that it adapts behind another one, and leaves adapters on ``meta`` where
their base is.  It is not imported for this.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import OffloadError

_WITHIN = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")
# By layers of peft, what gives the adapter of a name its first values.
_RESETS = ("reset_lora_parameters", "reset_ia3_parameters")


def has_adapters(model: nn.Module) -> bool:
    """Whether peft has put any into a model, or the model behind one of its own."""
    return isinstance(getattr(model, "peft_config", None), Mapping)


def base_of(model: nn.Module) -> nn.Module:
    """The model that was adapted, its layers behind others' by now."""
    own: Any = getattr(model, "get_base_model", None) if has_adapters(model) else None
    base = own() if callable(own) else model
    return base if isinstance(base, nn.Module) else model


def names_in_base(model: nn.Module) -> Callable[[str], str]:
    """Gives what a tensor of the base was called before there were adapters, by its name now."""
    if not has_adapters(model):
        return str
    base = base_of(model)
    within = next(name for name, module in model.named_modules() if module is base)
    prefix = f"{within}." if within else ""
    return lambda name: _WITHIN.sub("", name.removeprefix(prefix))


def may_be_missing(model: nn.Module, name: str) -> bool:
    """Whether files of a base need not have a parameter: it is an adapter's."""
    if not has_adapters(model):
        return False
    within = next(name for name, module in model.named_modules() if module is base_of(model))
    layers = [getattr(m, "prefix", None) for m in (model, *model.children())]
    adapters = [f".{mark}" for mark in layers if isinstance(mark, str) and mark]
    outside = bool(within) and not name.startswith(f"{within}.")
    return outside or any(mark in name for mark in adapters)


def initialiser_of(module: nn.Module, model: nn.Module) -> Callable[[], None] | None:
    """What gives the adapters of a layer their first values, as peft does; ``None``: it has none.

    Raises:
        OffloadError: they are made of the base's weights, which are not there yet.
    """
    reset = next((getattr(module, name) for name in _RESETS if hasattr(module, name)), None)
    names: Any = getattr(module, "active_adapters", None)
    if reset is None or names is None:
        return None
    configs: Mapping[str, Any] = getattr(model, "peft_config", {})

    def initialise() -> None:
        for name in configs:
            if getattr(configs[name], "use_dora", False):
                raise OffloadError(
                    f"adapter {name!r} takes its magnitudes from the base's weights (use_dora), "
                    "which are not in memory: load the base before get_peft_model"
                )
            how = getattr(configs[name], "init_lora_weights", True)
            how = getattr(configs[name], "init_ia3_weights", how)
            with torch.no_grad():
                if "lora" in reset.__name__:
                    reset(name, how)
                elif how:
                    reset(name)

    return initialise
