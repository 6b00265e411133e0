"""How a model gets its engine, new or over a store, and is let go."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .config import OffloadConfig
from .decide import calibrated, decide
from .durable.committing import adopt
from .durable.moving import move_store
from .durable.resume import check_fits, largest
from .engine import Engine, engine_of
from .errors import BudgetError
from .io_engine.committed import OwnedStore
from .measure.calibration import Calibration
from .movement.accelerators.choose import make_accelerator
from .optimizer import OffloadedOptimizer
from .planning.plan import Plan
from .state.filling import Taken, fill
from .state.homes import Homes
from .state.importing import open_weights
from .state.loading import match_files
from .training import torch_private

log = logging.getLogger("overspill")


def raise_shortfall(plan: Plan) -> None:
    """Raises ``BudgetError`` for a plan that does not fit."""
    if plan.fits:
        return
    first = plan.shortfalls[0]
    raise BudgetError(
        first.what, first.tier.value, first.need_bytes, first.have_bytes, first.have_bytes,
        first.remedy,
    )  # fmt: skip


def wrapped(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: OffloadConfig
) -> OffloadedOptimizer:
    """See ``wrap``."""
    accelerator = make_accelerator(config.device, config.rates)
    try:
        config, calibration = calibrated(model, optimizer, config, accelerator)
        blueprint = decide(model, optimizer, config, accelerator)
        raise_shortfall(blueprint.plan)
        if config.weights is not None:
            match_files(open_weights(config.weights), model, blueprint.parts)
        homes = Homes.open(blueprint, accelerator)
    except BaseException:
        accelerator.close()
        raise
    with undone(model, optimizer, homes) as taken:
        fill(model, optimizer, homes, taken)
        engine = Engine.open(model, optimizer.param_groups, homes, calibration)
        made = _handed_out(optimizer, engine)
    optimizer.state.clear()
    return made


def resumed(
    store: OwnedStore, model: nn.Module, optimizer: torch.optim.Optimizer, config: OffloadConfig
) -> tuple[OffloadedOptimizer, Any]:
    """See ``resume``."""
    homes, calibration = _homes_over(store, model, optimizer, config)
    with undone(model, optimizer, homes) as taken:
        taken.note()
        taken.move_buffers()
        for unit in homes.machinery.parts.units:
            taken.free(unit, theirs=False)
        adopt(model, optimizer.param_groups, homes.machinery)
        engine = Engine.open(model, optimizer.param_groups, homes, calibration)
        made = _handed_out(optimizer, engine)
        extra = engine.restart()
    optimizer.state.clear()
    return made, extra


def _homes_over(
    store: OwnedStore, model: nn.Module, optimizer: torch.optim.Optimizer, config: OffloadConfig
) -> tuple[Homes, Calibration | None]:
    """Homes over the store, or over a copy of it where ``config`` names other directories."""
    accelerator = make_accelerator(config.device, config.rates)
    try:
        config, calibration = calibrated(model, optimizer, config, accelerator)
        moves = set(config.nvme or ()) != set(store.directories)
        numel = None if moves else largest(store.layout.description)
        blueprint = decide(model, optimizer, config, accelerator, numel=numel)
        assert blueprint.plan.detail.layout is not None
        check_fits(store, blueprint.plan.detail.layout, blueprint.rules[0].name, cuts=not moves)
        raise_shortfall(blueprint.plan)
        if not moves:
            return Homes.open(blueprint, accelerator, store), calibration
        assert config.nvme is not None
        with move_store(
            store,
            store.last(),
            config.nvme,
            blueprint.plan.detail.layout,
            blueprint.plan.disk_bytes,
        ) as copy:
            return Homes.open(blueprint, accelerator, copy), calibration
    except BaseException:
        accelerator.close()
        raise


@contextmanager
def undone(model: nn.Module, optimizer: torch.optim.Optimizer, homes: Homes) -> Iterator[Taken]:
    """If the block, which wraps the model, raises, the model is as it was, and the homes go."""
    taken = Taken(model, optimizer.param_groups, homes)
    try:
        yield taken
    except BaseException:
        try:
            taken.read()
        except BaseException as error:
            log.warning("overspill: weights cannot be read back: %s", error)
        try:
            if (engine := engine_of(model)) is not None:
                engine.let_go()
            homes.machinery.close()
        finally:
            taken.give_back()
        raise


def _handed_out(optimizer: torch.optim.Optimizer, engine: Engine) -> OffloadedOptimizer:
    """What the user gets."""
    torch_private.tell_if_untried(torch.__version__)
    plan, config = engine.plan, engine.config
    log.info("overspill: %s", plan)
    if config.verbose:
        for name, home in plan.placement.items():
            grads = "on arrival" if home.grads is None else home.grads.value
            state = ", ".join(dict.fromkeys(tier.value for tier in home.state)) or "none"
            log.info(
                "overspill: unit %s: weights %s%s, gradients %s, state %s",
                name, home.weights.value, " (resident)" if home.resident else "", grads, state,
            )  # fmt: skip
    torch_private.count_step(optimizer)
    return OffloadedOptimizer(engine, optimizer)
