"""Writes a trace: JSON that Perfetto and chrome://tracing open, or a picture of its lanes."""

from __future__ import annotations

import json
from pathlib import Path

from .pictures import draw_timeline
from .trace import LANES, Span, StepMark, Trace


def save_trace(trace: Trace, path: Path) -> None:
    """Writes all that is recorded as Chrome trace JSON; the last steps as lanes for ``.png``."""
    if path.suffix == ".png":
        draw_timeline(trace, path)
        return
    events: list[dict[str, object]] = []
    rows = {lane: row for row, lane in enumerate((*LANES, "stall", "step"))}
    for lane, row in rows.items():
        for name, args in (
            ("thread_name", {"name": lane}),
            ("thread_sort_index", {"sort_index": row}),
        ):
            events.append({"ph": "M", "pid": 0, "tid": row, "name": name, "args": args})
    origin = trace.origin_ns
    for span in trace.spans():
        events.append(_event(origin, rows[span.lane], span.name, span, {"bytes": span.nbytes}))
    for span in trace.stalls():
        events.append(_event(origin, rows["stall"], f"{span.lane}: {span.name}", span, {}))
    for mark in trace.steps:
        events.append(_event(origin, rows["step"], f"step {mark.index}", mark, {}))
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _event(
    origin_ns: int, row: int, name: str, span: Span | StepMark, args: dict[str, int]
) -> dict[str, object]:
    return {
        "ph": "X",
        "pid": 0,
        "tid": row,
        "name": name,
        "ts": (span.started_ns - origin_ns) / 1000,
        "dur": (span.finished_ns - span.started_ns) / 1000,
        "args": args,
    }
