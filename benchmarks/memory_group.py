"""A limit for all memory of a process, the page cache of its files included: without one, what is
read again and again from disk is read from memory."""

from __future__ import annotations

import os
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")


def limit_memory(nbytes: int) -> bool:
    """Puts this process into a control group of its own with so much memory; whether that is
    possible here.  The group goes with the machine, or when somebody removes it, empty by then."""
    name = f"overspill-{os.getpid()}"
    for root, file in ((GROUPS / "memory", "memory.limit_in_bytes"), (GROUPS, "memory.max")):
        group = root / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / file).write_text(str(nbytes))
            (group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            group.rmdir()
            continue
        return True
    return False


def remove_groups() -> None:
    """Removes those whose process has ended."""
    for root in (GROUPS / "memory", GROUPS):
        for group in root.glob("overspill-*"):
            if not Path(f"/proc/{group.name.partition('-')[2]}").exists():
                try:
                    group.rmdir()
                except OSError:
                    continue  # it has one yet
