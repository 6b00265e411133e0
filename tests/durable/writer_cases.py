"""Kills every writer at random system calls, and looks at what it leaves; run as a program.

``python -m tests.durable.writer_cases FOLDER KILLS SEED [NAME ...]``. For each writer, and for an
empty folder and one that holds an older content: count the system calls that change files, then
kill the writer at some of them. What a reader then finds is the old content, the new one, or
nothing. A writer that comes after it succeeds, and removes what the killed one left.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.durable.writers import WRITERS, Writer, import_all
from tests.faults.killing import Traced, run

QUICK = 1  # with so few kills, slow writers are tried over an old content alone


def body(writer: Writer, folder: Path, value: int) -> Callable[[Callable[[], None]], None]:
    """What a child does: prepares the writer, tells that it is ready, writes."""

    def run_it(ready: Callable[[], None]) -> None:
        torch.set_num_threads(1)
        os.chdir(folder)
        write: Any = writer.prepare(value)
        if writer.target == "out" and writer.contents is not None:  # begins within
            write(ready)
        else:
            ready()
            write()

    return run_it


def whole(writer: Writer, folder: Path, value: int) -> tuple[Traced, Any]:
    """Write, killed by nothing."""
    traced = run(body(writer, folder, value))
    assert traced.code == 0, f"the writer ended with {traced.code}"
    left = [str(each) for each in folder.rglob("*") if each.name.endswith(".part")]
    assert not left, left
    found = writer.read(folder)
    assert found is not None
    return traced, found


def drawn(calls: list[str], kills: int, rng: random.Random) -> set[int]:
    """Numbers of calls to kill at: around one of the renames, and some others."""
    renames = [number for number, call in enumerate(calls, 1) if call.startswith("rename")]
    at = rng.choice(renames or [1])
    near = {at, at + 1} & set(range(1, len(calls) + 1))
    return near | set(rng.sample(range(1, len(calls) + 1), min(kills, len(calls))))


def copy(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)
    return target


def try_writer(
    name: str, writer: Writer, place: Path, kills: int, rng: random.Random, *, quick: bool
) -> str:
    """All cases of one writer, or few of a slow one; a line about them."""
    empty, old = place / "empty", place / "old"
    empty.mkdir(parents=True)
    if writer.beside is not None:
        (empty / writer.target).mkdir(parents=True)
        (empty / writer.target / writer.beside).write_text("mine")
    _, before = whole(writer, copy(empty, old), 1)
    told = []
    starts = [(empty, False), *(((old, True),) if writer.again else ())]
    for start, is_old in starts[-1:] if quick and writer.slow else starts:
        traced, after = whole(writer, copy(start, place / "new"), 2)
        assert after != before, "the two contents are the same"
        calls = len(traced.calls)
        assert calls, "no system call was seen"
        numbers = drawn(traced.calls, kills, rng)
        outcomes = {"old": 0, "new": 0, "nothing": 0}
        for at in sorted(numbers):
            folder = copy(start, place / "killed")
            killed = run(body(writer, folder, 2), at)
            words = f"{name}, {'over an old one' if is_old else 'anew'}, killed at call {at}"
            assert killed.killed or killed.code == 0, words
            words += f" ({killed.calls[-1]})"
            try:
                found = writer.read(folder)
            except Exception as error:
                raise AssertionError(f"{words}: torn: {error!r}") from error
            if found == after:
                outcomes["new"] += 1
            elif found is None:
                outcomes["nothing"] += 1
            else:
                assert is_old and found == before, f"{words}: neither old nor new: {found}"
                outcomes["old"] += 1
            if writer.beside is not None:
                assert (folder / writer.target / writer.beside).read_text() == "mine", words
        after_kill = not (quick and writer.slow) and (writer.again or writer.read(folder) is None)
        if after_kill:
            _, found = whole(writer, folder, 2)
            assert found == after, "the writer after a killed one"
        told.append(f"{calls} calls, {len(numbers)} kills: {outcomes}")
    return f"{name}: {'; '.join(told)}"


def main(folder: Path, kills: int, seed: int, names: list[str]) -> None:
    quick = kills <= QUICK
    import_all()
    for name in names or WRITERS:
        writer = WRITERS[name]
        rng = random.Random(f"{seed} {name}")
        place = folder / name.replace(" ", "-")
        print(try_writer(name, writer, place, kills, rng, quick=quick), flush=True)
        shutil.rmtree(place)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
