"""Models with peft adapters: the original names of the base, and initial values of adapters.

peft wraps every layer that it adapts, and leaves adapters on ``meta`` if their base is there.  This
module does not import peft.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from ..private import torch_private

Begin = Callable[[], None]
WeightOf = Callable[[nn.Parameter], Callable[[], torch.Tensor] | None]

log = logging.getLogger("overspill")
ADDED = "_overspill_added"  # attribute of a model: parameters that files need not have
_WITHIN = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


def has_adapters(model: nn.Module) -> bool:
    """Return whether peft has added adapters to a model: a peft model, or the model inside one."""
    return isinstance(getattr(model, "peft_config", None), Mapping)


def base_of(model: nn.Module) -> nn.Module:
    """Return the model that was adapted, whose layers are wrapped by now."""
    own: Any = getattr(model, "get_base_model", None) if has_adapters(model) else None
    base = own() if callable(own) else model
    return base if isinstance(base, nn.Module) else model


def names_in_base(model: nn.Module) -> Callable[[str], str]:
    """Return a function that maps a tensor's name to its name before adapters were added."""
    if not has_adapters(model):
        return str
    prefix = _prefix(model)
    return lambda name: _WITHIN.sub("", name.removeprefix(prefix))


def _prefix(model: nn.Module) -> str:
    base = base_of(model)
    within = next(name for name, module in model.named_modules() if module is base)
    return f"{within}." if within else ""


def adapter_parameters(model: nn.Module) -> frozenset[nn.Parameter]:
    """Return the parameters that peft has added to the base, trained or not.

    They may also be named by the attribute ``ADDED`` of the model.
    """
    if not has_adapters(model):
        return frozenset(getattr(model, ADDED, ()))
    found = {p for layer in _layers(model) for p in layer.parameters}
    inside = set(base_of(model).parameters())
    return frozenset(found | {p for p in model.parameters() if p not in inside})


@dataclass(frozen=True)
class _Adapter:
    """The parameters of one adapter in one layer."""

    module: nn.Module
    name: str
    parameters: tuple[nn.Parameter, ...]


def _layers(model: nn.Module) -> Iterator[_Adapter]:
    for module in model.modules():
        kinds = getattr(module, "adapter_layer_names", None)
        if kinds is None:
            continue
        found: dict[str, list[nn.Parameter]] = {}
        for kind in (*kinds, *getattr(module, "other_param_names", ())):
            container = getattr(module, kind, None)
            if isinstance(container, (nn.ModuleDict, nn.ParameterDict)):
                for name, each in container.items():
                    own = [each] if isinstance(each, nn.Parameter) else each.parameters()
                    found.setdefault(name, []).extend(own)
        for name, parameters in found.items():
            yield _Adapter(module, name, tuple(dict.fromkeys(parameters)))


def begin_adapters(model: nn.Module, weight_of: WeightOf, *, trains: bool) -> None:
    """Initialise adapters on ``meta`` as peft does.

    Supported are the default initialisations of LoRA, DoRA and IA3, and randomly drawn prompts.

    Args:
        weight_of: returns a function that reads the weights which a parameter of the base will
            have, on the CPU; ``None`` if they are not known.

    Raises:
        OffloadError: an adapter has another initialisation, or nothing is trained, so that new
            adapters would have no effect. Nothing was changed.
    """
    if not has_adapters(model):
        return
    configs: Mapping[str, Any] = getattr(model, "peft_config", {})
    # Modules in ``modules_to_save`` are copies of the base's modules: files have their values.
    own = [each for each in _layers(model) if not hasattr(each.module, "original_module")]
    empty = [each for each in own if any(p.is_meta for p in each.parameters)]
    readers = {id(each): _begin_of(each, configs, weight_of) for each in empty}
    inside = set(base_of(model).parameters())
    prompts = [
        module
        for module in model.modules()
        if any(p.is_meta and p not in inside for p in module.parameters(recurse=False))
    ]
    drawn = all(_is_drawn(configs[name]) for name in configs) if prompts else True
    unknown = sorted({each.name for each in empty if readers[id(each)] is None})
    if unknown or not drawn or not all(isinstance(each, nn.Embedding) for each in prompts):
        raise ModelError(
            f"adapters {', '.join(unknown or configs)} are on meta, and their initial values are "
            "not known without the base's weights; load the base before get_peft_model"
        )
    if not trains and (empty or prompts):
        raise ModelError(
            f"adapters {', '.join(configs)} are on meta, so they have no values: load the base "
            "before the adapter, or give no weights= and let peft load both"
        )
    with torch.no_grad():
        begins = [read() for read in readers.values() if read is not None]  # before any change
        for each, begin in zip(empty, begins, strict=True):
            _take_memory(each.parameters)
            begin()
    for module in prompts:
        assert isinstance(module, nn.Embedding)
        _take_memory(tuple(module.parameters(recurse=False)))
        module.reset_parameters()
    if empty or prompts:
        log.info(
            "overspill: adapters %s were on meta, and get new values; to go on with trained ones, "
            "load them after wrap (peft.set_peft_model_state_dict)", ", ".join(configs),
        )  # fmt: skip


def _begin_of(
    adapter: _Adapter, configs: Mapping[str, Any], weight_of: WeightOf
) -> Callable[[], Begin] | None:
    """Return a function that reads what an adapter begins with, and returns one that sets it;
    ``None`` if that is not known."""
    config, module, name = configs.get(adapter.name), adapter.module, adapter.name
    if config is None or not all(p.is_meta for p in adapter.parameters):
        return None
    lora: Any = getattr(module, "reset_lora_parameters", None)
    ia3: Any = getattr(module, "reset_ia3_parameters", None)
    how = getattr(config, "init_lora_weights", None)
    kind = str(getattr(config, "peft_type", "")).rpartition(".")[2]
    default = how in (True, "gaussian") and not getattr(config, "lora_bias", False)
    if kind == "LORA" and lora is not None and default:
        if not getattr(config, "use_dora", False):
            return lambda: partial(lora, name, how)
        base: Any = getattr(getattr(module, "base_layer", None), "weight", None)
        factors: Any = getattr(module, "lora_B", ())  # not of embeddings
        linear = isinstance(base, nn.Parameter) and base.dim() == 2 and name in factors
        read = weight_of(base) if linear else None
        if read is not None:
            return lambda: partial(_begin_dora, module, name, how, _norms_of(module, name, read()))
    if kind == "IA3" and ia3 is not None and getattr(config, "init_ia3_weights", False) is True:
        return lambda: partial(ia3, name)
    return None


def _norms_of(module: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return DoRA's magnitudes: the norms of the base's rows, as the update begins with zero.

    peft computes them in the dtype of the base, and converts adapters to fp32 afterwards.
    """
    magnitudes = module.lora_magnitude_vector[name]
    norms: torch.Tensor = magnitudes.get_weight_norm(
        weight, torch.zeros(_update_shape(module, name), dtype=weight.dtype, device="cpu"),
        module.scaling[name],
    )  # fmt: skip
    return norms


def _update_shape(module: Any, name: str) -> tuple[int, int]:
    return len(module.lora_B[name].weight), module.lora_A[name].weight.shape[1]


def _begin_dora(module: Any, name: str, how: Any, norms: torch.Tensor) -> None:
    module.reset_lora_parameters(name, how)
    module.lora_magnitude_vector[name].weight.copy_(norms)


def _is_drawn(config: Any) -> bool:
    kind = str(getattr(config, "peft_type", "")).rpartition(".")[2]
    how = str(getattr(config, "prompt_tuning_init", "")).rpartition(".")[2]
    return kind == "PROMPT_TUNING" and how == "RANDOM"


def _take_memory(parameters: tuple[nn.Parameter, ...]) -> None:
    for p in parameters:
        torch_private.become(p, torch.zeros(p.shape, dtype=p.dtype, device="cpu"))
