"""The rates of this machine, measured once and stored per machine, file systems and device.

Links, disks and memory are measured for each set of file systems; update rules and matrix products
when a run first needs them.  Nothing is measured while a model trains: a run that finds the rates
to be wrong logs that, and the next run measures again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import IoError
from ..facts.rates import Rates, UpdateRate
from ..io_engine.atomic_files import make_folder, write_text
from ..optim.bench import Case
from ..optim.cores import usable_cpus
from . import machine_rates

__all__ = ["Calibration", "Task", "calibrate"]

log = logging.getLogger("overspill")
FORMAT = 6  # of the file; those of another format are left alone


@dataclass(frozen=True)
class Task:
    """What a run asks of the processors.

    Attributes:
        update: ``None`` if no rule can be measured alone.
        products: the dtype of its matrix products.
        update_products: the dtype of those of its update; ``None`` if that has none.
    """

    update: Case | None
    products: torch.dtype
    update_products: torch.dtype | None = None


@dataclass
class Calibration:
    """What is known of one machine, its disks and its device; ``path`` keeps it.

    Attributes:
        about: what must be the same for the rates to be the same.
        updates: rates by rule and formats.
        flops: of matrix products per second, by dtype; those of the CPU as ``"cpu float32"``.
        doubt: why a run found that the rates no longer hold.
    """

    path: Path
    about: dict[str, Any]
    rates: Rates
    updates: dict[str, UpdateRate] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)
    doubt: str | None = None

    def for_task(self, task: Task | None) -> Rates:
        """The rates with those of a task among them."""
        if task is None:
            return self.rates
        update = None if task.update is None else self.updates.get(_name(task.update))
        return replace(
            self.rates,
            update_params_s=update.alone_params_s if update else None,
            update_beside_params_s=update.beside_params_s if update else None,
            device_update_params_s=update.device_params_s if update else None,
            device_flops_s=self.flops.get(_dtype_name(task.products)),
            host_flops_s=self.flops.get(_on_cpu(task.update_products)),
            device_update_flops_s=self.flops.get(_dtype_name(task.update_products)),
        )

    def doubted(self, reason: str) -> None:
        """Mark the rates as wrong, so that the next run measures again, and log the reason."""
        log.warning(
            "overspill: the rates kept in %s no longer hold: %s; the next run measures them again",
            self.path, reason,
        )  # fmt: skip
        self.doubt = reason
        self.keep()

    def keep(self) -> None:
        """Write all to the file; log a warning if that fails."""
        content = {
            "about": self.about,
            "rates": asdict(self.rates),
            "updates": {name: asdict(rate) for name, rate in self.updates.items()},
            "flops": self.flops,
            "doubt": self.doubt,
        }
        try:
            make_folder(self.path.parent)
            write_text(self.path, json.dumps(content, indent=2, allow_nan=False))
        except IoError as error:
            log.warning("could not keep the measured rates: %s", error)


def calibrate(
    directories: Sequence[str | os.PathLike[str]],
    device: str | torch.device,
    task: Task | None = None,
    *,
    remeasure: bool = False,
) -> Calibration:
    """Return stored rates of these file systems and this device; measure and store missing ones.

    They are stored under ``$OVERSPILL_CACHE``, else ``~/.cache/overspill``.  A file that cannot be
    read or written only causes a warning.  Takes about three seconds if nothing is stored, no time
    if everything is, and never more than 20 s with disks that move 0.2 MB/s.

    Args:
        task: the run's use of the processors; ``None`` measures no rates of it.
        remeasure: measure stored rates again.

    Raises:
        IoError: a directory is missing or cannot be written.
    """
    about = _about(directories, device)
    path = _path(about)
    found = None if remeasure else _kept(path, about)
    if found is not None and found.doubt is not None:
        log.info("overspill: measuring this machine again, since %s", found.doubt)
        found = None
    changed = found is None
    if found is None:
        found = Calibration(path, about, machine_rates.measure(directories, device))
    if task is not None:
        if task.update is not None and _name(task.update) not in found.updates:
            found.updates[_name(task.update)] = machine_rates.measure_update(task.update, device)
            changed = True
        for dtype in (task.products, task.update_products):
            if dtype is not None and _dtype_name(dtype) not in found.flops:
                found.flops[_dtype_name(dtype)] = machine_rates.measure_flops(device, dtype)
                changed = True
        if (dtype := task.update_products) is not None and _on_cpu(dtype) not in found.flops:
            found.flops[_on_cpu(dtype)] = machine_rates.measure_flops("cpu", dtype)
            changed = True
    if changed:
        found.keep()
    return found


def kept_rates(
    directories: Sequence[str | os.PathLike[str]] | None, device: str | torch.device
) -> Rates | None:
    """Return stored rates of these file systems (``None``: of any) and this device.

    ``None`` if there are none, or a run has marked them as wrong.
    """
    about = _about(directories or (), device)
    if directories is not None:
        return _undoubted(_kept(_path(about), about))
    for path in sorted(_path(about).parent.glob("rates-*.json")):
        try:
            there = json.loads(path.read_text(encoding="utf-8"))["about"]
            same = {**there, "file_systems": []} == about
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if same and (found := _undoubted(_kept(path, there))) is not None:
            return found
    return None


def _undoubted(found: Calibration | None) -> Rates | None:
    return None if found is None or found.doubt is not None else found.rates


def _name(case: Case) -> str:
    return f"{case.rule} {_dtype_name(case.weights)} master={case.master} moments={case.moments}"


def _dtype_name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _on_cpu(dtype: torch.dtype | None) -> str:
    return f"cpu {_dtype_name(dtype)}"


def _kept(path: Path, about: dict[str, Any]) -> Calibration | None:
    if not path.exists():
        return None
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(kept, dict) and kept.get("about") == about:
            return Calibration(
                path, about, Rates.from_values(kept.get("rates")),
                {name: UpdateRate(**rate) for name, rate in kept["updates"].items()},
                {name: float(rate) for name, rate in kept["flops"].items()}, kept["doubt"],
            )  # fmt: skip
        log.warning("%s holds something else than its rates; measuring again", path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("could not read the rates in %s (%s); measuring again", path, error)
    return None


def _path(about: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("OVERSPILL_CACHE") or Path.home() / ".cache" / "overspill")
    return folder / f"rates-{digest}.json"


def _about(
    directories: Sequence[str | os.PathLike[str]], device: str | torch.device
) -> dict[str, Any]:
    name = str(device)
    if name not in ("cpu", "sim"):
        module = torch.get_device_module(device)
        if hasattr(module, "get_device_name"):
            name = f"{name} {module.get_device_name(device)}"
    return {
        "format": FORMAT,
        "machine": platform.node(),
        "processor": f"{platform.machine()} x {usable_cpus()}",
        "torch": torch.__version__,
        "device": name,
        "file_systems": [file_system_of(Path(folder)) for folder in directories],
    }


def file_system_of(folder: Path) -> str:
    """The mount point that ``folder`` is, or would be, below: one disk has one rate."""
    folder = folder.resolve()
    while not folder.is_mount():
        folder = folder.parent
    return str(folder)
