"""What the pages say of the project's files is true, and the README stays one that is read."""

from __future__ import annotations

import re

import pytest

from .sources import ROOT

PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
NAMED = re.compile(r"`((?:offload|optim|io_engine|csrc|tests|benchmarks|examples)/[\w/.]+\.\w+)`")
LINKED = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    missing = [name for name in NAMED.findall(text) if not (ROOT / name).exists()]
    missing += [link for link in LINKED.findall(text) if not ((ROOT / page).parent / link).exists()]
    assert not missing, f"{page} names what is not there: {', '.join(missing)}"


def test_the_house_is_named() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert len(set(NAMED.findall(text))) > 30
    rooms = [p.name for p in (ROOT / "offload").iterdir() if (p / "__init__.py").exists()]
    unnamed = [
        r for r in rooms if f"{r}/" not in text and r not in ("cli", "train", "measure", "observe")
    ]
    assert not unnamed


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
