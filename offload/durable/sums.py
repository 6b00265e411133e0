"""The list of an export's files, with a checksum for each, to detect damage later."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import CorruptionError, OffloadError
from ..io_engine.native import crc32

SUMS = "overspill.export.json"


@dataclass(frozen=True)
class Written:
    """A finished file: its size, and the CRC-32 of its contents."""

    nbytes: int
    crc32: int


def sums_text(files: Mapping[str, Written], step: int) -> str:
    """Return the text of the list; its last entry is a checksum of everything before it."""
    listed = {name: [file.nbytes, file.crc32] for name, file in sorted(files.items())}
    content = {"format": 1, "step": step, "files": listed}
    return json.dumps({**content, "crc32": zlib.crc32(json.dumps(content).encode())})


def read_sums(folder: Path) -> tuple[int, dict[str, Written]]:
    """Return the step of an export, and its files.

    Raises:
        OffloadError: the list is damaged.
    """
    text = (folder / SUMS).read_bytes()
    try:
        content = json.loads(text)
        files = {name: Written(*entry) for name, entry in content["files"].items()}
        step = int(content["step"])
        whole = sums_text(files, step).encode() == text
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        path = folder / SUMS
        raise CorruptionError(f"{path} is damaged; export again, or copy it again", path=str(path))
    return step, files


def verify_export(folder: Path, note: Callable[[int], None]) -> list[str]:
    """Return what is wrong with an export's files; ``note`` is called with counts of bytes read."""
    try:
        _, files = read_sums(folder)
    except OffloadError as error:
        return [str(error)]
    wrong = []
    for name, expected in files.items():
        crc = nbytes = 0
        try:
            with (folder / name).open("rb") as file:
                while data := file.read(8 << 20):
                    crc = crc32(np.frombuffer(data, np.uint8), crc)
                    nbytes += len(data)
                    note(len(data))
        except OSError as error:
            wrong.append(f"{folder / name}: {error.strerror}")
            continue
        if (nbytes, crc) != (expected.nbytes, expected.crc32):
            wrong.append(
                f"{folder / name} is damaged: {nbytes} bytes with CRC-32 {crc:08x}, expected "
                f"{expected.nbytes} with {expected.crc32:08x}; export again, or copy it again"
            )
    return wrong
