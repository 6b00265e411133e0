"""A directory for a store: its file system, direct I/O, room, rates, and the life of its disk."""

from __future__ import annotations

import errno
import json
import mmap
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from ..errors import format_bytes
from ..measure.calibration import file_system_of, kept_rates
from .finding import Finding, State

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
LOCAL = ("ext4", "ext3", "xfs", "btrfs", "f2fs", "bcachefs", "zfs")
OVER_A_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "fuse", "9p", "virtiofs", "lustre", "ceph")
SECTOR_BYTES = 4096
SMART_S = 1.0  # that a tool may take to tell
GIB = 1 << 30
LEAST_FREE = 20 * GIB  # state of 1.7 B parameters
NO_ROOM = 64 << 20  # for any store that is worth one


def look(directory: Path, device: str, together: Sequence[Path] = ()) -> Iterator[Finding]:
    """Yield the findings about one directory; no files stay in it.

    Args:
        together: the directories that a run would use together.
    """
    if not directory.is_dir():
        there = os.path.lexists(directory)
        yield Finding(
            f"{directory}", "not a directory" if there else "no such directory", State.BROKEN,
            "a store needs a directory",
            "name another one" if there else f"mkdir -p {_typed(directory)}",
        )  # fmt: skip
        return
    yield file_system(directory)
    yield direct(directory)
    yield room(directory)
    yield rates(directory, device, together)
    yield endurance(directory)


def _typed(directory: Path) -> str:
    """As a shell takes it."""
    return shlex.quote(str(directory))


def _mount(directory: Path) -> tuple[str, str, str]:
    """The mount point that the directory is below, the kind of file system, and its device."""
    where = file_system_of(directory)
    found = where, "unknown", ""
    for part in psutil.disk_partitions(all=True):
        if part.mountpoint == where:
            found = where, part.fstype, part.device  # the last one hides those before
    return found


def file_system(directory: Path) -> Finding:
    """What kind it is."""
    about = f"{directory}: file system"
    where, kind, _ = _mount(directory)
    found, figures = f"{kind}, mounted at {where}", {"kind": kind, "mount": where}
    if kind in IN_MEMORY:
        return Finding(
            about, found, State.SLOW, "this is host memory, not a disk: a store here takes the "
            "memory that it is meant to spare", "name a directory on an NVMe disk", figures,
        )  # fmt: skip
    if kind.partition(".")[0] in OVER_A_NETWORK:
        return Finding(
            about, found, State.SLOW, "a network or a program stands between the engine and the "
            "disk", "name a directory on a disk of this machine", figures,
        )  # fmt: skip
    if kind == "overlay":
        return Finding(
            about, found, State.SLOW, "a container's own layer: slower, and gone with it",
            "mount a directory of the host into the container (-v /scratch:/scratch)", figures,
        )  # fmt: skip
    if kind in LOCAL:
        return Finding(about, found, State.GOOD, "on a disk of this machine", figures=figures)
    return Finding(
        about, found, State.NOTE, "not one that overspill was tried on", "ext4 and xfs were",
        figures,
    )  # fmt: skip


def direct(directory: Path) -> Finding:
    """Whether files here can be read past the page cache, which is tried with a small one."""
    about = f"{directory}: direct I/O"
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix="overspill-doctor-") as file:
            file.write(bytes(SECTOR_BYTES))
            file.flush()
            fd = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
            try:
                with mmap.mmap(-1, SECTOR_BYTES) as memory:
                    os.preadv(fd, [memory], 0)
            finally:
                os.close(fd)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return Finding(
                about, "refused by the file system", State.SLOW,
                "transfers go through the page cache: a third of the rate, ten times the "
                "processor time",
                "name a directory on ext4, xfs or btrfs",
            )  # fmt: skip
        mine = error.errno in (errno.EACCES, errno.EPERM)
        return Finding(
            about, f"not writable: {error.strerror}", State.BROKEN, "no store can be made here",
            f"name a directory that you own, or: sudo chown $USER {_typed(directory)}"
            if mine else "name another directory, or free space in this one",
        )  # fmt: skip
    return Finding(about, "works", State.GOOD, "transfers pass by the page cache")


def room(directory: Path) -> Finding:
    """Free space."""
    usage = shutil.disk_usage(directory)
    found = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)}"
    figures = {"free_bytes": usage.free, "total_bytes": usage.total}
    about, what = f"{directory}: room", "a store takes 12 bytes a parameter, twice that if durable"
    if usage.free < LEAST_FREE:
        state = State.BROKEN if usage.free < NO_ROOM else State.NOTE
        return Finding(about, found, state, what, "free some, or name several directories", figures)
    return Finding(about, found, State.GOOD, what, figures=figures)


def rates(directory: Path, device: str, together: Sequence[Path] = ()) -> Finding:
    """What was measured here before, if anything was."""
    about = f"{directory}: rates"
    kept = kept_rates(together or [directory], device) or kept_rates([directory], device)
    if kept is None or not kept.disk_read_bytes_s or not kept.disk_write_bytes_s:
        return Finding(
            about, "not measured yet", State.NOTE, "the first run here measures them",
            f"overspill plan --measure --nvme {_typed(directory)}",
        )  # fmt: skip
    read, write = kept.disk_read_bytes_s, kept.disk_write_bytes_s
    found = f"reads {read / 1e9:.3g} GB/s, writes {write / 1e9:.3g} GB/s"
    figures = {"read_bytes_s": read, "write_bytes_s": write}
    if min(read, write) < 1e9:
        return Finding(
            about, found, State.SLOW, "less than 1 GB/s: steps wait for the disk",
            "use an NVMe disk, or several (--nvme given twice stripes over both)", figures,
        )  # fmt: skip
    return Finding(about, found, State.GOOD, "as measured by the last run", figures=figures)


def endurance(directory: Path) -> Finding:
    """How much of the disk's life is used, where a tool is there that may tell."""
    about = f"{directory}: wear"
    _, kind, device = _mount(directory)
    if kind in IN_MEMORY:
        return Finding(about, "none", State.GOOD, "memory does not wear")
    used = None if not device.startswith("/dev/nvme") else _used_percent(device)
    if used is None:
        tells = f"sudo smartctl -A {device or 'DEVICE'}"
        return Finding(
            about, "not known", State.NOTE, "every step is written: look at the disk's rated "
            "writes", f"{tells}; overspill plan --endurance 600TB says how long",
        )  # fmt: skip
    found, figures = f"{used} % of its life used", {"used_percent": used}
    if used >= 90:
        return Finding(
            about, found, State.NOTE, "the disk is near its end, and every step writes",
            "use another one; commit_every=10 or durable=False write less", figures,
        )  # fmt: skip
    return Finding(about, found, State.GOOD, "by SMART", figures=figures)


def _used_percent(device: str) -> int | None:
    """As ``smartctl`` tells; ``None`` where it is not there or may not."""
    tool = shutil.which("smartctl")
    if tool is None:
        return None
    try:
        told = subprocess.run(
            [tool, "-j", "-A", device], capture_output=True, timeout=SMART_S, check=False
        ).stdout
        log = json.loads(told)["nvme_smart_health_information_log"]
        return int(log["percentage_used"])
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError):
        return None
