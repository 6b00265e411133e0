"""The page of errors has every kind and every message, and nothing that is not raised."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
import traceback

import pytest

from overspill.errors import BudgetError, IoError, ModelError, OffloadError
from tests.house.error_page import LIST, PAGE, classes, entry, lists, raised

TEXT = PAGE.read_text(encoding="utf-8")
SECTIONS = {
    re.sub(r"\W+", "-", title.lower()): body
    for title, body in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", TEXT, re.S | re.M)
}


def test_the_lists_are_those_of_the_source() -> None:
    assert lists(TEXT) == TEXT, "run python -m tests.house.error_page"
    assert len(re.findall(r"<!-- messages", TEXT)) == len(LIST.findall(TEXT))
    listed = [name for names in LIST.findall(TEXT) for name in names.split(", ")]
    assert sorted(listed) == sorted(set(listed)) == sorted(raised())


@pytest.mark.parametrize("name", classes())
def test_a_kind_has_its_section(name: str) -> None:
    body = SECTIONS[classes()[name].section]
    assert f"`{name}`" in body or name == "HostMemoryError"
    for text in raised().get(name, ()):
        assert entry(text) in body


def test_sections_are_those_of_errors_and_one_more() -> None:
    kinds = {OffloadError.section, *(kind.section for kind in classes().values())}
    assert set(SECTIONS) == {"after-an-error", *kinds}


def test_nothing_raises_the_base_class() -> None:
    assert "OffloadError" not in raised()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_a_traceback_ends_with_the_section() -> None:
    shown = traceback.format_exception_only(ModelError("a lazy module"))
    assert "".join(shown).endswith("a lazy module\nSee docs/errors.md#models\n")
    again = IoError("no room", path="/x").with_remedy("make some")
    assert again.__notes__ == ["See docs/errors.md#files-and-disks"]


def test_errors_can_be_pickled_and_do_not_share_their_notes() -> None:
    budget = BudgetError("unit 'a'", "host", 9, 5, 7, "raise host_memory")
    io = IoError("no room", path="/x", nbytes=3)
    for error in (budget, io, ModelError("a lazy module")):
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert type(again) is type(error) and str(again) == str(error)
            assert vars(again).keys() == vars(error).keys()
    assert pickle.loads(pickle.dumps(budget)).need_bytes == 9
    if sys.version_info >= (3, 11):
        io.with_remedy("make some").add_note("of the second")
        assert io.__notes__ == ["See docs/errors.md#files-and-disks"]


def test_a_command_names_the_section() -> None:
    command = [sys.executable, "-m", "overspill", "report", "/nowhere"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert re.search(r"error: .* \(docs/errors\.md#[a-z-]+\)$", ended.stderr.strip())
