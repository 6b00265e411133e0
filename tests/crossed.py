"""Large tables of cases: CI tries a part, in which every value meets others; soak tries all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def crossed(*values: Sequence[Any], every: int = 3) -> list[Any]:
    """All combinations; those are for the soak whose places do not add up to a multiple of
    ``every``, so that each value meets each of others."""
    found = []
    for places in itertools.product(*(range(len(each)) for each in values)):
        case = [each[place] for each, place in zip(values, places, strict=True)]
        marks = () if sum(places) % every == 0 else pytest.mark.soak
        found.append(pytest.param(*case, marks=marks, id="-".join(map(str, case))))
    return found
