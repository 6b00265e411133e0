"""Unpacking of frozen weights that a store keeps in another format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..io_engine import allocate_host
from ..optim import packed
from ..optim.packed_layout import Parts, Window, windows
from ..quantised.format_table import described_page
from .tensors import PART_BYTES, Bytes, Part, StreamedTensor, bytes_of

# requests bytes [low, high) of a page; the result waits for them
Begin = Callable[[int, int], Callable[[], Bytes]]


def unpacked(
    p: Mapping[str, Any], dtype: torch.dtype, where: Sequence[Any], begin: Begin
) -> StreamedTensor:
    """Return a parameter of a page as a streamed tensor.

    Args:
        where: its format (``None``: unpacked), its offset in the page, and its bytes.
    """
    described, base, nbytes = where
    shape = tuple(p["shape"])

    def turned() -> Iterator[Part]:
        had = begin(base, base + nbytes)

        def wait() -> Bytes:
            flat = torch.from_numpy(had()).view(dtype)
            return bytes_of(flat.as_strided(shape, p["stride"]))

        yield Part(nbytes, wait)

    def as_it_is() -> Iterator[Part]:
        for low in range(0, nbytes, PART_BYTES):
            high = min(low + PART_BYTES, nbytes)
            yield Part(high - low, begin(base + low, base + high))

    def dequantised() -> Iterator[Part]:
        page, had = described_page(described), begin(base, base + nbytes)

        def wait() -> Bytes:
            stored = allocate_host(nbytes).array
            stored[:] = had()
            weight = torch.empty(p["numel"], dtype=dtype, device="cpu")
            page.unpack(torch.from_numpy(stored), weight)
            return bytes_of(weight)

        yield Part(p["numel"] * dtype.itemsize, wait)

    def parts() -> Iterator[Part]:
        whole = Parts(described, shape)
        for window in windows(whole, PART_BYTES // dtype.itemsize):
            begun = [(begin(base + low, base + high), to) for low, high, to in window.moves]
            count = window.stop - window.start
            yield Part(count * dtype.itemsize, _unpack(window, dtype, begun))

    if isinstance(described, list):
        return StreamedTensor(p["name"], dtype, shape, dequantised)
    if described is not None:
        return StreamedTensor(p["name"], dtype, shape, parts)
    dense = torch.empty(shape, device="meta").stride() == tuple(p["stride"]) or p["numel"] < 2
    return StreamedTensor(p["name"], dtype, shape, as_it_is if dense else turned)


def _unpack(
    window: Window, dtype: torch.dtype, begun: Sequence[tuple[Callable[[], Bytes], int]]
) -> Callable[[], Bytes]:
    def wait() -> Bytes:
        page = allocate_host(window.parts.nbytes).array
        for had, to in begun:
            data = had()
            page[to : to + len(data)] = data
        weight = torch.empty(window.stop - window.start, dtype=dtype, device="cpu")
        packed.unpack(window.parts, torch.from_numpy(page), weight)
        return bytes_of(weight)

    return wait
