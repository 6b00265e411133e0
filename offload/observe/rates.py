"""How fast the machine's links, disks and processors are: the numbers the planner divides by."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from . import probes

__all__ = ["Rates", "cached", "measure"]

log = logging.getLogger("overspill")

MEASURE_S = 2.0  # all probes together take about this long


@dataclass(frozen=True)
class Rates:
    """Rates of one machine; ``None`` where one is not limited or not known.

    Attributes:
        h2d_bytes_s, d2h_bytes_s: from host to device memory and back, page-locked.
        link_latency_s: time of an empty copy between host and device.
        disk_read_bytes_s, disk_write_bytes_s: all directories of the store together.
        disk_both_bytes_s: reads and writes added up while both go on.
        update_params_s: parameters per second that the optimizer updates on the CPU.
        dram_bytes_s: host memory, reads and writes added up.
        device_flops_s: matrix products on the compute device.
    """

    h2d_bytes_s: float | None = None
    d2h_bytes_s: float | None = None
    link_latency_s: float | None = None
    disk_read_bytes_s: float | None = None
    disk_write_bytes_s: float | None = None
    disk_both_bytes_s: float | None = None
    update_params_s: float | None = None
    dram_bytes_s: float | None = None
    device_flops_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"rate {name} must be a number or None, got {value!r}")
            least = "at least" if name == "link_latency_s" else "more than"
            if not math.isfinite(value) or value < 0 or (value == 0 and least != "at least"):
                raise ValueError(f"rate {name} must be finite and {least} 0, got {value!r}")

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Rates:
        """Reads a JSON object with the attributes as keys; left out ones are ``None``.

        Raises:
            ValueError: not such an object, an unknown key, or a value that is no rate.
            OSError: the file cannot be read.
        """
        try:
            return cls.from_values(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error

    @classmethod
    def from_values(cls, values: object) -> Rates:
        """The rates in a mapping with the attributes as keys; errors as for ``from_file``."""
        known = [field.name for field in fields(cls)]
        if not isinstance(values, dict):
            raise ValueError(f"expected a JSON object of rates, got {type(values).__name__}")
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"unknown rate {', '.join(unknown)}; known: {', '.join(known)}")
        return cls(**values)

    def to_file(self, path: str | os.PathLike[str]) -> None:
        """Writes what ``from_file`` reads."""
        text = json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"
        Path(path).write_text(text, encoding="utf-8")


def measure(directories: Sequence[str | os.PathLike[str]], device: str | torch.device) -> Rates:
    """Measures this machine for about two seconds, leaving nothing behind.

    Args:
        directories: where the store will be.  Without any, or where less than 32 MiB is free, the
            disk rates are ``None``.
        device: ``"cuda[:i]"``, ``"cpu"`` or ``"sim"``; without a link of its own (``cpu``,
            ``sim``) the link's rates are ``None``.

    Raises:
        IoError: a directory is missing or cannot be written.
    """
    compute = torch.device("cpu" if str(device) == "sim" else device)
    disk = probes.disk(directories, MEASURE_S / 2) if directories else None
    link = probes.link(compute, MEASURE_S / 8) if compute.type != "cpu" else None
    return Rates(
        h2d_bytes_s=link.in_bytes_s if link else None,
        d2h_bytes_s=link.out_bytes_s if link else None,
        link_latency_s=link.latency_s if link else None,
        disk_read_bytes_s=disk.read_bytes_s if disk else None,
        disk_write_bytes_s=disk.write_bytes_s if disk else None,
        disk_both_bytes_s=disk.both_bytes_s if disk else None,
        update_params_s=probes.update(MEASURE_S / 8),
        dram_bytes_s=probes.dram(MEASURE_S / 8),
        device_flops_s=probes.flops(compute, MEASURE_S / 8),
    )


def cached(directories: Sequence[str | os.PathLike[str]], device: str | torch.device) -> Rates:
    """``measure``, or what it gave before on this machine for these file systems and this device.

    Kept under ``$OVERSPILL_CACHE``, else ``~/.cache/overspill``; delete the file to measure anew.
    A cache that cannot be read or written is said in a warning and does no other harm.
    """
    about = _about(directories, device)
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("OVERSPILL_CACHE") or Path.home() / ".cache" / "overspill")
    path = folder / f"rates-{digest}.json"
    if path.exists():
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(kept, dict) and kept.get("about") == about:
                return Rates.from_values(kept.get("rates"))
            log.warning("%s holds something else than its rates; measuring again", path)
        except (OSError, ValueError) as error:
            log.warning("could not read the rates in %s (%s); measuring again", path, error)
    rates = measure(directories, device)
    try:
        _keep(path, {"about": about, "rates": asdict(rates)})
    except OSError as error:
        log.warning("could not keep the measured rates in %s (%s)", path, error)
    return rates


def _about(
    directories: Sequence[str | os.PathLike[str]], device: str | torch.device
) -> dict[str, object]:
    """What must be the same for rates to be the same."""
    name = str(device)
    if name.startswith("cuda"):
        name = f"{name} {torch.cuda.get_device_name(device)}"
    return {
        "machine": platform.node(),
        "processor": f"{platform.machine()} x {len(os.sched_getaffinity(0))}",
        "torch": torch.__version__,
        "device": name,
        "file_systems": [_file_system(Path(folder)) for folder in directories],
    }


def _file_system(folder: Path) -> str:
    """The mount point that ``folder`` is, or would be, below: one disk has one rate."""
    folder = folder.resolve()
    while not folder.is_mount():
        folder = folder.parent
    return str(folder)


def _keep(path: Path, content: dict[str, object]) -> None:
    """Writes beside and renames, so that two processes never read half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2, allow_nan=False)
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise
