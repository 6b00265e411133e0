"""One word for one thing: no two classes share a name, and words that were replaced stay away."""

from __future__ import annotations

import ast
import re

from .sources import package_sources

# Once synonyms, each with the word that stands for it now (docs/architecture.md, "Words").
REPLACED = {
    r"\bforetell\w*|\bdecide\(": "plan",
    r"\bsettle\w*": "accumulate, await, reconcile or quiesce",
    r"\bUpdateWorker\b": "UpdateLane",
    r"\bCommitting\b": "Commits",
}


def test_no_two_classes_share_a_name() -> None:
    where: dict[str, list[str]] = {}
    for source in package_sources():
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(source.path)
    twice = {name: paths for name, paths in where.items() if len(paths) > 1}
    assert len(where) > 150 and not twice, twice


def test_words_that_were_replaced_stay_away() -> None:
    for source in package_sources():
        for pattern, word in REPLACED.items():
            found = re.search(pattern, source.text)
            assert found is None, f"{source.path}: {found.group()!r}; the word is {word}"
