"""The lists of messages in docs/errors.md, as the source has them.

``python -m tests.house.error_page`` writes them anew.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache

from overspill import errors
from overspill.errors import OffloadError
from tests.remedies.messages import PACKAGES, ROOT, text_of

PAGE = ROOT / "docs/errors.md"
LIST = re.compile(r"<!-- messages: (?P<names>[\w, ]+) -->\n\n(?:(?:- .*\n)+\n)?")
LEAST_WORDS = 3  # in what is known of a message before it is raised


def classes() -> dict[str, type[OffloadError]]:
    """Return the classes of errors by name, without the base class."""
    found = (getattr(errors, name) for name in errors.__all__)
    kinds = [each for each in found if isinstance(each, type) and issubclass(each, OffloadError)]
    return {each.__name__: each for each in kinds if each is not OffloadError}


@cache
def raised() -> dict[str, list[str]]:
    """Return by class the messages that the source raises, ``…`` for what varies."""
    found: dict[str, set[str]] = defaultdict(set)
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                    text = text_of(node.args[0])
                    if node.func.id in classes() and text and _told(text):
                        found[node.func.id].add(_told(text))
    return {name: sorted(texts, key=_order) for name, texts in found.items()}


def _told(text: str) -> str:
    """Return a message as the page shows it; empty if hardly anything of it is known."""
    shown = re.sub(r"^(…: )+(?=…)", "", " ".join(text.split()).replace("{}", "…"))
    return shown if len(re.findall(r"\w{2,}", shown)) >= LEAST_WORDS else ""


def _order(text: str) -> str:
    return re.sub(r"\W+", " ", text).strip().casefold()


def entry(text: str) -> str:
    """Return the line of a message: what happened, then what to do, if the message says that."""
    what, _, remedy = text.partition("; ")
    if not _told(what):
        what, remedy = text, ""
    quoted = f"`` {what} ``" if "`" in what else f"`{what}`"
    return f"- {quoted}: {remedy}" if remedy.strip("…") else f"- {quoted}"


def lists(page: str) -> str:
    """Return the page with its lists as they are to be."""
    messages = raised()

    def lines(found: re.Match[str]) -> str:
        texts = sorted(
            (text for name in found["names"].split(", ") for text in messages[name]), key=_order
        )
        return (
            f"<!-- messages: {found['names']} -->\n\n"
            + "".join(f"{entry(t)}\n" for t in texts)
            + "\n"
        )

    return LIST.sub(lines, page)


if __name__ == "__main__":
    PAGE.write_text(lists(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
