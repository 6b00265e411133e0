"""The scale suite: what it varies, and that a point in several series is measured once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import scale
from benchmarks.arms import parameters
from benchmarks.model import build
from benchmarks.runner import Row, Sample


def test_it_varies_one_thing_at_a_time_and_reaches_1_3_billion() -> None:
    """Size from 30 M to 1.3 B, sequence, disks, host budget."""
    series = [list(points.values()) for points in scale.series(quick=False).values()]
    sizes, tokens, kept, hosts, disks, large, adapter = series
    counts = [parameters(point.shape) for point in sizes]
    assert counts[0] < 31e6 and 1.3e9 < counts[-1] < 1.4e9
    assert counts[-1] * scale.PLAIN_BYTES > 16e9
    assert len({point.host for point in sizes}) == 1
    assert [point.shape.tokens for point in tokens] == [128, 512, 1024]
    assert kept == [replace(point, activations="keep") for point in tokens]
    assert [point.host / scale.GIB for point in hosts] == [0.5, 1, 2]
    assert [point.directories for point in disks] == [1, 2]
    for points in (tokens, hosts, disks):
        assert set(points) & set(sizes), "one of them is the model of the first series"
    (llama,) = large
    assert 6.7e9 < parameters(llama.shape) < 6.8e9 and llama.shape.tokens == 256
    assert llama.host < 8 * scale.GIB and dict(llama.options) == {"moments": "int8"}
    (lora,) = adapter
    assert replace(lora.shape, lora_rank=0) == llama.shape and lora.shape.lora_rank == 16
    assert lora.host < 4 * scale.GIB and dict(lora.options) == {"frozen": "nf4"}


def test_lora_alone_is_trained() -> None:
    shape = replace(scale.QUICK_LARGE, lora_rank=4)
    model = build(shape)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(name.endswith((".down.weight", ".up.weight")) for name in trained)
    assert all(".base." not in name for name in trained)
    assert parameters(shape) - parameters(replace(shape, lora_rank=0)) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )


def test_a_point_of_several_series_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[scale.Point] = []

    def measured(point: scale.Point, name: str, folder: Path) -> Row:
        asked.append(point)
        seen = {"read_bytes": 1, "written_bytes": 1, "peak_rss_bytes": 1, "loss": 9.0, "cpu_s": 1.0}
        return Row(name, {"parameters": len(asked)}, (Sample(1.0, seen),), median_s=1.0)

    monkeypatch.setattr(scale, "_measured", measured)
    made = scale.run(quick=True, folder=tmp_path)
    assert len(asked) == len(set(asked)) == 9
    assert [len(c.rows) for c in made.comparisons] == [2, 2, 2, 2, 2, 1, 1]
    made = scale.run(quick=True, folder=tmp_path, only=[6, 5])
    assert [c.title for c in made.comparisons] == [*scale.series(quick=True)][:-3:-1]
    assert (tmp_path / "scale-6-5.json").is_file() and len(asked) == 11
    with pytest.raises(ValueError, match="no table 7; there are 0 to 6"):
        scale.run(quick=True, folder=tmp_path, only=[7])
    kept = json.loads((tmp_path / "scale.json").read_text())["comparisons"]
    assert [row["name"] for row in kept[-3]["rows"]] == ["1", "2"]
