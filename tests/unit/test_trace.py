"""The recorder of spans: windows, unions, shares, and the file that trace viewers open."""

from __future__ import annotations

import itertools
import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from overspill.cli.app import app
from overspill.facts.stats import LaneStats, Stats, step_stats
from overspill.facts.trace import LANES, StepMark, Trace, intersection, length, union
from overspill.measure.steps import StepFigures
from overspill.observe.trace_files import load_trace, save_trace

Intervals = list[tuple[int, int]]
intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda t: (t[0], t[0] + t[1])),
    max_size=12,
)


def instants(spans: Intervals) -> set[int]:
    return {i for low, high in spans for i in range(low, high)}


def test_unknown_lane_is_refused() -> None:
    trace = Trace()
    with pytest.raises(KeyError, match="no lane 'gpu'; lanes are compute"):
        trace.add("gpu", "x", 0, 1)
    with pytest.raises(KeyError, match="no lane 'gpu'"):
        trace.stall("gpu", 0, 1, "x")
    assert trace.spans() == [] and trace.stalls() == []


@given(intervals)
def test_union_covers_the_same_instants_and_is_disjoint(spans: Intervals) -> None:
    joined = union(spans)
    assert instants(joined) == instants(spans)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(joined))
    assert length(joined) == len(instants(spans))


@given(intervals, intervals)
def test_intersection_is_that_of_instants(left: Intervals, right: Intervals) -> None:
    both = intersection(union(left), union(right))
    assert instants(both) == instants(left) & instants(right)


def test_covered_share_counts_overlapping_spans_once() -> None:
    trace = Trace()
    trace.add("compute", "a", 0, 100)
    trace.add("compute", "b", 200, 300)
    trace.add("read", "r", 50, 150)  # half of it lies under compute
    trace.add("read", "r", 60, 150)  # inside the first: adds nothing
    trace.add("update", "u", 200, 250)  # all of it
    assert trace.covered_share(["read"]) == 0.5
    assert trace.covered_share(["read", "update"]) == pytest.approx(100 / 150)
    assert trace.covered_share(["read"], 0, 100) == 1.0
    assert trace.covered_share(["write"]) == 1.0


def test_windows_side_by_side_count_bytes_once() -> None:
    trace = Trace()
    trace.add("read", "across the border", 50, 150, 1000)
    trace.add("read", "ends on the border", 80, 100, 10)
    trace.add("read", "starts on the border", 100, 130, 1)
    first, second = trace.spans(0, 100), trace.spans(100, 200)
    assert [s.nbytes for s in first] == [0, 10]
    assert [s.nbytes for s in second] == [1000, 1]
    assert [(s.started_ns, s.finished_ns) for s in first] == [(50, 100), (80, 100)]


def test_step_stats_from_a_script() -> None:
    trace = Trace()
    trace.add("compute", "forward", 0, 6_000_000_000)
    trace.add("read", "a", 1_000_000_000, 3_000_000_000, 500)
    trace.add("read", "b", 2_000_000_000, 4_000_000_000, 700)
    trace.stall("read", 6_000_000_000, 6_500_000_000, "unit 3")
    trace.add("write", "next step's", 11_000_000_000, 12_000_000_000, 9)
    stats = step_stats(trace, StepMark(1, 0, 10_000_000_000), {})
    assert stats.step_s == 10.0
    assert stats.bound_s == 6.0, "the busiest lane is compute"
    assert stats.read.bytes == 1200
    assert stats.read.busy_s == 3.0, "overlapping spans count once"
    assert stats.read.stall_s == 0.5
    assert stats.write.bytes == 0
    assert set(stats.lanes) == set(LANES)
    assert step_stats(trace, StepMark(1, 0, 10_000_000_000), {"read": 8.0}).bound_s == 6.0
    assert step_stats(trace, StepMark(1, 0, 10_000_000_000), {"compute": 2.0}).bound_s == 3.0
    assert stats.over_bound == 10 / 6
    assert stats.explain() == (
        "1.67 times the bound; compute waited for read 0.5 s; 3.5 s outside of the model's forward "
        "and backward"
    )
    assert "outside" not in Stats(0.0, 0.0, stats.lanes).per_step(1).explain()
    busy = {**stats.lanes, "compute": LaneStats(0, 9.2, 0.0)}
    assert Stats(10.0, 9.2, busy).explain().endswith("waited for read 0.5 s"), "little is not shown"


def test_advice_names_what_helps_where_compute_waits_long() -> None:
    def advice(busy_s: float, **waits: float) -> str | None:
        lanes = {name: LaneStats(0, busy_s, waits.get(name, 0.0)) for name in LANES}
        return Stats(10.0, 8.0, lanes).advice()

    assert Stats(0.0, 0.0).advice() is None
    assert advice(1.0, read=1.4) is None
    for name, helps in (
        ("read", "additional disk in nvme="),
        ("write", "moments='int8'"),
        ("copy_in", "more device_memory"),
        ("update", "more CPU cores"),
    ):
        found = advice(5.0, **{name: 2.0}) or ""
        assert found.startswith(
            f"compute waits for other lanes in 20% of a step, mostly for {name};"
        )
        assert "larger micro-batches" in found and helps in found
    assert "update, with its disks" in (advice(0.5, update=2.0) or "")
    assert "moments='int8'" in (advice(0.5, update=2.0) or "")


@pytest.mark.parametrize("tokens", [None, 16])  # which are counted if nothing is trained
def test_advice_is_logged_once(tokens: int | None, caplog: pytest.LogCaptureFixture) -> None:
    trace = Trace()
    figures = StepFigures(trace, {}, None)
    with caplog.at_level("INFO", "overspill"):
        for count in range(8):
            begun = time.perf_counter_ns()
            time.sleep(0.01)
            now = time.perf_counter_ns()
            trace.stall("read", begun, now, "a")
            trace.add("compute", "a", now, now + 1)
            figures.taken(count, tokens)
    told = [" compute waits "] if tokens is None else []
    assert [m.split(":")[1][:15] for m in caplog.messages] == told


def test_the_oldest_spans_are_forgotten() -> None:
    trace = Trace(longest=3)
    for i in range(5):
        trace.add("read", str(i), i, i + 1)
    assert [s.name for s in trace.spans()] == ["2", "3", "4"]


def test_many_threads_lose_nothing() -> None:
    trace = Trace()

    def record(lane: str) -> None:
        for i in range(2000):
            trace.add(lane, "x", i, i + 1, 1)

    threads = [threading.Thread(target=record, args=(lane,)) for lane in LANES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for lane in LANES:
        assert sum(s.nbytes for s in trace.spans() if s.lane == lane) == 2000


def test_a_span_costs_little() -> None:
    trace = Trace()

    def per_span_s() -> float:
        started = time.thread_time()
        for i in range(20_000):
            trace.add("read", "weights transformer.h.3", i, i + 1, 4096)
        return (time.thread_time() - started) / 20_000

    assert min(per_span_s() for _ in range(20)) < 2e-6


class Later:
    """A moment in compute that comes when it is told."""

    def __init__(self) -> None:
        self.at_ns: int | None = None

    def ns(self) -> int | None:
        return self.at_ns


def test_compute_is_shown_when_a_device_came_to_it() -> None:
    """The host is ahead: it gave the device all of this before the device had begun."""
    made: list[Later] = []

    def instant() -> Later:
        made.append(Later())
        return made[-1]

    trace = Trace(instant=instant)
    trace.compute_resume("a")
    assert trace.compute_waits() == "a" and not trace.computing
    trace.compute_waited("copy_in", "b")
    trace.compute_pause()
    started_a, finished_a, started_b, finished_b = made
    assert trace.spans() == []
    started_a.at_ns, finished_a.at_ns = 10, 20
    assert trace.spans() == [("compute", "a", 10, 20, 0)] and trace.stalls() == []
    started_b.at_ns = 35
    assert trace.stalls() == [("copy_in", "b", 20, 35, 0)] and len(trace.spans()) == 1
    finished_b.at_ns = 50
    assert trace.spans()[1:] == [("compute", "b", 35, 50, 0)]
    assert trace.compute_waits() is None, "it may wait before it computes"
    trace.compute_waited("read", "c")
    waits, started_c = made[4:]
    waits.at_ns, started_c.at_ns = 50, 70
    assert trace.stalls()[1:] == [("read", "c", 50, 70, 0)]
    with pytest.raises(KeyError, match="no lane 'gpu'"):
        trace.compute_waited("gpu", "c")


def test_streams_may_come_to_an_end_before_the_beginning() -> None:
    """The moments of a span may be on two streams, of which one is behind."""
    moments = [Later(), Later()]
    trace = Trace(instant=iter(moments).__next__)
    trace.compute_resume("a")
    trace.compute_pause()
    moments[1].at_ns = 10
    assert trace.spans() == []
    moments[0].at_ns = 30
    assert trace.spans() == [("compute", "a", 10, 10, 0)]


def test_whoever_comes_amid_a_look_at_the_trace_does_not_wait() -> None:
    """As a signal handler does, which runs on the very thread that it would wait for."""
    looked: list[int] = []

    class Handled(Later):
        def ns(self) -> int | None:
            if not looked:
                looked.append(len(trace.spans()))
            return 5

    trace = Trace(instant=Handled)
    trace.compute_resume("a")
    trace.compute_pause()
    assert looked == [0]
    assert trace.spans() == [("compute", "a", 5, 5, 0)]


def test_a_saved_trace_is_read_again(tmp_path: Path) -> None:
    trace, path = Trace(origin_ns=0), tmp_path / "trace.json"
    trace.add("compute", "h.0", 1000, 5000)
    trace.add("read", "state h.0", 2000, 9000, 77)
    trace.stall("read", 5000, 9000, "h.1")
    trace.mark_step(4, 10_000)
    save_trace(trace, path)
    again = load_trace(path)
    assert again.spans() == trace.spans() and again.stalls() == trace.stalls()
    assert again.steps == trace.steps
    result = CliRunner().invoke(app, ["trace", str(path)])
    assert result.exit_code == 0, result.output
    assert "compute waited for read" in result.output
    assert path.with_suffix(".png").stat().st_size > 10_000
    for text in ("{}", '{"traceEvents": []}', "not JSON"):
        path.write_text(text)
        refused = CliRunner().invoke(app, ["trace", str(path)])
        assert refused.exit_code != 0 and "trace" in refused.output


def test_saved_trace_has_a_named_sorted_row_per_lane(tmp_path: Path) -> None:
    trace = Trace()
    begun = trace.origin_ns
    for i, lane in enumerate(LANES):
        trace.add(lane, f"work of {lane}", begun + 1000 * i, begun + 1000 * i + 500, 10 * i)
    trace.stall("read", begun + 7000, begun + 9000, "unit h.3")
    trace.mark_step(1, begun + 10_000)
    save_trace(trace, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = [e for e in events if e["ph"] == "M" and e["name"] == "thread_name"]
    names = {e["tid"]: e["args"]["name"] for e in named}
    assert list(names.values()) == [*LANES, "stall", "step"]
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert sorted(order, key=lambda tid: order[tid]) == list(names)
    spans = {names[e["tid"]]: e for e in events if e["ph"] == "X"}
    assert spans["write"]["ts"] == 4.0 and spans["write"]["dur"] == 0.5
    assert spans["write"]["args"] == {"bytes": 40}
    assert spans["stall"]["name"] == "read: unit h.3" and spans["stall"]["dur"] == 2.0
    assert spans["step"]["dur"] == pytest.approx(10.0)
