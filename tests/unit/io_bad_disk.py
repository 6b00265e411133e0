"""What an engine does on a disk that fails: one case a run, in a process of its own.

``python io_bad_disk.py CASE DIRECTORY BACKEND`` prints what was seen as JSON.
``test_io_real_faults`` runs it, mostly inside mounts that only that process sees.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import logging
import os
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from overspill.io_engine import Extent, IoEngine, IoError, Lease, OffloadError, Ticket

MIB = 1 << 20
WAIT_S = 20.0
PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01  # of fallocate(2)
EXT4_SHUTDOWN, NO_LOG_FLUSH = 0x8004587D, 2  # of ext4's ioctl
# Numbers of system calls on x86-64.
READS = (17, 295, 327)  # pread64, preadv, preadv2
WRITES = (18, 296, 328, 285)  # pwrite64, pwritev, pwritev2, fallocate
IO_URING_ENTER = 426
ALLOW, FAIL = 0x7FFF0000, 0x00050000  # what a filter gives

libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def ends(tickets: Iterable[Ticket]) -> list[str]:
    """``done``, or the name of the errno, of every ticket; a hang raises TimeoutError."""
    return [end(ticket) for ticket in tickets]


def end(ticket: Ticket) -> str:
    try:
        ticket.wait(WAIT_S)
    except IoError as error:
        if error.path not in str(error) or "; " not in str(error):
            return f"no place, or no remedy: {error}"
        return errno.errorcode[error.errno] if error.errno else type(error).__name__
    return "done"


def opened(directory: Path, backend: str, nbytes: int = 4 * MIB) -> tuple[IoEngine, list[Extent]]:
    engine = IoEngine(directory, nbytes, backend=backend, block_bytes=64 << 10)
    return engine, [engine.allocate(MIB) for _ in range(nbytes // MIB)]


def round_trip(engine: IoEngine, extent: Extent, buffer: Lease, value: int) -> bool:
    """Whether an extent gives back what is written to it."""
    buffer.array[:] = value
    engine.write(extent, buffer).wait(WAIT_S)
    buffer.array[:] = 0
    engine.read(extent, buffer).wait(WAIT_S)
    return bool((buffer.array == value).all())


def refuse_calls(numbers: Iterable[int], code: int) -> None:
    """From now on these system calls of the process fail with ``code``, as from the kernel."""
    numbers = list(numbers)
    load, equal, give = 0x20, 0x15, 0x06
    steps = [struct.pack("HBBI", load, 0, 0, 0)]
    for index, number in enumerate(numbers):
        steps.append(struct.pack("HBBI", equal, len(numbers) - index, 0, number))
    steps.append(struct.pack("HBBI", give, 0, 0, ALLOW))
    steps.append(struct.pack("HBBI", give, 0, 0, FAIL | code))
    install(steps)


def refuse_submissions(code: int) -> None:
    """From now on io_uring takes no new entries: calls that only wait for results still work."""
    load, equal, give = 0x20, 0x15, 0x06
    install([
        struct.pack("HBBI", load, 0, 0, 0),
        struct.pack("HBBI", equal, 0, 3, IO_URING_ENTER),
        struct.pack("HBBI", load, 0, 0, 24),  # its second argument: entries to submit
        struct.pack("HBBI", equal, 1, 0, 0),
        struct.pack("HBBI", give, 0, 0, FAIL | code),
        struct.pack("HBBI", give, 0, 0, ALLOW),
    ])  # fmt: skip


def install(steps: list[bytes]) -> None:
    """Has the kernel run a filter on every system call of the process."""
    program = ctypes.create_string_buffer(b"".join(steps))
    filtered = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(program))
    assert libc.prctl(38, 1, 0, 0, 0) == 0, "no_new_privs"
    # On all threads: the engine's are there already.
    assert libc.syscall(317, 1, 1, filtered) == 0, os.strerror(ctypes.get_errno())


# -- the cases ------------------------------------------------------------------------------------


def full(directory: Path, backend: str) -> dict[str, Any]:
    """Blocks that were reserved are gone (a thin disk); then the file system is full, then not."""
    engine, extents = opened(directory, backend)
    with engine, engine.buffer(MIB) as buffer:
        buffer.array[:] = 1
        before = ends(engine.write(extent, buffer) for extent in extents)
        store = os.open(directory / "overspill.store", os.O_RDWR)
        for extent in extents[2:]:
            for piece in extent.pieces:
                hole = libc.fallocate(store, PUNCH_HOLE_KEEP_SIZE, piece.offset, piece.nbytes)
                assert hole == 0, os.strerror(ctypes.get_errno())
        os.close(store)
        filler = directory / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(64 << 10)):
                    pass
            except OSError:
                pass  # full, as it should be
        during = ends(engine.write(extent, buffer) for extent in extents)
        reads = ends(engine.read(extent, buffer) for extent in extents)
        filler.unlink()
        after = [round_trip(engine, extent, buffer, 7) for extent in extents]
        failures = engine.stats.failures
    return {
        "before": before, "during": during, "reads": reads, "after": after, "failures": failures,
        "left": sorted(os.listdir(directory)),
    }  # fmt: skip


def gone(directory: Path, backend: str) -> dict[str, Any]:
    """The file system is shut down under the engine, as when a disk is pulled."""
    engine, extents = opened(directory, backend)
    with engine.buffer(MIB) as buffer:
        before = [round_trip(engine, extent, buffer, 3) for extent in extents]
        place = os.open(directory, os.O_RDONLY)
        fcntl.ioctl(place, EXT4_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        os.close(place)
        writes = ends(engine.write(extent, buffer) for extent in extents)
        reads = ends(engine.read(extent, buffer) for extent in extents)
        flush = ""
        try:
            engine.flush()
        except IoError as error:
            flush = str(error)
        engine.close()
    return {"before": before, "writes": writes, "reads": reads, "flush": flush}


def unmounted(directory: Path, backend: str) -> dict[str, Any]:
    """The directory is unmounted under the engine, and another store begins where it was."""
    engine, extents = opened(directory, backend)
    with engine.buffer(MIB) as buffer:
        subprocess.run(["umount", "-l", str(directory)], check=True)
        works = [round_trip(engine, extent, buffer, 5) for extent in extents]
        with IoEngine(directory, MIB, backend=backend) as other:
            engine.close()
            left = sorted(os.listdir(directory))
            with other.buffer(MIB) as second:
                other_works = round_trip(other, other.allocate(MIB), second, 9)
            other.flush()
    return {"works": works, "left": left, "other": other_works, "end": os.listdir(directory)}


def refused(directory: Path, backend: str, code: str) -> dict[str, Any]:
    """Reserving, writing and reading are refused by the kernel with one errno after another."""
    number = getattr(errno, code)
    engine, extents = opened(directory, backend)
    with engine.buffer(MIB) as buffer:
        before = [round_trip(engine, extent, buffer, 3) for extent in extents]
        refuse_calls(WRITES, number)
        writes = ends(engine.write(extent, buffer) for extent in extents[:2])
        others = ends(engine.read(extent, buffer) for extent in extents[2:])
        refuse_calls(READS, number)
        reads = ends(engine.read(extent, buffer) for extent in extents[2:])
        engine.close()
    try:
        IoEngine(directory, MIB, backend=backend)
    except OffloadError as error:
        opening = str(error)
    return {
        "before": before, "writes": writes, "others": others, "reads": reads, "opening": opening,
        "left": os.listdir(directory),
    }  # fmt: skip


def stuck(directory: Path, backend: str, code: str) -> dict[str, Any]:
    """io_uring refuses everything new while much is on its way, and more is asked for."""
    engine, extents = opened(directory, backend, 16 * MIB)
    buffers = [engine.buffer(MIB) for _ in extents]
    before = [round_trip(engine, e, b, 3) for e, b in zip(extents[:2], buffers, strict=False)]
    tickets = [engine.write(e, b) for e, b in zip(extents, buffers, strict=True)]
    refuse_submissions(getattr(errno, code))
    tickets += [engine.write(e, b) for e, b in zip(extents, buffers, strict=True)]
    ended = sorted(set(ends(tickets)))
    started = time.monotonic()
    engine.close()
    took_s = time.monotonic() - started
    for buffer in buffers:
        buffer.release()
    return {
        "before": before, "ended": ended, "closed_s": took_s, "left": os.listdir(directory)
    }  # fmt: skip


def limited(directory: Path, backend: str, changing: str = "") -> dict[str, Any]:
    """The process may no longer write beyond 2 MiB of a file."""
    engine, extents = opened(directory, backend)
    with engine.buffer(MIB) as buffer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, 2 * MIB))
        tickets = [engine.write(extent, buffer, changing=bool(changing)) for extent in extents]
        writes = ends(tickets)
        reads = ends(engine.read(extent, buffer) for extent in extents)
        engine.close()
    try:
        IoEngine(directory, 4 * MIB, backend=backend)
    except IoError as error:
        opening = str(error)
    return {"writes": writes, "reads": reads, "opening": opening, "left": os.listdir(directory)}


def deleted(directory: Path, backend: str) -> dict[str, Any]:
    """Somebody removes the store and its lock, and opens one of his own there."""
    engine, extents = opened(directory, backend)
    with engine.buffer(MIB) as buffer:
        for name in os.listdir(directory):
            (directory / name).unlink()
        works = [round_trip(engine, extent, buffer, 5) for extent in extents]
        flush = ""
        try:
            engine.flush()
        except IoError as error:
            flush = str(error)
        with IoEngine(directory, MIB, backend=backend) as other:
            engine.close()
            left = sorted(os.listdir(directory))
            with other.buffer(MIB) as second:
                other_works = round_trip(other, other.allocate(MIB), second, 9)
    return {
        "works": works, "flush": flush, "left": left, "other": other_works,
        "end": os.listdir(directory),
    }  # fmt: skip


def shut(directory: Path, backend: str) -> dict[str, Any]:
    """What opening a store says, with a name and without one."""
    said = []
    for ephemeral in (False, True):
        try:
            IoEngine(directory, MIB, backend=backend, ephemeral=ephemeral)
        except IoError as error:
            said.append(str(error))
    return {"said": said, "left": os.listdir(directory)}


CASES = {
    case.__name__: case for case in (full, gone, unmounted, refused, stuck, limited, deleted, shut)
}

if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    name, place, *more = sys.argv[1:]
    print(json.dumps(CASES[name](Path(place), *more)))
