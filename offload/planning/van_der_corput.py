"""An order in which whatever is taken from the beginning lies evenly over the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def spread(items: Sequence[T]) -> list[T]:
    """The items in an order whose every beginning lies evenly over them all, so that those left
    out follow each other at even distances and no lane idles while others are used.

    The order is that of their numbers with the binary digits reversed (van der Corput).
    """
    digits = max(1, (len(items) - 1).bit_length())
    order = sorted(range(len(items)), key=lambda index: int(f"{index:0{digits}b}"[::-1], 2))
    return [items[index] for index in order]
