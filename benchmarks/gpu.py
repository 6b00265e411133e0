"""``python -m benchmarks.gpu``: what matters on a GPU, by priority, within a time budget.

Whether it is right: the suites that move memory, on the device, and its kernels; what they print
is kept (``tests.log``, ``kernels.log``), as is what arms say on stderr, with the stacks of those
that hang (``arms.log``), and all that they ran on (``environment.txt``).  Then the host link and
training steps: each arm alone on the device, in a process of its own, ended when its time or all
time is up.  Results are written after every arm, so a run that is cut keeps them.  With ``--device
sim`` the arms run to their end on any machine, at sizes that say nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .arms import GIB, Plan, Worker, parameters
from .bars import draw_times
from .gpu_cases import CASES, CUDA, SIM, Case, Scale
from .machine import ROOT, everything
from .results import Comparison, number, outcome
from .runner import Row, Sample, run_interleaved
from .step import columns

ROUNDS = 2
TESTS_S, KERNELS_S, COPY_S = 150.0, 30.0, 40.0
SUITES = ("@tests/device/moves.txt", "tests/parity")  # what names a defect goes first
MOST_WORKERS = 12


@dataclass
class _At:
    """An arm with so many sequences a step; whoever made it closes the worker."""

    worker: Worker
    batch: int

    @property
    def name(self) -> str:
        return self.worker.name

    def start(self) -> Mapping[str, Any]:
        return self.worker.start()

    def sample(self) -> Sample:
        return self.worker.sample_of(self.batch)

    def close(self) -> None:
        return None


def alone(
    worker: Worker, batches: Sequence[int], rounds: int, until: float, limit_s: float,
    pictures: Path | None = None,
) -> list[Row]:  # fmt: skip
    """A row for each batch size; the arm has the device to itself.

    It is ended at ``until`` of the monotonic clock, or after ``limit_s``.  ``pictures``: the
    files for its plan and the lanes of its last steps with each batch, without what follows that.
    """
    left = until - time.monotonic()
    if left <= 0:
        return [Row(worker.name, {}, (), error="not run: the time was up")] * len(batches)
    why = "the time was up" if left < limit_s else f"over {limit_s:.0f} s"
    timer = threading.Timer(min(left, limit_s), worker.kill, [why])
    timer.start()
    rows: list[Row] = []
    try:
        for batch in batches:
            failed = rows[-1].error if rows else None
            if failed:
                rows.append(Row(worker.name, {}, (), error=failed))
                continue
            rows += run_interleaved([_At(worker, batch)], rounds)
            if pictures is not None and not rows[-1].error:
                lanes(worker, pictures.with_name(f"{pictures.name}-{batch}"))
    finally:
        worker.close()
        timer.cancel()
    return rows


def lanes(worker: Worker, base: Path) -> None:
    """What explains the arm's time: its plan, the rates that it counts on, and the lanes of its
    last steps, as a trace and, with matplotlib, as a picture."""
    try:
        about = worker.about()
        rates = "\n".join(f"{name}: {rate}" for name, rate in about["rates"].items())
        base.with_suffix(".txt").write_text(f"{about['plan']}\n\n{rates}\n", encoding="utf-8")
        worker.trace(base.with_suffix(".json"))
        worker.trace(base.with_suffix(".png"))
    except RuntimeError as error:
        print(f"lanes of {worker.name}: {error}", flush=True)


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Rows with ratios of medians to the first: the arms did not take turns."""
    first = rows[0].median_s
    ratios = [r.median_s / first if r.median_s and first else None for r in rows]
    return [
        replace(r, ratio=ratio, ratio_low=ratio, ratio_high=ratio)
        for r, ratio in zip(rows, ratios, strict=True)
    ]


# The least share of the in-GPU rate: of models with fewer parameters than ``LARGE``, and of others.
OF_TORCH, OF_TORCH_LARGE, LARGE = 0.95, 0.9, 4e9
# By peer, where ours has its state, and how many times the peer's rate ours should reach.
OF_PEERS: Mapping[str, tuple[str, float]] = {
    "deepspeed-zero3": ("host", 2.0),
    "deepspeed-zero2": ("host", 2.0),
    "deepspeed-nvme": ("NVMe", 3.0),
    "roundpipe": ("host", 1.3),
}
HOST_BYTES = 14  # a parameter at most, beside what Python and torch take


def goals(row: Row, rows: Sequence[Row]) -> str:
    """What a row of overspill should reach, and whether it does."""
    if not row.name.startswith("overspill") or not row.median_s:
        return "-"
    told = []

    def tell(name: str, rate: float, least: float) -> None:
        told.append(f"{rate:.2f} of {name}, {'met' if rate >= least else f'under {least}'}")

    in_host = row.name.startswith("overspill, host")
    if in_host and rows[0].median_s:
        least = OF_TORCH if row.facts["parameters"] < LARGE else OF_TORCH_LARGE
        tell("torch", rows[0].median_s / row.median_s, least)
    for peer in rows:
        place, least = OF_PEERS.get(peer.name, ("", 0.0))
        if place and f", {place}," in row.name and peer.median_s:
            tell(peer.name, peer.median_s / row.median_s, least)
    if in_host:
        held = row.samples[-1].seen["peak_rss_bytes"] - row.facts["idle_rss_bytes"]
        most, each = HOST_BYTES, held / row.facts["parameters"]
        told.append(f"{each:.1f} bytes a parameter, {'met' if each <= most else f'over {most}'}")
    return "; ".join(told) or "-"


def _comparison(shape: Any, rows: Sequence[Row], plan: Plan) -> Comparison:
    def on_device(row: Row) -> str:
        value = row.samples[-1].seen.get("peak_device_bytes") if row.samples else None
        return number(None if value is None else value / GIB, " GiB")

    tokens, held = shape.tokens_per_step, with_ratios(rows)
    return Comparison(
        f"{parameters(shape) / 1e9:.2g} B parameters, {tokens} tokens a step; each alone",
        {**asdict(plan), "shape": asdict(shape)},
        held,
        [
            *columns(replace(plan, shape=shape)),
            ("peak device", on_device),
            ("goals", lambda row: goals(row, held)),
        ],
    )


def run_steps(
    scale: Scale, folder: Path, until: float, cases: Sequence[Case] = CASES
) -> list[Comparison]:
    """Runs the cases; ``gpu.json`` and ``gpu.md`` are written anew after every one."""
    rows: dict[tuple[str, int], list[Row]] = {}
    made: list[Comparison] = []
    for case in cases:
        plan = Plan(scale.shape(case), "bf16", rounds=ROUNDS, steps=1, warmup=2)
        print(f"{case.model}: {case.name}", flush=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="store-") as store:
            worker = scale.worker(case, plan, Path(store))
            about = f"gpu-lanes-{case.model}-{case.engine}-{case.update}-{case.activations}"
            pictures = folder / about.replace(" ", "") if case.update else None
            found = alone(worker, case.batches, ROUNDS, until, case.limit_s, pictures)
        for batch, row in zip(case.batches, found, strict=True):
            rows.setdefault((case.model, batch), []).append(row)
        made = [
            _comparison(replace(scale.shapes[model], batch=batch), mine, plan)
            for (model, batch), mine in rows.items()
        ]
        outcome("gpu", made, folder).save(folder)
        draw_times(made, folder / "gpu.png")
    return made


def _part(words: Sequence[str], limit_s: float, until: float) -> int:
    left = max(1.0, min(limit_s, until - time.monotonic()))
    try:
        return subprocess.run(
            [sys.executable, *words], cwd=ROOT, timeout=left, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        print(f"{' '.join(words)}: ended after {left:.0f} s", flush=True)
        return 1


def run_tests(device: str, suites: Sequence[str], log: Path, limit_s: float) -> bool:
    """Runs suites with ``device`` as theirs (empty: their own); whether all passed in time.

    The log has every traceback with its variables, and all threads where a test hangs.
    """
    words = [
        "-m", "pytest", "-m", "not soak and not alone", "-q", "--tb=long", "--showlocals",
        "-p", "no:cacheprovider", "-p", "benchmarks.at_once", "-o", "faulthandler_timeout=60",
    ]  # fmt: skip
    if importlib.util.find_spec("xdist") is not None:
        words += ["-n", str(min(MOST_WORKERS, os.cpu_count() or 1))]
    environment = {**os.environ, "OVERSPILL_TEST_DEVICE": device}
    with log.open("w", encoding="utf-8") as file:
        try:
            ended = subprocess.run(
                [sys.executable, *words, *suites], cwd=ROOT, env=environment, timeout=limit_s,
                check=False, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip
            passed = ended.returncode == 0
        except subprocess.TimeoutExpired:
            passed = False
            file.write(f"\nended after {limit_s:.0f} s\n")
    told = log.read_text(encoding="utf-8").splitlines()
    print("\n".join([f"{log.name}:", *told[-30:]]), flush=True)
    return passed


@contextmanager
def stderr_in(path: Path) -> Iterator[None]:
    """What processes that are started inside say on stderr goes to a file."""
    kept = os.dup(2)
    try:
        with path.open("w", encoding="utf-8") as file:
            os.dup2(file.fileno(), 2)
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def main(words: Sequence[str] | None = None) -> int:
    """Runs all; 1 if a suite failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    given = parser.parse_args(words)
    until = time.monotonic() + 60 * given.minutes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an error, so that all is closed
    folder = given.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "environment.txt").write_text(everything(folder), encoding="utf-8")
    scale = CUDA if given.device == "cuda" else SIM
    right = True
    if scale is CUDA:
        right = run_tests(given.device, SUITES, folder / "tests.log", TESTS_S)
        right &= run_tests("", ["tests/gpu"], folder / "kernels.log", KERNELS_S)
    _part(["-m", "benchmarks", "copy", "--quick", "--out", str(folder)], COPY_S, until)
    with stderr_in(folder / "arms.log"):
        made = run_steps(scale, folder, until)
    for comparison in made:
        print(f"\n{comparison.table()}", flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
