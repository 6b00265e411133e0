"""Errors as one clear line and an exit code, instead of a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from ..errors import OffloadError

REFUSED = 2
_FOLLOWS = "another rank has ended, or does not answer; its own error says why"


@contextmanager
def one_line_errors(debug: bool) -> Iterator[None]:
    """Turns what a user can mend into ``error: ...`` on stderr and exit code 2.

    Anything else is a defect of ours and keeps its traceback; with ``debug`` everything does.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of the output has closed it (``| head``): click ends quietly
    except Exception as error:
        follows = _follows(error)
        mendable = isinstance(error, (OffloadError, ValueError, OSError, *_of_torch()))
        if debug or not (mendable or follows):
            raise
        text = _FOLLOWS if follows else " ".join(str(error).split())
        see = f" (docs/errors.md#{error.section})" if isinstance(error, OffloadError) else ""
        typer.echo(f"{_who()}error: {text or type(error).__name__}{see}", err=True)
        raise typer.Exit(REFUSED) from error


def _who() -> str:
    """Which of several ranks speaks."""
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    return f"rank {os.environ.get('RANK')}: " if several else ""


def _follows(error: BaseException | None) -> bool:
    """Whether it comes of the end of another rank, which says itself why it has ended."""
    dist = sys.modules.get("torch.distributed")
    while error is not None and dist is not None:
        if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
            return True
        error = error.__cause__
    return False


def _of_torch() -> tuple[type[Exception], ...]:
    """Its own error for a device that is full, where torch was imported at all."""
    torch = sys.modules.get("torch")
    return () if torch is None else (torch.OutOfMemoryError,)
