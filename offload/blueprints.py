"""Blueprints: what is decided about a run before anything is allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .activations.known_code import known
from .activations.tiles import TiledLayers, layers_in, require_layers, tiled_layers
from .checks import check_devices, check_model, check_moments, check_packed, check_sources
from .config import OffloadConfig
from .facts.machine import Machine
from .facts.tier import Tier
from .logits.heads import (
    DeferredHeads,
    are_deferred,
    deferred_heads,
    heads_in,
    require_heads,
)
from .movement.accelerators.make import Accelerator
from .open_engines import untaken
from .optim import Master, Rule
from .optim.coupled import CoupledRule
from .optim.formats import granule_of
from .optim.registry import rules_for
from .optim.rule import is_whole
from .optim.streamed import StreamedRule
from .planning.blueprint import Blueprint
from .planning.bounds import (
    device_update_share,
    device_update_worth,
    step_bound,
)
from .planning.budgets import machine_budgets, resolve_budgets
from .planning.choose import (
    PlannedLayout,
    Workload,
    choose_layout,
    layout_with_room,
    plan_layout,
)
from .planning.fitting import (
    choose_side,
    copied_if_better,
    fitting_budgets,
    left_bytes,
    short_for_activations,
)
from .planning.packed_pages import with_described_pages, with_pages
from .planning.partition import Partition, partition, pinned_units, received_bytes
from .planning.plan import Budgets, Needs, Plan, PlanDetail, Preference
from .planning.sources import NO_SOURCES, Sources, described_sources
from .planning.stand_ins import (
    StandInModel,
    held_parameters,
    parameters_named,
    shared_memory_of,
    sharers,
    whole_model,
)
from .planning.subgroups import StateField
from .planning.unit_discovery import modules_named
from .planning.whole_updates import WholeUpdates
from .planning.working_memory import for_layout, of_budgets, working_bytes
from .schedule.units import Chunk
from .state.adapters import adapter_parameters
from .state.importing import match_weights, other_tensors
from .state.in_place import read_in_place
from .step.profiling import profile_step


def master_of(dtype: torch.dtype, config: OffloadConfig) -> Master:
    if dtype == torch.bfloat16:
        return "fp32" if config.master == "fp32" else "split"
    return "fp32" if dtype == torch.float16 else None


def _fields_of(
    rules: Sequence[Rule], config: OffloadConfig
) -> Callable[[Chunk], tuple[StateField, ...]]:
    def fields(chunk: Chunk) -> tuple[StateField, ...]:
        assert chunk.group is not None
        master, rule = master_of(chunk.dtype, config), rules[chunk.group]
        if is_whole(rule):
            (spec,) = chunk.params
            return rule.state_fields(chunk.dtype, master, config.moments, spec.shape)
        return rule.state_fields(chunk.dtype, master, config.moments)

    return fields


def make_blueprint(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: OffloadConfig,
    accelerator: Accelerator, *more: Any, unless_short: bool = False, **given: Any,
) -> Blueprint:  # fmt: skip
    """Build the blueprint: everything that is decided before anything is allocated.

    With ``tile="auto"``, feed-forward layers run in tiles if ``tokens`` fit only then.  For further
    arguments see ``_blueprint``.

    Args:
        unless_short: if no layout has room for activations, simulate none. The plan then has no
            times, but shows much sooner what is short.
    """

    def tiled(layers: tuple[nn.Module, ...], unless_short: bool = unless_short) -> Blueprint:
        new = TiledLayers((layer, lambda: 0) for layer in layers if layer not in now)
        try:
            how = {**given, "unless_short": unless_short}
            made = _blueprint(model, optimizer, config, accelerator, *more, **how)
        finally:
            new.remove()
        return replace(made, tiled=layers, shared_memory=shared_memory_of(model))

    now = tiled_layers(model)
    if config.tile not in (None, "auto"):
        return tiled(require_layers(modules_named(model, config.tile, "tile")))
    layers = layers_in(model) if config.tile == "auto" and not now else ()
    if layers:
        made = tiled(now, unless_short=True)
        if not made.plan.detail.activations_short:  # tiles reduce nothing else
            return made
    return tiled(layers or now)


def _blueprint(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: OffloadConfig,
    accelerator: Accelerator, machine: Machine | None = None,
    example: Callable[[], torch.Tensor] | None = None, prefer: Preference | None = None,
    every_update: bool = False, numel: int | None = None,
    description: Mapping[str, Any] | None = None, digests: Container[int] = (),
    unless_short: bool = False,
) -> Blueprint:  # fmt: skip
    """Build the blueprint for layers that run in tiles, or not, as they do now.

    Args:
        example: computes a micro-step; see ``plan``.
        prefer: use this placement instead of the best one.
        every_update: also plan the other update modes.
        numel: elements in a record of state, if a store has fixed it.
        description: the description of the store to be resumed.
        digests: the units for which its last commit has a checksum, if they are read in place.
        unless_short: see ``make_blueprint``.
    """
    rules = rules_for(optimizer)
    check_model(model, optimizer, config.weight_dtype)
    check_devices(model, accelerator)
    check_packed(model, accelerator, config.weight_dtype)
    check_moments(optimizer, config)
    check_sources(model, optimizer, config)
    parts = _parts_of(model, optimizer, rules, config)
    budgets = _budgets(config, accelerator, machine)
    coupled = next((rule for rule in rules if isinstance(rule, CoupledRule)), None)
    update = _update_mode(config.update, coupled)
    commit_every = config.commit_every if config.durable and config.nvme is not None else 0
    parts, sources = _sources(model, parts, config, description, digests)
    updates = updates_of(rules, optimizer, config)
    needs = Needs(
        _fields_of(rules, config), config.accumulate, update, commit_every, numel=numel,
        pinned=pinned_units(model, parts, config.resident or ()), named=bool(config.resident),
        activations=config.activations, recomputable=_recomputable(model, parts, config),
        in_place=frozenset(sources.ranges), sharers=sharers(model), work_of=updates.work_of,
        could_tile=_could_tile(model, config), packed_itemsize=_packed(parts, config, accelerator),
    )  # fmt: skip
    trained = {c.dtype for u in parts.units for c in u.chunks if c.group is not None}
    if config.master == "split" and torch.bfloat16 not in trained:
        raise ValueError(
            f"master='split' is for bf16 weights; these are {', '.join(map(str, trained))}; pass "
            "precision='bf16' or leave master out"
        )

    choice = _Choice(
        model, parts, config, budgets, needs, updates, example, prefer,
        trains=bool(rules), resumes=description is not None,
    )  # fmt: skip
    heads = require_heads(model) if config.loss == "chunked" else deferred_heads(model)
    deferrable = heads_in(model) if config.loss == "auto" and not heads else ()
    load, chosen = choice.for_heads(heads, unless_short=unless_short or bool(deferrable))
    if deferrable and choice.is_short(chosen, load):
        heads = deferrable
        load, chosen = choice.for_heads(heads, unless_short=unless_short)
    others: Mapping[str, float] = {}
    if coupled is not None:
        chosen = _because_coupled(chosen, coupled)
    elif every_update:
        others = _by_update(chosen, parts, budgets, config, load)
    plan = _plan_of(chosen, parts, budgets, config, load, others)
    plan = replace(plan, detail=replace(plan.detail, tiled=len(tiled_layers(model))))
    if ways := dict.fromkeys(_way(r) for r in rules if isinstance(r, StreamedRule)):
        plan = replace(plan, detail=replace(plan.detail, optimizer="; ".join(ways)))
    return Blueprint(config, parts, plan, budgets, rules, chosen.needs, sources, heads)


@dataclass(frozen=True)
class _Choice:
    """The choice of a layout for given parts, budgets and needs; see ``_blueprint``.

    Attributes:
        trains: whether there is an optimizer.
        resumes: whether the run is resumed from a store, which fixes what is read in place.
    """

    model: nn.Module
    parts: Partition
    config: OffloadConfig
    budgets: Budgets
    needs: Needs
    updates: WholeUpdates
    example: Callable[[], torch.Tensor] | None
    prefer: Preference | None
    trains: bool
    resumes: bool

    def for_heads(
        self, heads: tuple[nn.Linear, ...], *, unless_short: bool
    ) -> tuple[Workload, PlannedLayout]:
        """Return the compute and the layout if these heads defer their logits."""
        units = self.parts.units
        load = _workload(self.model, self.parts, self.config, self.example, heads)
        needs = replace(
            self.needs, recomputable=self.needs.recomputable - self.parts.units_of(heads)
        )
        if self.trains and (sizes := load.saved_bytes(units)) is not None:
            needs = replace(needs, saved_bytes=tuple(sizes))
        if unless_short:
            draft = self._placed(needs, load, simulated=False)
            if self.is_short(draft, load):
                return load, draft
        return load, self._placed(needs, load, simulated=True)

    def is_short(self, planned: PlannedLayout, load: Workload) -> bool:
        """Return whether a layout that fits has too little room for activations."""
        logits = load.logits_bytes(self.parts.units)
        return short_for_activations(planned, planned.needs, self.budgets, logits) is not None

    def _placed(self, needs: Needs, load: Workload, *, simulated: bool) -> PlannedLayout:
        """Return the fastest layout, or one without times; see ``layout_with_room``."""
        parts, budgets, config = self.parts, self.budgets, self.config

        def choose(needs: Needs) -> PlannedLayout:
            room, depth = for_layout(budgets, needs), config.prefetch_depth
            if simulated:
                found = choose_layout(parts, room, needs, depth, config.rates, load, self.prefer)
            else:
                found = layout_with_room(parts, room, needs, depth, self.prefer, has_room)
            return of_budgets(found, budgets, needs)

        def has_room(layout: PlannedLayout) -> bool:
            return not self.is_short(layout, load)

        def with_updates(on_device: bool) -> Needs:
            host, there, matrices = self.updates.memory(parts, device=on_device)
            return replace(
                needs, update_bytes=host, device_update_bytes=there, matrices_visit=matrices
            )

        logits = load.logits_bytes(parts.units)
        asked, chosen = choose_side(with_updates, choose, budgets, logits)
        if asked.in_place and not self.resumes:
            chosen = copied_if_better(chosen, asked, choose)
        return chosen


def _workload(
    model: nn.Module, parts: Partition, config: OffloadConfig,
    example: Callable[[], torch.Tensor] | None, heads: tuple[nn.Linear, ...],
) -> Workload:  # fmt: skip
    """Return the compute of a micro-step; ``heads``: those that defer their logits."""
    heads = heads or deferred_heads(whole_model(model))
    logits = not heads or not are_deferred(heads, config.tokens)
    if example is None:
        received = received_bytes(model, parts, config.weight_dtype)
        return Workload(config.tokens, None, logits, received)
    new = DeferredHeads((head, lambda: 0) for head in set(heads) - set(deferred_heads(model)))
    try:
        return Workload(config.tokens, profile_step(model, parts, example), logits)
    finally:
        new.remove()


def _could_tile(model: nn.Module, config: OffloadConfig) -> bool:
    """Return whether feed-forward layers could run in tiles, and do not."""
    return config.tile is None and bool(set(layers_in(model)) - set(tiled_layers(model)))


def _packed(parts: Partition, config: OffloadConfig, accelerator: Accelerator) -> int:
    """Return the bytes per element of activations that are packed, of the type that most weights
    have; 0: none is packed.

    Raises:
        ValueError: there is no tier to move them to.
    """
    if config.activations_format is None:
        return 0
    if config.nvme is None and not accelerator.has_device_memory:
        raise ValueError(
            f"activations_format={config.activations_format!r}: with device='cpu' and without "
            "nvme=, no activations are moved; pass nvme= (a directory), or leave it out"
        )
    sizes = Counter[int]()
    for chunk in (chunk for unit in parts.units for chunk in unit.chunks):
        sizes[chunk.dtype.itemsize] += chunk.nbytes
    return sizes.most_common(1)[0][0] if sizes else 0


def _parts_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, rules: Sequence[Rule], config: OffloadConfig
) -> Partition:
    """Divide the model into units, and its parameters into chunks and packed weights."""
    groups = {p: i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
    whole = {number for number, rule in enumerate(rules) if is_whole(rule)}
    records = [r.state_fields(torch.float32, None, config.moments)
               for number, r in enumerate(rules) if number not in whole]  # fmt: skip
    granule = max(map(granule_of, records), default=1)
    parts = partition(
        model, groups, names=config.units, dtype=config.weight_dtype, granule=granule, whole=whole
    )
    if config.frozen is not None:
        added = held_parameters(model, adapter_parameters(whole_model(model)))
        kept = added | parameters_named(model, config.resident or ())
        parts = with_pages(model, parts, config.frozen, kept)
    return parts


def _budgets(config: OffloadConfig, accelerator: Accelerator, machine: Machine | None) -> Budgets:
    if machine is not None and machine.host_memory is not None:
        return machine_budgets(config, machine)
    there = accelerator.device if accelerator.has_device_memory else None
    return resolve_budgets(config, there, untaken())


def _update_mode(asked: str, coupled: CoupledRule | None) -> str:
    """Return when updates run.

    Raises:
        ValueError: a coupled optimizer cannot run then.
    """
    if coupled is None:
        return "next_forward" if asked == "auto" else asked
    if asked not in ("auto", "step"):
        raise ValueError(
            f"update={asked!r} is not possible with {coupled.name}, whose step needs the gradients "
            "of all parameters at once; leave update out"
        )
    return "step"


def _sources(
    model: nn.Module, parts: Partition, config: OffloadConfig,
    description: Mapping[str, Any] | None, digests: Container[int],
) -> tuple[Partition, Sources]:  # fmt: skip
    """Return what can be read in place from ``weights=``, or is in a resumed store.

    Units that are quantised in the files get pages of what the files have.

    Raises:
        ValueError: the files do not match the model.
        OffloadError: they are not the files with which the store was made.
    """
    if description is not None:
        parts = with_described_pages(parts, description["units"])
        return parts, described_sources(description, digests, config.weight_files)
    if config.weights is None:
        return parts, NO_SOURCES
    matched = match_weights(config.weights, model, parts)
    other_tensors(matched, model, parts, config.ignore_weights or ())  # checks
    parts, sources = read_in_place(matched.files, matched.names, parts)
    path = config.weight_files
    return parts, replace(sources, root=path if isinstance(path, Path) else None)


def _recomputable(model: nn.Module, parts: Partition, config: OffloadConfig) -> frozenset[int]:
    """Return the units whose forward may be recomputed.

    With ``activations="auto"`` these are only units known to compute the same result again. Ranks
    choose on their own, so none is if its forward sends messages to other ranks.
    """
    if isinstance(model, StandInModel) and model.tensor_ranks > 1:
        return frozenset()
    if config.activations != "auto":
        return parts.recomputable
    return frozenset(i for i in parts.recomputable if known(parts.found[i].module))


def updates_of(
    rules: Sequence[Rule], optimizer: torch.optim.Optimizer, config: OffloadConfig
) -> WholeUpdates:
    groups, masters = optimizer.param_groups, partial(master_of, config=config)
    return WholeUpdates(rules, groups, masters, config.moments)


def _because_coupled(chosen: PlannedLayout, rule: CoupledRule) -> PlannedLayout:
    """Return the layout with the reason why it does not fit in host memory, if it does not."""
    what = f"{rule.name}, which couples parameters, so that it steps all of them in host memory,"
    remedy = (
        "raise host_memory, or use an optimizer that updates each parameter on its own, such as "
        "AdamW"
    )
    return replace(chosen, shortfalls=tuple(
        replace(short, what=what, remedy=remedy) if short.tier is Tier.HOST else short
        for short in chosen.shortfalls
    ))  # fmt: skip


def _way(rule: StreamedRule) -> str:
    """Return how an optimizer's own step runs."""
    return f"{rule.name} steps " + (
        "all parameters at once" if rule.coupled else "one parameter at a time"
    )


def _plan_of(
    chosen: PlannedLayout, parts: Partition, budgets: Budgets, config: OffloadConfig,
    load: Workload, step_s_by_update: Mapping[str, float],
) -> Plan:  # fmt: skip
    """Build the plan that describes a chosen layout."""
    layout, needs, rates, profile = chosen.layout, chosen.needs, config.rates, load.profile
    sizes, logits_bytes = needs.saved_bytes, load.logits_bytes(parts.units)
    missing = short_for_activations(chosen, needs, budgets, logits_bytes)
    shortfalls = chosen.shortfalls if missing is None else (missing,)
    fits, links, bound = not shortfalls, dict(chosen.link_bytes), None
    if load.wire_bytes and links:
        links["wire"] = load.wire_bytes * config.accumulate
    if rates is not None and chosen.simulated is not None:
        bound = step_bound(
            layout, links, rates, update=needs.update, micro_steps=config.accumulate,
            tokens=load.tokens * config.accumulate,
            compute_s=None if profile is None else profile.compute_s * config.accumulate,
        )  # fmt: skip
    held = {
        Tier.DEVICE: layout.regions.device_bytes + needs.device_update_bytes,
        Tier.HOST: layout.regions.counted_host_bytes
        + working_bytes(budgets, replace(needs, in_place=layout.in_place)),
        Tier.NVME: chosen.disk_bytes,
    }
    detail = PlanDetail(
        layout=layout,
        simulated=chosen.simulated,
        update=needs.update,
        accumulate=config.accumulate,
        step_s_by_update=step_s_by_update,
        device_update_share=device_update_share(layout),
        device_update_worth=None if rates is None else device_update_worth(rates),
        preference=needs.prefer,
        saved_bytes=None if sizes is None else tuple(sizes),
        activations_short=missing is not None,
        left_bytes=left_bytes(layout, for_layout(budgets, needs)),
        profile=profile,
        budgets=budgets,
        fitting={} if fits else fitting_budgets(needs, parts, budgets, logits_bytes),
        rates=rates,
        counts_compute=bool(
            (profile is not None and profile.compute_s)
            or (load.tokens and rates is not None and rates.device_flops_s)
        ),
        loss_in_chunks=not load.logits,
    )
    return Plan(
        fits=fits,
        shortfalls=shortfalls,
        placement={u.name: h for u, h in zip(parts.units, layout.homes, strict=True)},
        tier_bytes=held,
        link_bytes=links,
        disk_bytes=chosen.disk_bytes,
        step_s=chosen.step_s if rates is not None else None,
        bound_s=None if bound is None else bound.seconds,
        bottleneck=None if bound is None else bound.bottleneck,
        detail=detail,
    )


def _by_update(
    chosen: PlannedLayout, parts: Partition, budgets: Budgets, config: OffloadConfig, load: Workload
) -> dict[str, float]:
    """Return the seconds of a step for each update mode that the options allow."""
    if chosen.step_s is None or config.rates is None:
        return {}
    found = {chosen.needs.update: chosen.step_s}
    for other in ("step", "backward", "next_forward"):
        if other in found or (other == "backward" and config.max_grad_norm is not None):
            continue
        needs = replace(chosen.needs, update=other)
        room = for_layout(budgets, needs)
        step_s = plan_layout(parts, room, needs, config.rates, load).step_s
        if step_s is not None:
            found[other] = step_s
    return found
