"""From a backend's completion to the error that a user reads."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from .backend import Completion, Outcome
from .errors import CorruptionError, IoError, remedy_for
from .types import Ticket


def error_of(completion: Completion, ticket: Ticket, paths: Sequence[str]) -> IoError | None:
    """The error of a request that has ended; ``None`` if it went well."""
    if completion.outcome == Outcome.DONE:
        return None
    if completion.outcome == Outcome.CANCELLED:
        return cancelled(ticket)
    path, offset, nbytes = paths[completion.lane], completion.offset, completion.nbytes
    where = f"{path}: {ticket.kind} of {nbytes} bytes at offset {offset}"
    if completion.outcome == Outcome.CORRUPT:
        return CorruptionError(
            f"{where}: CRC-32 expected {completion.expected:#010x}, found "
            f"{completion.found:#010x}: these are not the bytes that were written; the device or "
            "its driver loses data: go back to the last commit, on another device",
            path=path,
            offset=offset,
            nbytes=nbytes,
            expected=completion.expected,
            found=completion.found,
        )
    if completion.outcome == Outcome.TRUNCATED:
        return IoError(
            f"{where}: the file ends before; it was truncated while in use: nothing else may write "
            "to the store",
            path=path,
            offset=offset,
            nbytes=nbytes,
            errno=completion.error,
        )
    return IoError(
        f"{where}: {os.strerror(completion.error)}; {remedy_for(completion.error)}",
        path=path,
        offset=offset,
        nbytes=nbytes,
        errno=completion.error,
    )


def cancelled(ticket: Ticket) -> IoError:
    """The error of a request that was taken back."""
    return IoError(
        f"the {ticket.kind} of {ticket.extent} was cancelled before it started",
        nbytes=ticket.nbytes,
        errno=errno.ECANCELED,
    )
