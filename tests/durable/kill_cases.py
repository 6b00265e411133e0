"""Ends a training process at random instants, again and again; run as a program.

``python -m tests.durable.kill_cases FOLDER CASES SEED``: every case is a process forked from this
one, which has everything imported.  It is ended by SIGKILL, by Ctrl-C or by a SIGTERM whose handler
raises, some of them twice; another one resumes from what is there, and must end with the weights of
a run that nobody ended, bit for bit.  Whoever may close its store must leave all steps it has taken
in it; a kill may cost the last few.  In every other case the power goes with the process: of what
was written since the last flush, each sector is there or is not.  The log is written anew as often
as it may be, so that this is interrupted too.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import overspill
from overspill.io_engine import manifest
from tests.devices import CPU, normal

STEPS, WIDTH = 24, 96
SECTOR = 4096
FILES = ("overspill.store", "overspill.manifest")
UPDATES = ("step", "backward", "next_forward")
MODES: list[dict[str, Any]] = [
    {"update": update, "commit_every": every, "stripes": stripes}
    for update, every, stripes in itertools.product(UPDATES, (1, 3), (1, 2))
] + [{"update": "next_forward", "host_memory": "64MiB", "precision": "bf16"}]
ENDS = (
    (signal.SIGKILL,), (signal.SIGKILL,), (signal.SIGINT,), (signal.SIGTERM,),
    (signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGTERM),
)  # fmt: skip


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.GELU())
                           for _ in range(4)])  # fmt: skip


def folders(folder: Path, stripes: int) -> list[Path]:
    """Those of a store's stripes."""
    found = [folder, *(folder / str(number) for number in range(1, stripes))]
    for each in found:
        each.mkdir(exist_ok=True)
    return found


def work(folder: Path, mode: dict[str, Any], out: Path, told: int) -> None:
    """Trains to the end, from the last commit if there is one; writes to ``told``, a byte each, at
    which step it begins and which it has taken."""
    model = build()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"device": CPU, "host_memory": "600KiB", "rates": overspill.Rates(), **mode}
    places = folders(folder, options.pop("stripes", 1))
    manifest.LARGEST_LOG_BYTES = 0  # written anew after eight commits
    try:
        optimizer, _ = overspill.resume(model, places, inner, **options)
    except overspill.CorruptionError:
        raise
    except overspill.IoError as error:
        if not any(words in str(error) for words in ("no store here", "never committed")):
            raise
        torch.manual_seed(5)  # before wrap: the first commit has the random states of then
        optimizer = overspill.wrap(model, inner, nvme=places, **options)
    with optimizer:
        os.write(told, bytes([optimizer.step_count]))
        while optimizer.step_count < STEPS:
            batch = normal(optimizer.step_count, 4, WIDTH).to(next(model.parameters()).dtype)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            os.write(told, bytes([optimizer.step_count]))
        torch.save({n: v.clone() for n, v in model.state_dict().items()}, out)


class Flushed:
    """Keeps, beside every file that is flushed, what the flush made sure of.

    Stands for ``os.fdatasync``.  The copy is taken before the flush and gets its name after it: a
    process that is killed in between had not been told that the flush was over.
    """

    def __init__(self) -> None:
        self._real, self._sync = os.fdatasync, os.fsync
        self._number = 0

    def __call__(self, fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        self._number += 1
        copy = path.with_name(f"{path.name}.{self._number}")
        shutil.copyfile(path, copy)
        self._real(fd)
        copy.replace(path.with_name(f"{path.name}.flushed"))

    def sync(self, fd: int) -> None:
        """Stands for ``os.fsync``: a log that is written anew replaces what was kept of the old."""
        self._sync(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.suffix == ".new":
            path.with_name(f"{path.stem}.flushed").unlink(missing_ok=True)


def cut_power(folder: Path, rng: random.Random) -> int:
    """Drops some of what was not flushed, sector by sector; returns how many were dropped."""
    lost = 0
    for name in FILES:
        path, kept = folder / name, folder / f"{name}.flushed"
        if not path.exists() or not kept.exists():
            continue
        now, before = bytearray(path.read_bytes()), kept.read_bytes()
        before = before.ljust(len(now), b"\0")
        share = rng.choice([0.3, 0.7, 1.0])
        for at in range(0, len(now), SECTOR):
            old = before[at : at + SECTOR]
            if now[at : at + SECTOR] != old and rng.random() < share:
                now[at : at + SECTOR] = old[: len(now) - at]
                lost += 1
        path.write_bytes(now)
    for left in [*folder.glob("overspill.*.flushed"), *folder.glob("overspill.*.[0-9]*")]:
        left.unlink()
    return lost


def terminate(*_: Any) -> None:
    """What many scripts do at SIGTERM."""
    raise SystemExit(143)


def forked(*arguments: Any, flushed: bool = False) -> Child:
    """Begins a process that does ``work``."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(told)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, terminate)
            if flushed:
                os.fdatasync = disk = Flushed()
                os.fsync = disk.sync
            torch.set_num_threads(1)
            work(*arguments, tell)
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        finally:
            os._exit(code)
    os.close(tell)
    return Child(pid, told)


class Child:
    """A process that trains: at which step it began, and which it told of last."""

    def __init__(self, pid: int, told: int) -> None:
        self._pid, self._told = pid, told
        self.first = self.last = -1
        self.code = 0

    def hear(self) -> bool:
        """Waits for one more step; whether there was one."""
        said = os.read(self._told, 1)
        if said:
            self.last = said[0]
            self.first = self.last if self.first < 0 else self.first
        return bool(said)

    def end(self, signals: Sequence[int], rng: random.Random) -> None:
        """Sends it signals at some instant of some step; of the start, if that is step 0."""
        for _ in range(rng.randrange(STEPS)):
            if not self.hear():
                break  # it has ended, for a run that was resumed has fewer steps
        for number in signals:
            time.sleep(rng.choice([0.001, 0.03]) * rng.random())
            os.kill(self._pid, number)
        self.wait()

    def wait(self) -> int:
        """Its exit status."""
        while self.hear():
            pass
        os.close(self._told)
        self.code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self.code


def least(child: Child, signals: Sequence[int], mode: dict[str, Any]) -> int:
    """The step at which a run must be found again."""
    every = mode.get("commit_every", 1)
    closes = len(signals) == 1 and signals[0] != signal.SIGKILL and child.last < STEPS
    # Amid a backward that updates, there is no step to commit but those that were.
    if child.code == 0 or (closes and (every == 1 or mode["update"] != "backward")):
        return child.last
    # Steps since the last wanted commit, and those for which that one and the one before may run.
    return max(0, child.last - 3 * every)


def reference(folder: Path, mode: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights of a run that nobody ends."""
    place = folder / "whole"
    place.mkdir()
    assert forked(place, mode, folder / "out").wait() == 0
    shutil.rmtree(place)
    found: dict[str, torch.Tensor] = torch.load(folder / "out")
    return found


def play(folder: Path, mode: dict[str, Any], power: bool, rng: random.Random) -> tuple[int, int]:
    """One case: ends runs, and lets one come to its end.  Sectors lost, and steps."""
    lost = cost = begin = 0
    for _ in range(rng.randint(1, 2)):  # a run that was resumed is ended too
        signals = rng.choice(ENDS)
        child = forked(folder, mode, folder / "out", flushed=power)
        child.end(signals, rng)
        assert child.first < 0 or child.first >= begin, (child.first, begin, mode)
        if power:
            stripes = folders(folder, mode.get("stripes", 1))
            lost += sum(cut_power(each, rng) for each in stripes)
        if child.last >= 0:
            begin = least(child, signals, mode)
            cost = child.last
    child = forked(folder, mode, folder / "out")
    assert child.wait() == 0
    assert child.first >= begin, (child.first, begin, signals, mode)
    return lost, max(0, cost - child.first)


def main(folder: Path, cases: int, seed: int) -> None:
    rng = random.Random(seed)
    references: dict[str, dict[str, torch.Tensor]] = {}
    modes = rng.sample(MODES, len(MODES))
    lost = cost = 0
    for case in range(cases):
        mode = modes[case % len(modes)]
        precision = mode.get("precision", "fp32")  # no other option changes a bit
        if precision not in references:
            references[precision] = reference(folder, mode)
        place = folder / f"case{case}"
        place.mkdir()
        dropped, again = play(place, mode, case % 2 == 1, rng)
        lost, cost = lost + dropped, cost + again
        found = torch.load(place / "out")
        for name, value in references[precision].items():
            assert torch.equal(found[name], value), (seed, case, name, mode)
        shutil.rmtree(place)
    assert lost or cases < 20, "no power cut has dropped anything"
    print(f"{cases} cases passed, {lost} sectors dropped, {cost} steps taken again", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
