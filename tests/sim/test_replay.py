"""A run's trace against its plan: the compute as measured, moves and memory as simulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import overspill
from benchmarks.model import Gpt, Shape, batch_of
from overspill.cli.app import app
from overspill.facts.trace import LANES, TierBytes, Trace
from overspill.observe.memory_picture import draw_memory
from overspill.observe.trace_files import load_trace
from overspill.planning.costs import Profile
from overspill.planning.replay import replay
from tests.devices import DEVICE, NAME, SIM, about_cpu, link

SHAPE = Shape(layers=6, width=64, heads=4, vocabulary=256, batch=2, tokens=32)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[overspill.Plan, Path]:
    folder = tmp_path_factory.mktemp("run")
    model = Gpt(SHAPE)
    adamw = torch.optim.AdamW(model.parameters())
    # On a real machine disk and processors have rates of their own: there the link is the bound.
    with link(2e7 if NAME else 2e8) as rates:
        if not NAME:
            rates = replace(
                rates, disk_read_bytes_s=1e8, disk_write_bytes_s=1e8, update_params_s=1e7
            )
        optimizer = overspill.wrap(
            model, adamw, device=SIM, device_memory="700KiB", host_memory="2MiB", nvme=folder,
            rates=rates,
        )  # fmt: skip
        for step in range(4):
            model(batch_of(SHAPE, step).to(DEVICE)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.trace(folder / "trace.json")
        optimizer.close()
        return optimizer.plan, folder / "trace.json"


@pytest.mark.alone
def test_a_plan_replays_its_run(ran: tuple[overspill.Plan, Path]) -> None:
    plan, path = ran
    trace = load_trace(path)
    again = replay(plan, trace)
    assert again is not None
    measured = sorted((m.finished_ns - m.started_ns) / 1e9 for m in trace.steps[1:])
    assert again.stats.step_s == pytest.approx(measured[1], rel=0.5)
    compute = Profile.from_trace(trace, 1).compute_s
    assert again.stats.compute.busy_s == pytest.approx(compute, rel=0.02)
    # What runs in no unit that streams is spread over those that stay.
    assert len([s for s in again.trace.spans() if s.lane == "compute"]) >= 3 * SHAPE.layers


def test_compute_is_told_apart_by_unit_and_way() -> None:
    trace, at = Trace(origin_ns=0), 0
    trace.mark_step(1, 0)
    for name, length in (
        ("model", 1), ("a", 10), ("b", 20), ("b", 1), ("a", 40), ("a", 2),
        ("model", 1), ("a", 10), ("b", 20), ("backward", 3), ("b", 50), ("a", 40),
    ):  # fmt: skip
        trace.add("compute", name, at, at + length)
        at += length
    trace.mark_step(2, at)
    profile = Profile.from_trace(trace, 2)
    assert {k: round(2e9 * s) for k, s in profile.forward_s.items()} == {"": 2, "a": 20, "b": 41}
    assert {k: round(2e9 * s) for k, s in profile.backward_s.items()} == {"a": 82, "": 3, "b": 50}


def test_memory_in_use_is_recorded_under_what_is_held(ran: tuple[overspill.Plan, Path]) -> None:
    """Measured and simulated levels stay under the same limits, and come to the same peak."""
    plan, path = ran
    trace = load_trace(path)
    again = replay(plan, trace)
    assert again is not None
    for name in ("device", "host"):
        measured = [getattr(level, f"{name}_bytes") for level in trace.levels()]
        simulated = [getattr(level, f"{name}_bytes") for level in again.trace.levels()]
        limits = trace.tiers[name]
        assert len(measured) > 20 and len(simulated) > 20
        assert max(measured) <= limits.held_bytes <= limits.budget_bytes
        assert max(simulated) <= limits.held_bytes
        assert max(simulated) == pytest.approx(max(measured), rel=0.25)
    assert trace.tiers["nvme"].held_bytes == plan.disk_bytes


def test_pictures_lay_the_plan_beside_the_run(
    ran: tuple[overspill.Plan, Path], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    from typer.testing import CliRunner

    from overspill.observe.trace_files import save_trace

    plan, path = ran
    again = replay(plan, load_trace(path))
    assert again is not None
    save_trace(again.trace, tmp_path / "plan.json")
    files = [tmp_path / name for name in ("lanes.png", "memory.png")]
    done = CliRunner().invoke(
        app,
        ["trace", str(path), "--png", str(files[0]), "--memory", str(files[1]), "--planned",
         str(tmp_path / "plan.json")],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    for file, least in zip(files, (700, 600), strict=True):
        data = file.read_bytes()
        width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
        assert width == 1200 and height >= least


def test_levels_in_a_window() -> None:
    trace = Trace(origin_ns=0)
    for at, used in ((10, 1), (20, 2), (25, 2), (30, 3)):
        trace.level(at, used, 10 * used)
    assert [level.at_ns for level in trace.levels()] == [10, 20, 30], "the same is not repeated"
    assert [tuple(level) for level in trace.levels(22, 30)] == [(22, 2, 20, 0)]


def test_activations_are_seen_where_compute_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run and its simulation, in the file and in the picture."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    monkeypatch.setattr("overspill.activations.offloader.LEAST_BYTES", 1)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    adamw = torch.optim.AdamW(model.parameters())
    path = tmp_path / "trace.json"
    with overspill.wrap(model, adamw, device="sim", activations="host") as optimizer:
        for _ in range(2):
            model(torch.ones(32, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.trace(path)
        levels = optimizer._engine.trace.levels()
    known = load_trace(path)
    saved = [level.saved_bytes for level in known.levels()]
    assert max(saved) == max(level.saved_bytes for level in levels) >= 4 * 32 * 64
    assert all(level.saved_bytes <= level.device_bytes for level in levels)

    labels: list[str] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **more: labels.extend(
        text.get_text() for axes in figure.axes for text in axes.get_legend().get_texts()
    ))  # fmt: skip
    draw_memory(known, tmp_path / "memory.png")
    assert labels.count("of that, activations") == 1


def test_a_budget_far_away_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace = Trace(origin_ns=0)
    trace.tiers = {"host": TierBytes(2**40, 2**20)}
    trace.level(0, 0, 2**19)
    trace.add(LANES[0], "x", 0, 10)
    trace.mark_step(1, 100)
    draw_memory(trace, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 5000
    with pytest.raises(overspill.OffloadError, match="no memory figures"):
        silent = Trace(origin_ns=0)
        silent.mark_step(1, 100)
        draw_memory(silent, tmp_path / "none.png")


@about_cpu
def test_the_end_of_a_run_says_how_it_went(caplog: pytest.LogCaptureFixture) -> None:
    """Time over the bound, and what compute waited for, whoever runs the loop."""
    model = torch.nn.Linear(8, 8)
    adamw = torch.optim.AdamW(model.parameters())
    optimizer = overspill.wrap(model, adamw, device="sim", rates=overspill.Rates())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    with caplog.at_level("INFO", "overspill"):
        optimizer.close()
    assert "step 1, the last, took" in caplog.text
    assert "times the bound; compute waited for" in caplog.text
