"""Options and checks for a run that continues in a store: formats, optimizer, layout."""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import StoreError
from ..io_engine.committed import FoundStore
from ..schedule.describe import describe_units, difference
from ..schedule.layout import Layout

log = logging.getLogger("overspill")

_FORMATS = ("precision", "master", "moments", "frozen")


def check_fits(store: FoundStore, layout: Layout, rule: str, *, cuts: bool) -> None:
    """Check that a store belongs to this model and optimizer.

    Args:
        cuts: also compare the sizes of its records.

    Raises:
        OffloadError: it does not.
    """
    description = store.layout.description
    if rule != description["optimizer"]:
        found: str | None = (
            f"it was trained with {description['optimizer']}, not {rule}; pass such an optimizer "
            "to resume (of several, pass all in the order of wrap)"
        )
    else:
        found = difference(description["units"], describe_units(layout), cuts=cuts)
    if found is not None:
        raise StoreError(f"{store.directories[0]}: the store does not fit: {found}")


def with_formats(store: FoundStore, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, with the formats and directories of the store."""
    given = dict(options)
    nvme = _directories(store, given.pop("nvme", None))
    reads = store.layout.description.get("sources", {}).get("units")
    for name in ("init",) if reads else ("weights", "init"):
        if given.get(name) is not None:
            raise ValueError(f"{name}= is for wrap: resume takes the weights of the store")
    if given.pop("durable", None) is False:
        raise ValueError("resume goes on in a durable store; leave durable out")
    description = store.layout.description
    given = formats_of(description, given)
    if given.get("units") is None:
        given["units"] = description["names"]
    kept, asked = store.layout.checksum, given.pop("checksum", None)
    if asked is not None and asked != kept:
        raise ValueError(
            f"the store was made with checksum={kept!r}, not {asked!r}; leave checksum out"
        )
    return {**given, "nvme": nvme, "checksum": kept}


def formats_of(description: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, with the number formats of a store."""
    given = dict(options)
    for name in _FORMATS:
        kept = description.get(name)  # `None` in stores that are older than frozen=
        if name in given and given[name] != kept and given[name] not in (None, "auto"):
            raise ValueError(
                f"the store was made with {name}={kept!r}, not {given[name]!r}; leave {name} out"
            )
        given[name] = kept
    return given


def _directories(store: FoundStore, nvme: Any) -> list[Path]:
    """Return where training continues: the store's directories, or entirely different ones."""
    own = {path.resolve() for path in store.directories}
    listed = [nvme] if isinstance(nvme, (str, os.PathLike)) else list(nvme or ())
    wanted = {Path(path).resolve() for path in listed}
    if not wanted or wanted == own:
        return list(store.directories)
    if shared := wanted & own:
        raise ValueError(
            f"{min(shared)} has the store itself: leave nvme out to go on in the store, or give "
            "directories without it, which may be on the same disks, to have it copied there"
        )
    return [Path(path) for path in listed]


# Keys of param groups that are not hyper-parameters: how torch computes, and schedulers' own data.
_NO_OPTIONS = {"params", "param_names", "foreach", "fused", "capturable", "differentiable",
               "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}  # fmt: skip


def warn_of_kept_options(
    given: Sequence[Mapping[str, Any]], stored: Sequence[Mapping[str, Any]]
) -> None:
    """Warn where a commit's param groups replace other values of the optimizer that was passed.

    A learning rate or momentum that a scheduler had changed by then is expected.
    """
    found = []
    for number, (group, kept) in enumerate(zip(given, stored, strict=True)):
        scheduled = {"betas", "momentum"} if "base_momentum" in kept else set()
        cyclic = "max_lr" in kept or "base_momentum" in kept
        if cyclic or ("initial_lr" in kept and _text(group.get("lr")) == _text(kept["initial_lr"])):
            scheduled.add("lr")
        differing = [
            f"{name}={_text(kept[name])} (passed: {_text(group[name])})"
            for name in group
            if name in kept and name not in _NO_OPTIONS | scheduled
            and _text(group[name]) != _text(kept[name])
        ]  # fmt: skip
        if differing:
            found.append(f"group {number}: {', '.join(differing)}")
    if found:
        more = f"; and {len(found) - 3} more groups" if len(found) > 3 else ""
        log.warning(
            "overspill: resume uses the hyper-parameters of the commit, not those of the optimizer "
            "that was passed: %s%s. If your loop or a scheduler does not set them, and you want to "
            "change one, set it in optimizer.param_groups after resume",
            "; ".join(found[:3]), more,
        )  # fmt: skip


def _text(value: Any) -> str:
    """Return the same text for equal values, also for a tensor, a list, or a number of NumPy."""
    value = value.value if isinstance(value, enum.Enum) else value
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text, value))})"
    return repr(float(value) if type(value) is int else value)


def largest(description: Mapping[str, Any]) -> int | None:
    """Return the number of elements in a full record of state."""
    counts = [s["count"] for unit in description["units"] for s in unit["subgroups"]]
    return max(counts, default=None)


def optimizer_for(
    model: nn.Module, description: Mapping[str, Any], facts: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Build an optimizer like the one that the store was trained with, and with its groups.

    Raises:
        OffloadError: torch has no such optimizer, or a parameter is not in the model.
    """
    groups: list[Mapping[str, Any]] = facts["groups"]
    members: list[list[str]] = facts["members"]
    decoupled = all(group.get("decoupled_weight_decay", True) for group in groups)
    kinds: dict[str, Any] = {
        "adam": torch.optim.AdamW if decoupled else torch.optim.Adam,
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "muon": getattr(torch.optim, "Muon", None),
    }
    kind = kinds.get(description["optimizer"])
    if kind is None:
        raise StoreError(
            f"the store was trained with {description['optimizer']}; build that optimizer and "
            "pass it to resume"
        )
    options = {key for key in _defaults(kind) if key in groups[0]}
    if any(key not in group for group in groups for key in options):
        raise StoreError(
            "the store was trained with several optimizers; build them and pass a list to resume"
        )
    params = dict(model.named_parameters())
    missing = [name for names in members for name in names if name not in params]
    if missing:
        raise StoreError(f"parameter {missing[0]!r} is in the store, but not in the model")
    # Options are passed, since some decide what state there is (amsgrad, momentum).
    made: torch.optim.Optimizer = kind(
        [{**kept, "params": [params[name] for name in names]}
         for kept, names in zip(groups, members, strict=True)], lr=1e-3,
    )  # fmt: skip
    return made


def _defaults(kind: Any) -> dict[str, Any]:
    """Return the options of torch's optimizer of a kind."""
    with torch.device("cpu"):
        defaults: dict[str, Any] = kind([torch.nn.Parameter(torch.zeros(1, 1))]).defaults
    return defaults


def models_in(description: Mapping[str, Any]) -> list[str]:
    """Return the first parts of parameter names in a store, in order: several models' names."""
    chunks = (chunk for unit in description["units"] for chunk in unit["chunks"])
    names = (p["name"].partition(".")[0] for chunk in chunks for p in chunk["params"])
    return list(dict.fromkeys(names))
