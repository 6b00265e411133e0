"""The contents of a commit besides weights and state, and their encoding.

These are counts, hyper-parameters, random generator states and the user's own data.  They can be
read back without running code from them.
"""

from __future__ import annotations

import enum
import io
import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import StoreError
from ..planning.regions import Place
from ..planning.stand_ins import StandInModel


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the state of every generator that training usually draws from."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    found = np.random.get_state(legacy=False)
    # otherwise the user has chosen a bit generator, and has to save it
    if found["bit_generator"] == "MT19937":
        inner = found["state"]
        states["numpy"] = [
            "MT19937", torch.from_numpy(np.array(inner["key"], np.int64)), int(inner["pos"]),
            int(found["has_gauss"]), float(found["gauss"]),
        ]  # fmt: skip
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def restore_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore the result of ``random_states``."""
    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    if "numpy" in states:
        kind, keys, position, has_gauss, cached = states["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    if device.type != "cpu" and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value


def kept_groups(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the hyper-parameters of every param group.

    NumPy numbers, which schedulers may produce, become plain ones, and members of enumerations
    their values: see ``as_before``.
    """
    return [
        {name: _plain(value) for name, value in group.items() if name != "params"}
        for group in groups
    ]


def as_before(kept: Any, present: Any) -> Any:
    """Return a kept hyper-parameter; a member of an enumeration if the present one is."""
    return type(present)(kept) if isinstance(present, enum.Enum) else kept


def member_names(model: nn.Module, groups: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Return the model's names of each group's parameters, in the optimizer's order."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in groups]


def regions_of(model: nn.Module) -> dict[str, Place]:
    """Return, for a model of a rank's shards, the place of each in its whole parameter, by name."""
    if not isinstance(model, StandInModel):
        return {}
    found = ((name, model.regions.get(id(p))) for name, p in model.named_parameters())
    return {name: region.place for name, region in found if region is not None}


def encode_facts(facts: Mapping[str, Any]) -> bytes:
    """Serialise facts."""
    target = io.BytesIO()
    torch.save(dict(facts), target)
    return target.getvalue()


def decode_facts(data: bytes) -> dict[str, Any]:
    """Deserialise facts, without running code from them."""
    facts = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    assert isinstance(facts, dict)
    return facts


def _is_plain(value: Any) -> bool:
    """Return whether a value consists only of types that can always be read back."""
    kind = type(value)
    if kind is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if kind in (list, tuple):
        return all(map(_is_plain, value))
    if kind is torch.Tensor:
        return not value.__dict__  # its attributes would be saved too
    return kind in (bool, int, float, str, type(None))


def is_readable(value: Any) -> bool:
    """Return whether a commit that holds the value can be read back."""
    return _obstacle(value) is None


def _obstacle(value: Any) -> Exception | None:
    if _is_plain(value):
        return None
    try:
        decode_facts(encode_facts({"value": value}))
    except Exception as error:
        return error
    return None


def check_readable(facts: Mapping[str, Any]) -> None:
    """Raise unless facts of a commit can be read back.

    Raises:
        OffloadError: they cannot: param groups and ``extra`` may hold numbers, texts, tensors, and
            lists, tuples and dicts of them.
    """
    for name, value in facts.items():
        if (error := _obstacle(value)) is not None:
            what = "extra returned" if name == "extra" else "optimizer.param_groups hold"
            raise StoreError(
                f"{what} something that cannot be read back without running code from it; use "
                "numbers, texts, tensors, and lists, tuples and dicts of them (a scheduler's "
                f"state_dict() is one): {error}"
            ) from error
