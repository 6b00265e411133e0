"""Machines described in a file: rates and sizes, for plans of machines that are not here."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .rates import Rates

__all__ = ["Machine"]


@dataclass(frozen=True)
class Machine:
    """A machine that need not be here.

    Attributes:
        rates: of its links, disks and processors; all directories together.
        device_memory, host_memory, nvme_memory: free for a run, as sizes (``"24GiB"``); ``None``
            where there is no such tier, or, for host memory, where that of this machine counts.
        disks: that ``nvme_memory`` and the disk rates are of.
        endurance: what may be written to all disks over their lives, as a size (``"1200TB"``).
    """

    name: str
    rates: Rates
    device_memory: str | None = None
    host_memory: str | None = None
    nvme_memory: str | None = None
    disks: int = 1
    endurance: str | None = None

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Machine:
        """Reads TOML (``.toml``) or JSON: the attributes, with ``rates`` as a table of its own.

        A file of nothing but rates, as ``Rates.to_file`` writes it, is a machine without sizes.

        Raises:
            ValueError: not such a file, an unknown key, or a value that makes no sense.
            OSError: the file cannot be read.
        """
        path = Path(path)
        try:
            return cls._from_values(path.stem, _read(path))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def _from_values(cls, name: str, values: object) -> Machine:
        if not isinstance(values, dict):
            raise ValueError(f"expected a table of rates, got {type(values).__name__}")
        known = [field.name for field in fields(cls)]
        if "rates" not in values:
            if sizes := sorted(set(values) & set(known)):
                raise ValueError(
                    f"a file with {', '.join(sizes)} needs its rates in the table [rates]"
                )
            return cls(name, Rates.from_values(values))
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"unknown key {', '.join(unknown)}; known: {', '.join(known)}")
        given = {"name": name, **values, "rates": Rates.from_values(values["rates"])}
        disks = given.get("disks", 1)
        if not isinstance(disks, int) or isinstance(disks, bool) or disks < 1:
            raise ValueError(f"disks must be a whole number >= 1, got {disks!r}")
        return cls(**given)


def _read(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".toml":
        return json.loads(text)
    try:
        import tomllib
    except ImportError:
        raise ValueError("TOML needs Python 3.11 or later; write the same keys as JSON") from None
    return tomllib.loads(text)
