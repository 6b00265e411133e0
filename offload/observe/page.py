"""A run as one page of HTML that needs nothing else: figures, loss, lanes, memory, what to change.

What is shown is in the page as JSON, as ``run.json`` and the traces have it; its script draws it.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from heapq import nlargest
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from ..errors import ReportError
from ..facts.stats import FIGURES
from ..io_engine.atomic_files import write_text
from .pictures import LANE_COLOURS, LANE_WORDS, TIER_COLOURS, last_steps
from .trace_files import load_trace

if TYPE_CHECKING:
    from ..facts.trace import Level, Span, Trace

RUN, TRACE, PLANNED, PAGE = "run.json", "trace.json", "planned.json", "report.html"
MORE_TOKENS = "twice the tokens"
LINKS = ("read", "write", "copy_in", "copy_out")
LONGEST = 20_000  # spans and levels of a picture: more say no more, and a browser draws them slowly


def page_of(folder: Path) -> str:
    """The page of the run whose files are in ``folder``: ``run.json`` and ``trace.json``, and
    ``planned.json`` where there is one.

    Raises:
        OffloadError: a file is missing, or is not what a run writes.
    """
    try:
        run = json.loads((folder / RUN).read_text(encoding="utf-8"))
        trace = load_trace(folder / TRACE)
    except FileNotFoundError as error:
        raise ReportError(
            f"{folder} holds no run: {Path(error.filename).name} is missing; give the folder that "
            "`overspill train --out` wrote"
        ) from error
    except ValueError as error:
        raise ReportError(f"{folder / RUN} is not valid JSON ({error})") from error
    keys = ("model", "steps", "memory", "plan", "step_s")
    missing = [key for key in keys if not isinstance(run, dict) or key not in run]
    if missing:
        raise ReportError(f"{folder / RUN} is not that of a run: {missing[0]!r} is missing")
    planned = load_trace(folder / PLANNED) if (folder / PLANNED).exists() else None
    return make_page(run, trace, planned)


def write_page(folder: Path) -> Path:
    """Write ``report.html`` beside the files of a run; raises as ``page_of`` does."""
    path = folder / PAGE
    write_text(path, page_of(folder))
    return path


def make_page(run: Mapping[str, Any], trace: Trace, planned: Trace | None) -> str:
    """The page from the values of ``run.json`` and the traces."""
    lanes: dict[str, Any] = {
        "order": list(LANE_COLOURS), "words": dict(LANE_WORDS), "colours": dict(LANE_COLOURS),
        "tiers": dict(TIER_COLOURS), "links": {lane: LANE_WORDS[lane] for lane in LINKS},
        "more_tokens": MORE_TOKENS, "measured": _lanes(trace),
    }  # fmt: skip
    if planned is not None:
        lanes["planned"] = _lanes(planned)
    figures = {key: figure._asdict() for key, figure in FIGURES.items()}
    facts = json.dumps(
        _finite({"run": run, "lanes": lanes, "figures": figures}), separators=(",", ":")
    )
    parts = files(__package__) / "page"
    return Template((parts / "page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(f"overspill: {run['model']}"),
        version=version("overspill"),
        style=(parts / "page.css").read_text(encoding="utf-8"),
        script=(parts / "page.js").read_text(encoding="utf-8"),
        facts=facts.replace("<", "\\u003c"),  # a name may hold what would end the script
    )


def _finite(value: Any) -> Any:
    """Plain values, with ``None`` for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lanes(trace: Trace) -> dict[str, Any]:
    """The last steps of a trace, in microseconds from the beginning of the first of them."""
    steps = last_steps(trace)
    start, end = steps[0].started_ns, steps[-1].finished_ns

    def at(ns: int) -> float:
        return round((max(start, min(end, ns)) - start) / 1000, 1)

    spans, stalls = trace.spans(start, end), trace.stalls(start, end)
    levels = list(trace.levels(start, end))
    return {
        "end": at(end),
        "spans": [[s.lane, s.name, at(s.started_ns), at(s.finished_ns), s.nbytes]
                  for s in _fewer(spans)],
        "stalls": [[s.lane, s.name, at(s.started_ns), at(s.finished_ns), 0]
                   for s in _fewer(stalls)],
        "steps": [[mark.index, at(mark.started_ns), at(mark.finished_ns)] for mark in steps],
        "levels": [[at(x.at_ns), x.device_bytes, x.host_bytes, x.saved_bytes]
                   for x in _highest(levels)],
    }  # fmt: skip


def _fewer(spans: Sequence[Span]) -> Sequence[Span]:
    """The longest of them, where there are more than a page can draw."""
    longest = nlargest(LONGEST, spans, key=lambda s: s.finished_ns - s.started_ns)
    return sorted(longest, key=lambda s: s.started_ns)


def _highest(levels: Sequence[Level]) -> Sequence[Level]:
    """Of neighbours, where there are more than a page can draw, the one with the most in use."""
    each = 1 + len(levels) // LONGEST
    return [
        max(levels[at : at + each], key=lambda x: x.device_bytes + x.host_bytes)
        for at in range(0, len(levels), each)
    ]
