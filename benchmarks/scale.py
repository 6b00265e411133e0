"""How cost grows with the size of the model, at one host budget; the rest is on NVMe.

Time should grow with the bytes that are moved, and peak memory not at all.  The model is built
without memory and initialized unit by unit, so that its weights never lie in memory together.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from .arms import GIB, Plan, Worker, parameters
from .bars import draw_growth, or_say
from .model import Shape
from .results import Column, Comparison, Outcome, number, others, outcome
from .runner import Row, run_interleaved

# 30 M to 1.3 B parameters.
SHAPES = (
    Shape(layers=6, width=512, heads=8, vocabulary=8192, batch=1, tokens=128),
    Shape(layers=12, width=768, heads=12, vocabulary=8192, batch=1, tokens=128),
    Shape(layers=24, width=1024, heads=16, vocabulary=8192, batch=1, tokens=128),
    Shape(layers=24, width=1536, heads=16, vocabulary=8192, batch=1, tokens=128),
    Shape(layers=24, width=2048, heads=16, vocabulary=32768, batch=1, tokens=128),
)
QUICK_SHAPES = tuple(
    Shape(layers=layers, width=128, heads=4, vocabulary=512, batch=1, tokens=32)
    for layers in (2, 4)
)
HOST_BYTES = GIB
PLAIN_BYTES = 16  # per parameter of plain mixed-precision training: weight 2, gradient 2, 12 state


def _moved(row: Row) -> float | None:
    """Bytes read and written by a step, the median of its samples."""
    moved = [s.seen["read_bytes"] + s.seen["written_bytes"] for s in row.samples]
    return statistics.median(moved) if moved else None


def _columns() -> list[Column]:
    def seen(row: Row, key: str) -> float | None:
        return row.samples[-1].seen.get(key) if row.samples else None

    def gib(value: float | None) -> str:
        return number(None if value is None else value / GIB, " GiB")

    def per_gib(row: Row) -> str:
        moved = _moved(row)
        return number(row.median_s / moved * GIB if row.median_s and moved else None, " s")

    def plain(row: Row) -> str:
        return gib(row.facts["parameters"] * PLAIN_BYTES if "parameters" in row.facts else None)

    return [
        ("plain state", plain),
        ("step", lambda row: number(row.median_s, " s")),
        ("moved a step", lambda row: gib(_moved(row))),
        ("step per GiB", per_gib),
        ("peak RSS", lambda row: gib(seen(row, "peak_rss_bytes"))),
        ("loss", lambda row: number(seen(row, "loss"), digits=5)),
        ("CPU", lambda row: number(seen(row, "cpu_s"), " s")),
        ("others", others),
    ]


def _draw(rows: Sequence[Row], path: Path) -> None:
    done = [row for row in rows if row.median_s and row.samples]
    if not done:
        return
    sizes = [row.facts["parameters"] / 1e6 for row in done]
    peaks = [row.samples[-1].seen["peak_rss_bytes"] / GIB for row in done]
    moved = [(_moved(row) or 0.0) / GIB for row in done]
    plain = [row.facts["parameters"] * PLAIN_BYTES / GIB for row in done]
    times = [row.median_s or 0.0 for row in done]
    panels = [
        ("GiB", [("peak RSS", peaks), ("plain training state", plain)]),
        ("seconds a step", [("step", times)]),
        ("GiB a step", [("read and written", moved)]),
    ]
    or_say(lambda: draw_growth(sizes, panels, path))


def run(*, quick: bool, folder: Path) -> Outcome:
    """Runs the suite, one size after the other; each store is removed before the next."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    host = (64 << 20) if quick else HOST_BYTES
    rows: list[Row] = []
    for shape in QUICK_SHAPES if quick else SHAPES:
        plan = Plan(shape, "bf16", rounds=2 if quick else 3, steps=1, warmup=2, host_memory=host)
        with tempfile.TemporaryDirectory(dir=folder.resolve(), prefix="store-") as store:
            options = {
                "nvme": store, "durable": False, "host_memory": host, "update": "backward",
            }  # fmt: skip
            arm = Worker(f"{parameters(shape) / 1e6:.0f} M", plan, device, options)
            (row,) = run_interleaved([arm], plan.rounds)
        rows.append(replace(row, ratio=None))
    settings = {"host_memory": host, "shapes": [row.facts.get("shape") for row in rows]}
    title = (
        f"Step by model size, host budget {host / GIB:.3g} GiB; what it does not hold lies on NVMe"
    )
    _draw(rows, folder / "scale.png")
    return outcome("scale", [Comparison(title, settings, rows, _columns())], folder)
