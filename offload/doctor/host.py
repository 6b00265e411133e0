"""Host memory, huge pages, locked memory, processors, and how bytes get to disk."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from ..errors import format_bytes
from ..io_engine.backend import choose
from ..optim.cgroups import SYSTEM, cpu_quota
from ..optim.cores import default_threads
from ..optim.kernels import native_isa
from ..planning.budgets import MACHINE, free_host_memory, total_host_bytes
from .finding import Finding, State

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
FAST_ISA = ("avx512", "avx2", "neon")
GIB = 1 << 30
REBUILD = (
    "unset OVERSPILL_NATIVE; else install a C++ compiler (apt install g++) and overspill again"
)
CAP_IPC_LOCK = 14
ENOUGH_LOCKED = GIB  # of transfer memory that io_uring may hold for good


def memory(root: Path = SYSTEM) -> Finding:
    """Report the host memory that budgets are taken from, and what limits it."""
    left, total = free_host_memory(root), total_host_bytes(root)
    limit = min(left, key=lambda each: left[each])
    free = left[limit]
    found = f"{format_bytes(free)} free of {format_bytes(total)}"
    figures = {
        "total_bytes": total, "free_bytes": free, "limited_by": limit,
        "limited_by_cgroup": limit.startswith("control group"),
    }  # fmt: skip
    what = 'host_memory="auto" takes what is free less a margin'
    if limit != MACHINE:
        what += f"; it is limited by {limit}, not by the machine's memory"
    if free < 2 * GIB:
        return Finding(
            "host memory", found, State.SLOW, f"{what}; with so little, most state goes to disk",
            "end what else uses memory" + ("" if limit == MACHINE else ", or raise that limit"),
            figures,
        )  # fmt: skip
    return Finding("host memory", found, State.GOOD, what, figures=figures)


def huge_pages(setting: Path = HUGE_PAGES) -> Finding:
    """Whether buffers of transfers may lie on pages of 2 MiB."""
    about = "huge pages"
    try:
        text = setting.read_text(encoding="utf-8")
    except OSError:
        return Finding(
            about, "not known", State.NOTE, "this system does not say whether it has huge pages"
        )
    chosen = text[text.find("[") + 1 : text.find("]")]
    if chosen in ("always", "madvise"):
        return Finding(about, chosen, State.GOOD, "transfers go through pages of 2 MiB")
    return Finding(
        about, chosen or text.strip(), State.SLOW,
        "disk transfers take up to a third longer and several times the processor time",
        f"echo madvise | sudo tee {setting}",
    )  # fmt: skip


def locked_memory() -> Finding:
    """How much memory this process may lock."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = limit == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else format_bytes(limit)
    figures = {"limit_bytes": None if unlimited else limit}
    if unlimited or limit >= ENOUGH_LOCKED or may_lock_anything():
        enough = "io_uring keeps the memory of transfers registered"
        return Finding("locked memory", found, State.GOOD, enough, figures=figures)
    return Finding(
        "locked memory", found, State.SLOW,
        "io_uring pins pages again for each transfer beyond that, for a little processor time",
        "ulimit -l unlimited, or a line `* - memlock unlimited` in /etc/security/limits.conf",
        figures,
    )  # fmt: skip


def may_lock_anything(status: Path = Path("/proc/self/status")) -> bool:
    """Whether the limit is not one for this process, as it has the right to go beyond."""
    try:
        lines = status.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    held = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(held, 16) >> CAP_IPC_LOCK & 1)


def processors() -> Finding:
    """Which instructions updates use, on how many cores."""
    isa, cores = native_isa(), default_threads()
    quota = cpu_quota()
    figures = {"isa": isa, "threads": cores, "quota_cpus": quota}
    limited = "" if quota is None else f" (control groups allow {quota:.3g} CPUs)"
    found = f"{cores} cores{limited}, {isa}"
    if isa in FAST_ISA:
        return Finding(
            "processors", found, State.GOOD, "updates run at the rate of memory", figures=figures
        )
    if isa == "torch":
        return Finding(
            "processors", found, State.SLOW,
            "the extension is not there: updates run in plain torch, several times slower",
            REBUILD,
            figures,
        )  # fmt: skip
    return Finding(
        "processors", found, State.SLOW, "without vector instructions updates take several times "
        "as long", "use a processor with AVX2, AVX-512 or NEON; unset OVERSPILL_ISA", figures,
    )  # fmt: skip


def transfers() -> Finding:
    """The backend that moves bytes to and from disk."""
    backend, why = choose("auto")
    about, figures = "disk transfers", {"backend": backend}
    if backend == "uring":
        return Finding(about, "io_uring", State.GOOD, "many transfers on one thread",
                       figures=figures)  # fmt: skip
    if backend == "threads":
        return Finding(
            about, f"threads: {why}", State.NOTE,
            "as fast in large blocks, for more processor time",
            "allow io_uring: sysctl kernel.io_uring_disabled=0; in a container, a seccomp profile "
            "that lets io_uring_setup pass",
            figures,
        )  # fmt: skip
    return Finding(
        about, f"plain Python: {why}", State.SLOW, "slower, and with far more processor time",
        REBUILD,
        figures,
    )  # fmt: skip


def look() -> Iterator[Finding]:
    """All of them."""
    yield memory()
    yield huge_pages()
    yield locked_memory()
    yield processors()
    yield transfers()
