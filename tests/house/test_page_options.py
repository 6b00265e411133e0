"""The page of options has each option, in the same words: its default, effect, cost and example."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from typing import Any

import pytest

import overspill
from tests.tidy.sources import ROOT

PAGE = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
ENTRIES = dict(re.findall(r"^### (\w+)\n\n(.*?)(?=^##|\Z)", PAGE, re.S | re.M))
OPTIONS = {field.name: field.default for field in fields(overspill.OffloadConfig)}


def test_the_page_has_all_options_and_no_others() -> None:
    assert set(ENTRIES) == set(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_entry_is_complete(name: str) -> None:
    entry = ENTRIES[name]
    heads = re.findall(r"^- \*\*(\w+)\*\*:", entry, re.M)
    assert heads == ["Default", "Effect", "Cost", "Example"]
    default = re.search(r"\*\*Default\*\*: (.*)", entry)
    assert default is not None
    value = OPTIONS[name]
    if value is not None and value != "auto":
        shown = re.match(r"`?([^`.,]+)`?[.,]", default.group(1))
        assert shown is not None and ast.literal_eval(shown.group(1)) == value
    if value == "auto":
        assert default.group(1).startswith('`"auto"`')


@pytest.mark.parametrize("name", OPTIONS)
def test_an_example_is_valid(name: str) -> None:
    example = re.search(r"\*\*Example\*\*: `(.*)`", ENTRIES[name])
    assert example is not None
    call = ast.parse(f"options({example.group(1)})", mode="eval").body
    assert isinstance(call, ast.Call) and [keyword.arg for keyword in call.keywords] == [name]
    value = call.keywords[0].value
    if isinstance(value, (ast.Lambda, ast.Call)):
        return
    given: dict[str, Any] = {name: ast.literal_eval(value)}
    store = {"nvme": "/"}
    beside = {
        "on_nonfinite": store, "commit_every": store, "ignore_weights": {"weights": "/"},
        "master": {"precision": "bf16"},
    }.get(name, {})  # fmt: skip
    config = overspill.OffloadConfig.from_options({**given, **beside})
    assert getattr(config, name) != OPTIONS[name], "an example that changes something"
