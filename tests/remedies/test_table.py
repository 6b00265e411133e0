"""Every message that advises something is in the table of what has been tried.

A new message that tells its reader what to do fails here until a test executes its remedy: write
one in this folder, and enter it with ``tries``.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.remedies.elsewhere import ELSEWHERE, NO_ADVICE, NOT_HERE
from tests.remedies.messages import ROOT, Message, advises, messages, texts
from tests.remedies.table import TRIED

for file in sorted(Path(__file__).parent.glob("test_*.py")):
    if file.stem != Path(__file__).stem:
        importlib.import_module(f"tests.remedies.{file.stem}")

TABLES = (ELSEWHERE, NOT_HERE, NO_ADVICE)


def entries() -> list[tuple[str, str]]:
    """File and part of every message that is in a table."""
    return [*TRIED, *(entry for table in TABLES for entry in table)]


def is_in(message: Message, entry: tuple[str, str]) -> bool:
    file, part = entry
    return message.file == file and part in message.text


def test_every_message_that_advises_is_in_the_table() -> None:
    known = entries()
    missing = [each for each in messages() if not any(is_in(each, entry) for entry in known)]
    assert not missing, "no test executes the remedy of:\n" + "\n".join(
        f"{each.file}:{each.line}: {each.text}" for each in missing
    )


def test_every_entry_is_of_a_message() -> None:
    gone = [entry for entry in entries() if not any(is_in(each, entry) for each in texts())]
    assert not gone, "no such message any more:\n" + "\n".join(map(str, gone))


def test_tests_elsewhere_are_there() -> None:
    for name in ELSEWHERE.values():
        path, _, test = name.partition("::")
        assert f"def {test}(" in (ROOT / path).read_text(), name


@pytest.mark.parametrize(("text", "found"), [
    ("the model is wrapped already; unwrap it first", True),
    ("{} is not a directory; create it first", True),
    ("lower the learning rate, clip with max_grad_norm, or look for the first loss", True),
    ("the engine of this gradient is closed", False),
    ("expected a table of rates, got {}", False),
])  # fmt: skip
def test_advice_is_found(text: str, *, found: bool) -> None:
    assert advises(text) is found
