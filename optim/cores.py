"""How many physical cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path

from .cgroups import cpu_quota

MOST_THREADS = 256
CPUS = Path("/sys/devices/system/cpu")


def allowed_cpus() -> set[int]:
    """The CPUs of this process's affinity mask."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def quota_cpus() -> int:
    """Whole CPUs' worth of time that control groups grant, at least 1; many without a limit."""
    quota = cpu_quota()
    return MOST_THREADS if quota is None else max(1, int(quota))


def usable_cpus() -> int:
    """CPUs that this process can keep busy: those of its affinity mask, within the quota."""
    return min(len(allowed_cpus()), quota_cpus())


def default_threads() -> int:
    """Physical cores within the affinity mask and the quota, at least 1.

    A second hardware thread of a core adds nothing to work that is bound by memory.
    """
    cores = set()
    for cpu in allowed_cpus():
        siblings = CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(cpu))  # no topology shown: count every CPU as a core
    return max(1, min(len(cores), quota_cpus(), MOST_THREADS))
