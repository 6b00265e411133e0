"""What a plan says, and what it is made from: plain facts."""

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
from .subgroups import FieldsOf


@dataclass(frozen=True)
class Shortfall:
    """A tier that is too small: for what, how much it needs, what it has, and the remedy."""

    tier: Tier
    what: str
    need_bytes: int
    have_bytes: int
    remedy: str

    @property
    def missing_bytes(self) -> int:
        """By how much the budget is too small."""
        return self.need_bytes - self.have_bytes

    def __str__(self) -> str:
        need, have = format_distinct(self.need_bytes, self.have_bytes)
        return (
            f"{self.what} needs {need} of {self.tier.value} memory; the budget is {have}; "
            f"{self.remedy}"
        )


@dataclass(frozen=True)
class Budgets:
    """Bytes per tier that the engine may hold; ``device`` is ``None`` where there is no such tier,
    ``nvme`` is ``None`` where no directory was given.

    ``compute_bytes``: what is there, for the engine and all else, of the memory that compute uses;
    ``None`` where that is not known.
    """

    device: int | None
    host: int
    nvme: int | None
    compute_bytes: int | None = None

    def raised(self, shortfalls: Iterable[Shortfall]) -> Budgets:
        """Return budgets that are larger by what is missing."""
        return replace(self, **{
            s.tier.value: (getattr(self, s.tier.value) or 0) + s.missing_bytes
            for s in shortfalls
        })  # fmt: skip

    def beyond(self, other: Budgets) -> dict[str, str]:
        """Return those of these budgets that differ from ``other``'s, by option."""
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
    """What stays where there is room: any choice is legal, not every one is fast.

    Attributes:
        kinds: what moves up from disk to host memory, first what is first.
        order: of units, by index; ``None`` lets those that stay lie evenly over the model.
        share: of the room that is left for what stays; the rest goes to staging and prefetch.
        device: of such room on the device, what goes to units that live there as a whole, weights,
            gradients and state, and are updated there; the rest goes to weights alone.
        visiting: share of the other records of state that go to the device for their update and
            come back.
        recompute: units whose forward is computed again in backward, under ``"auto"``.
    """

    kinds: tuple[str, ...] = ("weights", "gradients", "state")
    order: tuple[int, ...] | None = None
    share: float = 1.0
    device: float = 0.0
    visiting: float = 0.0
    recompute: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Needs:
    """What the planner must know about the run besides the model."""

    fields_of: FieldsOf
    accumulate: int
    update: str  # "step", "backward" or "next_forward"
    commit_every: int  # steps; 0: nothing is durable
    prefetch_depth: int | None = None
    prefer: Preference = Preference()
    numel: int | None = None  # elements of a record of state; ``None``: as fits the budgets
    pinned: frozenset[int] = frozenset()  # units whose weights stay where compute is
    activations: str = "keep"
    saved_bytes: tuple[int, ...] | None = None  # by unit, what autograd keeps, if it is known
    recomputable: frozenset[int] = frozenset()  # units whose forward may be computed again
    in_place: frozenset[int] = frozenset()  # units that may be read from files which are not ours

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
    """How a plan came about, and what follows from it.

    Attributes:
        layout: the homes and regions of all that moves; ``None`` where nothing was laid out.
        budgets, rates: that it was made for.
        simulated: the step as the simulator runs it: stalls, peaks, and its trace.
        update: when the update runs (``auto`` is ``next_forward``).
        accumulate: micro-steps of a step.
        step_s_by_update: predicted times of the ways to update that the options allow; empty in a
            run, which has but one.
        device_update_share: share of the parameters updated on the device: whose state stays there,
            or goes there for it.
        device_update_worth: share worth updating there by DESIGN's formula, where the link has
            nothing else to do; ``None`` without a link.
        preference: which of the legal placements was chosen.
        saved_bytes: by unit, about what autograd would keep of a micro-step until backward,
            measured where an example was given; ``None`` where the load is not known.
        activations_short: whether no tier that they may be in has room for them.
        left_bytes: of the budget of the memory that compute uses, what nothing else takes.
        profile: compute and activations by unit, where an example step was given.
        fitting: budgets that would fit, if the plan does not, by option, as
            ``{"host_memory": "628KiB"}``; empty for one that fits, and where none were found.
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
    rates: Rates | None = field(default=None, repr=False)
    pageable_bytes: int = 0

    @property
    def activation_bytes(self) -> int | None:
        """Those of all units."""
        return None if self.saved_bytes is None else sum(self.saved_bytes)

    @property
    def activations_fit(self) -> bool | None:
        """Whether there is room for the activations; ``None`` where they are not known."""
        return None if self.activation_bytes is None else not self.activations_short

    @property
    def about_fitting(self) -> str:
        """The budgets that would fit, as the end of a message."""
        sizes = ", ".join(f"{option}={size!r}" for option, size in self.fitting.items())
        return f". Budgets that would fit: {sizes}" if sizes else ""

    @property
    def about_activations(self) -> str:
        """What is known of them, in words."""
        saved = SavedRoom() if self.layout is None else self.layout.saved
        room = "" if self.left_bytes is None else f"{format_bytes(self.left_bytes)} left for them"
        if self.activation_bytes is None:
            if saved.policy == "keep":
                return "activations not counted"
            return f"activations ({saved.policy}) not known yet, {room}"
        again = f", {len(saved.recompute)} units computed again" if saved.recompute else ""
        kept = f"about {format_bytes(self.activation_bytes)} of activations ({saved.policy}{again})"
        return f"{kept}, {room}" if room else kept


@dataclass(frozen=True)
class Plan:
    """What a run would hold, move and cost.

    Attributes:
        fits: whether every tier has room; ``shortfalls`` says what is missing.
        placement: by unit name, the homes of its weights, gradients and state.
        tier_bytes: bytes that the engine would hold, by tier.
        link_bytes: bytes per step by lane (``read, write, copy_in, copy_out``).
        step_s, bound_s: predicted time of a step and its lower bound, or ``None`` where no rates
            are known; without compute where tokens were not given.
        bottleneck: the lane that sets the bound.
        disk_bytes: size of the store.
        detail: how it came about, and what follows from it.
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
        bound = "" if self.bound_s is None else f"; bound {self.bound_s:.3g} s ({self.bottleneck})"
        held = f"holds {tiers or 'nothing'}, {self.detail.about_activations}"
        if self.detail.pageable_bytes:
            pageable = format_bytes(self.detail.pageable_bytes)
            held += f"; {pageable} of host memory cannot be page-locked, so copies are slower"
        return f"{held}; moves {moved or 'nothing'} a step{bound}"


def host_grad_dtype(weight: torch.dtype, accumulate: int) -> torch.dtype:
    """How the host keeps gradients: as they come, and in fp32 where several are added up."""
    # fp16 gradients come scaled: GradScaler unscales them, which it does in fp32 only.
    return torch.float32 if accumulate > 1 or weight == torch.float16 else weight


def host_grad_bytes(unit: Unit, accumulate: int) -> int:
    """Bytes of a unit's gradients in host memory; every chunk on a page border."""
    return sum(
        align(chunk.numel * host_grad_dtype(chunk.dtype, accumulate).itemsize, 4096)
        for chunk in unit.chunks
        if chunk.group is not None
    )


def converts_grads(unit: Unit, accumulate: int) -> bool:
    """Whether the host keeps a unit's gradients in another dtype than they come in."""
    return any(
        chunk.group is not None and host_grad_dtype(chunk.dtype, accumulate) != chunk.dtype
        for chunk in unit.chunks
    )
