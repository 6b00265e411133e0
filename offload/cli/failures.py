"""Errors as one clear line and an exit code, instead of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from ..errors import OffloadError

REFUSED = 2


@contextmanager
def one_line_errors(debug: bool) -> Iterator[None]:
    """Turns what a user can mend into ``error: ...`` on stderr and exit code 2.

    Anything else is a defect of ours and keeps its traceback; with ``debug`` everything does.
    """
    try:
        yield
    except Exception as error:
        if debug or not isinstance(error, (OffloadError, ValueError, OSError, *_of_torch())):
            raise
        text = " ".join(str(error).split())
        typer.echo(f"error: {text or type(error).__name__}", err=True)
        raise typer.Exit(REFUSED) from error


def _of_torch() -> tuple[type[Exception], ...]:
    """Its own error for a device that is full, where torch was imported at all."""
    torch = sys.modules.get("torch")
    return () if torch is None else (torch.OutOfMemoryError,)
