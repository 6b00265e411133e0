"""The outcome of a suite: JSON with every sample, and a table for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from .machine import facts
from .runner import Row

Column = tuple[str, Callable[[Row], str]]


def number(value: float | None, unit: str = "", digits: int = 3) -> str:
    """``value`` with ``digits`` significant ones; a dash for ``None``."""
    if value is None:
        return "-"
    if abs(value) >= 10**digits:
        return f"{value:.0f}{unit}"
    return f"{value:#.{digits}g}".rstrip(".") + unit


def spread(row: Row) -> str:
    """The ratio to the first row and its range."""
    if row.ratio is None:
        return "-"
    return f"{row.ratio:.2f} ({row.ratio_low:.2f}-{row.ratio_high:.2f})"


def others(row: Row) -> str:
    """The most that other processes took of the machine during a sample."""
    return f"{max((s.seen.get('others', 0.0) for s in row.samples), default=0.0):.0%}"


TIMES: tuple[Column, ...] = (
    ("median", lambda row: number(row.median_s, " s")),
    ("ratio", spread),
    ("others", others),
)


@dataclass(frozen=True)
class Comparison:
    """Arms that did the same work.  ``settings`` say which."""

    title: str
    settings: Mapping[str, Any]
    rows: Sequence[Row]
    columns: Sequence[Column] = TIMES

    def table(self) -> str:
        """A Markdown table, its cells padded so that it also reads well as plain text."""
        lines = [["", *(name for name, _ in self.columns)]]
        for row in self.rows:
            lines.append([row.name, *(cell(row) for _, cell in self.columns)])
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        texts = [
            "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
            for line in lines
        ]
        texts.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
        errors = [f"{row.name}: {row.error}" for row in self.rows if row.error]
        return "\n".join([f"### {self.title}", "", *texts, *(["", *errors] if errors else [])])


@dataclass(frozen=True)
class Outcome:
    """All comparisons of one run of a suite."""

    suite: str
    comparisons: Sequence[Comparison]
    machine: Mapping[str, object]
    at: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat("T", "seconds"))

    def save(self, folder: Path) -> tuple[Path, Path]:
        """Writes ``SUITE.json`` and ``SUITE.md`` into ``folder``; returns both paths."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "suite": self.suite,
            "at": self.at,
            "machine": self.machine,
            "comparisons": [
                {"title": c.title, "settings": c.settings, "rows": [r.as_json() for r in c.rows]}
                for c in self.comparisons
            ],
        }
        data, text = folder / f"{self.suite}.json", folder / f"{self.suite}.md"
        _replace(data, json.dumps(content, indent=1, default=str) + "\n")
        _replace(text, self.text() + "\n")
        return data, text

    def text(self) -> str:
        """Where it was measured, and all tables."""
        machine = self.machine
        where = (
            f"{self.suite}: {machine['processor']}, {machine['cores']} cores; "
            f"commit {machine['commit']}; {self.at}; load before {machine['load_before']:.1f}"
        )
        legend = (
            "Medians over interleaved rounds; ratios are to the first row, round by round, with "
            "their range; 'others': the most of the machine that other processes took meanwhile."
        )
        return "\n\n".join([where, legend, *(c.table() for c in self.comparisons)])

    @property
    def failed(self) -> bool:
        """Whether an arm has an error."""
        return any(row.error for c in self.comparisons for row in c.rows)


def _replace(path: Path, text: str) -> None:
    """At once: a suite that writes again after every arm may be cut while it does.

    Results are made to be shown, so they do not say where on this machine they were made.
    """
    text = text.replace(str(path.parent.resolve()), "DIR").replace(str(Path.home()), "~")
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def outcome(suite: str, comparisons: Sequence[Comparison], folder: Path) -> Outcome:
    """The outcome with this machine's facts."""
    return Outcome(suite, comparisons, facts(folder))


Table = TypeVar("Table")


def chosen_of(
    suite: str, tables: Sequence[Table], only: Sequence[int]
) -> tuple[str, Sequence[Table]]:
    """Those of a suite's tables that are asked for by their numbers, all where none is, and the
    name that their results get.

    Raises:
        ValueError: there is no such table.
    """
    if unknown := [each for each in only if not 0 <= each < len(tables)]:
        raise ValueError(f"no table {unknown[0]}; there are 0 to {len(tables) - 1}")
    name = "-".join([suite, *map(str, only)])
    return name, [tables[each] for each in only] if only else tables
