"""Plans, and the budgets and needs that they are made from.  Plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from ..errors import format_budget, format_bytes, format_distinct
from ..facts.rates import Rates
from ..facts.tier import Tier
from ..schedule.layout import Layout, SavedRoom, UnitHome
from ..schedule.units import Unit, align
from .costs import Profile
from .steady import Simulated
from .subgroups import FieldsOf, WorkOf


@dataclass(frozen=True)
class Shortfall:
    """A tier that is too small.

    Attributes:
        what: what does not fit.
        need_bytes: bytes that it needs.
        have_bytes: bytes of the budget, or what is left of it.
        remedy: what the user can do.
        of_bytes: the budget, of which ``have_bytes`` are left; ``None``: they are all of it.
    """

    tier: Tier
    what: str
    need_bytes: int
    have_bytes: int
    remedy: str
    of_bytes: int | None = None

    @property
    def missing_bytes(self) -> int:
        """The bytes by which the budget is too small."""
        return self.need_bytes - self.have_bytes

    def __str__(self) -> str:
        need, have = format_distinct(self.need_bytes, self.have_bytes)
        there = f"the budget is {have}"
        if self.of_bytes is not None:
            there = f"{have} of the budget of {format_bytes(self.of_bytes)} is left"
        return f"{self.what} needs {need} of {self.tier.value} memory; {there}; {self.remedy}"


@dataclass(frozen=True)
class Budgets:
    """The bytes per tier that the engine may hold.

    Attributes:
        device: ``None`` without a device tier.
        nvme: ``None`` if no directory was given.
        compute_bytes: available bytes of the memory that compute uses, for the engine and all other
            uses; ``None`` if unknown.
    """

    device: int | None
    host: int
    nvme: int | None
    compute_bytes: int | None = None

    def raised(self, shortfalls: Iterable[Shortfall]) -> Budgets:
        """Return budgets that are larger by the missing bytes."""
        return replace(self, **{
            s.tier.value: (getattr(self, s.tier.value) or 0) + s.missing_bytes
            for s in shortfalls
        })  # fmt: skip

    def beyond(self, other: Budgets) -> dict[str, str]:
        """Return the budgets that differ from ``other``'s, by option."""
        return {
            f"{tier}_memory": format_budget(nbytes)
            for tier, nbytes, its in (
                ("device", self.device, other.device),
                ("host", self.host, other.host),
                ("nvme", self.nvme, other.nvme),
            )
            if nbytes is not None and nbytes != its
        }


@dataclass(frozen=True)
class Preference:
    """The preferred homes if there is room: every choice is valid, but not every one is fast.

    Attributes:
        kinds: the kinds of data that move from disk to host memory, in this order.
        order: of units, by index; ``None`` spreads the units that stay evenly over the model.
        share: part of the remaining room that homes take; the rest is for staging and prefetch.
        device: part of this room on the device for whole units (weights, gradients and state, with
            updates on the device); the rest is for weights alone.
        beside: whether gradients and state of trained weights beside frozen ones, such as adapters,
            have their home on the device too, if there is room.
        visiting: share of the other state records that are copied to the device for their update.
        recompute: units whose forward is recomputed in backward, under ``"auto"``.
        keep_attention: those of them that keep the outputs of their attention.
    """

    kinds: tuple[str, ...] = ("weights", "gradients", "state")
    order: tuple[int, ...] | None = None
    share: float = 1.0
    device: float = 0.0
    beside: bool = False
    visiting: float = 0.0
    recompute: frozenset[int] = frozenset()
    keep_attention: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Needs:
    """The properties of a run that the planner needs, apart from the model."""

    fields_of: FieldsOf
    accumulate: int
    update: str  # "step", "backward" or "next_forward"
    commit_every: int  # steps; 0: nothing is durable
    prefetch_depth: int | None = None
    prefer: Preference = Preference()
    numel: int | None = None  # elements of a state record; ``None``: chosen to fit the budgets
    pinned: frozenset[int] = frozenset()  # units whose weights stay in compute's memory
    named: bool = False  # whether the user has named some of these
    update_bytes: int = 0  # host memory of the update itself, of parameters updated as a whole
    device_update_bytes: int = 0  # the same on the device
    work_of: WorkOf = lambda chunk: None  # of updates as a whole
    matrices_visit: bool = False  # see Note [Device updates of matrices]
    activations: str = "keep"
    saved_bytes: tuple[int, ...] | None = None  # by unit, what autograd keeps, if known
    recomputable: frozenset[int] = frozenset()  # units whose forward may be recomputed
    in_place: frozenset[int] = frozenset()  # units that may be read from the user's own files
    sharers: int = 1  # ranks of this machine that have the same frozen weights, this one included
    packed_itemsize: int = 0  # bytes per element of activations that are packed; 0: none is
    could_tile: bool = False  # whether feed-forward layers could run in tiles, and do not

    @property
    def durable(self) -> bool:
        """Whether steps are committed."""
        return self.commit_every > 0

    @property
    def update_in_backward(self) -> bool:
        """Whether a unit is updated while earlier ones still run backward."""
        return self.update == "backward"

    @property
    def transient_grads(self) -> bool:
        """Whether the update consumes gradients on arrival, so that they need no home."""
        return self.update_in_backward and self.accumulate == 1


@dataclass(frozen=True)
class PlanDetail:
    """The inputs of a plan, and further results.

    Attributes:
        layout: the homes and regions; ``None`` if nothing was laid out.
        budgets, rates: the budgets and rates that the plan was made for.
        simulated: the simulated step: stalls, peaks and trace.
        update: when the update runs (``auto`` is ``next_forward``).
        accumulate: micro-steps per step.
        step_s_by_update: predicted step times by update mode that the options allow; empty in a
            run, which has only one.
        device_update_share: share of the parameters updated on the device, because their state
            stays there or is copied there for it.
        device_update_worth: share worth updating on the device by DESIGN's formula, if the link is
            otherwise idle; ``None`` without a link.
        preference: the chosen placement among the valid ones.
        saved_bytes: by unit, about what autograd would keep of a micro-step until backward,
            measured if an example was given; ``None`` if the load is unknown.
        activations_short: whether the tiers that activations may use have too little room for them.
        left_bytes: bytes left of the budget for the memory that compute uses.
        profile: compute and activations by unit, if an example step was given.
        fitting: budgets that would fit, by option, as ``{"host_memory": "628KiB"}``; empty if the
            plan fits, or if none were found.
        ranks: the number of ranks among which ``fitting`` divides host memory and disk space.
        optimizer: how an optimizer's own step runs; ``None`` if overspill has a rule for the
            optimizer.
        counts_compute: whether times include compute: that of tokens at the device's rate, or of an
            example.
        loss_in_chunks: the plan counts no whole logits, because the model computes its loss from
            parts of them.
        tiled: the number of layers that run in tiles.
        pageable_bytes: host memory of a run that could not be page-locked; copies of it are slower.
            0 in a plan without a run.
    """

    layout: Layout | None = field(default=None, repr=False)
    simulated: Simulated | None = field(default=None, repr=False)
    update: str = "next_forward"
    accumulate: int = 1
    step_s_by_update: Mapping[str, float] = field(default_factory=dict, repr=False)
    device_update_share: float = 0.0
    device_update_worth: float | None = None
    preference: Preference = field(default=Preference(), repr=False)
    saved_bytes: tuple[int, ...] | None = None
    activations_short: bool = False
    left_bytes: int | None = None
    profile: Profile | None = field(default=None, repr=False)
    budgets: Budgets | None = field(default=None, repr=False)
    fitting: Mapping[str, str] = field(default_factory=dict, repr=False)
    ranks: int = 1
    rates: Rates | None = field(default=None, repr=False)
    optimizer: str | None = None
    counts_compute: bool = True
    loss_in_chunks: bool = False
    tiled: int = 0
    pageable_bytes: int = 0

    @property
    def activation_bytes(self) -> int | None:
        """The activations of all units; ``None`` if they are not known."""
        return None if self.saved_bytes is None else sum(self.saved_bytes)

    @property
    def activations_fit(self) -> bool | None:
        """Whether there is room for the activations; ``None`` if they are not known."""
        return None if self.activation_bytes is None else not self.activations_short

    @property
    def cpu_has_matrices(self) -> bool:
        """Whether the CPU updates matrices that a device with more memory would update."""
        layout = self.layout
        return (
            layout is not None and layout.has_device and not layout.matrices_visit
            and any(record.matrix for record in layout.records)
        )  # fmt: skip

    @property
    def about_streaming(self) -> str:
        """How many units leave the device between uses, as the start of a description.

        A unit counts if its weights leave, or its frozen weights, or those that it shares.
        """
        layout = self.layout
        if layout is None or not layout.has_device:
            return ""
        moved = [
            0 if home.resident else unit.weight_bytes
            for unit, home in zip(layout.units, layout.homes, strict=True)
        ]
        running = [unit for unit in layout.units if unit.runs]
        streamed = sum(any(moved[i] for i in (unit.index, *unit.shares)) for unit in running)
        moved_bytes, all_bytes = sum(moved), sum(unit.weight_bytes for unit in layout.units)
        if not moved_bytes:
            return "streams no units, "
        share = f"{moved_bytes / all_bytes:.0%}"
        if share == "100%" and moved_bytes < all_bytes:
            share = "over 99%"
        return f"streams {streamed} of {len(running)} units ({share} of the weights), "

    @property
    def about_fitting(self) -> str:
        """The budgets that would fit, as the end of a message."""
        sizes = ", ".join(f"{option}={size!r}" for option, size in self.fitting.items())
        shared = [option for option in self.fitting if option != "device_memory"]
        if self.ranks > 1 and shared:
            sizes += f" ({' and '.join(shared)}: in total for the machine's {self.ranks} ranks)"
        return f". Budgets that would fit: {sizes}" if sizes else ""

    @property
    def about_activations(self) -> str:
        """A description of the activations."""
        saved = SavedRoom() if self.layout is None else self.layout.saved
        room = "" if self.left_bytes is None else f"{format_bytes(self.left_bytes)} left for them"
        if self.loss_in_chunks:
            room += ", if the loss is computed in chunks"
        if self.tiled:
            room += f", with {self.tiled} layers in tiles"
        if self.activation_bytes is None:
            if saved.policy == "keep":
                return "activations not counted"
            return f"activations ({saved.policy}) not known yet, {room}"
        again = f", {len(saved.recompute)} units computed again" if saved.recompute else ""
        if saved.keep_attention:
            again += f", {len(saved.keep_attention)} of them without their attention"
        packed = ", moved as int8" if saved.itemsize else ""
        kept = (
            f"about {format_bytes(self.activation_bytes)} of activations ({saved.policy}{packed}"
            f"{again})"
        )
        return f"{kept}, {room}" if room else kept


@dataclass(frozen=True)
class Plan:
    """A plan of a run: what it holds, what it moves, and the time of a step.

    Attributes:
        fits: whether every tier has room.
        shortfalls: what is missing, by tier.
        placement: by unit name, the homes of its weights, gradients and state.
        tier_bytes: bytes that the engine would hold, by tier.
        link_bytes: bytes per step by lane (``read, write, copy_in, copy_out``, and with several
            ranks ``wire``: what a rank receives from the others).
        step_s, bound_s: predicted time of a step and its lower bound; ``None`` without rates.
            Without the number of tokens, they leave compute out.
        bottleneck: the lane that sets the bound.
        disk_bytes: size of the store.
        detail: the inputs of the plan, and further results.
    """

    fits: bool
    shortfalls: tuple[Shortfall, ...]
    placement: Mapping[str, UnitHome]
    tier_bytes: Mapping[Tier, int]
    link_bytes: Mapping[str, int]
    disk_bytes: int
    step_s: float | None = None
    bound_s: float | None = None
    bottleneck: str | None = None
    detail: PlanDetail = field(default_factory=PlanDetail, repr=False)

    def __str__(self) -> str:
        tiers = ", ".join(f"{t.value} {format_bytes(n)}" for t, n in self.tier_bytes.items() if n)
        moved = ", ".join(f"{k} {format_bytes(v)}" for k, v in self.link_bytes.items() if v)
        if not self.fits:
            return (
                "does not fit: " + "; ".join(map(str, self.shortfalls)) + self.detail.about_fitting
            )
        bound = ""
        if self.bound_s is not None and self.bottleneck is not None:
            bound = f"; bound {self.bound_s:.3g} s ({self.bottleneck})"
            if not self.detail.counts_compute:
                bound += ", without compute"
        held = f"holds {tiers or 'nothing'}, {self.detail.about_streaming}"
        held += self.detail.about_activations
        if self.detail.pageable_bytes:
            pageable = format_bytes(self.detail.pageable_bytes)
            held += f"; {pageable} of host memory cannot be page-locked, so copies are slower"
        if self.detail.optimizer is not None:
            held += f"; {self.detail.optimizer}"
        if self.detail.device_update_share:
            held += f"; the device runs {self.detail.device_update_share:.0%} of the update"
        elif self.detail.cpu_has_matrices:
            held += "; the CPU runs the matrix products of the update, for lack of device memory"
        return f"{held}; moves {moved or 'nothing'} a step{bound}"


def host_grad_dtype(weight: torch.dtype, accumulate: int) -> torch.dtype:
    """Return the dtype in which the host keeps gradients: that of the weights, or fp32 if several
    micro-steps are accumulated or the weights are fp16."""
    # fp16 gradients are scaled by GradScaler, and are unscaled in fp32 only.
    return torch.float32 if accumulate > 1 or weight == torch.float16 else weight


def host_grad_bytes(unit: Unit, accumulate: int) -> int:
    """Return the bytes of a unit's gradients in host memory, with every chunk page-aligned."""
    return sum(
        align(chunk.numel * host_grad_dtype(chunk.dtype, accumulate).itemsize, 4096)
        for chunk in unit.chunks
        if chunk.group is not None
    )


def converts_grads(unit: Unit, accumulate: int) -> bool:
    """Return whether the host keeps a unit's gradients in another dtype than compute's."""
    return any(
        chunk.group is not None and host_grad_dtype(chunk.dtype, accumulate) != chunk.dtype
        for chunk in unit.chunks
    )
