"""How fast the machine's links, disks and processors are: the numbers the planner divides by."""

from __future__ import annotations

import json
import math
import os
import secrets
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class UpdateRate:
    """Parameters per second that a rule updates with all threads: alone, and beside a thread that
    copies memory without pause; and on a device that has memory of its own."""

    alone_params_s: float
    beside_params_s: float
    device_params_s: float | None = None


@dataclass(frozen=True)
class Rates:
    """The rates of one machine; ``None`` if a rate is unlimited or unknown.

    Attributes:
        h2d_bytes_s, d2h_bytes_s: from host to device memory and back, page-locked.
        link_latency_s: time of an empty copy between host and device.
        disk_read_bytes_s, disk_write_bytes_s: all directories of the store together.
        disk_both_bytes_s: the sum of reads and writes while both run.
        update_params_s: parameters per second that the optimizer updates on the CPU.
        dram_bytes_s: the sum of reads and writes of host memory.
        device_flops_s: matrix products on the compute device.
        h2d_pageable_bytes_s, d2h_pageable_bytes_s: like ``h2d_bytes_s`` and ``d2h_bytes_s``, with
            host memory that is not page-locked.
        update_beside_params_s: like ``update_params_s``, while a thread copies memory continuously.
        disk_cpu_bytes_s: bytes that could be moved to and from the disks if all of compute's time
            went into it.  With ``device="cpu"`` compute stops for bytes moved over this rate.
        device_update_params_s: like ``update_params_s``, for state on the device; if unknown,
            assumed to be no faster than the CPU.
        host_flops_s: floating-point operations per second of matrix products on the CPU, for
            optimizers that have them (Muon, SOAP).
        device_update_flops_s: like ``device_flops_s``, in the dtype of the products of updates; if
            unknown, assumed to be the same.
        wire_bytes_s: what a device receives from those of the other ranks, while all of them do.
        device_memory_bytes_s: like ``dram_bytes_s``, in the device's memory, for updates there by
            optimizers without a kernel; if unknown, assumed to be no faster than host memory.
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
    h2d_pageable_bytes_s: float | None = None
    d2h_pageable_bytes_s: float | None = None
    update_beside_params_s: float | None = None
    disk_cpu_bytes_s: float | None = None
    device_update_params_s: float | None = None
    host_flops_s: float | None = None
    device_update_flops_s: float | None = None
    device_memory_bytes_s: float | None = None
    wire_bytes_s: float | None = None

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
        """Write what ``from_file`` reads.

        Raises:
            OSError: the file cannot be written; what was there before is as it was.
        """
        # Same steps as in Note [Atomic writes], repeated since facts/ may import nothing of ours.
        text = json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"
        draft = f"{os.fspath(path)}.{secrets.token_hex(16)}.part"
        try:
            with open(draft, "x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except OSError as error:  # an error of a write does not name the file
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        finally:
            Path(draft).unlink(missing_ok=True)
        folder = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
