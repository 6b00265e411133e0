"""The ``overspill`` command; one file per sub-command, imported when it is called."""

from __future__ import annotations


def main() -> None:
    """Runs the command line.  Exit code 2: the input was refused, with one line that says why."""
    from .app import app

    app(prog_name="overspill")


__all__ = ["main"]
