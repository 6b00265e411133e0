"""Every message of the package that tells its reader what to do, found in the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("offload", "io_engine", "optim")

# What advice begins with, behind a mark of punctuation.
_VERBS = (
    "add ask assign attach begin build call change choose clear clip close commit continue copy "
    "create delete do edit end export find finish free freeze get give go hand have initialise "
    "install keep leave load look lower make mend mount move name open pass pickle pip point pull "
    "put raise read regenerate release rename remove replace reset restore resume retry return "
    "run save say see set shorten split start stop take tell tie train try turn unset unwrap "
    "update use wait wrap write"
)
_ADVICE = re.compile(
    r"(?:[;:,.] |; .*?\bor |\()(?:or |and |then |please |first )?"
    rf"(?:{'|'.join(_VERBS.split())})\b"
    r"|[;,] (?:keep state = |overspill\.\w+\()|; for [^;]*\buse\b",
    re.IGNORECASE,
)


class Message(NamedTuple):
    """A text in the source: ``{}`` stands for what is put in when it is said."""

    file: str
    line: int
    text: str


def text_of(node: ast.expr) -> str | None:
    """What a string expression says, or ``None`` if it is none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(v) or "{}" for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        if left is None and right is None:
            return None
        return (left or "{}") + (right or "{}")
    return None


def _strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The longest string expressions, without docstrings."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        if isinstance(node, ast.expr) and (text := text_of(node)) is not None:
            yield node.lineno, text
        else:
            yield from _strings(node)


def advises(text: str) -> bool:
    """Whether a text tells its reader to do something."""
    return len(text) > 20 and " " in text and _ADVICE.search(text) is not None


@cache
def texts() -> tuple[Message, ...]:
    """All texts in the package, by file and line."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            for line, text in _strings(ast.parse(path.read_text())):
                found.append(Message(name, line, text))
    return tuple(found)


@cache
def messages() -> tuple[Message, ...]:
    """Those of them that advise something."""
    return tuple(each for each in texts() if advises(each.text))
