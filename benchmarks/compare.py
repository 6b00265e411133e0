"""``python -m benchmarks compare OLD NEW``: has anything become slower beside its first arm?

Compares ratios, never seconds: two machines, or one on two days, differ in those.  ``--keep`` makes
the ratios of NEW what later ones are held to.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MARGIN = 1.5  # ratios of short runs on a shared machine differ by a third


def regressions(old: Mapping[str, Any], new: Mapping[str, Any], margin: float) -> list[str]:
    """What is worse in ``new`` than in ``old``, both as written by a suite; empty: nothing."""
    found = []
    now = _rows(new)
    for key, before in _rows(old).items():
        name, after = " / ".join(key), now.get(key)
        if before["error"]:
            continue
        if after is None:
            found.append(f"{name}: is missing")
        elif after["error"]:
            found.append(f"{name}: {after['error']}")
        elif before["ratio"] and after["ratio"] and after["ratio"] > margin * before["ratio"]:
            found.append(f"{name}: ratio {before['ratio']:.2f} before, {after['ratio']:.2f} now")
    return found


def _rows(result: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, Any]]:
    return {(c["title"], row["name"]): row for c in result["comparisons"] for row in c["rows"]}


def ratios(result: Mapping[str, Any]) -> dict[str, Any]:
    """What is compared of a result, and nothing else."""
    kept = ("name", "ratio", "error")
    return {
        "comparisons": [
            {"title": c["title"], "rows": [{k: row[k] for k in kept} for row in c["rows"]]}
            for c in result["comparisons"]
        ]
    }


def main(words: Sequence[str] | None = None) -> int:
    """Prints what is worse.  1 if anything is."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks compare", description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--margin", type=float, default=MARGIN, help="a ratio may grow so much")
    parser.add_argument("--keep", action="store_true", help="write the ratios of NEW to OLD")
    given = parser.parse_args(words)
    new = json.loads(given.new.read_text(encoding="utf-8"))
    if given.keep:
        text = json.dumps(ratios(new), indent=1)
        given.old.write_text(text + "\n", encoding="utf-8")
        return 0
    old = json.loads(given.old.read_text(encoding="utf-8"))
    found = regressions(old, new, given.margin)
    print("\n".join(found) or "nothing is worse")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
