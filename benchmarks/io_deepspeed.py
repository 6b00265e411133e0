"""The side of the disk suite that runs in DeepSpeed's own environment; knows nothing of overspill.

The first order names a file and the sizes of extents that lie one behind the other in it; every
other one is a sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from .serving import serve

QUEUE_DEPTH = 32


class Handles:
    """A handle to read and one to write, as DeepSpeed's own swapper has; and locked buffers."""

    def __init__(self, file: str, sizes: Sequence[int]) -> None:
        import torch
        from deepspeed.ops.op_builder import AsyncIOBuilder

        self._make = AsyncIOBuilder().load(verbose=False).aio_handle
        self._file = file
        self._keeper = self._make()
        sample = torch.empty(0, dtype=torch.uint8)
        self._buffers = [self._keeper.new_cpu_locked_tensor(size, sample) for size in sizes]
        for buffer in self._buffers:
            buffer.fill_(37)
        self._offsets = [sum(sizes[:index]) for index in range(len(sizes))]
        self._made: dict[tuple[int, int], tuple[Any, Any]] = {}

    def move(self, steps: Sequence[tuple[bool, int]], threads: int, block_bytes: int) -> float:
        """Seconds from the first request to the last result."""
        key = (threads, block_bytes)
        if key not in self._made:
            self._made = {}  # with their threads
            arguments = (block_bytes, QUEUE_DEPTH, False, True, threads)
            self._made[key] = self._make(*arguments), self._make(*arguments)
        reader, writer = self._made[key]
        count = [0, 0]
        started = time.perf_counter()
        for write, index in steps:
            handle = writer if write else reader
            start = handle.async_pwrite if write else handle.async_pread
            if start(self._buffers[index], self._file, self._offsets[index]) != 0:
                raise RuntimeError("a request was not taken")
            count[write] += 1
        # It takes an unbounded number of requests; waiting for all is what is cheapest for it.
        for handle, expected in ((reader, count[0]), (writer, count[1])):
            if expected and handle.wait() != expected:
                raise RuntimeError("requests are missing")
        return time.perf_counter() - started


def begin(order: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], Any]]:
    """Makes the handles for ``order["file"]`` and ``order["sizes"]``."""
    import deepspeed
    import torch

    handles = Handles(order["file"], order["sizes"])

    def sample(asked: dict[str, Any]) -> dict[str, Any]:
        cpu_s = time.process_time()
        seconds = handles.move(asked["steps"], asked["threads"], asked["block_bytes"])
        return {"seconds": seconds, "cpu_s": time.process_time() - cpu_s}

    facts = {
        "deepspeed": deepspeed.__version__, "torch": torch.__version__,
        "queue_depth": QUEUE_DEPTH, "extents": len(order["sizes"]),
    }  # fmt: skip
    return facts, sample


if __name__ == "__main__":
    serve(begin)
