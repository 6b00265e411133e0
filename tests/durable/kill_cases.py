"""Kills a training process at random instants, again and again; run as a program.

``python kill_cases.py FOLDER CASES SEED``: every case is a process forked from this one, which has
everything imported.  It is killed with SIGKILL; another one resumes from what is there, and must
end with the weights of a run that nobody killed, bit for bit.  In every other case the power goes
with the process: of what was written since the last flush, each sector is there or is not.
The log is written anew as often as it may be, so that this is killed too.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import overspill
from overspill.io_engine import manifest

STEPS, WIDTH = 24, 96
SECTOR = 4096
FILES = ("overspill.store", "overspill.manifest")
MODES: list[dict[str, Any]] = [
    {"update": "step"},
    {"update": "next_forward", "commit_every": 2},
    {"update": "backward"},
    {"update": "next_forward", "stripes": 2},
    {"update": "next_forward", "host_memory": "64MiB", "precision": "bf16"},
]


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
    """Trains to the end, from the last commit if there is one; writes a byte a step to ``told``."""
    model = build()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"device": "cpu", "host_memory": "600KiB", "rates": overspill.Rates(), **mode}
    places = folders(folder, options.pop("stripes", 1))
    manifest.LARGEST_LOG_BYTES = 0  # written anew after eight commits
    try:
        optimizer, _ = overspill.resume(model, places, inner, **options)
        print(f"resumed at step {optimizer.step_count}", flush=True)
    except overspill.CorruptionError:
        raise
    except overspill.IoError as error:
        if not any(words in str(error) for words in ("no store here", "never committed")):
            raise
        torch.manual_seed(5)  # before wrap: the first commit has the random states of then
        optimizer = overspill.wrap(model, inner, nvme=places, **options)
    with optimizer:
        while optimizer.step_count < STEPS:
            draw = torch.Generator().manual_seed(optimizer.step_count)
            batch = torch.randn(4, WIDTH, generator=draw).to(next(model.parameters()).dtype)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            os.write(told, b".")
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


def forked(*arguments: Any, flushed: bool = False) -> tuple[int, int]:
    """The process, and where it tells of its steps."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(told)
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
    return pid, told


def killed(child: tuple[int, int], rng: random.Random) -> None:
    """Ends it at some instant of some step; of the start, if that is step 0."""
    pid, told = child
    for _ in range(rng.randrange(STEPS)):
        if not os.read(told, 1):
            break  # it has ended, for a run that was resumed has fewer steps
    time.sleep(rng.uniform(0, 0.03))
    os.kill(pid, signal.SIGKILL)
    ended(child)


def ended(child: tuple[int, int]) -> int:
    pid, told = child
    while os.read(told, 64):
        pass
    os.close(told)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(folder: Path, cases: int, seed: int) -> None:
    rng = random.Random(seed)
    references: list[dict[str, torch.Tensor]] = []
    for number, mode in enumerate(MODES[:cases]):
        place = folder / f"whole{number}"
        place.mkdir()
        assert ended(forked(place, mode, folder / "out")) == 0
        references.append(torch.load(folder / "out"))
        shutil.rmtree(place)
    lost = 0
    for case in range(cases):
        number = case % len(MODES)
        wanted = references[number]
        place = folder / f"case{case}"
        place.mkdir()
        for _ in range(rng.randint(1, 2)):  # a run that was resumed is killed too
            power = case % 2 == 1
            killed(forked(place, MODES[number], folder / "out", flushed=power), rng)
            if power:
                stripes = folders(place, MODES[number].get("stripes", 1))
                lost += sum(cut_power(each, rng) for each in stripes)
        (folder / "out").unlink(missing_ok=True)
        assert ended(forked(place, MODES[number], folder / "out")) == 0, (seed, case)
        found = torch.load(folder / "out")
        for name, value in wanted.items():
            assert torch.equal(found[name], value), (seed, case, name)
        shutil.rmtree(place)
    assert lost or cases < 20, "no power cut has dropped anything"
    print(f"{cases} cases passed, {lost} sectors dropped", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
