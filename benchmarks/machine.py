"""What a figure was measured on: without it, it says nothing."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

import psutil
import torch

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("overspill", "torch", "numpy", "transformers")


class OtherWork:
    """How much of the machine others take within a ``with`` block.  Ours is this process's work.

    On a busy machine threads that wait for each other lose far more than the share taken, so a
    figure with more than a few percent here says little.
    """

    def __enter__(self) -> OtherWork:
        self.share = 0.0
        self._wall_s, self._busy_s, self._own_s = self._now()
        return self

    @staticmethod
    def _now() -> tuple[float, float, float]:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        return time.perf_counter(), sum(times) - idle - guests, time.process_time()

    def __exit__(self, *exc: object) -> None:
        wall_s, busy_s, own_s = self._now()
        others_s = (busy_s - self._busy_s) - (own_s - self._own_s)
        machine_s = (wall_s - self._wall_s) * psutil.cpu_count()
        self.share = max(0.0, others_s / machine_s)


def facts(folder: Path) -> dict[str, object]:
    """Processor, memory, GPU, versions, commit, and the file system that ``folder`` is on."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [
            {
                "name": torch.cuda.get_device_name(i),
                "memory_bytes": torch.cuda.get_device_properties(i).total_memory,
            }
            for i in range(torch.cuda.device_count())
        ],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
        "disk": _disk(folder),
        "load_before": os.getloadavg()[0],
    }


def everything(folder: Path) -> str:
    """What a failure may hang on, for people: ``facts``, every package, the GPU's driver and state,
    and the environment variables that torch, CUDA, OpenMP and overspill look at."""
    known = {str(d.metadata["Name"]): d.version for d in distributions() if d.metadata}
    looked_at = ("CUDA", "NVIDIA", "NCCL", "OMP", "MKL", "TORCH", "PYTORCH", "OVERSPILL")
    try:
        smi = subprocess.run(
            ["nvidia-smi", "-q"], capture_output=True, text=True, check=False, timeout=30
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        smi = f"nvidia-smi: {error}"
    parts = [
        *(f"{name}: {fact}" for name, fact in facts(folder).items()), "",
        *(f"{name}=={known[name]}" for name in sorted(known, key=str.lower)), "",
        *(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(looked_at)), "",
        torch.__config__.show(), "", smi,
    ]  # fmt: skip
    return "\n".join(parts)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    """The commit, with ``+`` where files differ from it; ``unknown`` outside a clone."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no")
    return f"{commit}{'+' if changed else ''}" if commit else "unknown"


def _disk(folder: Path) -> dict[str, object]:
    folder = folder.resolve()
    while not folder.is_mount():
        folder = folder.parent
    kinds = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    return {
        "file_system": kinds.get(str(folder)),
        "free_bytes": psutil.disk_usage(str(folder)).free,
    }
