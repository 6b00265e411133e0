"""Writes and reads traces: JSON that Perfetto and chrome://tracing open; a picture of the lanes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from ..errors import ReportError
from ..facts.trace import LANES, Level, Span, StepMark, TierBytes, Trace
from ..io_engine.atomic_files import write_text
from .pictures import draw_timeline


def save_trace(trace: Trace, path: Path) -> None:
    """Write all that is recorded as Chrome trace JSON; the last steps as lanes for ``.png``.

    Raises:
        IoError: the file cannot be written.
    """
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
    events += [_counter(origin, level) for level in trace.levels()]
    tiers = {name: asdict(tier) for name, tier in trace.tiers.items()}
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"tiers": tiers}}
    write_text(path, json.dumps(content))


def load_trace(path: Path) -> Trace:
    """What ``save_trace`` wrote as JSON.

    Raises:
        OffloadError: the file is not such a trace, or holds no finished step.
        OSError: it cannot be read.
    """
    trace = Trace(origin_ns=0)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        events = content["traceEvents"]
        tiers = content.get("otherData", {}).get("tiers", {})
        trace.tiers = {name: TierBytes(**tier) for name, tier in tiers.items()}
        rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        for event in events:
            if event["ph"] == "C":
                used = event["args"]
                saved = used.get("activations", 0)  # traces of before know nothing of them
                trace.level(round(event["ts"] * 1000), used["device"], used["host"], saved)
            if event["ph"] != "X":
                continue
            started_ns = round(event["ts"] * 1000)
            finished_ns = started_ns + round(event["dur"] * 1000)
            row = rows[event["tid"]]
            if row == "stall":
                lane, _, name = event["name"].partition(": ")
                trace.stall(lane, started_ns, finished_ns, name)
            elif row == "step":
                trace.add_step(StepMark(int(event["name"].split()[1]), started_ns, finished_ns))
            else:
                trace.add(row, event["name"], started_ns, finished_ns, event["args"]["bytes"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ReportError(
            f"{path} is not a trace of overspill ({error!r}); write one with "
            "optimizer.trace('trace.json')"
        ) from error
    if not trace.steps:
        raise ReportError(f"{path} holds no finished step; train at least one step first")
    return trace


def _counter(origin_ns: int, level: Level) -> dict[str, object]:
    return {
        "ph": "C",
        "pid": 0,
        "name": "bytes in use",
        "ts": (level.at_ns - origin_ns) / 1000,
        "args": {
            "device": level.device_bytes,
            "host": level.host_bytes,
            "activations": level.saved_bytes,
        },
    }


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
