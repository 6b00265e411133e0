"""Two processes fight for one store, and are killed at it; run as a program.

``python fight_cases.py FOLDER CASES SEED [STEPS]``: a case is a store over two directories.  Always
two processes at a time do something with it, drawn anew each time: wrap a model there, resume and
train, export, inspect; whichever directory they name first.  Many of them are killed.  What a
process was told is committed must be found by all that come after it, until training has come to
its end; then the weights are those of a run that had the store to itself.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import overspill
from overspill.durable.export import export_store
from overspill.durable.inspect import inspect_store
from overspill.io_engine import manifest
from overspill.planning import choose
from tests.resumed import adamw, build, options, train

STEPS = int(sys.argv[4]) if len(sys.argv) > 4 else 20
# Seconds of processor time after which a process is killed, on average: by the clock, none would
# come to a commit on a busy machine.  Some die young, and some live long enough for a few steps.
LIVES_S = (0.5, 2.0, 8.0)
HUNG_S = 120  # a process that computes nothing for this long is hung
Weights = dict[str, torch.Tensor]
BEFORE = (  # what may be said as long as there is no commit that anybody may want
    "no store here", "never committed", "store file", "is missing", "made a new store here",
)  # fmt: skip


class Told:
    """The last step that any process was told is committed; all of them share it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096)

    @property
    def step(self) -> int:
        return self._memory[0]

    def committed(self, step: int) -> None:
        """By the owner of the store: nobody else writes."""
        assert step >= self.step, f"told of step {self.step}, and now of {step}"
        self._memory[0] = step


class Fighter:
    """One process of the two: does one thing and ends."""

    def __init__(self, places: list[Path], told: Told, reference: list[Weights], seed: int) -> None:
        self.rng = random.Random(seed)
        self.places = self.rng.sample(places, len(places))
        self.told, self.reference = told, reference

    def fight(self) -> None:
        kinds = [self.wrap, self.resume, self.resume, self.resume, self.export, self.inspect]
        what = self.rng.choice(kinds)
        known = self.told.step
        try:
            what()
        except overspill.CorruptionError:
            raise
        except overspill.OffloadError as error:
            words = ("in use by", "was being read; try again when", *(() if known else BEFORE))
            if what == self.wrap:
                words += ("committed at step", "of the store that was committed")
            if not any(each in str(error) for each in words):
                raise

    def wrap(self) -> None:
        model = build()
        torch.manual_seed(5)
        with overspill.wrap(model, adamw(model), **options(self.places, **self._drawn())) as mine:
            assert self.told.step == 0, f"a store committed at step {self.told.step} is gone"
            self._train(model, mine)

    def resume(self) -> None:
        model, given = build(), options("", **self._drawn())
        del given["nvme"]
        where = self.places[: self.rng.randint(1, 2)]
        optimizer, _ = overspill.resume(model, where, adamw(model), **given)
        with optimizer:
            found = optimizer.step_count
            assert found >= self.told.step, f"step {self.told.step} is lost: {found} is there"
            self._same(dict(model.state_dict()), found)
            self._train(model, optimizer)

    def export(self) -> None:
        out, known = self.places[0].parent / f"out{os.getpid()}", self.told.step
        step = export_store(self.places[0], out).step
        assert step >= known, f"step {known} is lost: {step} was exported"
        self._same(load_file(out / "model.safetensors"), step)

    def inspect(self) -> None:
        known = self.told.step
        found = inspect_store(self.places[0])
        assert not found.wrong, found.wrong
        last = max((each.step for each in found.commits), default=0)
        assert last >= known, f"step {known} is lost: {last} is there"

    def _drawn(self) -> dict[str, Any]:
        return {
            "update": self.rng.choice(["step", "backward", "next_forward"]),
            "commit_every": self.rng.choice([1, 3]),
        }

    def _train(self, model: torch.nn.Module, optimizer: Any) -> None:
        manifest.LARGEST_LOG_BYTES = 0  # written anew after eight commits
        for _ in range(self.rng.randint(0, 3)):
            train(model, optimizer, min(STEPS, optimizer.step_count + self.rng.randint(1, 2)))
            optimizer.commit()
            self.told.committed(optimizer.step_count)

    def _same(self, found: Weights, step: int) -> None:
        for name, value in self.reference[step].items():
            assert torch.equal(found[name], value), f"{name} is not that of step {step}"


def begun(call: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            call()
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        finally:
            os._exit(code)
    return pid


def computed_s(pid: int) -> float:
    """The processor time of a process that nobody has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def reference(folder: Path) -> list[Weights]:
    """The weights after every step of a run that has its store to itself."""
    model, found = build(), list[Weights]()
    torch.manual_seed(5)
    with overspill.wrap(model, adamw(model), **options(folder)) as optimizer:
        for step in range(STEPS + 1):
            train(model, optimizer, step)
            found.append({name: value.clone() for name, value in model.state_dict().items()})
    return found


def play(folder: Path, rng: random.Random, wanted: list[Weights]) -> int:
    """One store, from its first step to its last; how many processes were killed at it."""
    places = [folder / "a", folder / "b"]
    for each in places:
        each.mkdir()
    told, running, killed = Told(), dict[int, float](), set[int]()  # seconds that each may compute
    seen = dict[int, tuple[float, float]]()  # what each had computed, and when that was last new
    while told.step < STEPS or running:
        while told.step < STEPS and len(running) < 2:
            fighter = Fighter(places, told, wanted, rng.getrandbits(32))
            running[begun(fighter.fight)] = rng.expovariate(1 / rng.choice(LIVES_S))
        time.sleep(rng.uniform(0, 0.1))
        for pid, life_s in running.items():
            computed, now = computed_s(pid), time.monotonic()
            if computed > seen.get(pid, (-1.0, 0.0))[0]:
                seen[pid] = computed, now
            if pid not in killed and now - seen[pid][1] > HUNG_S:
                for each in running:
                    os.kill(each, signal.SIGKILL)
                raise AssertionError(f"process {pid} hung")
            if pid not in killed and computed > life_s:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
        for pid in sorted(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del running[pid], seen[pid]
                code = os.waitstatus_to_exitcode(status)
                assert code == 0 or (pid in killed and code == -signal.SIGKILL), code
    last = Fighter(places, told, wanted, 0)
    assert os.waitpid(begun(last.export), 0)[1] == 0
    return len(killed)


def main(folder: Path, cases: int, seed: int) -> None:
    torch.set_num_threads(1)
    choose.DEPTHS, choose.OTHERS = (choose.DEFAULT_DEPTH,), ()  # the fight is not about placement
    rng = random.Random(seed)
    alone = folder / "alone"
    alone.mkdir()
    assert os.waitpid(begun(lambda: torch.save(reference(alone), folder / "wanted")), 0)[1] == 0
    wanted = torch.load(folder / "wanted")  # in a child: this process must have no threads
    killed = 0
    for case in range(cases):
        place = folder / f"case{case}"
        place.mkdir()
        killed += play(place, rng, wanted)
        shutil.rmtree(place)
    assert killed, "nobody was killed"
    print(f"{cases} cases passed, {killed} processes killed", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
