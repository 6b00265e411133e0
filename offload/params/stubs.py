"""Placeholders, which parameters point at while their weights are elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..private import torch_private
from ..schedule.units import Unit


def _poison(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


class Stubs:
    """Placeholders for all parameters of a model, each with one NaN expanded to its shape.

    The NaNs of a dtype share one allocation, because a device rounds each up to 512 bytes. Each
    placeholder has a storage of its own, because code that looks for tied weights compares
    storages.
    """

    def __init__(self, units: Sequence[Unit], device: torch.device) -> None:
        places: dict[torch.dtype, dict[int, int]] = {}
        for unit in units:
            for chunk, spec in unit.params:
                of_dtype = places.setdefault(spec.as_parameter(chunk.dtype)[0], {})
                of_dtype.setdefault(spec.index, len(of_dtype))
        self._places = places
        self._nans = {
            dtype: torch.full((len(numbers),), _poison(dtype), dtype=dtype, device=device)
            for dtype, numbers in places.items()
        }

    def of(self, unit: Unit) -> tuple[torch.Tensor, ...]:
        """Return a new placeholder for each parameter of a unit, with its shape and dtype."""
        shapes = ((spec, spec.as_parameter(chunk.dtype)) for chunk, spec in unit.params)
        return tuple(
            self._stub(spec.index, dtype).expand(shape) for spec, (dtype, _, shape, _) in shapes
        )

    def index_of(self, t: torch.Tensor) -> int | None:
        """Return the parameter whose placeholder ``t`` is, or is a view of."""
        nans = None if any(t.stride()) else self._nans.get(t.dtype)
        if nans is None:
            return None
        place = (t.data_ptr() - nans.data_ptr()) // nans.itemsize
        if not 0 <= place < nans.numel():
            return None
        return next(i for i, number in self._places[t.dtype].items() if number == place)

    def _stub(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        place, nans = self._places[dtype][index], self._nans[dtype]
        storage = torch_private.storage_over(nans[place : place + 1], keep=True)
        stub = torch.empty(0, dtype=dtype, device=nans.device)
        return stub.set_(storage, 0, ())  # type: ignore[call-overload,no-any-return]
