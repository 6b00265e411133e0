"""Every command of the pages is one that there is, with options that it has; plans are made."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from typer.testing import CliRunner

from overspill.cli.app import app
from tests.house.test_page_blocks import PAGES
from tests.tidy.sources import ROOT

FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.S | re.M)
SPAN = re.compile(r"`(overspill [a-z][^`]*)`")
MACHINE = ROOT / "examples/machines/rtx4090.toml"


def commands() -> list[Any]:
    """Those in blocks, whole, without their comments."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        lines = "\n".join(FENCED.findall(text)).replace("\\\n", " ").splitlines()
        words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines
                 if line.removeprefix("$ ").startswith("overspill ")]  # fmt: skip
        found += [pytest.param(each[1:], id=f"{page}-{' '.join(each[1:4])}") for each in words]
    return found


def spans() -> list[Any]:
    """Those in the text, which may be abridged."""
    return [
        pytest.param(each.group(1).split()[1:], id=f"{page}-{each.group(1)}")
        for page in PAGES
        for each in SPAN.finditer(FENCED.sub("", (ROOT / page).read_text(encoding="utf-8")))
    ]


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that is named, and the rest of the words."""
    found: Any = typer.main.get_command(app)
    while words and hasattr(found, "commands"):
        assert words[0] in found.commands, words[0]
        found, words = found.commands[words[0]], words[1:]
    return found, words


@pytest.mark.parametrize("words", commands())
def test_a_command_in_a_block_is_understood(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    command, rest = command_of([word.replace("/scratch", str(tmp_path)) for word in words])
    assert command.make_context(command.name, list(rest), resilient_parsing=False).params


def plans() -> list[Any]:
    """The plans among them; of those that differ only in values, the first."""
    found: dict[Any, Any] = {}
    for each in commands():
        (words,) = each.values
        options = [word for word in words if word.startswith("-")]
        if words[0] == "plan":
            found.setdefault((words[1], *sorted(options)), each)
    return list(found.values())


@pytest.mark.parametrize("words", plans())
def test_a_plan_in_a_block_is_made(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    here = [word.replace("/scratch", str(tmp_path)) for word in words]
    there = [] if "--rates" in here else ["--rates", str(MACHINE)]
    answer = CliRunner().invoke(app, [*here, *there])
    assert answer.exit_code == 0, answer.output


@pytest.mark.parametrize("words", spans())
def test_a_command_in_the_text_is_there(words: list[str]) -> None:
    command, rest = command_of(words)
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    asked = {
        part for word in rest for part in word.strip(",;.").split("/") if part.startswith("--")
    }
    assert asked <= known, asked - known


def test_there_are_some() -> None:
    assert len(commands()) >= 10 and len(plans()) >= 5 and len(spans()) >= 15
