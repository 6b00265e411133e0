"""How weights that are packed lie in memory: the parts of each format, and windows of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

Format = Literal["int8", "nf4"]
FORMATS: tuple[Format, ...] = ("int8", "nf4")

BLOCK = 64  # elements that share a scale of nf4
SCALES = 256  # such scales that share one of their own
WINDOW = BLOCK * SCALES  # elements: weights may be unpacked from multiples of so many on
BORDER = 64  # bytes: where the parts of a packed weight begin


def _on_border(nbytes: int) -> int:
    return -(-nbytes // BORDER) * BORDER


@dataclass(frozen=True)
class Parts:
    """Where the parts of a packed weight of ``shape`` lie, in bytes from its begin.

    nf4: codes, two a byte, the first in the upper half; ``scale_codes``, one a block; ``scales``,
    one (fp32) for ``SCALES`` of these; and one fp32 that is added to all of them, at ``offset``.
    int8: codes, and an fp32 in ``scales`` for each row.
    """

    form: Format
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.form not in FORMATS:
            raise ValueError(f"a format is one of {FORMATS}, not {self.form!r}")

    @property
    def numel(self) -> int:
        """Elements of the weight."""
        return prod(self.shape)

    def describe(self) -> str:
        """Return the format's name; the shape is known from elsewhere."""
        return self.form

    @property
    def rows(self) -> int:
        """Of int8: how many scales."""
        return self.numel // max(1, self.columns)

    @property
    def columns(self) -> int:
        """Of int8: elements that share a scale."""
        return self.shape[-1] if self.shape else 1

    @property
    def blocks(self) -> int:
        """Of nf4."""
        return -(-self.numel // BLOCK)

    @property
    def scale_codes(self) -> int:
        """See above; of nf4."""
        return _on_border(-(-self.numel // 2))

    @property
    def scales(self) -> int:
        """See above."""
        if self.form == "int8":
            return _on_border(self.numel)
        return self.scale_codes + _on_border(self.blocks)

    @property
    def offset(self) -> int:
        """See above; of nf4."""
        return self.scales + _on_border(4 * -(-self.blocks // SCALES))

    @property
    def nbytes(self) -> int:
        """Of the whole, in multiples of ``BORDER``."""
        if self.form == "int8":
            return self.scales + _on_border(4 * self.rows)
        return self.offset + BORDER


@dataclass(frozen=True)
class Window:
    """Elements ``[start, stop)`` of a packed weight: ``parts`` of these alone, and which bytes
    ``[low, high)`` of the whole belong where ``to`` in them."""

    start: int
    stop: int
    parts: Parts
    moves: tuple[tuple[int, int, int], ...]


def windows(parts: Parts, most: int) -> Iterator[Window]:
    """Cuts a packed weight into windows of about ``most`` elements."""
    if parts.form == "int8":
        rows = max(1, most // max(1, parts.columns))
        for first in range(0, parts.rows, rows):
            last = min(first + rows, parts.rows)
            start, stop = first * parts.columns, last * parts.columns
            cut = Parts("int8", (last - first, parts.columns))
            scales = parts.scales + 4 * first, parts.scales + 4 * last, cut.scales
            yield Window(start, stop, cut, ((start, stop, 0), scales))
        return
    each = max(1, most // WINDOW) * WINDOW
    for start in range(0, parts.numel, each):
        stop = min(start + each, parts.numel)
        cut = Parts("nf4", (stop - start,))
        first, last = start // BLOCK, -(-stop // BLOCK)
        upper = first // SCALES, -(-last // SCALES)
        yield Window(
            start, stop, cut,
            (
                (start // 2, -(-stop // 2), 0),
                (parts.scale_codes + first, parts.scale_codes + last, cut.scale_codes),
                (parts.scales + 4 * upper[0], parts.scales + 4 * upper[1], cut.scales),
                (parts.offset, parts.offset + 4, cut.offset),
            ),
        )  # fmt: skip
