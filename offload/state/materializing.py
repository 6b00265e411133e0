"""All weights at once, as an ordinary model has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import OffloadError
from ..movement.machinery import Machinery
from ..training.residences import Residences
from ..training.showing import Showing
from .weight_access import Weights


class Materializing:
    """See ``overspill.materialized``."""

    def __init__(
        self, machinery: Machinery, residences: Residences, showing: Showing, weights: Weights
    ) -> None:
        self._machinery, self._residences = machinery, residences
        self._showing, self._weights = showing, weights
        self.active = False
        self._over = False  # yet the parameters may not show what they did before

    def require_ended(self) -> None:
        """
        Raises:
            OffloadError: the parameters are ordinary ones now.
        """
        if self._over:
            self._end()
        if self.active:
            raise OffloadError("the model is materialized; leave the `with` block before training")

    @contextmanager
    def all(self, *, writeback: bool) -> Iterator[None]:
        """Inside, every parameter has its weights; nothing else may be done with the model."""
        weights, params = self._weights, self._machinery.parts.parameters
        full = weights.read_all()
        given = False
        try:
            self.active = True
            self._residences.give_away(full)
            given = True
            yield
        finally:
            self._over = True
            edited = {index: p.data for index, p in enumerate(params)} if given else {}
            self._end()
            if writeback and not self._machinery.closed:
                # Only what was edited: a bf16 weight written back would round its master.
                changed = {
                    index: value
                    for index, value in edited.items()
                    if not torch.equal(value, weights.read(index))
                }
                weights.write_all(changed)

    def _end(self) -> None:
        """Where an exception cuts this off, the next use does it again."""
        if not self._machinery.closed:
            self._residences.take_back(self._weights, self._showing.hidden)
        self.active = self._over = False
