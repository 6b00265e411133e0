"""The page of the command line explains the figures of a run as the run itself does."""

from __future__ import annotations

from overspill.facts.stats import FIGURES
from tests.tidy.sources import ROOT


def test_the_page_has_the_figures_and_their_meanings() -> None:
    page = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    table = page.partition("| figure | meaning |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = [f"| {figure.name} | {figure.meaning} |" for figure in FIGURES.values()]
    assert table.splitlines() == rows
