"""``plan``, ``wrap`` and ``unwrap``: how a model gets its engine, and loses it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .config import OffloadConfig
from .decide import calibrated, decide, foretell
from .engine import ATTRIBUTE, Engine, engine_of
from .errors import BudgetError, OffloadError
from .facts.machine import Machine
from .movement.accelerators.choose import make_accelerator
from .optimizer import OffloadedOptimizer
from .planning.plan import Plan
from .state.filling import Taken, fill
from .state.importing import open_weights
from .state.loading import match_files
from .state.model_state import StateHooks
from .training import torch_private

log = logging.getLogger("overspill")


def plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    tokens: int = 0,
    machine: Machine | None = None,
    measure: bool = False,
    example: Callable[[], torch.Tensor] | None = None,
    **options: Any,
) -> Plan:
    """What ``wrap`` with the same options would hold and move.  Allocates nothing.

    Lack of room is not an error: ``plan.fits`` and ``plan.shortfalls`` tell.

    Args:
        tokens: of one micro-step.  They let compute count; without them, time is that of moves and
            updates alone.
        machine: plan for that one; with sizes in it, its memory and disks count, not those here.
        example: runs one micro-batch forward and returns its loss, as in
            ``lambda: model(**batch).loss``.  It and its backward run a few times, in memory, and
            what each unit computes and keeps counts instead of what its FLOPs suggest; a model on
            ``meta`` tells its activations only.  Gradients that were there stay.
        measure: measure this machine anew instead of using the rates kept from before.
        options: see ``OffloadConfig``.

    Raises:
        TypeError: an unknown option, or an optimizer that is not supported.
        ValueError: an option's value makes no sense.
    """
    return foretell(
        model, optimizer, options, tokens=tokens, machine=machine, measure=measure, example=example
    )


def raise_shortfall(plan: Plan) -> None:
    """Raises ``BudgetError`` for a plan that does not fit."""
    if plan.fits:
        return
    first = plan.shortfalls[0]
    raise BudgetError(
        first.what, first.tier.value, first.need_bytes, first.have_bytes, first.have_bytes,
        first.remedy,
    )  # fmt: skip


def wrap(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> OffloadedOptimizer:
    """Offloads a model and its optimizer; the training loop stays as it is.

    Changes ``model`` in place (hooks; no module is replaced) and returns an optimizer over the
    same param groups.  Options: see ``OffloadConfig``.

    Example::

        optimizer = overspill.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-5),
                                   device_memory="10GiB", host_memory="24GiB", nvme="/scratch")

    Raises:
        BudgetError: a budget is too small; nothing was allocated.
        TypeError: an unknown option, or an optimizer that is not supported.
        ValueError: an option's value makes no sense, or weights do not match the model.
        OffloadError: the model is wrapped already, or cannot be.
    """
    config = OffloadConfig.from_options(options)
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
        wrapped = install(model, optimizer, engine)
    optimizer.state.clear()
    return wrapped


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


def unwrap(model: nn.Module) -> nn.Module:
    """Gives back an ordinary model with its trained weights; ends the engine.

    Needs memory for the whole model on its device.  Gradients are dropped.

    Raises:
        OffloadError: the model is not wrapped, or its engine was closed.
    """
    engine = engine_of(model)
    if engine is None:
        raise OffloadError("the model is not wrapped by overspill")
    engine.settle()  # also ends what an exception has left of ``materialized``
    values = [engine.weights.read(index) for index in range(len(engine.parts.parameters))]
    for p in engine.parts.parameters:
        p.grad = None
    engine.residences.give_away(values)
    let_go(model, engine)
    engine.close()
    return model
