"""``overspill doctor``: whether this machine is set up for fast runs, and what mends it."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from . import options as opt
from .failures import one_line_errors

if TYPE_CHECKING:
    from ..doctor.finding import Finding

BROKEN = 1
WIDTH, INDENT = 100, 8
MARKS = {"good": "ok", "note": "note", "slow": "slow", "broken": "BROKEN"}
COLOURS = {"good": "green", "note": "blue", "slow": "yellow", "broken": "red"}


def doctor(
    nvme: opt.Nvme = None,
    as_json: opt.AsJson = False,
    debug: opt.Debug = False,
) -> None:
    """Show what this machine has for a run, what costs speed, and the command that mends it.

    Measures nothing.  Exit code 1 where something does not work.
    """
    with one_line_errors(debug):
        from ..doctor.every import examine

        found = examine(nvme or [Path.cwd()])
    wrong = [each for each in found if each.state.value == "broken"]
    if as_json:
        typer.echo(json.dumps({"works": not wrong, "findings": [f.as_json() for f in found]}))
    else:
        for each in found:
            _show(each)
        typer.echo(_verdict(found))
    if wrong:
        raise typer.Exit(BROKEN)


def _show(finding: Finding) -> None:
    state = finding.state.value
    typer.secho(f"{MARKS[state]:<{INDENT}}", fg=COLOURS[state], bold=state == "broken", nl=False)
    typer.echo(f"{finding.about}: {finding.found}")
    typer.echo(_indented(finding.meaning))
    if finding.remedy:
        typer.echo(_indented(f"-> {finding.remedy}"))


def _indented(text: str) -> str:
    margin = " " * INDENT
    return textwrap.fill(text, WIDTH, initial_indent=margin, subsequent_indent=margin)


def _verdict(found: list[Finding]) -> str:
    counts = {state: sum(f.state.value == state for f in found) for state in MARKS}
    if counts["broken"]:
        return f"{counts['broken']} of {len(found)} do not work"
    if counts["slow"]:
        return f"everything works; {counts['slow']} of {len(found)} cost speed"
    return "everything works, and nothing costs speed"
