"""Starts the backend that was chosen."""

from __future__ import annotations

from collections.abc import Sequence

from .aiofiles_backend import AiofilesBackend
from .backend import Backend, NativeBackend, Tuning


def open_backend(fds: Sequence[int], tuning: Tuning) -> Backend:
    """Starts the backend that ``tuning`` names, over open files.

    Raises:
        RuntimeError: a part that it needs is not installed.
    """
    if tuning.backend == "aiofiles":
        return AiofilesBackend(fds, tuning)
    return NativeBackend.start(fds, tuning)
