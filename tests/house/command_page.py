"""The tables of options in docs/commands.md, as the commands have them.

``python -m tests.house.command_page`` writes them anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from overspill.cli.app import app
from tests.tidy.sources import ROOT

PAGE = ROOT / "docs/commands.md"
TABLE = re.compile(r"<!-- options: (?P<name>[\w ]+) -->\n+(?:\|.*\n)*\n?")


def commands() -> dict[str, Any]:
    """Return all commands by what is typed behind ``overspill``."""
    return dict(_of(typer.main.get_command(app), ()))


def _of(group: Any, before: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _of(command, (*before, name))
        else:
            yield " ".join((*before, name)), command


def rows(command: Any) -> list[str]:
    """Return the rows of a table: how an option is written, its default, and what it does."""
    found = []
    for each in command.params:
        kind = type(each).__name__
        if each.name == "help":
            continue
        opts = "/".join([*each.opts, *each.secondary_opts])
        written = each.name.upper() if kind.endswith("Argument") else opts
        default = "" if each.default is None or each.default is False else f"`{each.default}`"
        if each.required:
            default = "required"
        meaning = " ".join((getattr(each, "help", None) or "").split())
        found.append(f"| `{written}` | {default} | {meaning.replace('|', '/')} |")
    return found


def tables(page: str) -> str:
    """Return the page with its tables as they are to be."""
    known = commands()

    def table(found: re.Match[str]) -> str:
        lines = ["| option | default | effect |", "|---|---|---|", *rows(known[found["name"]])]
        return f"<!-- options: {found['name']} -->\n\n" + "\n".join(lines) + "\n\n"

    return TABLE.sub(table, page).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
