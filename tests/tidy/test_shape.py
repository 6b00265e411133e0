"""Files and functions stay of a size that is read at one sitting, and say what they are."""

from __future__ import annotations

import ast

from .sources import ROOT, package_sources, project_sources

AIM_FILE_LINES, MOST_FILE_LINES = 400, 500
AIM_FUNCTION_LINES, MOST_FUNCTION_LINES = 70, 80
EMPTY_WORDS = {"util", "utils", "helper", "helpers", "misc", "common", "stuff", "tools"}


def over_aim(sizes: dict[str, int], aim: int) -> str:
    """The report: what is longer than the aim, longest first."""
    lines = [f"{size:5d}  {name}" for name, size in sizes.items() if size > aim]
    return "\n".join(sorted(lines, reverse=True))


def test_files_are_short() -> None:
    sizes = {source.path: source.text.count("\n") for source in project_sources()}
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix in (".cpp", ".h", ".cu", ".cuh"):
            sizes[path.relative_to(ROOT).as_posix()] = path.read_text().count("\n")
    report = over_aim(sizes, AIM_FILE_LINES)
    print(f"files over {AIM_FILE_LINES} lines:\n{report}")
    assert max(sizes.values()) <= MOST_FILE_LINES, report


def test_functions_are_short() -> None:
    sizes = {}
    for source in project_sources():
        for node in ast.walk(source.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                last = node.end_lineno or node.lineno
                sizes[f"{source.path}:{node.lineno} {node.name}"] = last - node.lineno + 1
    report = over_aim(sizes, AIM_FUNCTION_LINES)
    print(f"functions over {AIM_FUNCTION_LINES} lines:\n{report}")
    assert max(sizes.values()) <= MOST_FUNCTION_LINES, report


def test_names_say_something() -> None:
    empty = []
    for source in project_sources():
        words = [set(part.removesuffix(".py").split("_")) for part in source.path.split("/")]
        if any(EMPTY_WORDS & parts for parts in words):
            empty.append(source.path)
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef) and node.name.endswith(
                ("Util", "Utils", "Helper", "Helpers")
            ):
                empty.append(f"{source.path}:{node.lineno} {node.name}")
    assert not empty, f"name these by what they are for: {empty}"


def test_files_say_what_they_are() -> None:
    silent = [
        source.path
        for source in project_sources()
        if source.tree.body and not ast.get_docstring(source.tree)
    ]
    assert not silent, f"no docstring at the head of: {silent}"


def test_no_state_hides_in_modules() -> None:
    """No ``global``, and no list, dict or set at module level that is not a named constant."""
    hidden = []
    for source in package_sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Global):
                hidden.append(f"{source.path}:{node.lineno} global {', '.join(node.names)}")
        for node in source.tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AnnAssign):
                targets = [node.target]
            if targets and isinstance(node.value, (ast.List, ast.Dict, ast.Set, ast.ListComp)):
                names = [t.id for t in targets if isinstance(t, ast.Name)]
                if any(not n.strip("_").isupper() and n != "__all__" for n in names):
                    hidden.append(f"{source.path}:{node.lineno} {', '.join(names)}")
    assert not hidden, "\n".join(["state at module level:", *hidden])


def test_what_is_left_to_soak_is_there() -> None:
    """A test that is renamed would go back to CI unseen."""
    lines = (ROOT / "tests" / "soak.txt").read_text(encoding="utf-8").splitlines()
    for line in (each for each in lines if not each.startswith("#")):
        path, _, test = line.partition("[")[0].partition("::")
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), line
