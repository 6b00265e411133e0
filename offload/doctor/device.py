"""The accelerator: whether torch sees it, its driver, and its link to the host."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import torch

from ..errors import format_bytes
from ..io_engine import allocate_host
from ..measure.calibration import kept_rates
from ..movement.accelerators.vendors import LOCK_REMEDY, VENDORS, Vendor
from ..optim.cores import allowed_cpus
from ..planning.budgets import free_host_bytes
from .finding import Finding, State

LOCKED_PIECE, LOCKED_PIECES = 64 << 20, 16  # bytes, and how many are tried at most
DRIVER = Path("/proc/driver/nvidia/version")
NODES = Path("/dev")
PCI = Path("/sys/bus/pci/devices")
MEMORY_NODES = Path("/sys/devices/system/node")
# Bytes per second and lane, one way, by transfers per second, less the encoding (PCI-SIG).
LANE_BYTES_S = {"2.5": 0.25e9, "5.0": 0.5e9, "8.0": 0.985e9, "16.0": 1.969e9, "32.0": 3.938e9,
                "64.0": 7.563e9}  # fmt: skip


def accelerator() -> torch.device | None:
    """The device that a run would use by default; ``None``: the CPU."""
    if not torch.accelerator.is_available():
        return None
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, torch.accelerator.current_device_index())  # as a run names it


def look() -> Iterator[Finding]:
    """Yield the findings about the device."""
    device = accelerator()
    if device is None:
        yield missing()
        return
    index = device.index
    properties = torch.cuda.get_device_properties(index) if device.type == "cuda" else None
    free, total = torch.accelerator.get_memory_info(index)
    name = properties.name if properties is not None else device.type
    count = torch.accelerator.device_count()
    several = f" (one of {count})" if count > 1 else ""
    yield Finding(
        "device", f"{name}{several}, {format_bytes(free)} free of {format_bytes(total)}",
        State.GOOD, "what runs compute on",
        figures={"name": name, "free_bytes": free, "total_bytes": total, "devices": count},
    )  # fmt: skip
    if device.type == "cuda":
        yield driver()
    yield page_locking(device)
    if properties is not None:
        yield link(_pci(properties), str(device))
        yield from memory_node(_pci(properties))


def page_locking(device: torch.device) -> Finding:
    """Report whether host memory can be page-locked for the device, by locking up to 1 GiB."""
    about, vendor = "page-locked memory", VENDORS.get(device.type, Vendor())
    slow = "pageable memory: results are the same, but copies are slower and do not overlap compute"
    if vendor.register is None or vendor.unregister is None:
        return Finding(about, "PyTorch cannot page-lock for this device", State.SLOW, slow)
    most = max(1, min(LOCKED_PIECES, free_host_bytes() // 4 // LOCKED_PIECE))
    locked, reason = list[int](), ""
    with allocate_host(most * LOCKED_PIECE, populate=False) as memory:
        try:
            while len(locked) < most and not reason:
                address = memory.address + len(locked) * LOCKED_PIECE
                try:
                    vendor.register(address, LOCKED_PIECE, device)
                    locked.append(address)
                except RuntimeError as error:
                    reason = str(error)
        finally:
            for address in locked:
                vendor.unregister(address)
    nbytes = len(locked) * LOCKED_PIECE
    figures = {"locked_bytes": nbytes, "tried_bytes": most * LOCKED_PIECE}
    if reason:
        found = f"{format_bytes(nbytes)}, then refused ({reason})"
        return Finding(about, found, State.SLOW, f"the rest is {slow}", LOCK_REMEDY, figures)
    found = f"{format_bytes(nbytes)} locked, all that was tried"
    return Finding(about, found, State.GOOD, "copies run beside compute", figures=figures)


def missing(nodes: Path | None = None) -> Finding:
    """No device: whether there is one that torch does not see."""
    if not any((nodes or NODES).glob("nvidia[0-9]*")):
        return Finding(
            "device", "none", State.NOTE, "everything runs on the CPU, with one memory tier"
        )
    if torch.version.cuda is None:
        return Finding(
            "device", "an NVIDIA GPU that torch was not built for", State.BROKEN,
            "this torch is a build for the CPU, so the GPU is not used",
            "pip install torch from https://pytorch.org/get-started with CUDA",
        )  # fmt: skip
    return Finding(
        "device",
        "an NVIDIA GPU that torch cannot use",
        State.BROKEN,
        f"torch was built for CUDA {torch.version.cuda}, and finds no usable driver",
        "nvidia-smi must list the GPU; update the driver, or in a container run with --gpus all",
    )


def driver(file: Path = DRIVER) -> Finding:
    """The version of the kernel's driver, and of CUDA that torch was built for."""
    try:
        text = file.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        text = ""
    words = [word for word in text.split() if word[:1].isdigit() and "." in word]
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    found = f"{words[0] if words else 'not known'}, torch built for {built}"
    return Finding("driver", found, State.GOOD, "torch works with it")


def _pci(properties: object) -> Path:
    """The directory of the device in sysfs."""
    domain, bus, slot = (
        int(getattr(properties, f"pci_{part}_id", 0)) for part in ("domain", "bus", "device")
    )
    return PCI / f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def link(pci: Path, device: str) -> Finding:
    """The link between host and device: as measured, where it was; else what it may carry."""
    about = "host link"
    kept = kept_rates(None, device)
    if kept is not None and kept.h2d_bytes_s and kept.d2h_bytes_s:
        into, out = kept.h2d_bytes_s, kept.d2h_bytes_s
        return Finding(
            about, f"{into / 1e9:.3g} GB/s in, {out / 1e9:.3g} GB/s out, measured", State.GOOD,
            "what weights, gradients and activations share",
            figures={"h2d_bytes_s": into, "d2h_bytes_s": out},
        )  # fmt: skip
    try:
        speed = {each: (pci / each).read_text(encoding="utf-8").split()[0] for each in (
            "current_link_width", "max_link_width", "max_link_speed")}  # fmt: skip
        width, most = int(speed["current_link_width"]), int(speed["max_link_width"])
        if not width:  # as some virtual machines say
            raise ValueError(width)
        rate = LANE_BYTES_S[speed["max_link_speed"]] * width
    except (OSError, ValueError, KeyError, IndexError):
        return Finding(
            about, "not known", State.NOTE, "the first run measures it",
            "overspill plan --measure",
        )  # fmt: skip
    found, figures = f"{width} lanes, at most {rate / 1e9:.3g} GB/s each way", {"bytes_s": rate}
    if width < most:
        return Finding(
            about, f"{found}; the device has {most} lanes", State.SLOW,
            "a step that waits for the link takes as much longer as lanes are missing",
            "put the GPU into a slot with all lanes (lspci -vv, LnkSta)", figures,
        )  # fmt: skip
    return Finding(about, found, State.GOOD, "the first run measures it", figures=figures)


def memory_node(
    pci: Path, nodes: Path | None = None, allowed: Collection[int] | None = None
) -> Iterator[Finding]:
    """Yield whether this process runs on the NUMA node that the device is connected to.

    Yields nothing if there is only one node, or if the system does not say.

    Args:
        pci: directory of the device in sysfs.
        nodes: directory of the NUMA nodes in sysfs.
        allowed: the processors that this process may use.
    """
    nodes = MEMORY_NODES if nodes is None else nodes
    allowed = allowed_cpus() if allowed is None else allowed
    try:
        node = int((pci / "numa_node").read_text(encoding="utf-8"))
        lists = [each / "cpulist" for each in nodes.glob("node[0-9]*")]
        cpus = {int(each.parent.name[4:]): _numbers(each.read_text("utf-8")) for each in lists}
    except (OSError, ValueError):
        return
    if len(cpus) < 2 or not cpus.get(node):
        return
    used = [number for number in sorted(cpus) if not cpus[number].isdisjoint(allowed)]
    about, figures = "NUMA node", {"device_node": node, "process_nodes": used}
    if used == [node]:
        found = f"the device is on node {node}, and so are this process's processors"
        yield Finding(about, found, State.GOOD, "transfers stay on the node", figures=figures)
        return
    yield Finding(
        about,
        f"the device is on node {node}; this process may use the processors of "
        f"{', '.join(map(str, used))}",
        State.SLOW,
        "transfers to memory of another node share the link between the processors",
        f"numactl --cpunodebind={node} --membind={node} python ..., if the node has enough memory",
        figures,
    )


def _numbers(text: str) -> set[int]:
    """Return the numbers in a list of ranges, such as ``0-15,32``."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
