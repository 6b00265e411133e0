"""What autograd saves inside a unit: weights become handles, everything else goes on as it was."""

from __future__ import annotations

from typing import Any

import torch

from . import torch_private
from .backward import Backward
from .residences import Residences

_VIEWS = frozenset({"TBackward0", "TransposeBackward0", "PermuteBackward0", "AliasBackward0"})


class WeightHandle:
    """A saved weight: enough to make the same view again, and the version it must still have."""

    __slots__ = ("_counts", "cast", "dtype", "offset", "shape", "stride", "unit", "version")

    def __init__(
        self, unit: int, version: int, t: torch.Tensor, offset: int, cast: torch.dtype | None,
        counts: list[int],
    ) -> None:  # fmt: skip
        self.unit, self.version, self.offset, self.cast = unit, version, offset, cast
        self.shape, self.stride = tuple(t.shape), tuple(t.stride())
        self.dtype = t.dtype
        counts[unit] += 1
        self._counts = counts  # last: one that was interrupted here takes nothing back

    def __del__(self) -> None:
        counts = getattr(self, "_counts", None)
        if counts is not None:
            counts[self.unit] -= 1


class CastHandle(WeightHandle):
    """A saved low-precision cast of parameter ``param`` (autocast): made again when wanted."""

    __slots__ = ("param",)
    param: int


class _Plain:
    """A saved tensor that is no weight.  Holds a detached alias, so that graphs stay free."""

    __slots__ = ("tensor", "version")

    def __init__(self, t: torch.Tensor) -> None:
        self.tensor, self.version = t.detach(), torch_private.version_of(t)


class _Outer:
    """A saved tensor that an enclosing pair of hooks (checkpoint, save_on_cpu) has packed."""

    __slots__ = ("packed", "unpack")

    def __init__(self, packed: Any, unpack: torch_private.Unpack) -> None:
        self.packed, self.unpack = packed, unpack


Hooks = tuple[torch_private.Pack, torch_private.Unpack]


class _Packing:
    """Called for every tensor that autograd saves."""

    __slots__ = ("_outer", "saved")

    def __init__(self, saved: SavedTensors, outer: Hooks | None) -> None:
        self.saved, self._outer = saved, outer

    @torch_private.not_compiled  # torch 2.11 would compile it for whatever a compiled part saves
    def __call__(self, t: torch.Tensor) -> Any:
        return self.saved.pack(t, self._outer)


class SavedTensors:
    """The pair of hooks of one engine; ``versions`` counts the updates of every unit."""

    def __init__(
        self,
        residences: Residences,
        versions: list[int],
        backward: Backward,
    ) -> None:
        self._residences, self._versions, self._backward = residences, versions, backward
        self.live = [0] * len(versions)

    def packing(self, outer: Hooks | None) -> _Packing:
        """The first of the pair of hooks; ``outer``: the pair that encloses it."""
        return _Packing(self, outer)

    def is_packing(self, pair: Hooks | None) -> bool:
        """Whether a pair of hooks is this engine's."""
        return pair is not None and isinstance(pair[0], _Packing) and pair[0].saved is self

    def pack(self, t: torch.Tensor, outer: Hooks | None) -> Any:
        """What to keep instead of ``t``."""
        residence = self._residences.by_storage.get(torch_private.storage_key(t))
        if residence is not None:
            unit = residence.unit
            self._residences.used_here(residence)
            return WeightHandle(
                unit, self._versions[unit], t, int(t.storage_offset()), None, self.live
            )
        if t.grad_fn is not None and torch.is_autocast_enabled(t.device.type):
            source = self._cast_of(t)
            if source is not None:
                unit, param = source
                handle = CastHandle(
                    unit, self._versions[unit], t, int(t.storage_offset()), t.dtype, self.live
                )
                handle.param = param
                return handle
        if outer is not None:
            return _Outer(outer[0](t), outer[1])
        return _Plain(t)

    def _cast_of(self, t: torch.Tensor) -> tuple[int, int] | None:
        """(unit, parameter's place in it) of which ``t`` is a cast or a transpose of a cast."""
        node: Any = t.grad_fn
        for _ in range(4):
            if node is None:
                return None
            name = node.name()
            if name == "ToCopyBackward0":
                source = node.next_functions[0][0]
                variable = getattr(source, "variable", None)
                return None if variable is None else self._residences.streamed_place(variable)
            if name not in _VIEWS:
                return None
            node = node.next_functions[0][0]
        return None

    def unpack(self, saved: Any) -> torch.Tensor:
        """The tensor again; fetches the unit when it is not there."""
        if isinstance(saved, _Plain):
            version = torch_private.version_of(saved.tensor)
            if version != saved.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: {tuple(saved.tensor.shape)} is at version "
                    f"{version}; expected version {saved.version} instead"
                )
            return saved.tensor
        if isinstance(saved, _Outer):
            return saved.unpack(saved.packed)
        assert isinstance(saved, WeightHandle)
        return self._fetch(saved)

    def _fetch(self, handle: WeightHandle) -> torch.Tensor:
        unit = handle.unit
        if self._versions[unit] != handle.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"optimizer step: a weight of unit {self._residences.parts.units[unit].name!r}; "
                "run backward before step()"
            )
        inside = torch_private.current_graph_task() >= 0
        if inside:
            self._backward.enter(unit)
        else:
            self._residences.enter(unit)
        try:
            # A graph of the backward itself, or a reader outside of it, may keep the tensor.
            return self._tensor(handle, copy=torch.is_grad_enabled() or not inside)
        finally:
            if not inside:
                self._residences.leave(unit)

    @torch_private.without_grad
    def _tensor(self, handle: WeightHandle, *, copy: bool) -> torch.Tensor:
        residence = self._residences.current[handle.unit]
        assert residence is not None
        self._residences.used_here(residence)
        if isinstance(handle, CastHandle):
            assert handle.cast is not None
            cast = residence.views[handle.param].to(handle.cast)
            return cast.as_strided(handle.shape, handle.stride, handle.offset)
        view = self._residences.view(
            handle.unit, handle.offset, handle.dtype, handle.shape, handle.stride
        )
        return view.clone() if copy else view
