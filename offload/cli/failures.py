"""Errors as one clear line and an exit code, instead of a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
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
    except (OffloadError, ValueError, OSError, torch.OutOfMemoryError) as error:
        if debug:
            raise
        text = " ".join(str(error).split())
        typer.echo(f"error: {text or type(error).__name__}", err=True)
        raise typer.Exit(REFUSED) from error
