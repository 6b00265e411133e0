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
from .durable.moving import move_store
from .durable.resume import check_fits, largest
from .engine import ATTRIBUTE, Engine
from .errors import BudgetError
from .io_engine import OwnedStore
from .movement.accelerators.choose import make_accelerator
from .optimizer import OffloadedOptimizer
from .planning.plan import Plan
from .state.filling import Taken, fill
from .state.importing import open_weights
from .state.loading import match_files
from .state.model_state import StateHooks
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
        engine = Engine(model, optimizer.param_groups, blueprint, accelerator, calibration)
    except BaseException:
        accelerator.close()
        raise
    with undone(model, engine) as taken:
        fill(model, optimizer, engine, taken)
        made = install(model, optimizer, engine)
    optimizer.state.clear()
    return made


def resumed(
    store: OwnedStore, model: nn.Module, optimizer: torch.optim.Optimizer, config: OffloadConfig
) -> tuple[OffloadedOptimizer, Any]:
    """See ``resume``."""
    engine = _engine_over(store, model, optimizer, config)
    with undone(model, engine) as taken:
        taken.note()
        taken.move_buffers()
        for unit in engine.parts.units:
            taken.free(unit, theirs=False)
        engine.adopt()
        made = install(model, optimizer, engine)
        assert engine.committing is not None
        extra = engine.committing.restart()
    optimizer.state.clear()
    return made, extra


def _engine_over(
    store: OwnedStore, model: nn.Module, optimizer: torch.optim.Optimizer, config: OffloadConfig
) -> Engine:
    """An engine over the store, or over a copy of it where ``config`` names other directories."""
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
            return Engine(
                model, optimizer.param_groups, blueprint, accelerator, calibration, store=store
            )
        assert config.nvme is not None
        with move_store(
            store,
            store.last(),
            config.nvme,
            blueprint.plan.detail.layout,
            blueprint.plan.disk_bytes,
        ) as copy:
            return Engine(
                model, optimizer.param_groups, blueprint, accelerator, calibration, store=copy
            )
    except BaseException:
        accelerator.close()
        raise


@contextmanager
def undone(model: nn.Module, engine: Engine) -> Iterator[Taken]:
    """If the block, which wraps the model, raises, the model is as it was, and the engine ends."""
    taken = Taken(model, engine)
    try:
        yield taken
    except BaseException:
        try:
            taken.read()
        except BaseException as error:
            log.warning("overspill: weights cannot be read back: %s", error)
        try:
            let_go(model, engine)
            engine.discard()
        finally:
            taken.give_back()
        raise


def install(
    model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine
) -> OffloadedOptimizer:
    """Hooks up a model whose weights and state are in their homes, and hands out the optimizer."""
    torch_private.tell_if_untried(torch.__version__)
    engine.install()
    engine.state_hooks = StateHooks(engine)
    log.info("overspill: %s", engine.blueprint.plan)
    if engine.config.verbose:
        for name, home in engine.blueprint.plan.placement.items():
            grads = "on arrival" if home.grads is None else home.grads.value
            state = ", ".join(dict.fromkeys(tier.value for tier in home.state)) or "none"
            log.info(
                "overspill: unit %s: weights %s%s, gradients %s, state %s",
                name, home.weights.value, " (resident)" if home.resident else "", grads, state,
            )  # fmt: skip
    # Found on the instance, these refuse copies and pickles of the model before they begin.
    model.__dict__.update(
        {
            ATTRIBUTE: engine,
            "__deepcopy__": engine.__deepcopy__,
            "__reduce_ex__": engine.__reduce_ex__,
        }
    )
    torch_private.count_step(optimizer)
    return OffloadedOptimizer(engine, optimizer)


def let_go(model: nn.Module, engine: Engine) -> None:
    """Takes hooks and marks from the model; also after a part of ``install``."""
    for part in ("hooks", "collector", "state_hooks"):
        if hasattr(engine, part):
            getattr(engine, part).remove()
    for name in (ATTRIBUTE, "__deepcopy__", "__reduce_ex__"):
        model.__dict__.pop(name, None)
