"""The table of the longest sequences is what plans say."""

from __future__ import annotations

from benchmarks.longest import BEGIN, END, MODELS, PAGE, POLICIES, Model, rows


def test_the_page_has_what_plans_say() -> None:
    lines = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].splitlines()
    each = len(POLICIES) + 1  # and one in tiles
    assert len(lines) == 2 + len(MODELS) * each
    assert lines[2 : 2 + each] == rows("1 B")


def test_what_is_found_fits_and_little_more_does_not() -> None:
    model, tiled = Model("8 B", tiled=False), Model("8 B", tiled=True)
    for policy in ("keep", "auto"):
        found = model.longest(24, policy)
        assert model.fits(found, 24, policy)
        assert not model.fits(int(found * 1.05) + 1, 24, policy)
    assert model.longest(24, "auto") > 8 * model.longest(24, "keep")
    assert tiled.longest(24, "auto") > 2 * model.longest(24, "auto")
