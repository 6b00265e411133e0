"""Saved-tensor hooks inside units: weights become handles, and other tensors are passed on.

See Note [Offloading of saved tensors] in ``offloader.py`` for the other tensors.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..errors import LifecycleError
from ..params.backward import Backward
from ..params.onloaded_units import OnloadedUnits
from ..params.param_handle import PlaceholderParam
from ..params.views import View
from ..private import compile_private, torch_private
from .local_parts import local_part
from .offloader import SavedHandle, SavedTensorOffloader
from .untracked_activations import UntrackedStep


class WeightHandle:
    """A saved weight: the view to rebuild, and the version that the weight must still have."""

    __slots__ = ("_held", "unit", "version", "view")

    def __init__(self, unit: int, version: int, view: View, held: _Held) -> None:
        self.unit, self.version, self.view, self._held = unit, version, view, held


class _Held:
    """A token that lives as long as a graph holds handles of its unit.

    No Python code runs at its end: a signal that arrived during it would be lost.
    """

    __slots__ = ("__weakref__",)


class _Plain:
    """A saved tensor that is no weight, as a detached alias, so that graphs can still be freed."""

    __slots__ = ("rest", "tensor", "version")

    def __init__(self, t: torch.Tensor, rest: UntrackedStep | None = None) -> None:
        self.tensor, self.version, self.rest = t.detach(), torch_private.version_of(t), rest


class _Local:
    """A saved ``DTensor``, of which this rank's part is offloaded."""

    __slots__ = ("again", "handle")

    def __init__(self, handle: SavedHandle, again: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.handle, self.again = handle, again


class _Outer:
    """A saved tensor that an enclosing pair of hooks (checkpoint, ``save_on_cpu``) has packed."""

    __slots__ = ("packed", "unpack")

    def __init__(self, packed: Any, unpack: torch_private.Unpack) -> None:
        self.packed, self.unpack = packed, unpack


Hooks = tuple[torch_private.Pack, torch_private.Unpack]


class _Packing:
    """The pack hook, called for every tensor that autograd saves."""

    __slots__ = ("outer", "saved")

    def __init__(self, saved: SavedTensors, outer: Hooks | None) -> None:
        self.saved, self.outer = saved, outer

    @compile_private.not_compiled  # torch 2.11 would compile it for what compiled parts save
    def __call__(self, t: torch.Tensor) -> Any:
        return self.saved.pack(t, self.outer)


def _record_in_checkpoint(weight: torch.Tensor, outer: Hooks | None) -> None:
    """Record a managed weight in the enclosing checkpoint, which does not keep it.

    Checkpoints match saved tensors by position.  A view of a weight that is an argument is a weight
    in forward, but an ordinary tensor in the recomputation, so skipping weights would shift
    positions.
    """
    while outer is not None:
        if torch_private.of_checkpoint(outer):
            with torch_private.without_overrides():  # reading a hidden one would load it
                outer[0](weight)
            return
        outer = outer[0].outer if isinstance(outer[0], _Packing) else None


class SavedTensors:
    """The saved-tensor hooks of one engine; ``versions`` counts the updates of every unit."""

    def __init__(
        self,
        onloaded_units: OnloadedUnits,
        versions: list[int],
        backward: Backward,
        saved_offloader: SavedTensorOffloader | None,
    ) -> None:
        """Set up; ``saved_offloader``: takes what is no weight; ``None``: it stays as it is."""
        self._onloaded_units, self._versions, self._backward = onloaded_units, versions, backward
        self.saved_offloader = saved_offloader
        self._held: list[weakref.ref[_Held]] = [weakref.ref(_Held())] * len(versions)
        self._lock = threading.Lock()
        self._outlive: set[int] = set()  # units for which ``outlive_gradients`` was ever true

    def by_handles(self, unit: int) -> bool:
        """Return whether graphs must hold the unit's weights by handles.

        They must if the weights move, if the unit's module changes them in place when it runs, or
        if a graph has held them longer than its gradients took (``outlive_gradients``).
        """
        units = self._onloaded_units
        return self.moves(unit) or unit in self._outlive or units.changed_before(unit)

    def moves(self, unit: int) -> bool:
        """Return whether the weights with which the unit's module computes move.

        Under FSDP2, shards move, and modules compute with what is gathered from them.
        """
        return self._onloaded_units.moves[unit]

    def outlive_gradients(self, unit: int) -> bool:
        """Return whether a graph holds the unit's weights now that its gradients are complete.

        Backward goes on to use them, so an update has to wait, which only handles can tell.
        """
        if not self.holds(unit):
            return False
        self._outlive.add(unit)
        return True

    def packing(self, outer: Hooks | None) -> _Packing:
        """Return the pack hook; ``outer``: the pair of hooks that encloses this engine's."""
        return _Packing(self, outer)

    def is_packing(self, pair: Hooks | None) -> bool:
        """Return whether a pair of hooks is this engine's."""
        return pair is not None and isinstance(pair[0], _Packing) and pair[0].saved is self

    def around(self, pair: Hooks | None) -> Hooks | None:
        """Return the pair that encloses this engine's if that is the innermost, else ``pair``."""
        if pair is None or not isinstance(pair[0], _Packing) or pair[0].saved is not self:
            return pair
        return pair[0].outer  # never this engine's

    def pack(self, t: torch.Tensor, outer: Hooks | None) -> Any:
        """Return what autograd keeps instead of ``t``."""
        # A hidden parameter is an argument of a Function, which may have read it in its own way.
        found = self._onloaded_units.whereabouts(t) if isinstance(t, PlaceholderParam) else None
        if found is not None:
            _record_in_checkpoint(t, outer)
            return self._handle(*found)
        plain = torch_private.has_memory(t)
        onloaded = (
            self._onloaded_units.by_storage.get(torch_private.storage_key(t)) if plain else None
        )
        if onloaded is not None:
            self._onloaded_units.used_here(onloaded)
            _record_in_checkpoint(t, outer)
            return self._handle(onloaded.unit, View.of(t))
        if plain:
            self._onloaded_units.refuse_placeholder(t)
        if outer is not None:
            return _Outer(outer[0](t), outer[1])
        if self.saved_offloader is None or not plain:
            return _Plain(t)
        if (rest := self.saved_offloader.rest_for(t)) is not None:
            return _Plain(t, rest)
        local = None if type(t) is torch.Tensor else local_part(t)
        if local is None:
            return self.saved_offloader.pack(t) or _Plain(t)
        handle = self.saved_offloader.pack(local[0], exact=True)
        return _Plain(t) if handle is None else _Local(handle, local[1])

    def _handle(self, unit: int, view: View) -> WeightHandle:
        with self._lock:
            if (held := self._held[unit]()) is None:
                held = _Held()
                self._held[unit] = weakref.ref(held)
        return WeightHandle(unit, self._versions[unit], view, held)

    def holds(self, unit: int) -> bool:
        """Return whether a graph holds handles of the unit."""
        return self._held[unit]() is not None

    def unpack(self, saved: Any) -> torch.Tensor:
        """Return the saved tensor, and onload its unit if necessary."""
        if isinstance(saved, _Plain):
            version = torch_private.version_of(saved.tensor)
            if version != saved.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: {tuple(saved.tensor.shape)} is at version "
                    f"{version}; expected version {saved.version} instead"
                )
            return saved.tensor
        if isinstance(saved, SavedHandle):
            assert self.saved_offloader is not None
            return self.saved_offloader.unpack(saved)
        if isinstance(saved, _Local):
            assert self.saved_offloader is not None
            return saved.again(self.saved_offloader.unpack(saved.handle))
        if isinstance(saved, _Outer):
            return saved.unpack(saved.packed)
        assert isinstance(saved, WeightHandle)
        return self._fetch(saved)

    def _fetch(self, handle: WeightHandle) -> torch.Tensor:
        unit = handle.unit
        if self._versions[unit] != handle.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "optimizer step, or in place after the forward of its module: a weight of unit "
                f"{self._onloaded_units.parts.units[unit].name!r}; run backward before step() and "
                "before such a change"
            )
        inside = torch_private.current_graph_task() >= 0
        if inside:
            self._backward.enter(unit)
        else:
            self._onloaded_units.enter(unit, visible=False)
        try:
            # Code that may keep the tensor, or return it as a gradient, gets a copy: a graph of the
            # backward itself, a reader outside of it, or a Function written in Python.
            own = torch.is_grad_enabled() or not inside or not torch_private.for_node_of_torch()
            return self._tensor(handle, copy=own)
        finally:
            if not inside:
                self._onloaded_units.leave(unit, visible=False)

    @torch_private.without_grad
    def _tensor(self, handle: WeightHandle, *, copy: bool) -> torch.Tensor:
        onloaded = self._onloaded_units.current[handle.unit]
        if onloaded is None:
            name = self._onloaded_units.parts.units[handle.unit].name
            raise LifecycleError(
                f"backward needs weights of unit {name!r}, but the engine is closed; run backward "
                "before close() or unwrap()"
            )
        self._onloaded_units.used_here(onloaded)
        t = self._onloaded_units.view(handle.unit, handle.view)
        return t.clone() if copy else t
