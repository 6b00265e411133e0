"""What a parameter shows where its weights are elsewhere: one NaN that takes every shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..schedule.units import Unit
from . import torch_private


class Stubs:
    """One NaN for each parameter of a model.

    All of a dtype are one allocation, which a device rounds up to 512 bytes, and every one has a
    storage of its own: whoever looks for tied weights would take all for one.
    """

    def __init__(self, units: Sequence[Unit], device: torch.device) -> None:
        places: dict[torch.dtype, dict[int, int]] = {}
        for unit in units:
            for chunk, spec in unit.params:
                of_dtype = places.setdefault(spec.as_parameter(chunk.dtype)[0], {})
                of_dtype.setdefault(spec.index, len(of_dtype))
        self._places = places
        self._nans = {
            dtype: torch.full((len(numbers),), float("nan"), dtype=dtype, device=device)
            for dtype, numbers in places.items()
        }

    def of(self, unit: Unit) -> tuple[torch.Tensor, ...]:
        """For each parameter a new tensor of its shape and dtype with its NaN behind it."""
        shapes = ((spec, spec.as_parameter(chunk.dtype)) for chunk, spec in unit.params)
        return tuple(
            self._stub(spec.index, dtype).expand(shape) for spec, (dtype, _, shape, _) in shapes
        )

    def index_of(self, t: torch.Tensor) -> int | None:
        """Return the parameter whose placeholder a tensor is, or is a view of."""
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
