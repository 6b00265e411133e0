"""Where everything lives: the fixed homes, and the regions that the rest moves through."""

from __future__ import annotations

from dataclasses import dataclass

from ..facts.tier import Tier
from .arena import Place
from .units import Subgroup, Unit


@dataclass(frozen=True)
class UnitHome:
    """The homes of one unit.

    ``weights`` is the tier that owns the weights; ``resident`` says that the copy that compute
    uses never leaves.  ``grads`` is where gradients wait between backward and the update
    (``None``: only from arrival to an immediate update).  ``state`` is by subgroup.  Places are
    set for what stays put: a host home, a resident device copy, and so on.
    """

    weights: Tier
    resident: bool
    grads: Tier | None
    state: tuple[Tier, ...]
    host_place: Place | None = None
    device_place: Place | None = None
    grad_place: Place | None = None
    state_places: tuple[Place | None, ...] = ()


@dataclass(frozen=True)
class Regions:
    """Bytes of each part of the two memory arenas; the fixed part comes first in both."""

    device_fixed: int = 0
    device_weights: int = 0
    device_grads: int = 0
    host_fixed: int = 0
    host_weights: int = 0
    host_grads: int = 0
    state_slot: int = 0
    state_slots: int = 0
    visit_slot: int = 0
    visit_slots: int = 0

    @property
    def device_visits(self) -> int:
        return self.visit_slot * self.visit_slots

    @property
    def device_bytes(self) -> int:
        return self.device_fixed + self.device_weights + self.device_grads + self.device_visits

    @property
    def host_bytes(self) -> int:
        return (
            self.host_fixed
            + self.host_weights
            + self.host_grads
            + self.state_slot * self.state_slots
        )


@dataclass(frozen=True)
class Layout:
    """All that the residency machine must know: sizes, homes and regions.  Plain facts."""

    units: tuple[Unit, ...]
    subgroups: tuple[tuple[Subgroup, ...], ...]
    homes: tuple[UnitHome, ...]
    regions: Regions
    grad_bytes: tuple[int, ...]  # a unit's gradients as the host keeps them
    converts: tuple[bool, ...]  # whether that is in another dtype than they come in
    has_device: bool
    durable: bool
    prefetch_depth: int
    visiting: float = 0.0  # share of the records kept elsewhere that are updated on the device

    @property
    def compute_tier(self) -> Tier:
        """Where weights must be for compute to use them."""
        return Tier.DEVICE if self.has_device else Tier.HOST
