"""An order of items in which every prefix is spread evenly over all items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def spread(items: Sequence[T]) -> list[T]:
    """Return the items in an order in which every prefix is spread evenly over all of them.

    The items after such a prefix are then at even distances too, so that no lane idles while others
    are used.  The order is by the index with its binary digits reversed (van der Corput).
    """
    digits = max(1, (len(items) - 1).bit_length())
    order = sorted(range(len(items)), key=lambda index: int(f"{index:0{digits}b}"[::-1], 2))
    return [items[index] for index in order]
