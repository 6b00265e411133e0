"""The project's Python files and what they import, read as text: nothing is run."""

from __future__ import annotations

import ast
import gc
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("offload", "optim", "io_engine")
NAMES = {"offload": "overspill", "optim": "overspill.optim", "io_engine": "overspill.io_engine"}


@dataclass(frozen=True)
class Import:
    """One imported module.  ``names``: what is taken from it, empty for a plain ``import``."""

    module: str
    names: tuple[str, ...]
    line: int
    relative: bool


@dataclass(frozen=True)
class Source:
    """One file.  ``path`` is relative to the root of the project, with forward slashes."""

    path: str

    @cached_property
    def text(self) -> str:
        return (ROOT / self.path).read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def module(self) -> str:
        """The dotted name under which the file is imported."""
        parts = self.path.removesuffix(".py").split("/")
        if parts[-1] == "__init__":
            parts.pop()
        return ".".join([NAMES[parts[0]], *parts[1:]])

    @cached_property
    def package(self) -> str:
        """What a relative import with one dot starts from."""
        return self.module if self.path.endswith("/__init__.py") else self.module.rpartition(".")[0]

    @cached_property
    def imports(self) -> list[Import]:
        """All imports, those inside functions and for type checking included."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [Import(alias.name, (), node.lineno, False) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                # A compiled extension is no file of ours: it does not import back.
                names = tuple(alias.name for alias in node.names if alias.name != "_native")
                if not names:
                    continue
                found.append(Import(self._absolute(node), names, node.lineno, node.level > 0))
        return found

    def _absolute(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        base = self.package.split(".")
        base = base[: len(base) - (node.level - 1)]
        return ".".join([*base, *([node.module] if node.module else [])])


def package_sources() -> list[Source]:
    """Every file that is installed."""
    return _parsed(PACKAGES)


def project_sources() -> list[Source]:
    """Every Python file of the project."""
    return [*package_sources(), *_parsed(("tests", "benchmarks", "examples", "csrc"))]


@cache
def _parsed(folders: tuple[str, ...]) -> list[Source]:
    found = [
        Source(path.relative_to(ROOT).as_posix())
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    for each in found:
        _ = each.tree
    gc.freeze()  # they stay: later collections need not look at millions of nodes
    return found


def inner_imports(sources: list[Source]) -> dict[str, dict[str, int]]:
    """By module of ours, the modules of ours that it imports, with the line of the first import.

    ``from .room import part`` counts for ``room.part`` where that is a file, else for ``room``.
    """
    modules = {source.module for source in sources}
    graph: dict[str, dict[str, int]] = {}
    for source in sources:
        edges = graph.setdefault(source.module, {})
        for found in source.imports:
            names = [f"{found.module}.{name}" for name in found.names]
            targets = [name for name in names if name in modules]
            if len(targets) < len(found.names) or not found.names:  # a plain name of the room
                targets.append(found.module)
            for target in targets:
                if target in modules and target != source.module:
                    edges.setdefault(target, found.line)
    return graph
