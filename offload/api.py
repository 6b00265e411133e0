"""The main public functions: ``plan``, ``wrap``, ``resume``, ``unwrap`` and ``materialized``."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from torch import nn

from .arguments import as_model, as_one
from .closeable import end_unused
from .config import OffloadConfig
from .durable.meta import decode_facts
from .durable.resume import models_in, optimizer_for, warn_of_kept_options, with_formats
from .engine import Engine, engine_of
from .engine_handle import OffloadedInference
from .errors import LifecycleError, StoreError
from .facts.machine import Machine
from .facts.rates import Rates
from .io_engine.committed import OwnedStore, own_store
from .joint_steps import in_parts
from .open_engines import close_engines_in, describe, engine_around, refuse_folders_in_use
from .optimizer import OffloadedOptimizer
from .over_ranks import (
    is_spread,
    over_ranks_around,
    over_ranks_of,
    plan_for,
    refuse_spread,
    resumed_of_ranks,
)  # fmt: skip
from .paths import as_path, as_paths
from .planning.models import named_models, reorder
from .planning.plan import Plan
from .ranks.stores import in_the_way, runs_in, with_ranks
from .wrapping import resumed, wrapped, wrapped_for_inference

if TYPE_CHECKING:
    from typing_extensions import Never

log = logging.getLogger("overspill")

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
OneOrMore = nn.Module | Mapping[str, nn.Module]
WeightPaths = str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]]
M = TypeVar("M", bound=OneOrMore)


def _options(given: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """Return the options among a function's arguments.

    Unknown ones are included, so that ``OffloadConfig`` can report them.
    """
    own = {name: value for name, value in given.items() if name not in ("unknown", *others)}
    return {**own, **given["unknown"]}


def _as_one(model: object, optimizer: object) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Check the arguments, and return the models and the optimizers as one each."""
    return as_model(model), None if optimizer is None else as_one(optimizer)


def _wrapped(model: nn.Module) -> Engine:
    """Return the engine of a model.

    Raises:
        OffloadError: it is not wrapped.
    """
    engine = engine_of(model)
    parts = named_models(model).values()
    if engine is None and (of_part := next(filter(None, map(engine_of, parts)), None)) is not None:
        raise LifecycleError(
            f"these models were wrapped as {describe(of_part)}; give the same dict, or, to "
            "named_weights and materialized, one of the models"
        )
    if engine is None:
        raise LifecycleError(
            "the model is not wrapped by overspill; overspill.wrap(model, ...) first"
        )
    return engine


def plan(
    model: OneOrMore,
    optimizer: Optimizers | None = None,
    *,
    machine: Machine | None = None,
    ranks: int = 1,
    measure: bool = False,
    example: Callable[[], torch.Tensor] | None = None,
    device: str | torch.device | None = None,
    device_memory: int | str = "auto",
    host_memory: int | str = "auto",
    leave: int | str | Mapping[str, int | str] = 0,
    nvme: Paths | None = None,
    nvme_memory: int | str = "auto",
    precision: Literal["bf16", "fp16", "fp32"] | None = None,
    master: Literal["auto", "split", "fp32"] = "auto",
    moments: Literal["fp32", "bf16", "int8"] = "fp32",
    activations: Literal["auto", "keep", "host", "nvme", "recompute", "selective"] = "auto",
    activations_format: Literal["int8"] | None = None,
    loss: Literal["auto", "chunked"] | None = None,
    tile: Literal["auto"] | Sequence[str] | None = None,
    frozen: Literal["int8", "nf4"] | None = None,
    tokens: int = 0,
    max_grad_norm: float | None = None,
    update: Literal["auto", "step", "backward", "next_forward"] = "auto",
    accumulate: int = 1,
    units: Sequence[str] | None = None,
    resident: Sequence[str] | None = None,
    weights: WeightPaths | None = None,
    ignore_weights: Sequence[str] | None = None,
    init: Callable[[nn.Module], None] | None = None,
    prefetch_depth: int | None = None,
    threads: int | None = None,
    checksum: bool = True,
    rates: Rates | None = None,
    durable: bool = True,
    commit_every: int = 1,
    extra: Callable[[], Mapping[str, Any]] | None = None,
    on_nonfinite: Literal["raise", "skip", "rollback"] = "raise",
    verbose: bool = False,
    **unknown: Never,
) -> Plan:
    """Return what ``wrap`` with the same options would hold and move, without allocating anything.

    A lack of memory is not an error: see ``plan.fits`` and ``plan.shortfalls``.  Without an
    optimizer a step is one forward.

    Args:
        tokens: the tokens of one micro-step, which include compute and activations in the plan.
            Without them, times cover only transfers and updates.
        machine: the machine to plan for.  Sizes given in it replace the memory and disks of this
            machine.
        ranks: the ranks on this machine that train the model together under FSDP2, each with a
            device of its own.  The plan is one rank's, of its part of the machine; ``tokens`` are
            those of one rank.
        example: runs the forward of one micro-batch and returns its loss, such as ``lambda:
            model(**batch).loss``.  It and its backward run a few times, in memory, and the measured
            compute time and activations of each unit replace those estimated from FLOPs.  With a
            model on ``meta``, only activations are measured.  Existing gradients are kept.
        measure: measure this machine again instead of using stored rates.

    For all other arguments, see ``OffloadConfig``.

    Raises:
        TypeError: an unknown option, or an optimizer that is not supported.
        ValueError: an option has an invalid value.
    """
    options = _options(locals(), "model", "optimizer", "machine", "ranks", "measure", "example")
    whole, one = _as_one(model, optimizer)
    if machine is not None:  # its values apply unless an option is given
        options = {name: value for name, value in options.items() if value is not None}
    return plan_for(whole, one, options, ranks, machine=machine, measure=measure, example=example)


@overload
def wrap(
    model: OneOrMore,
    optimizer: torch.optim.Optimizer,
    *,
    device: str | torch.device | None = None,
    device_memory: int | str = "auto",
    host_memory: int | str = "auto",
    leave: int | str | Mapping[str, int | str] = 0,
    nvme: Paths | None = None,
    nvme_memory: int | str = "auto",
    precision: Literal["bf16", "fp16", "fp32"] | None = None,
    master: Literal["auto", "split", "fp32"] = "auto",
    moments: Literal["fp32", "bf16", "int8"] = "fp32",
    activations: Literal["auto", "keep", "host", "nvme", "recompute", "selective"] = "auto",
    activations_format: Literal["int8"] | None = None,
    loss: Literal["auto", "chunked"] | None = None,
    tile: Literal["auto"] | Sequence[str] | None = None,
    frozen: Literal["int8", "nf4"] | None = None,
    tokens: int = 0,
    max_grad_norm: float | None = None,
    update: Literal["auto", "step", "backward", "next_forward"] = "auto",
    accumulate: int = 1,
    units: Sequence[str] | None = None,
    resident: Sequence[str] | None = None,
    weights: WeightPaths | None = None,
    ignore_weights: Sequence[str] | None = None,
    init: Callable[[nn.Module], None] | None = None,
    prefetch_depth: int | None = None,
    threads: int | None = None,
    checksum: bool = True,
    rates: Rates | None = None,
    durable: bool = True,
    commit_every: int = 1,
    extra: Callable[[], Mapping[str, Any]] | None = None,
    on_nonfinite: Literal["raise", "skip", "rollback"] = "raise",
    verbose: bool = False,
) -> OffloadedOptimizer: ...


@overload
def wrap(
    model: OneOrMore, optimizer: Sequence[torch.optim.Optimizer], **options: Any
) -> list[OffloadedOptimizer]: ...


@overload
def wrap(
    model: OneOrMore,
    optimizer: None = None,
    *,
    device: str | torch.device | None = None,
    device_memory: int | str = "auto",
    host_memory: int | str = "auto",
    leave: int | str | Mapping[str, int | str] = 0,
    nvme: Paths | None = None,
    nvme_memory: int | str = "auto",
    precision: Literal["bf16", "fp16", "fp32"] | None = None,
    activations: Literal["auto", "keep", "host", "nvme", "recompute", "selective"] = "auto",
    activations_format: Literal["int8"] | None = None,
    loss: Literal["auto", "chunked"] | None = None,
    tile: Literal["auto"] | Sequence[str] | None = None,
    frozen: Literal["int8", "nf4"] | None = None,
    tokens: int = 0,
    units: Sequence[str] | None = None,
    resident: Sequence[str] | None = None,
    weights: WeightPaths | None = None,
    ignore_weights: Sequence[str] | None = None,
    init: Callable[[nn.Module], None] | None = None,
    prefetch_depth: int | None = None,
    threads: int | None = None,
    checksum: bool = True,
    rates: Rates | None = None,
    verbose: bool = False,
) -> OffloadedInference: ...


def wrap(
    model: OneOrMore,
    optimizer: Optimizers | None = None,
    *,
    device: str | torch.device | None = None,
    device_memory: int | str = "auto",
    host_memory: int | str = "auto",
    leave: int | str | Mapping[str, int | str] = 0,
    nvme: Paths | None = None,
    nvme_memory: int | str = "auto",
    precision: Literal["bf16", "fp16", "fp32"] | None = None,
    master: Literal["auto", "split", "fp32"] = "auto",
    moments: Literal["fp32", "bf16", "int8"] = "fp32",
    activations: Literal["auto", "keep", "host", "nvme", "recompute", "selective"] = "auto",
    activations_format: Literal["int8"] | None = None,
    loss: Literal["auto", "chunked"] | None = None,
    tile: Literal["auto"] | Sequence[str] | None = None,
    frozen: Literal["int8", "nf4"] | None = None,
    tokens: int = 0,
    max_grad_norm: float | None = None,
    update: Literal["auto", "step", "backward", "next_forward"] = "auto",
    accumulate: int = 1,
    units: Sequence[str] | None = None,
    resident: Sequence[str] | None = None,
    weights: WeightPaths | None = None,
    ignore_weights: Sequence[str] | None = None,
    init: Callable[[nn.Module], None] | None = None,
    prefetch_depth: int | None = None,
    threads: int | None = None,
    checksum: bool = True,
    rates: Rates | None = None,
    durable: bool = True,
    commit_every: int = 1,
    extra: Callable[[], Mapping[str, Any]] | None = None,
    on_nonfinite: Literal["raise", "skip", "rollback"] = "raise",
    verbose: bool = False,
    **unknown: Never,
) -> OffloadedOptimizer | list[OffloadedOptimizer] | OffloadedInference:
    """Offload a model and its optimizer; the training loop stays unchanged.

    Changes ``model`` in place (hooks; no module is replaced) and returns an optimizer over the same
    param groups.  For the options, see ``OffloadConfig``.

    A dict of models, such as ``{"policy": policy, "reference": reference}``, shares one set of
    budgets and one store.  Each model is called on its own, in any order.  Names of parameters and
    units begin with the model's name.

    A list of optimizers, such as Muon for matrices and AdamW for the rest, gives a list.  Each
    takes its own steps.

    Without an optimizer nothing is trained: weights are streamed for inference, including
    ``generate``.  Gradients pass through to parameters outside of the model, and ``activations``
    applies.  The returned object has ``plan``, ``stats``, ``memory``, ``trace`` and
    ``close``.

    Example::

        optimizer = overspill.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-5),
                                   device_memory="10GiB", host_memory="24GiB", nvme="/scratch")

    Raises:
        BudgetError: a budget is too small; nothing was allocated.
        TypeError: an unknown option, or an optimizer that is not supported.
        ValueError: an option has an invalid value, or weights do not match the model.
        OffloadError: the model is already wrapped, or cannot be.
    """
    options = _options(locals(), "model", "optimizer")
    whole, one = _as_one(model, optimizer)
    config = OffloadConfig.from_options(options)
    refuse_spread(whole)
    if one is None:
        return wrapped_for_inference(whole, config)
    if is_spread(whole):
        from .ranks.sharding import wrapped_shards

        return wrapped_shards(whole, one, config)
    if config.nvme is not None and (ranks := runs_in(config.nvme)):
        raise in_the_way(config.nvme[0], min(ranks))
    return in_parts(wrapped(whole, one, config), one)


def resume(
    model: OneOrMore,
    path: Paths,
    optimizer: Optimizers | None = None,
    *,
    device: str | torch.device | None = None,
    device_memory: int | str = "auto",
    host_memory: int | str = "auto",
    leave: int | str | Mapping[str, int | str] = 0,
    nvme: Paths | None = None,
    nvme_memory: int | str = "auto",
    precision: Literal["bf16", "fp16", "fp32"] | None = None,
    master: Literal["auto", "split", "fp32"] | None = None,
    moments: Literal["fp32", "bf16", "int8"] | None = None,
    activations: Literal["auto", "keep", "host", "nvme", "recompute", "selective"] = "auto",
    activations_format: Literal["int8"] | None = None,
    loss: Literal["auto", "chunked"] | None = None,
    tile: Literal["auto"] | Sequence[str] | None = None,
    frozen: Literal["int8", "nf4"] | None = None,
    tokens: int = 0,
    max_grad_norm: float | None = None,
    update: Literal["auto", "step", "backward", "next_forward"] = "auto",
    accumulate: int = 1,
    units: Sequence[str] | None = None,
    resident: Sequence[str] | None = None,
    weights: WeightPaths | None = None,
    ignore_weights: Sequence[str] | None = None,
    init: Callable[[nn.Module], None] | None = None,
    prefetch_depth: int | None = None,
    threads: int | None = None,
    checksum: bool | None = None,
    rates: Rates | None = None,
    durable: bool | None = None,
    commit_every: int = 1,
    extra: Callable[[], Mapping[str, Any]] | None = None,
    on_nonfinite: Literal["raise", "skip", "rollback"] = "raise",
    verbose: bool = False,
    **unknown: Never,
) -> tuple[OffloadedOptimizer, Any]:
    """Wrap ``model`` with the contents of a store's last commit, and continue in that store.

    Weights, state, step counts, hyper-parameters, buffers and random generators are restored from
    the commit.  The values in the model and the optimizer are not used, so the model may be built
    under ``empty_init()``.  A warning names hyper-parameters of ``optimizer`` that differ; to
    change one, set it in ``param_groups`` afterwards.

    Budgets, tiers, update mode and device may differ from those of the previous run; number formats
    are those of the store.  With other directories in ``nvme``, the commit is first copied there,
    striped over all of them, and the old store stays.

    Args:
        path: the directory of the store, or all of them.
        optimizer: of the same kind, with the same param groups; ``None`` for one of torch's that
            has a native rule, with the groups of the store.
        options: see ``OffloadConfig``; ``nvme``: where to continue, if not in the store itself.

    Returns:
        The optimizer, or a list if one was given, and what ``extra`` returned when the commit was
        sealed.

    Raises:
        IoError: there is no store, a part of it is missing, or another process uses it.
        CorruptionError: it is damaged; the error names the last whole commit.
        OffloadError: it is the store of another model.
        BudgetError: a budget is too small.
    """
    options = _options(locals(), "model", "path", "optimizer")
    whole, one = _as_one(model, optimizer)
    refuse_spread(whole)
    end_unused()  # an unused engine may still own the store
    refuse_folders_in_use(as_paths(path, "path"))
    if (found := resumed_of_ranks(whole, path, one, options)) is not None:
        return found
    with own_store(path) as store:
        made, extra = _resumed(store, whole, one, options)
    return in_parts(made, one), extra  # type: ignore[return-value]


def _resumed(
    store: OwnedStore, model: nn.Module, optimizer: torch.optim.Optimizer | None,
    options: dict[str, Any],
) -> tuple[OffloadedOptimizer, Any]:  # fmt: skip
    """Resume from a store that this process now owns."""
    generation = store.last()
    config = OffloadConfig.from_options(with_formats(store, options))
    facts = decode_facts(generation.meta)
    reorder(model, models_in(store.layout.description))
    if optimizer is None:
        optimizer = optimizer_for(model, store.layout.description, facts)
    if len(optimizer.param_groups) != len(facts["groups"]):
        raise StoreError(
            f"the store has {len(facts['groups'])} param groups, the optimizer "
            f"{len(optimizer.param_groups)}; build it as for the run before"
        )
    warn_of_kept_options(optimizer.param_groups, facts["groups"])
    made, extra = resumed(store, model, optimizer, config)
    log.info("overspill: resumed at step %d (generation %d)", generation.step, generation.number)
    return made, extra


@overload
def unwrap(model: M) -> M: ...


@overload
def unwrap(model: str | os.PathLike[str]) -> None: ...


def unwrap(model: OneOrMore | str | os.PathLike[str]) -> OneOrMore | None:
    """Return the model to an ordinary one with its trained weights, and close its engine.

    Needs memory for the whole model on its device.  Gradients are dropped.  Models that were
    wrapped together are unwrapped together: give the same dict.

    Given a folder instead, close the engines of this process that use it as ``nvme``, as
    ``close()`` of the optimizer does: the last step is committed, threads end, and memory and disk
    space are freed.  Weights are not loaded; ``overspill.resume`` continues from a durable store.
    Use it for an engine to which you have no reference, such as one kept alive by a traceback in a
    notebook.

    Returns:
        The model; ``None`` for a folder.

    Raises:
        OffloadError: the model is not wrapped, its engine was closed, or no engine of this process
            uses the folder.
    """
    if isinstance(model, (str, os.PathLike)):
        close_engines_in(folder := as_path(model, "model"), with_ranks(folder))
        return None
    whole = as_model(model)
    if (over_ranks := over_ranks_of(whole)) is not None:
        over_ranks.give_back()
        return model
    engine = _wrapped(whole)
    if engine.model is not whole:
        raise LifecycleError(
            f"this model was wrapped together with others, as {describe(engine)}; unwrap all of "
            "them in one call, with what was given to wrap"
        )
    engine.give_back()
    engine.close()
    return model


def materialized(model: M, writeback: bool = False) -> AbstractContextManager[M]:
    """Load all weights into ordinary tensors, for code that reads or edits ``p.data``.

    Returns a context manager.  ``model`` is the model or a module in it, or a dict of models as it
    was wrapped, or one of them.  Needs memory for its weights on its device.  With ``writeback``,
    edited weights are written back (and to their masters); without, edits are dropped.  On several
    ranks, all must make the same edits, and modules that FSDP2 has sharded cannot run in the block.

    Raises:
        OffloadError: it is not wrapped, or is running, or ranks differ; then nothing is written.
    """
    part = as_model(model)
    if (over_ranks := over_ranks_around(part)) is not None:
        return over_ranks.materialized(part, model, writeback=writeback)
    engine = engine_of(part) or engine_around(part) or _wrapped(part)
    return engine.materialized(part, model, writeback=writeback)


def named_weights(model: OneOrMore) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the full, current weights of a wrapped model, to export, average or send them.

    For models that were wrapped together, pass one of them or the dict of all.  Weights come in the
    engine's order, unit by unit.  Each is fetched once, so the caller need not hold several, and is
    the current one when it is fetched; training may continue between iterations.  Tied parameters
    come once.  Buffers are not included, because they are not offloaded.

    Yields:
        The parameter's name and a copy of its weight, on the model's device, in its dtype.

    Raises:
        OffloadError: the model is not wrapped, or is running.
    """
    whole = as_model(model)
    if (over_ranks := over_ranks_of(whole)) is not None:
        return over_ranks.named_weights()
    return _wrapped(whole).named_weights(whole)
