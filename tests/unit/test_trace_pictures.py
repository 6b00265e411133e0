"""Pictures: files that open, at a legible size; and clear words where nothing can be drawn."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from overspill import OffloadError
from overspill.facts.trace import LANES, Trace
from overspill.observe import pictures
from overspill.observe.trace_files import save_trace

pytest.importorskip("matplotlib")


def size_of(path: Path) -> tuple[int, int]:
    """Width and height from the header of a PNG file."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def recorded(steps: int) -> Trace:
    trace = Trace()
    at = trace.origin_ns
    for index in range(1, steps + 1):
        for i, lane in enumerate(LANES):
            trace.add(lane, lane, at + i * 10**6, at + (i + 3) * 10**6, 10**6)
        trace.stall("read", at, at + 10**6, "unit")
        at += 10**7
        trace.mark_step(index, at)
    return trace


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_timeline(tmp_path: Path, steps: int) -> None:
    path = tmp_path / "timeline.png"
    save_trace(recorded(steps), path)
    assert size_of(path)[0] == 1200


def test_timeline_without_a_step_says_so(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match="no finished step"):
        save_trace(Trace(), tmp_path / "timeline.png")
    assert not list(tmp_path.iterdir())


def test_every_lane_has_a_colour_of_its_own() -> None:
    assert set(pictures.LANE_COLOURS) == set(pictures.LANE_WORDS) == set(LANES)
    assert len(set(pictures.LANE_COLOURS.values())) == len(LANES)


@pytest.mark.parametrize("curves", [{"a": [1.0]}, {"a": [3.0, 2.0], "b": [3.0, 2.1]}])
def test_loss(tmp_path: Path, curves: dict[str, list[float]]) -> None:
    pictures.draw_loss(curves, tmp_path / "loss.png")
    assert size_of(tmp_path / "loss.png")[0] == 1000


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(OffloadError, match=r'pip install "overspill\[plot\]"'):
        pictures.draw_loss({"a": [1.0]}, tmp_path / "loss.png")
