"""How cost grows: with the size of the model, the length of its sequences, the host budget, and the
number of directories on NVMe; and one large model in little memory, all of it and LoRA.

With the model, time should grow with the bytes that are moved, and peak memory hardly: only with
the largest unit.  The model is built without memory and initialized unit by unit, so that its
weights never lie in memory together.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .arms import GIB, Plan, Worker, parameters
from .bars import draw_growth, or_say
from .model import Shape
from .results import Column, Comparison, Outcome, chosen_of, number, others, outcome
from .runner import Row, run_interleaved

# 30 M to 1.3 B parameters.
SHAPES = (
    Shape(layers=6, width=512, heads=8, vocabulary=8192, batch=1, tokens=128),
    Shape(layers=12, width=768, heads=12, vocabulary=8192, batch=1, tokens=128),
    Shape(layers=24, width=1024, heads=16, vocabulary=8192, batch=1, tokens=128),
    Shape(layers=24, width=1536, heads=16, vocabulary=8192, batch=1, tokens=128),
    Shape(layers=26, width=2048, heads=16, vocabulary=8192, batch=1, tokens=128),
)
# Of Llama 7B: 6.7 B parameters.
LARGE = Shape(
    layers=32, width=4096, heads=32, vocabulary=32000, batch=1, tokens=256,
    kv_heads=32, inner=11008,
)  # fmt: skip
QUICK_LARGE = replace(LARGE, layers=4, width=256, heads=4, vocabulary=512, kv_heads=4, inner=688)
LARGE_HOST = 6 * GIB  # of the 8 GiB that the process may have
LORA_HOST = 2 * GIB  # of 4 GiB
QUICK_SHAPES = tuple(
    Shape(layers=layers, width=128, heads=4, vocabulary=512, batch=1, tokens=32)
    for layers in (4, 12)
)
ROUNDS = 2
LIMIT_S = 600.0  # 1.3 B parameters are drawn first, on a machine that may be busy
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

    def over_bound(row: Row) -> str:
        bound = seen(row, "bound_s")
        return number(row.median_s / bound if row.median_s and bound else None)

    return [
        ("plain state", plain),
        ("step", lambda row: number(row.median_s, " s")),
        ("over bound", over_bound),
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


@dataclass(frozen=True)
class Point:
    """A model under a host budget, with its state in so many directories.

    ``options``: of ``wrap``, beside those of every point.  ``brief``: three steps in all, of which
    the first one is not timed.
    """

    shape: Shape
    host: int
    directories: int = 1
    activations: str = "auto"
    options: tuple[tuple[str, str], ...] = field(default=())
    brief: bool = False


def _measured(point: Point, name: str, folder: Path) -> Row:
    """One row; its store is removed before the next."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plan = Plan(point.shape, "bf16", ROUNDS, steps=1, warmup=2, limit_s=LIMIT_S)
    if point.brief:
        plan = replace(plan, warmup=1, lead_in=0)
    with tempfile.TemporaryDirectory(dir=folder.resolve(), prefix="store-") as store:
        places = [Path(store, str(number)) for number in range(point.directories)]
        for place in places:
            place.mkdir()
        options: dict[str, Any] = {
            "nvme": [str(place) for place in places], "durable": False,
            "host_memory": point.host, "update": "backward", "activations": point.activations,
            **dict(point.options),
        }  # fmt: skip
        (row,) = run_interleaved([Worker(name, plan, device, options)], ROUNDS)
    return replace(row, ratio=None)


def series(quick: bool) -> dict[str, dict[str, Point]]:
    """What is varied: for each title, the points by their names.  The first one has the sizes."""
    shapes = QUICK_SHAPES if quick else SHAPES
    host = (64 << 20) if quick else GIB
    middle = Point(shapes[len(shapes) // 2], host)
    tokens = middle.shape.tokens

    longer = [
        replace(middle, shape=replace(middle.shape, tokens=times * tokens))
        for times in ((1, 2) if quick else (1, 4, 8))
    ]
    kept = [replace(point, activations="keep") for point in longer]

    of = f", {parameters(middle.shape) / 1e6:.0f} M parameters"
    large = QUICK_LARGE if quick else LARGE
    of_large = f"{parameters(large) / 1e9:.2g} B"
    int8 = (("moments", "int8"),)
    large_host, lora_host = (host, host) if quick else (LARGE_HOST, LORA_HOST)
    adapter = Point(
        replace(large, lora_rank=16), lora_host, options=(("frozen", "nf4"),), brief=True
    )
    by_size = {f"{parameters(shape) / 1e6:.0f} M": Point(shape, host) for shape in shapes}
    return {
        f"Step by model size, {tokens} tokens, host budget {host / GIB:.3g} GiB": by_size,
        f"Step by tokens{of}": {str(point.shape.tokens): point for point in longer},
        f"Step by tokens, activations beside the budget{of}": {
            str(point.shape.tokens): point for point in kept
        },
        f"Step by host budget{of}": {
            f"{host * share / GIB:.3g} GiB": replace(middle, host=int(host * share))
            for share in ((1, 2) if quick else (0.5, 1, 2))
        },
        f"Step by directories, all on one disk here{of}": {
            str(count): replace(middle, directories=count) for count in (1, 2)
        },
        f"Step of a Llama, int8 moments, {large.tokens} tokens, host budget "
        f"{large_host / GIB:.3g} GiB": {
            of_large: Point(large, large_host, options=int8, brief=True)
        },
        f"Step of LoRA, rank 16, over a Llama in nf4, {large.tokens} tokens, host budget "
        f"{lora_host / GIB:.3g} GiB": {of_large: adapter},
    }


def run(*, quick: bool, folder: Path, only: Sequence[int] = ()) -> Outcome:
    """Runs the suite, one point after the other; what stands in several series is run once.
    ``only``: series by their number, into a file of their own.

    Raises:
        ValueError: there is no such series.
    """
    folder.mkdir(parents=True, exist_ok=True)
    every = list(series(quick).items())
    suite, chosen = chosen_of("scale", every, only)
    known: dict[Point, Row] = {}
    made: list[Comparison] = []
    for title, points in chosen:
        rows = []
        for name, point in points.items():
            if point not in known:
                known[point] = _measured(point, name, folder)
            rows.append(replace(known[point], name=name))
        settings = {name: asdict(point) for name, point in points.items()}
        made.append(Comparison(title, settings, rows, _columns()))
        outcome(suite, made, folder).save(folder)
    if not only:
        _draw(made[0].rows, folder / "scale.png")
    return outcome(suite, made, folder)
