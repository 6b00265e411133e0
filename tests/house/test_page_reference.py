"""The page of commands has each command with its options, as ``--help`` says."""

from __future__ import annotations

import re

from tests.house.command_page import PAGE, TABLE, commands, rows, tables

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_has_all_commands_and_their_options() -> None:
    assert tables(TEXT) == TEXT, "run python -m tests.house.command_page"
    named = [found["name"] for found in TABLE.finditer(TEXT)]
    assert sorted(named) == sorted(commands())
    headings = re.findall(r"^## overspill (.+)$", TEXT, re.M)
    assert headings == named


def test_every_option_has_a_help_text() -> None:
    silent = [
        f"{name}: {row}" for name, command in commands().items() for row in rows(command)
        if row.endswith("|  |")
    ]  # fmt: skip
    assert not silent
