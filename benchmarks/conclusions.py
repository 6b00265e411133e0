"""What the newest results come to, for the pages: one short table a comparison, losses beside the
times, and a sentence wherever another is ahead of overspill."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .results import number

GIB = 1 << 30
# In this order; ``bound`` and the like are about the schedule, not about others.
SUITES = ("step", "step-peers", "modes", "scale", "memory", "checkpoint", "optim", "io")
MOST_ROWS = 8  # of a comparison of rates with more, the best of each engine is shown
_MADE = "python -m benchmarks report DIR --pages"
RESULTS = f"<!-- results: {_MADE} -->", "<!-- end of results -->"
HEADLINE = f"<!-- headline: {_MADE} -->", "<!-- end of headline -->"

Row = Mapping[str, Any]


def _seen(row: Row, key: str) -> Any:
    return row["samples"][-1]["seen"].get(key) if row["samples"] else None


def _columns(moved: float | None, growing: bool) -> list[tuple[str, Callable[[Row], str | None]]]:
    """Titles and cells; ``None`` where a row has nothing to say.

    ``moved``: bytes of a sample, if the comparison is about rates; ``growing``: the rows are models
    of several sizes.
    """

    def gib(row: Row, key: str) -> str | None:
        value = _seen(row, key)
        return None if not value else number(value / GIB, " GiB")

    def ratio(row: Row) -> str | None:
        if row["ratio"] is None:
            return None
        return f"{row['ratio']:.2f} ({row['ratio_low']:.2f}-{row['ratio_high']:.2f})"

    def time(row: Row) -> str | None:
        return number(row["median_s"], " s") if row["median_s"] else None

    def rate(row: Row) -> str | None:
        return number(moved / row["median_s"] / 1e9, " GB/s") if moved and row["median_s"] else None

    def fact(row: Row, key: str, unit: str, per: float = 1.0) -> str | None:
        value = row["facts"].get(key)
        return None if value is None else number(value / per, unit)

    def beside(row: Row) -> str | None:
        return None if "beside" not in row else f"{row['beside'][0]:.2f} ({row['beside'][1]})"

    def loss(row: Row) -> str | None:
        value = _seen(row, "loss")
        return None if value is None else f"{value:.4f}"

    return [
        ("time", time if moved is None else lambda row: None),
        ("rate", rate),
        ("over the first (range)", ratio),
        ("overspill beside it", beside),
        ("loss", loss),
        ("peak RSS", lambda row: gib(row, "peak_rss_bytes")),
        ("written", lambda row: gib(row, "written_bytes")),
        ("a parameter", lambda row: fact(row, "bytes_per_parameter", " bytes")),
        ("parameters", lambda row: fact(row, "parameters", " M", 1e6) if growing else None),
        ("the next one lacks", lambda row: row["facts"].get("short")),
        ("refused", lambda row: row["facts"].get("refused")),
        ("error", lambda row: row["error"]),
    ]


def ahead(rows: Sequence[Row]) -> str:
    """The sentence on those that beat the best of ours; empty if none does."""

    def ranked(value: Callable[[Row], float | None], verb: str, digits: str) -> str:
        ours = [v for row in rows if row["name"].startswith("overspill") and (v := value(row))]
        if not ours:
            return ""
        better = [
            f"{row['name']} ({v / min(ours):{digits}} of it)"
            for row in rows
            if not row["name"].startswith("overspill") and not row["facts"].get("sweep")
            and (v := value(row)) and v < min(ours)
        ]  # fmt: skip
        return f"{verb} than the best of overspill: {', '.join(better)}." if better else ""

    together = [row for row in rows if "beside" in row]
    if together:
        better = [
            f"{row['name']} ({row['ratio'] / row['beside'][0]:.2f} of it)"
            for row in together
            if row["ratio"] is not None and row["ratio"] < row["beside"][0]
        ]
        return f"Faster than overspill beside it: {', '.join(better)}." if better else ""
    if any("bytes_per_parameter" in row["facts"] for row in rows):
        return ranked(lambda row: row["facts"].get("bytes_per_parameter"), "Leaner", ".2f")
    return ranked(lambda row: row["median_s"], "Faster", ".2f")


def _shown(rows: Sequence[Row]) -> list[Row]:
    """All rows, or of many the fastest of each engine, which the first word names."""
    if len(rows) <= MOST_ROWS:
        return list(rows)
    best: dict[str, Row] = {}
    for row in rows:
        kept = best.get(key := row["name"].split()[0])
        if kept is None or (row["median_s"] or 1e9) < (kept["median_s"] or 1e9):
            best[key] = row
    return list(best.values())


def table(comparison: Mapping[str, Any]) -> str:
    """A comparison as Markdown; empty where nothing was timed."""
    moved = comparison["settings"].get("moved_bytes")
    rows = _shown(comparison["rows"]) if moved else comparison["rows"]
    if comparison["rows"] and comparison["rows"][0] not in rows:
        rows = [{**row, "ratio": None} for row in rows]  # what they are held to is not shown
    growing = len({row["facts"].get("parameters") for row in rows} - {None}) > 1
    found = _columns(moved, growing)
    columns = [(t, cell) for t, cell in found if any(cell(row) for row in rows)]
    if not columns:
        return ""
    lines = [" | ".join(["", *(t for t, _ in columns)]), "---" + " | ---" * len(columns)]
    for row in rows:
        cells = [(cell(row) or "-").replace("|", "/").splitlines()[0] for _, cell in columns]
        lines.append(" | ".join([row["name"], *cells]))
    text = "\n".join(f"| {line} |" for line in lines)
    told = ahead(rows)
    return f"**{comparison['title']}**\n\n{text}\n" + (f"\n{told}\n" if told else "")


def peers_together(comparisons: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One comparison of those in which each peer is the last row beside the same others."""
    rows: list[Row] = []
    for comparison in comparisons:
        *others, peer = comparison["rows"]
        ours = [r for r in others if r["name"].startswith("overspill") and r["ratio"] is not None]
        if not ours:
            rows += comparison["rows"]  # those that do not run
            continue
        best = min(ours, key=lambda row: float(row["ratio"]))
        rows.append({**peer, "beside": (best["ratio"], best["name"].partition(", ")[2])})
    title = f"{comparisons[0]['title'].split(';')[0]}, each peer beside torch in memory"
    return [{"title": title, "settings": {}, "rows": rows}]


def newest(folder: Path, suite: str) -> Path | None:
    """The last report of a suite, by its date."""
    found = [f for f in sorted(folder.glob("*.json")) if f.stem[10:].lstrip("-") == suite]
    return found[-1] if found else None


def conclusions(folder: Path, link: str) -> str:
    """Markdown of the newest report of every suite.  ``link``: the folder, as a page names it."""
    parts = []
    for suite in SUITES:
        file = newest(folder, suite)
        if file is None:
            continue
        result = json.loads(file.read_text(encoding="utf-8"))
        found = result["comparisons"]
        if suite == "step-peers":
            found = peers_together(found)
        tables = [text for c in found if (text := table(c))]
        machine = result["machine"]
        where = f"{machine['processor']}, {machine['cores']} cores, commit {machine['commit']}"
        command = "step --peers all" if suite == "step-peers" else suite
        samples = f"[every sample]({link}/{file.name})"
        parts.append(f"`python -m benchmarks {command}` ({where}; {samples}):\n")
        parts += tables
    return "\n".join(parts)


def headline(folder: Path, link: str) -> str:
    """The one table that a newcomer sees: the newest training step beside others, with losses."""
    file = newest(folder, "step")
    if file is None:
        return ""
    result = json.loads(file.read_text(encoding="utf-8"))
    return f"{table(result['comparisons'][0])}\n[every sample]({link}/{file.name})\n"


def put(page: Path, marks: tuple[str, str], text: str) -> None:
    """Replaces what stands between the marks of a page.

    Raises:
        ValueError: the page has no marks.
    """
    old = page.read_text(encoding="utf-8")
    head, begin, rest = old.partition(marks[0])
    _, end, tail = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"{page} has no place for results; put in {' and '.join(marks)}")
    page.write_text(f"{head}{begin}\n\n{text.strip()}\n\n{end}{tail}", encoding="utf-8")
