"""The door to the native extension, and what stands in when it is not there."""

from __future__ import annotations

import importlib
import logging
import os
import zlib
from types import ModuleType

import numpy as np
from numpy.typing import NDArray


def _load() -> ModuleType | None:
    wish = os.environ.get("OVERSPILL_NATIVE", "")
    if wish not in ("", "0", "1"):
        raise ValueError(f"OVERSPILL_NATIVE must be 0 or 1, not {wish!r}")
    if wish == "0":
        return None
    try:
        module = importlib.import_module("._native", __package__)
    except ImportError as error:
        if wish == "1":
            raise
        logging.getLogger("overspill.io_engine").warning(
            "disk transfers run in plain Python (aiofiles), slower and with more CPU: %s", error
        )
        return None
    return module


NATIVE = _load()


def crc32(data: NDArray[np.uint8], before: int = 0) -> int:
    """CRC-32 (zlib's) of contiguous bytes, the same with and without the extension.

    ``before``: that of the bytes in front of them.
    """
    if NATIVE is None:
        return zlib.crc32(data.data, before)
    return int(NATIVE.crc32(data.__array_interface__["data"][0], data.nbytes, before))
