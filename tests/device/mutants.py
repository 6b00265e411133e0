"""Takes one wait, event, mark or stream out of the code that moves memory, at a time, and counts
which of that the suites find: ``python -m tests.device.mutants [NUMBER ...]``.

A mutant that nobody finds is a wait that nobody tests, or one that is not needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUITES = (
    "tests/device/test_engine.py", "tests/device/test_streams.py", "@tests/device/moves.txt",
    "tests/robust/test_slots.py", "tests/parity/test_between.py", "tests/unit/test_range_events.py",
)  # fmt: skip
LIMIT_S = 900


@dataclass(frozen=True)
class Mutant:
    """In ``file`` the line ``line`` (where it stands the ``nth`` time) becomes ``new``.

    ``harmless``: why no suite can find it.
    """

    file: str
    line: str
    new: str = "pass"
    nth: int = 0
    harmless: str = ""

    def applied(self, text: str) -> str:
        """The file's text with the mutant in it."""
        lines = text.splitlines()
        found = [number for number, line in enumerate(lines) if line.strip() == self.line]
        if len(found) <= self.nth:
            raise SystemExit(f"{self.file} has no line {self.line!r} any more")
        number = found[self.nth]
        lines[number] = lines[number].replace(self.line, self.new)
        return "\n".join(lines) + "\n"


MOVES, VISITS = "movement/moves.py", "movement/device_updates.py"
COMPUTE, REQUESTS = "movement/compute_use.py", "movement/engine_port.py"
WORKER = "movement/update_lane.py"
GRADIENTS, RESIDENCES = "grads/gradients.py", "params/onloaded_units.py"
STREAMS, EVENTS = "movement/accelerators/streams.py", "movement/compute_use.py"

MUTANTS = (
    Mutant(MOVES, "after=self._events.over(work.place),", "after=[],"),
    Mutant(MOVES, "self._events.set(work.place, event)"),
    Mutant(MOVES, "after=self._events.over(work.source),", "after=[],"),
    Mutant(MOVES, "self._events.set(work.source, event)"),
    Mutant(VISITS, "after=self._events.over(device), on_done=done,", "after=[], on_done=done,"),
    Mutant(VISITS, "self._events.set(device, event)"),
    Mutant(COMPUTE, "self._events.set(place, self._accelerator.record())"),
    Mutant(COMPUTE, "self._accelerator.wait(event)"),
    Mutant(COMPUTE, "self._accelerator.wait(event)", nth=1),
    Mutant(WORKER, "self._accelerator.wait(event)"),
    Mutant(
        WORKER, "with self._accelerator.update_stream():", "if True:",
        harmless="slower alone: the worker waits on the host for what it has enqueued",
    ),
    Mutant(WORKER, "self._events.set(place, event)"),
    Mutant(
        WORKER, "event.synchronize()",
        harmless="whoever comes next waits for the event; the trace alone shows less time",
    ),
    Mutant(GRADIENTS, 'self.executor.compute.wait_for(place, "copy_out")'),
    Mutant(GRADIENTS, "self.executor.compute.mark(place)"),
    Mutant(GRADIENTS, "self._onloaded_units.compute_over(unit)"),
    Mutant(
        RESIDENCES, 'self.executor.compute.wait_for(place, "copy_in")', nth=1,
        harmless="copies to the device share a stream: two updates of a unit come in order anyway",
    ),
    Mutant(GRADIENTS, "self.accelerator.join(pending.streams, made)"),
    Mutant(RESIDENCES, "self.accelerator.join(onloaded.streams)"),
    Mutant(
        RESIDENCES, 'self.executor.compute.wait_for(self.place(onloaded.unit), "copy_in")'
    ),
    Mutant(RESIDENCES, "self.executor.compute.mark(place)", nth=1),
    Mutant(RESIDENCES, 'self.executor.compute.wait_for(place, "copy_in")'),
    Mutant(RESIDENCES, "self.executor.compute.mark(place)"),
    Mutant(REQUESTS, "self._compute.mark(freed.held.place)"),
    Mutant("step/stepping.py", "self._onloaded_units.compute_over(unit)"),
    Mutant("activations/offloader.py", 'self._executor.compute.wait_on((event,), "copy_in")'),
    Mutant(
        EVENTS, "return [event for used, event in self._events if used.overlaps(place)]",
        "return [event for used, event in self._events if used == place]",
    ),
    Mutant(
        EVENTS, "if not (begin <= used.offset and used.offset + used.nbytes <= end)",
        "if not used.overlaps(place)",
    ),
    Mutant(STREAMS, "self.stream.wait_event(_event_of(event))"),
    Mutant(STREAMS, "with self._make.on(self.stream):", "if True:"),
    Mutant(STREAMS, "finished.event.record(self.stream)", "finished = started"),
    Mutant(STREAMS, "copy.finished.synchronize()"),
    Mutant(STREAMS, "self.synchronize()"),
    Mutant(STREAMS, "self.synchronize()", nth=1),
    Mutant(STREAMS, "self._vendor.register(address, nbytes, self.device)"),
    Mutant(STREAMS, "edges = [0, *sorted(cuts), host.numel()]", "edges = [0, host.numel()]"),
    Mutant(STREAMS, "self._make.current().wait_event(_event_of(event))"),
    Mutant(STREAMS, "event.event.record(self._make.current())"),
)  # fmt: skip


def tree(folder: Path, mutant: Mutant | None) -> None:
    """The packages under their import name, with the mutant in them, and the tests."""
    leave = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "offload", folder / "overspill", ignore=leave)
    for name in ("optim", "io_engine"):
        shutil.copytree(ROOT / name, folder / "overspill" / name, ignore=leave)
    (folder / "tests").symlink_to(ROOT / "tests")
    shutil.copy(ROOT / "pyproject.toml", folder)
    if mutant is not None:
        path = folder / "overspill" / mutant.file
        path.write_text(mutant.applied(path.read_text(encoding="utf-8")), encoding="utf-8")


def outcome(mutant: Mutant | None) -> str | None:
    """The first test that fails with the mutant, or ``None``."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tree(folder, mutant)
        environment = {
            **os.environ, "OVERSPILL_TEST_DEVICE": "testdev", "OVERSPILL_TEST_DELAYS": "5",
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), "OVERSPILL_VALIDATE": "0",
        }  # fmt: skip
        command = [
            sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider",
            "--timeout", "60", "--timeout-method", "thread", "-m",
            "not soak and not gpu and not alone", *SUITES,
        ]  # fmt: skip
        try:
            ended = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True,
                timeout=LIMIT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return "hangs"
        if ended.returncode == 0:
            return None
        told = [
            line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))
        ] or ["ended with " + str(ended.returncode)]
        return told[0].removeprefix("FAILED ").removeprefix("ERROR ").split(" - ")[0]


def main(numbers: list[int]) -> int:
    found = outcome(None)
    if found is not None:
        print(f"without a mutant: {found}")
        return 2
    chosen = numbers or range(len(MUTANTS))
    missed = 0
    for number in chosen:
        mutant = MUTANTS[number]
        started = time.perf_counter()
        found = outcome(mutant)
        missed += found is None
        print(
            f"{number:3} {time.perf_counter() - started:5.0f} s  "
            f"{'NOT FOUND' if found is None else 'found'}  {mutant.file}: {mutant.line}"
            f"  ({found or mutant.harmless})",
            flush=True,
        )
    print(f"{len(chosen) - missed} of {len(chosen)} found")
    return int(missed > len(chosen) / 10)


if __name__ == "__main__":
    sys.exit(main([int(number) for number in sys.argv[1:]]))
