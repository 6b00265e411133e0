"""The backend in plain Python, for where no extension was built: aiofiles over preadv and pwritev.

It does what csrc/io/lane.cpp does, under the same names, one event loop for all lanes.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import math
import mmap
import os
import queue
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from .backend import (
    LATENCY_STEPS,
    Completion,
    LaneCounts,
    Outcome,
    Segment,
    Tuning,
)
from .types import SECTOR_BYTES

_P = ParamSpec("_P")
_T = TypeVar("_T")

_Task = tuple["Future[Any]", Callable[[], Any]]


class DaemonPool(Executor):
    """``threads`` daemon threads, joined by ``shutdown``."""

    def __init__(self, threads: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """See ``concurrent.futures.Executor``."""
        future: Future[_T] = Future()
        self._tasks.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Lets what was submitted end, then the threads."""
        for _ in self._threads:
            self._tasks.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, run = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(run())
            except BaseException as error:
                future.set_exception(error)
            del task, future, run  # nothing of the last transfer is kept while waiting


_MAX_ATTEMPTS = 50
_REPEAT = (errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ENOBUFS)


@dataclass
class _Request:
    id: int
    write: bool
    urgent: bool
    remaining: int = 0
    started_ns: int = 0
    failure: Completion | None = None


@dataclass
class _Block:
    request: _Request
    offset: int
    memory: memoryview
    checksum: ctypes.c_uint32 | None
    changing: bool = False
    moved: int = 0
    attempts: int = 0


@dataclass
class _Lane:
    """One file's queues and counters; everything is done in the loop's thread."""

    index: int
    fd: int
    queues: list[deque[_Block]] = field(default_factory=lambda: [deque() for _ in range(4)])
    work: asyncio.Event = field(default_factory=asyncio.Event)
    write_next: bool = False
    bytes: list[int] = field(default_factory=lambda: [0, 0])
    blocks: list[int] = field(default_factory=lambda: [0, 0])
    retries: int = 0
    busy_ns: int = 0
    busy_since_ns: int = 0
    in_flight: int = 0
    latencies: list[int] = field(default_factory=lambda: [0] * LATENCY_STEPS)

    def queue_of(self, request: _Request) -> deque[_Block]:
        return self.queues[2 * request.urgent + request.write]

    def pick(self) -> _Block | None:
        """The next block: urgent ones first, reads and writes in turn."""
        for urgent in (2, 0):
            for write in (self.write_next, not self.write_next):
                queue = self.queues[urgent + write]
                if queue:
                    self.write_next = not write
                    return queue.popleft()
        return None

    def start(self) -> None:
        if self.in_flight == 0:
            self.busy_since_ns = time.perf_counter_ns()
        self.in_flight += 1

    def end(self) -> None:
        self.in_flight -= 1
        if self.in_flight == 0:
            self.busy_ns += time.perf_counter_ns() - self.busy_since_ns


class AiofilesBackend:
    """See ``backend.Backend``."""

    name = "aiofiles"

    def __init__(self, fds: Sequence[int], tuning: Tuning) -> None:
        try:
            from aiofiles.base import wrap
        except ImportError as error:
            raise RuntimeError(
                "disk transfers without the native extension need the package aiofiles, which is "
                f"not installed ({error}); pip install aiofiles"
            ) from error
        self._block_bytes = tuning.block_bytes
        self._read, self._write, self._sum = wrap(os.preadv), wrap(os.pwritev), wrap(zlib.crc32)
        self._pool = DaemonPool(len(fds) * tuning.queue_depth, "overspill-aiofiles")
        self._engine_port: dict[int, _Request] = {}
        self._ended: deque[Completion] = deque()
        self._ready = threading.Condition()
        self._woken = self._stopping = False
        self._loop = asyncio.new_event_loop()
        self._lanes = [_Lane(index, fd) for index, fd in enumerate(fds)]
        self._thread = threading.Thread(
            target=self._run, args=(tuning.queue_depth,), name="overspill-io-loop", daemon=True
        )
        self._thread.start()

    def _run(self, depth: int) -> None:
        async def serve_all() -> None:
            await asyncio.gather(*(self._serve(lane) for lane in self._lanes for _ in range(depth)))

        self._loop.run_until_complete(serve_all())
        self._loop.close()

    # -- the protocol ---------------------------------------------------------------------------

    def submit(self, id: int, write: bool, urgent: bool, segments: Sequence[Segment]) -> None:
        request = _Request(id, write, urgent)
        blocks = [(s.lane, b) for s in segments for b in self._cut(request, s)]
        request.remaining = len(blocks)
        self._loop.call_soon_threadsafe(self._queue, request, blocks)

    def cancel(self, id: int) -> bool:
        return asyncio.run_coroutine_threadsafe(self._cancel(id), self._loop).result()

    def promote(self, id: int) -> None:
        self._loop.call_soon_threadsafe(self._promote, id)

    def collect(self, timeout_s: float) -> list[Completion]:
        with self._ready:
            self._ready.wait_for(lambda: self._woken or self._ended, timeout_s)
            self._woken = False
            ended = list(self._ended)
            self._ended.clear()
        return ended

    def wake(self) -> None:
        with self._ready:
            self._woken = True
            self._ready.notify()

    def add_memory(self, address: int, nbytes: int) -> None:
        return None  # Python's calls take any memory alike

    def drop_memory(self, address: int, nbytes: int) -> None:
        return None

    def stats(self) -> list[LaneCounts]:
        return [
            LaneCounts(
                lane.bytes[0], lane.bytes[1], lane.blocks[0], lane.blocks[1], lane.retries,
                lane.busy_ns, lane.in_flight, sum(map(len, lane.queues)),
            )
            for lane in self._lanes
        ]  # fmt: skip

    def latencies(self) -> list[int]:
        return [sum(steps) for steps in zip(*(lane.latencies for lane in self._lanes), strict=True)]

    def close(self, timeout_s: float) -> bool:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop)
        before = -1
        while self._thread.is_alive():
            now = sum(sum(lane.bytes) + lane.retries for lane in self._lanes)
            if now == before:
                self._pool.shutdown(wait=False)
                return False
            before = now
            self._thread.join(timeout_s)
        self._pool.shutdown()
        return True

    # -- in the loop ----------------------------------------------------------------------------

    def _cut(self, request: _Request, segment: Segment) -> list[_Block]:
        raw = (ctypes.c_ubyte * segment.nbytes).from_address(segment.address)
        memory = memoryview(raw).cast("B")
        blocks = []
        for index, at in enumerate(range(0, segment.nbytes, self._block_bytes)):
            checksum = None
            if segment.checksums:
                checksum = ctypes.c_uint32.from_address(segment.checksums + 4 * index)
            part = memory[at : at + self._block_bytes]
            changing = segment.changing and request.write
            blocks.append(_Block(request, segment.offset + at, part, checksum, changing))
        return blocks

    def _queue(self, request: _Request, blocks: list[tuple[int, _Block]]) -> None:
        self._engine_port[request.id] = request
        for lane, block in blocks:
            self._lanes[lane].queue_of(request).append(block)
            self._lanes[lane].work.set()

    async def _cancel(self, id: int) -> bool:
        request = self._engine_port.get(id)
        if request is None or request.started_ns:
            return False
        for lane in self._lanes:
            for waiting in lane.queues:
                kept = [block for block in waiting if block.request is not request]
                waiting.clear()
                waiting.extend(kept)
        request.failure = self._failure(request, Outcome.CANCELLED, errno.ECANCELED)
        self._end_request(request)
        return True

    def _promote(self, id: int) -> None:
        request = self._engine_port.get(id)
        if request is None or request.urgent:
            return
        for lane in self._lanes:
            waiting = lane.queue_of(request)
            mine = [block for block in waiting if block.request is request]
            kept = [block for block in waiting if block.request is not request]
            waiting.clear()
            waiting.extend(kept)
            lane.queues[2 + request.write].extend(mine)
        request.urgent = True

    def _stop(self) -> None:
        self._stopping = True
        for lane in self._lanes:
            lane.work.set()

    async def _serve(self, lane: _Lane) -> None:
        while True:
            block = lane.pick()
            if block is None:
                if self._stopping:
                    return
                lane.work.clear()
                await lane.work.wait()
                continue
            block.request.started_ns = block.request.started_ns or time.perf_counter_ns()
            lane.start()
            try:
                if block.request.failure is None:
                    await self._move(lane, block)
            finally:
                lane.end()
            block.request.remaining -= 1
            if block.request.remaining == 0:
                self._end_request(block.request)

    async def _sum_of(self, block: _Block) -> int:
        return int(await self._sum(block.memory, loop=self._loop, executor=self._pool))

    async def _move(self, lane: _Lane, block: _Block) -> None:
        request = block.request
        if block.changing:
            own = memoryview(mmap.mmap(-1, len(block.memory)))  # aligned, as direct I/O needs it
            own[:] = block.memory
            block.memory = own
        if request.write and block.checksum is not None:
            block.checksum.value = await self._sum_of(block)
        while block.moved < len(block.memory):
            failure = await self._move_some(lane, block)
            if failure is not None:
                request.failure = request.failure or failure
                return
        if not request.write and block.checksum is not None:
            expected, found = block.checksum.value, await self._sum_of(block)
            if expected != found:
                request.failure = request.failure or self._failure(
                    request, Outcome.CORRUPT, 0, lane.index, block, expected, found
                )
                return
        lane.blocks[request.write] += 1

    async def _move_some(self, lane: _Lane, block: _Block) -> Completion | None:
        """One transfer; a failure if it cannot go on."""
        request, left = block.request, block.memory[block.moved :]
        transfer = self._write if request.write else self._read
        code, begun = 0, time.perf_counter_ns()
        try:
            moved = await transfer(
                lane.fd, [left], block.offset + block.moved, loop=self._loop, executor=self._pool
            )
        except OSError as error:
            moved, code = 0, error.errno or errno.EIO
        lane.bytes[request.write] += moved
        step = int(4 * math.log2(max(time.perf_counter_ns() - begun, 1)))
        lane.latencies[min(step, LATENCY_STEPS - 1)] += 1
        if moved == len(left):
            block.moved += moved
            return None
        if code and code not in _REPEAT:
            return self._failure(request, Outcome.FAILED, code, lane.index, block)
        if moved == 0 and not code and not request.write:
            return self._failure(request, Outcome.TRUNCATED, errno.EIO, lane.index, block)
        # Direct I/O goes on only from a whole sector: what is short of one is moved again.
        whole = moved // SECTOR_BYTES * SECTOR_BYTES
        block.moved += whole
        block.attempts = 0 if whole else block.attempts + 1
        if block.attempts > _MAX_ATTEMPTS:
            return self._failure(request, Outcome.FAILED, code or errno.EIO, lane.index, block)
        lane.retries += 1
        if not whole and code != errno.EINTR:
            await asyncio.sleep(min(20e-6 * 2 ** min(block.attempts, 12), 0.05))
        return None

    def _failure(
        self,
        request: _Request,
        outcome: Outcome,
        code: int,
        lane: int = 0,
        block: _Block | None = None,
        expected: int = 0,
        found: int = 0,
    ) -> Completion:
        offset, nbytes = (block.offset, len(block.memory)) if block is not None else (0, 0)
        return Completion(request.id, outcome, code, lane, offset, nbytes, expected, found, 0, 0)

    def _end_request(self, request: _Request) -> None:
        del self._engine_port[request.id]
        ended = request.failure or self._failure(request, Outcome.DONE, 0)
        ended = ended._replace(started_ns=request.started_ns, finished_ns=time.perf_counter_ns())
        with self._ready:
            self._ended.append(ended)
            self._ready.notify()
