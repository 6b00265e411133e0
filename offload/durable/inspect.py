"""Inspection, verification and repair of a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..errors import IoError, OffloadError, StoreError
from ..io_engine.committed import FoundStore, find_store, own_store
from ..io_engine.manifest import Generation
from ..io_engine.manifest_repair import repair
from ..io_engine.pins import MOST_READS, CommitPin
from ..io_engine.reading import StoreReader
from ..io_engine.store_file import STORE_NAME

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Note = Callable[[int], None]


@dataclass(frozen=True)
class CommitFound:
    """A generation: when it was made, and the number of bytes it holds."""

    number: int
    step: int
    when_s: float
    nbytes: int


@dataclass(frozen=True)
class Inspection:
    """The condition of a store.  ``file_bytes`` is the disk space of its files.

    ``wrong`` describes damage.  Only the data of the last commit is verified, because that of
    earlier ones may have been overwritten since.
    """

    directories: tuple[str, ...]
    optimizer: str
    parameters: int
    file_bytes: int
    commits: tuple[CommitFound, ...]
    verified_bytes: int
    wrong: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


def inspect_store(paths: Paths, *, verify: bool = True, note: Note | None = None) -> Inspection:
    """Inspect a store without changing it.

    With ``verify``, a run that trains in the store does not commit meanwhile.

    Args:
        note: called with numbers of verified bytes.

    Raises:
        IoError: there is no store, or a part of it is missing.
        CorruptionError: its layout is damaged.
        OffloadError: its owner continued training, and has overwritten what was inspected.
    """
    if not verify:
        return _inspected(find_store(paths), paths, note, verify=False)
    return read_pinned(paths, lambda store: _inspected(store, paths, note, verify=True))


def _inspected(store: FoundStore, paths: Paths, note: Note | None, *, verify: bool) -> Inspection:
    wrong, verified = list(store.damage), 0
    if verify and store.generations:
        found: list[str] = []
        with StoreReader(store, store.generations[-1]) as reader:
            for nbytes, problem in reader.verify():
                verified += nbytes
                if problem is not None:
                    found.append(problem)
                if note is not None:
                    note(nbytes)
        found += _wrong_in_place(store)
        if found:
            require_unmoved(store, store.generations[-1], find_store(paths))
        wrong += found
    description = store.layout.description
    numels = [
        p["numel"] for u in description["units"] for c in u["chunks"] for p in c["params"]
    ]  # fmt: skip
    return Inspection(
        tuple(str(each) for each in store.directories), description["optimizer"], sum(numels),
        sum(_on_disk(each) for each in store.directories), _commits(store), verified, tuple(wrong),
    )  # fmt: skip


def _wrong_in_place(store: FoundStore) -> list[str]:
    """Return what is wrong with weights that are only in the user's files."""
    if not store.layout.description.get("sources", {}).get("units"):
        return []  # avoids importing torch, which facts need
    from .in_place_weights import InPlaceReader
    from .meta import decode_facts

    digests = decode_facts(store.generations[-1].meta).get("digests", {})
    try:
        files = InPlaceReader(store.layout.description, digests, None)
    except OffloadError as error:
        return [str(error)]
    wrong = []
    with closing(files):
        for unit in files.units:
            try:
                files.check(unit)
            except IoError as error:
                wrong.append(str(error))
    return wrong


def _on_disk(directory: Path) -> int:
    """Return the disk space of the store's file, parts of which may never have been written."""
    return (directory / STORE_NAME).stat().st_blocks * 512


def _commits(store: FoundStore) -> tuple[CommitFound, ...]:
    found = []
    for generation in store.generations:
        with StoreReader(store, generation) as reader:
            held = reader.nbytes()
        found.append(CommitFound(generation.number, generation.step, generation.when_s, held))
    return tuple(found)


def stored_bytes(path: Path) -> int:
    """Return the number of bytes that ``inspect_store`` will verify."""
    commits = _commits(find_store(path))
    return commits[-1].nbytes if commits else 0


def repair_store(paths: Paths) -> str:
    """Drop damaged records from the manifests, so that the last whole commit is the last.

    The caller has asked the user.

    Raises:
        IoError: another process uses the store.
        OffloadError: no commit is whole, or the data of the last whole one is damaged.
    """
    with own_store(paths) as store:
        if not store.generations:
            raise StoreError(f"{store.directories[0]}: no commit is complete; start from an export")
        last = store.generations[-1]
        if not store.layout.checksum and store.damage:
            raise StoreError(
                f"{'; '.join(store.damage)}; the store was made with checksum=False, so it is not "
                "known whether the data of an earlier commit were overwritten; nothing was changed"
            )
        with StoreReader(store, last) as reader:
            problem = next((p for _, p in reader.verify() if p is not None), None)
        if problem is not None:
            raise StoreError(f"{problem}; records cannot mend data, so nothing was changed")
        for found in store.manifests:
            if found.damage:
                repair(found)
    return f"the store is at generation {last.number}, step {last.step}"


class StoreMovedError(StoreError):
    """The owner of a store committed while its last commit was being read."""


T = TypeVar("T")


def read_pinned(paths: Paths, read: Callable[[FoundStore], T]) -> T:
    """Return ``read(store)``, with the store's last commit pinned.

    See Note [Pinned commits]: if the owner commits all the same, ``read`` is called again.

    Raises:
        StoreMovedError: the owner continued, and has overwritten what was read.
    """
    with CommitPin(find_store(paths).directories[0]):
        for left in reversed(range(MOST_READS)):
            try:
                return read(find_store(paths))
            except StoreMovedError:
                if not left:
                    raise
    raise AssertionError("the last try returns or raises")


def require_unmoved(store: FoundStore, generation: Generation, now: FoundStore) -> None:
    """Raise if the store's owner has committed since ``generation``.

    Its steps may have overwritten what was read.

    Raises:
        StoreMovedError: it has.
    """
    last = now.generations[-1].number if now.generations else 0
    if now.layout.store != store.layout.store or last != generation.number:
        raise StoreMovedError(
            f"{store.directories[0]}: the run committed generation {last} while generation "
            f"{generation.number} was being read; try again when the run has ended, or call "
            "optimizer.save(path) in it"
        )
