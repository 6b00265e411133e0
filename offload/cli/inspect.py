"""``overspill inspect``: what is in a store or an export, and whether it is whole."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import StoreError
from ..observe.long_work import LongWork
from . import options as opt
from .failures import one_line_errors

if TYPE_CHECKING:
    from ..durable.inspect import Inspection

DAMAGED = 1


def inspect(
    place: Annotated[Path, typer.Argument(help="Directory of a store, or folder of an export.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    verify: Annotated[bool, typer.Option(help="Read everything and check it.")] = True,
    repair: Annotated[
        bool, typer.Option("--repair", help="Drop what is damaged after the last good commit.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Repair without asking.")] = False,
    debug: opt.Debug = False,
) -> None:
    """Show the commits of a store and verify its checksums; exit code 1 if it is damaged."""
    with one_line_errors(debug):
        from ..durable.sums import SUMS

        several = any(place.glob("rank-?????-of-?????"))
        look = _export if (place / SUMS).exists() else _run if several else _store
        wrong = look(place, as_json, verify)
        if wrong and repair and several:
            raise StoreError("repair mends one store; name the folder of the rank that is damaged")
        if wrong and repair:
            from ..durable.inspect import repair_store

            if not yes:
                typer.confirm("Drop the damaged records?", abort=True, err=True)
            typer.echo(repair_store(place), err=as_json)
            wrong = []
    if wrong:
        raise typer.Exit(DAMAGED)


def _say(lines: list[str], wrong: list[str], checked: str) -> list[str]:
    for line in lines:
        typer.echo(line)
    for line in wrong:
        typer.echo(f"damaged: {line}")
    if not wrong:
        typer.echo(checked)
    return wrong


def _export(folder: Path, as_json: bool, verify: bool) -> list[str]:
    from ..durable.sums import read_sums, verify_export
    from ..errors import format_bytes

    step, files = read_sums(folder)
    wrong: list[str] = []
    if verify:
        with LongWork("verifying", sum(file.nbytes for file in files.values())) as done:
            wrong = verify_export(folder, done)
    if as_json:
        sizes = {name: file.nbytes for name, file in files.items()}
        typer.echo(json.dumps({"step": step, "files": sizes, "wrong": wrong}))
        return wrong
    lines = [f"export of step {step}"]
    lines += [f"  {name}  {format_bytes(file.nbytes)}" for name, file in files.items()]
    return _say(lines, wrong, "all checksums match" if verify else "not verified")


def _run(place: Path, as_json: bool, verify: bool) -> list[str]:
    """The stores of all ranks, and the commit that they have in common."""
    from ..ranks.stores import find_run

    run = find_run([place])
    if run is None or not run.ranks:  # one rank's is newer
        return _store(place, as_json, verify)
    each = [(str(store.directories[0].name), _inspected(store.directories[0], verify))
            for store in run.stores]  # fmt: skip
    wrong = [f"{name}: {problem}" for name, found in each for problem in found.wrong]
    if as_json:
        stores = [found.as_json() for _, found in each]
        typer.echo(json.dumps({"ranks": len(each), "step": run.step, "stores": stores}))
        return wrong
    lines = [f"run of {len(each)} ranks; the last commit that all have is of step {run.step}"]
    for _, found in each:
        lines += _lines(found)
    return _say(lines, wrong, _checked(verify))


def _inspected(place: Path, verify: bool) -> Inspection:
    from ..durable.inspect import inspect_store, stored_bytes

    with LongWork("verifying", stored_bytes(place)) as done:
        return inspect_store(place, verify=verify, note=done)


def _checked(verify: bool) -> str:
    return "all checksums of the last commit match" if verify else "data was not verified"


def _store(place: Path, as_json: bool, verify: bool) -> list[str]:
    found = _inspected(place, verify)
    wrong = list(found.wrong)
    if as_json:
        typer.echo(json.dumps(found.as_json()))
        return wrong
    return _say(_lines(found), wrong, _checked(verify))


def _lines(found: Inspection) -> list[str]:
    from ..errors import format_bytes

    lines = [
        f"store of {found.parameters:,} parameters, {found.optimizer}, "
        f"{format_bytes(found.file_bytes)} in {', '.join(found.directories)}"
    ]
    for commit in found.commits:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(commit.when_s))
        lines.append(
            f"  generation {commit.number}  step {commit.step}  {when}  "
            f"{format_bytes(commit.nbytes)}"
        )
    return lines
