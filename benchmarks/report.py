"""``python -m benchmarks report DIR``: one dated page of all results in a folder.

The page, the JSON files with every sample and the pictures go to ``benchmarks/reports``.  With
``--pages`` the newest results there, of whatever day, are also put into ``RESULTS.md`` and, their
first table, into the README.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from .conclusions import HEADLINE, RESULTS, conclusions, headline, put

HERE = Path(__file__).parent / "reports"


def write(source: Path, target: Path) -> Path:
    """Writes the page of the results in ``source``; returns its path.

    Raises:
        ValueError: there are none.
    """
    results = [(file, json.loads(file.read_text(encoding="utf-8"))) for file in _files(source)]
    if not results:
        raise ValueError(f"no results in {source}; run python -m benchmarks SUITE --out {source}")
    day = max(str(result["at"]) for _, result in results)[:10]
    target.mkdir(parents=True, exist_ok=True)
    lines = [f"# Benchmarks of {day}", ""]
    for file, result in results:
        name = f"{day}-{result['suite']}"
        shutil.copyfile(file, target / f"{name}.json")
        lines += [f"## {result['suite']}", "", file.with_suffix(".md").read_text("utf-8").strip()]
        picture = file.with_suffix(".png")
        if picture.exists():
            shutil.copyfile(picture, target / f"{name}.png")
            lines += ["", f"![{result['suite']}]({name}.png)"]
        lines += ["", f"Every sample: [{name}.json]({name}.json)", ""]
    page = target / f"{day}.md"
    page.write_text("\n".join(lines), encoding="utf-8")
    return page


def _files(source: Path) -> list[Path]:
    return [file for file in sorted(source.glob("*.json")) if file.with_suffix(".md").exists()]


def main(words: Sequence[str] | None = None) -> int:
    """Writes the page and prints its path."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=__doc__)
    parser.add_argument("source", type=Path, nargs="?", help="folder; without: no new page")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument(
        "--pages", action="store_true", help="put the newest results into the pages"
    )
    given = parser.parse_args(words)
    if given.source is None and not given.pages:
        parser.error("name a folder of results, or --pages")
    if given.source is not None:
        print(write(given.source, given.out))
    if given.pages:
        made = [(HERE.parent / "RESULTS.md", RESULTS, conclusions),
                (HERE.parents[1] / "README.md", HEADLINE, headline)]  # fmt: skip
        for page, marks, text in made:
            put(
                page,
                marks,
                text(given.out, given.out.resolve().relative_to(page.parent).as_posix()),
            )
            print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
