"""Budgets in bytes per tier, from the options of the user and the free memory of the machine."""

from __future__ import annotations

import resource
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from ..config import OffloadConfig, parse_size
from ..errors import format_bytes
from ..facts.machine import Machine
from ..optim.cgroups import SYSTEM, memory_limits
from .plan import Budgets

HOST_MARGIN = 0.15  # of free host memory, left for the framework and the user's own data
DEVICE_MARGIN = 0.25  # of free device memory, left for the temporary memory of a running unit
DISK_MARGIN = 0.05
SIM_DEVICE_BYTES = 2**30  # `sim` has no hardware to query

MACHINE = "the machine"
# ulimit limits on memory, by the field of /proc/self/status that they apply to.
_RLIMITS = {
    "VmSize": ("ulimit -v", resource.RLIMIT_AS),
    "VmData": ("ulimit -d", resource.RLIMIT_DATA),
}


def free_host_memory(root: Path = SYSTEM) -> dict[str, int]:
    """Return the bytes of host memory that this process can still take, by what limits them.

    The limits are the machine's free memory, every control group of this process that has a limit,
    strict overcommit, and ``ulimit``.
    """
    found = free_pages(root)
    found |= _strict_overcommit(root)
    limits = {what: resource.getrlimit(kind)[0] for what, (_, kind) in _RLIMITS.items()}
    if all(limit == resource.RLIM_INFINITY for limit in limits.values()):
        return found
    for line in (root / "proc/self/status").read_text(encoding="utf-8").splitlines():
        what, _, value = line.partition(":")
        limit = limits.get(what, resource.RLIM_INFINITY)
        if limit != resource.RLIM_INFINITY:
            found[_RLIMITS[what][0]] = max(0, limit - 1024 * int(value.split()[0]))
    return found


def free_pages(root: Path = SYSTEM) -> dict[str, int]:
    """Return the bytes of pages that this process can still take, by what limits them.

    The limits are the machine's free memory, and every control group of this process that has one.
    """
    found = {MACHINE: int(psutil.virtual_memory().available)}
    return found | {f"control group {each.group}": each.free_bytes for each in memory_limits(root)}


def _strict_overcommit(root: Path) -> dict[str, int]:
    """Return what is left of the commit limit if the kernel enforces it; else nothing."""
    try:
        if (root / "proc/sys/vm/overcommit_memory").read_text().strip() != "2":
            return {}
        lines = (root / "proc/meminfo").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)}
        left = kib["CommitLimit"] - kib["Committed_AS"]
    except (OSError, ValueError, KeyError, IndexError):
        return {}
    return {"strict overcommit (vm.overcommit_memory=2)": max(0, 1024 * left)}


def free_host_bytes(root: Path = SYSTEM) -> int:
    """Return the bytes of host memory that this process can still take, under every limit."""
    return min(free_host_memory(root).values())


def total_host_bytes(root: Path = SYSTEM) -> int:
    """Return the most host memory that this process could ever have, in bytes."""
    groups = [limit.limit_bytes for limit in memory_limits(root)]
    return min([int(psutil.virtual_memory().total), *groups])


@dataclass(frozen=True)
class Untaken:
    """Memory and disk that open engines have not taken yet but may take within their budgets.

    The system reports these bytes as free.

    Attributes:
        host: of host memory.
        device: of each device's memory.
        disk: of each file system, by ``st_dev``.
    """

    host: int = 0
    device: Mapping[torch.device, int] = field(default_factory=dict)
    disk: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def together(cls, parts: Iterable[Untaken]) -> Untaken:
        """Return the sum of all parts."""
        host, device, disk = 0, Counter[torch.device](), Counter[int]()
        for each in parts:
            host += each.host
            device.update(each.device)
            disk.update(each.disk)
        return cls(host, device, disk)


NOTHING = Untaken()


def free_disk_bytes(directories: Sequence[Path], untaken: Untaken = NOTHING) -> int:
    """Return the bytes that a store with an equal stripe in each directory can take.

    Directories on one file system share its free space.
    """
    sharing = Counter(folder.stat().st_dev for folder in directories)
    stripes = [
        (shutil.disk_usage(folder).free - untaken.disk.get(number, 0)) // sharing[number]
        for folder in directories for number in (folder.stat().st_dev,)
    ]  # fmt: skip
    return max(0, min(stripes)) * len(directories)


def _free_device_bytes(device: torch.device, untaken: Untaken) -> int:
    """Return the free memory of a device, without what other engines may still take."""
    free = int(torch.accelerator.get_memory_info(device)[0])
    promised = untaken.device.get(device, 0)
    if promised and hasattr(torch.accelerator, "memory_reserved"):  # from torch 2.9 on
        # The allocator's unused reserve does not count as free; other engines' activations take
        # memory from it first.
        reserved = torch.accelerator.memory_reserved(device)
        promised -= min(promised, reserved - torch.accelerator.memory_allocated(device))
    return max(0, free - promised)


def machine_budgets(config: OffloadConfig, machine: Machine) -> Budgets:
    """Return the budgets on a machine described in a file.  What the file leaves out is as on this
    machine.

    Raises:
        ValueError: a size cannot be parsed, or a budget is set for a tier that does not exist.
    """
    host_free = free_host_bytes()
    if machine.host_memory is not None:
        host_free = _size_of(machine.host_memory, "host_memory")
    host_free = max(0, host_free - config.left_bytes("host"))
    host = parse_size(config.host_memory, "host_memory")
    device = nvme = None
    compute = host_free
    if machine.device_memory is not None:
        free = _size_of(machine.device_memory, "device_memory")
        compute = free = max(0, free - config.left_bytes("device"))
        asked = parse_size(config.device_memory, "device_memory")
        device = asked.resolve(free, int(free * DEVICE_MARGIN))
    elif config.device_memory != "auto":
        raise ValueError(f"device_memory: {machine.name} has none; its file does not say how much")
    asked = parse_size(config.nvme_memory, "nvme_memory")
    if machine.nvme_memory is not None:
        free = _size_of(machine.nvme_memory, "nvme_memory")
        nvme = asked.resolve(free, int(free * DISK_MARGIN))
    elif asked.nbytes is not None:
        nvme = asked.nbytes
    return Budgets(device, host.resolve(host_free, int(host_free * HOST_MARGIN)), nvme, compute)


def beyond_this_machine(budgets: Budgets) -> str | None:
    """Return a message if the host budget exceeds the memory of this machine, else ``None``."""
    total = total_host_bytes()
    if budgets.host <= total:
        return None
    asked, has = format_bytes(budgets.host), format_bytes(total)
    return f"host_memory is {asked}, which is more than the {has} that this machine has"


def _size_of(text: str, name: str) -> int:
    size = parse_size(text, name)
    if size.nbytes is None:
        raise ValueError(f"{name}: a machine's own is a size such as '24GiB', got {text!r}")
    return size.nbytes


def resolve_budgets(
    config: OffloadConfig, device: torch.device | None, untaken: Untaken = NOTHING
) -> Budgets:
    """Return the budgets in bytes.

    Args:
        device: the device, if it has its own memory; for ``sim``, the CPU.
        untaken: memory promised to other engines; budgets that are not in bytes leave it out.

    Raises:
        ValueError: ``device_memory`` was given but there is no device memory, or a directory does
            not exist.
    """
    host_free = max(0, free_host_bytes() - untaken.host - config.left_bytes("host"))
    host = parse_size(config.host_memory, "host_memory")
    there: int | None = None
    compute = host_free  # also with "sim", whose activations are in host memory
    if device is not None:
        asked = parse_size(config.device_memory, "device_memory")
        if device.type == "cpu":
            there = asked.resolve(max(0, SIM_DEVICE_BYTES - config.left_bytes("device")), 0)
        else:
            free = _free_device_bytes(device, untaken)
            compute = free = max(0, free - config.left_bytes("device"))
            there = asked.resolve(free, int(free * DEVICE_MARGIN))
    elif isinstance(config.leave, Mapping) and "device" in config.leave:
        raise ValueError("leave: there is no device here; name 'host' alone, or pass device='sim'")
    elif config.device_memory != "auto":
        raise ValueError(
            "device_memory: there is no device here, so there is one memory tier: leave it out and "
            "set host_memory, or pass device='sim'; for a machine that is not here, overspill plan "
            "has --rates FILE"
        )
    else:
        config.require_use_of_leave(["host"])
    nvme: int | None = None
    if config.nvme is not None:
        require_directories(config.nvme)
        free = free_disk_bytes(config.nvme, untaken)
        asked = parse_size(config.nvme_memory, "nvme_memory")
        nvme = min(asked.resolve(free, int(free * DISK_MARGIN)), free_disk_bytes(config.nvme))
    return Budgets(there, host.resolve(host_free, int(host_free * HOST_MARGIN)), nvme, compute)


def require_directories(folders: Iterable[Path]) -> None:
    """Raise ``ValueError`` if one of the ``nvme`` folders does not exist."""
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"nvme: {folder} is not a directory; create it first")
