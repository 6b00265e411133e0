"""The memory and processor limits that Linux control groups put on this process.

A process is limited by its own control group and by all ancestors of that group: SLURM, systemd
slices and ``systemd-run`` usually set the limit on an ancestor.  Versions 1 and 2, and machines
that mount both, are supported.  Every function takes the root directory that contains ``proc``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

SYSTEM = Path("/")


@dataclass(frozen=True)
class MemoryLimit:
    """The memory limit of one control group.

    Attributes:
        group: the directory of the control group.
        limit_bytes: what all processes in the group may use together.
        used_bytes: what they use, without the file cache that the kernel drops under pressure.
    """

    group: Path
    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        """What is left of the limit, at least 0."""
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True)
class _Mount:
    """A mounted hierarchy of control groups."""

    version: int
    group: PurePosixPath  # the control group that is visible at ``directory``
    directory: Path
    controllers: tuple[str, ...]  # of version 1; those of version 2 are not listed


def memory_limits(root: Path = SYSTEM) -> list[MemoryLimit]:
    """Return the memory limits that hold for this process, the innermost group first.

    Groups without a limit are left out.
    """
    found = [_memory_limit(group) for group in _groups("memory", root)]
    return [limit for limit in found if limit is not None]


def cpu_quota(root: Path = SYSTEM) -> float | None:
    """Return the CPUs' worth of time that this process may use; ``None`` without a limit."""
    quotas = [_cpu_quota(group) for group in _groups("cpu", root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _memory_limit(group: Path) -> MemoryLimit | None:
    # Beyond ``memory.high`` the kernel slows a process down so much that it hardly moves.
    second = [_number(group / name) for name in ("memory.max", "memory.high")]
    limits = [n for n in (*second, _number(group / "memory.limit_in_bytes")) if n is not None]
    used = _number(group / "memory.current")
    if used is None:
        used = _number(group / "memory.usage_in_bytes")
    if not limits or used is None or min(limits) >= _UNLIMITED:
        return None
    return MemoryLimit(group, min(limits), max(0, used - _droppable_bytes(group)))


def _droppable_bytes(group: Path) -> int:
    """The file cache that the kernel can drop without taking pages from a running program."""
    counts = dict[str, int]()
    for line in _text(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        counts[name] = int(value) if value.isdigit() else 0
    prefix = "total_" if "total_cache" in counts else ""  # version 1: with all descendants
    active, inactive = (counts.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
    mapped = counts.get("file_mapped", counts.get(f"{prefix}mapped_file", 0))
    return max(0, active + inactive - mapped)


def _cpu_quota(group: Path) -> float | None:
    words = _text(group / "cpu.max").split()  # "150000 100000" or "max 100000"
    if len(words) != 2:
        words = [_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    quota, period = words
    if not quota.isdigit() or not period.isdigit() or not int(period):  # "max", or -1
        return None
    return int(quota) / int(period)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The directories of this process's group and its ancestors, innermost first."""
    mounts = list(_mounts(root))
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)  # version 2 names no controllers, and has all
        if names and controller not in names.split(","):
            continue
        here = [
            mount for mount in mounts
            if (controller in mount.controllers if names else mount.version == 2)
        ]  # fmt: skip
        if here:
            yield from _ancestors(PurePosixPath(path), here)


def _ancestors(group: PurePosixPath, mounts: list[_Mount]) -> Iterator[Path]:
    """The directories of ``group`` and its ancestors, as far as one of the mounts shows them."""
    resident_guard = [
        m for m in mounts if group.is_relative_to(m.group) and ".." not in group.parts
    ]
    if not resident_guard:
        # Another control group namespace: the mount point is the best that is known.
        yield mounts[0].directory
        return
    widest = min(resident_guard, key=lambda mount: len(mount.group.parts))
    inside = group.relative_to(widest.group)
    for each in (inside, *inside.parents):
        directory = widest.directory / each
        if each != inside and _text(directory / "memory.use_hierarchy").strip() == "0":
            return  # version 1: this group does not limit its children
        yield directory


def _mounts(root: Path) -> Iterator[_Mount]:
    """The control group hierarchies that are mounted."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        front, _, back = line.partition(" - ")
        fields, kinds = front.split(), back.split()
        if len(fields) < 5 or len(kinds) < 3 or kinds[0] not in ("cgroup", "cgroup2"):
            continue
        group, directory = (_unescaped(field) for field in fields[3:5])
        version, controllers = (1, tuple(kinds[2].split(","))) if kinds[0] == "cgroup" else (2, ())
        yield _Mount(version, PurePosixPath(group), root / directory.lstrip("/"), controllers)


def _unescaped(field: str) -> str:
    """A path of ``mountinfo``, where blanks are written as ``\\040``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    """The content of a file; empty where it does not exist or cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


_UNLIMITED = 1 << 62  # version 1 writes the largest multiple of the page size below 2**63
