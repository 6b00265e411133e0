"""Goes on from the last commit of a store, bit for bit."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..api import install, raise_shortfall, undone
from ..config import OffloadConfig
from ..decide import calibrated, decide
from ..engine import Engine
from ..errors import OffloadError
from ..io_engine import FoundStore, OwnedStore, own_store
from ..movement.accelerators.choose import make_accelerator
from ..optimizer import OffloadedOptimizer
from ..planning.blueprint import Blueprint
from ..schedule.describe import describe_units, difference
from .meta import decode_facts
from .moving import move_store

log = logging.getLogger("overspill")

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_FORMATS = ("precision", "master", "moments")


def resume(
    model: nn.Module, path: Paths, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> tuple[OffloadedOptimizer, Any]:
    """Wraps ``model`` with what the last commit of a store holds, and goes on in that store.

    Weights, state, step counts, hyper-parameters, buffers and random generators are set to those
    of the commit; what the model and the optimizer hold is of no account, so the model may be
    built under ``empty_init()``.  Budgets, tiers, the way to update and the device may differ from
    those of the run before; the formats of numbers are those of the store.  With other directories
    in ``nvme`` the commit is first copied there, over as many stripes as they are, and the
    store that was there stays.

    Args:
        path: the directory of the store, or all of them.
        optimizer: of the same kind, with the same param groups; ``None`` for torch's
            of that kind, with the groups of the store.
        options: see ``OffloadConfig``; ``nvme``: where to go on, if not in the store itself.

    Returns:
        The optimizer, and what ``extra`` gave when the commit was sealed.

    Raises:
        IoError: there is no store, a part of it is missing, or another process has it.
        CorruptionError: it is damaged; the last whole commit is named.
        OffloadError: it is the store of another model.
        BudgetError: a budget is too small.
    """
    with own_store(path) as store:
        generation = store.last()
        config = OffloadConfig.from_options(_with_formats(store, options))
        facts = decode_facts(generation.meta)
        if optimizer is None:
            optimizer = _optimizer_for(model, store.layout.description, facts)
        if len(optimizer.param_groups) != len(facts["groups"]):
            raise OffloadError(
                f"the store has {len(facts['groups'])} param groups, the optimizer "
                f"{len(optimizer.param_groups)}; build it as for the run before"
            )
        engine = _engine_over(store, model, optimizer, config)
    wrapped, extra = _take_over(engine, model, optimizer)
    log.info("overspill: resumed at step %d (generation %d)", generation.step, generation.number)
    return wrapped, extra


def _engine_over(
    store: OwnedStore, model: nn.Module, optimizer: torch.optim.Optimizer, config: OffloadConfig
) -> Engine:
    """An engine over the store, or over a copy of it where ``config`` names other directories."""
    accelerator = make_accelerator(config.device, config.rates)
    try:
        config, calibration = calibrated(model, optimizer, config, accelerator)
        moves = set(config.nvme or ()) != set(store.directories)
        numel = None if moves else _largest(store.layout.description)
        blueprint = decide(model, optimizer, config, accelerator, numel=numel)
        _check_fits(store, blueprint, cuts=not moves)
        raise_shortfall(blueprint.plan)
        if not moves:
            return Engine(
                model, optimizer.param_groups, blueprint, accelerator, calibration, store=store
            )
        assert config.nvme is not None and blueprint.plan.layout is not None
        with move_store(
            store, store.last(), config.nvme, blueprint.plan.layout, blueprint.plan.disk_bytes
        ) as copy:
            return Engine(
                model, optimizer.param_groups, blueprint, accelerator, calibration, store=copy
            )
    except BaseException:
        accelerator.close()
        raise


def _check_fits(store: FoundStore, blueprint: Blueprint, *, cuts: bool) -> None:
    """Whether the store is of this model and optimizer; ``cuts``: also of records cut alike."""
    description, rule = store.layout.description, blueprint.rules[0].name
    assert blueprint.plan.layout is not None
    if rule != description["optimizer"]:
        found: str | None = f"it was trained with {description['optimizer']}, not {rule}"
    else:
        mine = describe_units(blueprint.plan.layout)
        found = difference(description["units"], mine, cuts=cuts)
    if found is not None:
        raise OffloadError(f"{store.directories[0]}: the store does not fit: {found}")


def _take_over(
    engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[OffloadedOptimizer, Any]:
    """Gives the engine the commit instead of what the model and the optimizer hold."""
    with undone(model, engine) as taken:
        taken.note()
        taken.move_buffers()
        for unit in engine.parts.units:
            taken.free(unit, theirs=False)
        engine.adopt()
        wrapped = install(model, optimizer, engine)
        assert engine.committing is not None
        extra = engine.committing.restart()
    optimizer.state.clear()
    return wrapped, extra


def _with_formats(store: FoundStore, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with the formats and directories of the store."""
    given = dict(options)
    nvme = _directories(store, given.pop("nvme", None))
    for name in ("weights", "init"):
        if given.get(name) is not None:
            raise ValueError(f"{name}= is for wrap: resume takes the weights of the store")
    if given.get("durable") is False:
        raise ValueError("resume goes on in a durable store; leave durable out")
    description = store.layout.description
    for name in _FORMATS:
        kept = description[name]
        if name in given and given[name] != kept and given[name] not in (None, "auto"):
            raise ValueError(f"the store was made with {name}={kept!r}, not {given[name]!r}")
        given[name] = kept
    if given.get("units") is None:
        given["units"] = description["names"]
    return {**given, "nvme": nvme, "checksum": store.layout.checksum}


def _directories(store: FoundStore, nvme: Any) -> list[Path]:
    """Where training goes on: in the store's own directories, or in others altogether."""
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


def _largest(description: Mapping[str, Any]) -> int | None:
    """The elements of a whole record."""
    counts = [s["count"] for unit in description["units"] for s in unit["subgroups"]]
    return max(counts, default=None)


def _optimizer_for(
    model: nn.Module, description: Mapping[str, Any], facts: Mapping[str, Any]
) -> torch.optim.Optimizer:
    groups: list[Mapping[str, Any]] = facts["groups"]
    members: list[list[str]] = facts["members"]
    decoupled = all(group.get("decoupled_weight_decay", True) for group in groups)
    kinds: dict[str, Any] = {
        "adam": torch.optim.AdamW if decoupled else torch.optim.Adam,
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
    }
    kind = kinds.get(description["optimizer"])
    if kind is None:
        raise OffloadError(
            f"the store was trained with {description['optimizer']}; build that optimizer and "
            "pass it to resume"
        )
    params = dict(model.named_parameters())
    missing = [name for names in members for name in names if name not in params]
    if missing:
        raise OffloadError(
            f"parameter {missing[0]!r} is in the store alone: it is that of another model"
        )
    # With their options: some say what state there is (amsgrad, momentum).
    made: torch.optim.Optimizer = kind(
        [{**kept, "params": [params[name] for name in names]}
         for kept, names in zip(groups, members, strict=True)], lr=1e-3,
    )  # fmt: skip
    return made
