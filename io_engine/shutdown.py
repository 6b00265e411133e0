"""Functions that end an engine; as methods they would be references that keep it alive."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from .backend import Backend
from .dispatch import Dispatcher
from .store import StoreFile

STUCK_AFTER_S = 30.0

log = logging.getLogger("overspill.io_engine")


def forget_memory(mover: Backend, address: int, nbytes: int, owner: int) -> None:
    """Memory that transfers have used is about to go."""
    if os.getpid() == owner:  # in a forked child the backend is its parent's
        mover.drop_memory(address, nbytes)


def shut_down(dispatcher: Dispatcher, files: Sequence[StoreFile], owner: int) -> None:
    """Ends the threads, and closes the files."""
    if os.getpid() != owner:
        return  # a forked child: threads, locks and files are its parent's
    ended = dispatcher.close(STUCK_AFTER_S)
    if not ended:
        log.error("transfers are stuck in the kernel; their threads and files are left to it")
    for file in files:
        file.close(keep_descriptor=not ended)
