"""Makes parameters point into their slot while the unit is in use, and at a stub otherwise.

A stub keeps shape, dtype and device, holds one NaN of its own and no more, so that a stray read
shows.  Every residency gets a new storage object over the slot: when that has expired, nothing
points into the slot any more.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import OffloadError
from ..schedule.arena import Place
from ..schedule.messages import Freed, Need, Release
from ..schedule.partition import Partition, Unit
from . import torch_private
from .accelerators.base import Accelerator
from .executor import Executor


@dataclass(frozen=True)
class Residence:
    """One residency of one unit: the storage over its slot, and its parameters' views."""

    unit: int
    storage: torch.UntypedStorage
    views: tuple[torch.Tensor, ...]  # in the order of ``unit.params``


def view_in(
    storage: torch.UntypedStorage, byte_offset: int, dtype: torch.dtype,
    offset: int, shape: Sequence[int], stride: Sequence[int],
) -> torch.Tensor:  # fmt: skip
    """A tensor over part of a storage; ``offset`` counts elements after ``byte_offset``."""
    start = byte_offset // dtype.itemsize + offset
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, start, shape, stride)


def make_views(unit: Unit, storage: torch.UntypedStorage) -> tuple[torch.Tensor, ...]:
    """Views of all parameters of a unit over its slot."""
    return tuple(
        view_in(storage, chunk.byte_offset, chunk.dtype, spec.offset, spec.shape, spec.stride)
        for chunk, spec in unit.params
    )


def make_stub(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of one NaN, expanded: ``numel()`` is true and there is no memory behind it."""
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(tuple(shape))


class Residences:
    """Opens and closes units for compute.  Counts uses; the first opens, the last closes."""

    def __init__(
        self,
        parts: Partition,
        executor: Executor,
        accelerator: Accelerator,
        place_of: Callable[[int], Place],
    ) -> None:
        self.parts, self.executor, self.accelerator = parts, executor, accelerator
        self._place_of = place_of
        count = len(parts.units)
        homes = executor.machine.layout.homes
        self.fixed = [home.resident for home in homes]
        self.groups = [(u.index, *u.shares) for u in parts.units]
        self.streamed = [not all(self.fixed[m] for m in group) for group in self.groups]
        self.uses = [0] * count  # of a unit as a whole
        self.open = [0] * count  # of its weights, through itself or a unit that shares them
        self.current: list[Residence | None] = [None] * count
        self.by_storage: dict[int, Residence] = {}
        self._stubs: list[tuple[torch.Tensor, ...]] = [()] * count
        self._params: list[tuple[nn.Parameter, ...]] = [
            tuple(parts.parameters[spec.index] for _, spec in unit.params) for unit in parts.units
        ]
        self._held: list[tuple[int, torch_private.StorageWatch]] = []

    def install(self) -> None:
        """Points every parameter at its fixed slot or at its stub."""
        device = self.accelerator.device
        for unit in self.parts.units:
            params = self._params[unit.index]
            self._stubs[unit.index] = tuple(
                make_stub(spec.shape, chunk.dtype, device) for chunk, spec in unit.params
            )
            if self.fixed[unit.index]:
                residence = self._residence(unit.index)
                self.current[unit.index] = residence
                for p, view in zip(params, residence.views, strict=True):
                    p.data = view
            else:
                self._to_stubs(unit.index)

    def _residence(self, unit: int) -> Residence:
        memory = self.executor.arenas.bytes_of(self._place_of(unit))
        storage = torch_private.storage_over(memory)
        return Residence(unit, storage, make_views(self.parts.units[unit], storage))

    def _to_stubs(self, unit: int) -> None:
        for p, stub in zip(self._params[unit], self._stubs[unit], strict=True):
            p.data = stub

    def suspend(self, unit: int) -> None:
        """A resident unit is about to be updated: nobody may read it before ``resume``."""
        self._to_stubs(unit)

    def resume(self, unit: int) -> None:
        """A resident unit's update is over."""
        residence = self.current[unit]
        assert residence is not None
        for p, view in zip(self._params[unit], residence.views, strict=True):
            p.data = view

    def params_of(self, unit: int) -> tuple[nn.Parameter, ...]:
        """The unit's own parameters."""
        return self._params[unit]

    # -- opening and closing --------------------------------------------------------------------

    def enter(self, unit: int) -> None:
        """Compute is about to use the unit: fetches it, and points its parameters at it."""
        if not self.streamed[unit]:
            return
        if self.uses[unit] == 0:
            self.collect_freed()
            with torch.inference_mode(False), torch.no_grad():
                self._open(unit)
        self.uses[unit] += 1

    def _open(self, unit: int) -> None:
        self.executor.request(lambda ticket: Need(unit, ticket), self.parts.units[unit].name)
        opened: list[int] = []
        try:
            for member in self.groups[unit]:
                if self.fixed[member]:
                    continue
                if self.open[member] == 0:
                    self._show(member)
                self.open[member] += 1
                opened.append(member)
        except BaseException:
            for member in opened:
                self._hide(member)
            self.executor.tell(Release(unit))
            raise

    def _show(self, unit: int) -> None:
        if self.accelerator.has_device_memory:
            place = self._place_of(unit)
            self.executor.compute_waits_for(place, "copy_in")
            self.accelerator.used(self.executor.arenas.bytes_of(place))
        self._check(unit, self._stubs[unit])
        residence = self._residence(unit)
        self.current[unit] = residence
        self.by_storage[torch_private.identity(residence.storage)] = residence
        for p, view in zip(self._params[unit], residence.views, strict=True):
            p.data = view

    def check_fixed(self, late: Container[int]) -> None:
        """Raises if a parameter that never moves was given other data; ``late``: units that show
        stubs now."""
        for unit, residence in enumerate(self.current):
            if self.fixed[unit] and residence is not None and unit not in late:
                self._check(unit, residence.views)

    def _check(self, unit: int, expected: Sequence[torch.Tensor]) -> None:
        """Whether the unit's parameters show what the engine has given them."""
        specs = self.parts.units[unit].params
        for p, given, (_, spec) in zip(self._params[unit], expected, specs, strict=True):
            if torch_private.storage_key(p) != torch_private.storage_key(given):
                raise OffloadError(
                    f"the data of parameter {spec.name!r} was replaced outside of the engine "
                    "(model.to, half, load_state_dict(assign=True), p.data = ...); edit weights "
                    "inside `with overspill.materialized(model, writeback=True)`"
                )

    def leave(self, unit: int) -> None:
        """The counterpart of ``enter``: the last use sends the parameters back to their stubs."""
        if not self.streamed[unit]:
            return
        self.uses[unit] -= 1
        if self.uses[unit] == 0:
            members = [m for m in self.groups[unit] if not self.fixed[m]]
            held = tuple(member for member in members if self._hide(member))
            if not self.executor.failed:
                self.executor.tell(Release(unit, held))

    def _hide(self, unit: int) -> bool:
        """Whether something still points into the slot after the last use has let go."""
        self.open[unit] -= 1
        if self.open[unit]:
            return False
        residence = self.current[unit]
        assert residence is not None
        if self.accelerator.has_device_memory:
            self.executor.mark_device_use(self._place_of(unit), self.accelerator.record())
        self._to_stubs(unit)
        self.current[unit] = None
        del self.by_storage[torch_private.identity(residence.storage)]
        watch = torch_private.StorageWatch(residence.storage)
        del residence
        if watch.expired:
            return False
        self._held.append((unit, watch))
        return True

    def collect_freed(self) -> None:
        """Tells the machine of slots that graphs have let go since."""
        if self._held:
            freed = [unit for unit, watch in self._held if watch.expired]
            self._held = [(unit, watch) for unit, watch in self._held if not watch.expired]
            for unit in freed:
                self.executor.tell(Freed(unit))

    def view(self, unit: int, offset: int, dtype: torch.dtype, shape: Sequence[int],
             stride: Sequence[int]) -> torch.Tensor:  # fmt: skip
        """A tensor over an open unit's slot; ``offset`` in elements of ``dtype`` from its start."""
        residence = self.current[unit]
        assert residence is not None
        return view_in(residence.storage, 0, dtype, offset, shape, stride)
