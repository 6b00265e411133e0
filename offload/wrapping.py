"""Wrapping of a model: build its engine, new or from a store, and undo that after an error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from .blueprints import make_blueprint
from .closeable import end_unused
from .config import OffloadConfig
from .durable.commits import Unmanaged, adopt
from .durable.meta import decode_facts
from .durable.moving import move_store
from .durable.resume import check_fits, largest
from .engine import Engine, engine_of
from .engine_handle import OffloadedInference
from .errors import BudgetError
from .io_engine.committed import OwnedStore
from .measure.calibration import Calibration
from .movement.accelerators.make import make_accelerator
from .movement.runtime import Runtime
from .open_engines import refuse_folders_in_use, warn_of_open_engines
from .optim.untrained import NoOptimizer
from .optimizer import OffloadedOptimizer
from .planning.blueprint import Blueprint
from .planning.budgets import beyond_this_machine
from .planning.plan import Plan
from .plans import calibrated
from .private import buffers_private, optimizer_private, torch_private
from .state.engine_resources import EngineResources
from .state.loading import load
from .state.original_weights import OriginalWeights
from .state.unmanaged import warn_of_large

log = logging.getLogger("overspill")
Made = TypeVar("Made")
MakeBlueprint = Callable[[OffloadConfig], Blueprint]
Agree = Callable[[MakeBlueprint, OffloadConfig], Blueprint]


def raise_shortfall(plan: Plan) -> None:
    """Raise ``BudgetError`` for a plan that does not fit.

    If only activations do not fit, and may stay on the device beyond the budget, log a warning.
    """
    if plan.detail.budgets is not None and (why := beyond_this_machine(plan.detail.budgets)):
        log.warning("overspill: %s", why)
    if plan.fits:
        return
    first, layout = plan.shortfalls[0], plan.detail.layout
    if plan.detail.activations_short and layout is not None and layout.saved.policy == "auto":
        log.warning("overspill: %s; until then what has no room stays, over the budget", first)
        return
    remedy = ". Also, ".join([first.remedy, *map(str, plan.shortfalls[1:])])
    remedy += plan.detail.about_fitting
    whole = first.have_bytes if first.of_bytes is None else first.of_bytes
    raise BudgetError(
        first.what, first.tier.value, first.need_bytes, first.have_bytes, whole, remedy
    )


def wrapped(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: OffloadConfig
) -> OffloadedOptimizer:
    """Wrap a model for training; see ``wrap``."""
    return opened(model, optimizer, config, lambda engine: OffloadedOptimizer(engine, optimizer))


def wrapped_for_inference(model: nn.Module, config: OffloadConfig) -> OffloadedInference:
    """Wrap a model without an optimizer; see ``wrap``."""
    return opened(model, NoOptimizer(), config.for_inference(), OffloadedInference)


def as_planned(plan: MakeBlueprint, config: OffloadConfig) -> Blueprint:
    """Return the blueprint for the options that are given; see ``opened``."""
    return plan(config)


def opened(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: OffloadConfig,
    make: Callable[[Engine], Made], agree: Agree = as_planned,
) -> Made:  # fmt: skip
    """Build an engine for a model, and return what ``make`` returns for it.

    After an error everything is as before.

    Args:
        agree: returns the blueprint, given how one is made; ranks exchange messages there.
    """
    transaction = WrapTransaction(model, optimizer, config)
    try:
        transaction.promote()
        config, calibration = calibrated(model, optimizer, config, transaction.accelerator)
        blueprint = agree(
            lambda config: make_blueprint(model, optimizer, config, transaction.accelerator), config
        )
        raise_shortfall(blueprint.plan)
        resources, original = transaction.open(blueprint)
        load(model, optimizer, resources, original)
        engine = Engine.open(model, optimizer.param_groups, resources, calibration)
        _tell(optimizer, engine)
        made = make(engine)
        engine.model_holds(made)
        optimizer.state.clear()
        return made
    except BaseException:
        transaction.undo()
        raise


def resumed(
    store: OwnedStore, model: nn.Module, optimizer: torch.optim.Optimizer, config: OffloadConfig
) -> tuple[OffloadedOptimizer, Any]:
    """Resume from a store; see ``resume``."""
    return reopened(store, model, optimizer, config, partial(OffloadedOptimizer, inner=optimizer))


def reopened(
    store: OwnedStore, model: nn.Module, optimizer: torch.optim.Optimizer, config: OffloadConfig,
    make: Callable[[Engine], Made], agree: Agree = as_planned,
) -> tuple[Made, Any]:  # fmt: skip
    """Do as ``opened``, with the last commit of a store; also return the commit's ``extra``."""
    transaction = WrapTransaction(model, optimizer, config)
    try:
        transaction.promote()
        Unmanaged(model, decode_facts(store.last().meta))  # raises if it does not fit
        resources, original, calibration = _homes_over(store, transaction, config, agree)
        original.note()
        original.move_unmanaged()
        for unit in resources.runtime.parts.units:
            original.free(unit, theirs=False)
        adopt(model, optimizer.param_groups, resources.runtime, resources.contents)
        engine = Engine.open(model, optimizer.param_groups, resources, calibration)
        _tell(optimizer, engine)
        made = make(engine)
        engine.model_holds(made)
        extra = engine.restart()
        optimizer.state.clear()
        return made, extra
    except BaseException:
        transaction.undo()
        raise


def _homes_over(
    store: OwnedStore, transaction: WrapTransaction, config: OffloadConfig, agree: Agree
) -> tuple[EngineResources, OriginalWeights, Calibration | None]:
    """Allocate resources over the store, or over a copy if ``config`` names other directories."""
    model, optimizer, accelerator = (
        transaction.model,
        transaction.optimizer,
        transaction.accelerator,
    )
    config, calibration = calibrated(model, optimizer, config, accelerator)
    moves = set(config.nvme or ()) != set(store.directories)
    numel = None if moves else largest(store.layout.description)
    digests = decode_facts(store.last().meta).get("digests", {})
    blueprint = agree(
        lambda config: make_blueprint(
            model, optimizer, config, accelerator, numel=numel,
            description=store.layout.description, digests=digests,
        ),
        config,
    )  # fmt: skip
    check_fits(store, blueprint.layout, blueprint.rules[0].name, cuts=not moves)
    raise_shortfall(blueprint.plan)
    if not moves:
        return *transaction.open(blueprint, store), calibration
    assert config.nvme is not None
    with move_store(
        store,
        store.last(),
        config.nvme,
        blueprint.layout,
        blueprint.plan.disk_bytes,
    ) as copy:
        return *transaction.open(blueprint, copy), calibration


class WrapTransaction:
    """A wrap in progress.  ``undo`` restores the model and frees everything else.

    An exception may occur between any two lines.  So everything that starts threads or allocates
    memory is recorded here before it does.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, config: OffloadConfig
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._state: dict[Any, Any] = {}
        self._runtime: list[Runtime] = []
        self._original: OriginalWeights | None = None
        end_unused()
        if config.durable:
            refuse_folders_in_use(config.nvme or ())
        warn_of_open_engines(config)
        self.accelerator = make_accelerator(config.device, config.rates)
        self._promoted: list[nn.Module] = []

    def open(
        self, blueprint: Blueprint, found: OwnedStore | None = None
    ) -> tuple[EngineResources, OriginalWeights]:
        """Allocate memory and disk space; see ``EngineResources.open``."""
        self._state = dict(self.optimizer.state)
        resources = EngineResources.open(blueprint, self.accelerator, self._runtime, found)
        self._original = original = OriginalWeights(
            self.model, self.optimizer.param_groups, resources
        )
        return resources, original

    def promote(self) -> None:
        """Make codes in buffers parameters; see ``buffers_private``."""
        buffers_private.promote(self.model, self._promoted)

    def undo(self) -> None:
        """Restore the model and its optimizer, and free everything else.

        The caller raises the error that made this necessary, so errors here are only logged.
        """
        engine = None if self._original is None else engine_of(self.model)
        steps: list[Callable[[], object]] = []
        if self._original is not None:
            steps.append(self._original.read)
        if engine is not None:
            steps.append(engine.let_go)
        steps += [runtime.close for runtime in self._runtime]
        steps.append(self.accelerator.close)
        if self._original is not None:
            steps.append(self._original.give_back)
        if self._state:
            steps.append(partial(self.optimizer.state.update, self._state))
        steps.append(partial(buffers_private.demote, self._promoted))
        for step in steps:
            try:
                step()
            except BaseException as error:
                log.warning("overspill: wrap could not be undone completely: %s", error)


def _tell(optimizer: torch.optim.Optimizer, engine: Engine) -> None:
    """Log the plan of a wrapped model."""
    torch_private.tell_if_untried(torch.__version__)
    plan, config = engine.plan, engine.config
    log.info("overspill: %s", plan)
    commits = config.durable and config.nvme is not None
    warn_of_large(engine.model, engine.parameters, commits=commits)
    if config.verbose:
        for name, home in plan.placement.items():
            grads = "on arrival" if home.grads is None else home.grads.value
            state = ", ".join(dict.fromkeys(tier.value for tier in home.state)) or "none"
            log.info(
                "overspill: unit %s: weights %s%s, gradients %s, state %s",
                name, home.weights.value, " (resident)" if home.resident else "", grads, state,
            )  # fmt: skip
    optimizer_private.count_step(optimizer)
