"""Finds a durable store by its directories, says what is there, and takes it over to go on in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .errors import CorruptionError, IoError
from .manifest import MANIFEST_NAME, Found, Generation, StoreLayout, read_manifest
from .ownership import Locks
from .store_file import STORE_NAME

Paths = Sequence[str | os.PathLike[str]] | str | os.PathLike[str]


@dataclass(frozen=True)
class FoundStore:
    """A store with all its directories, in the order of its stripes, as it was when it was read.

    Nothing is open or locked: its owner may have gone on since.
    """

    directories: tuple[Path, ...]
    manifests: tuple[Found, ...]

    @property
    def layout(self) -> StoreLayout:
        return self.manifests[0].layout

    @property
    def generations(self) -> tuple[Generation, ...]:
        """Every whole commit in the log, oldest first.  Only the last one's data is sure to be
        there; that of the one before it is until the next write."""
        return self.manifests[0].generations

    @property
    def damage(self) -> tuple[str, ...]:
        """What is damaged in the manifests, in words."""
        return tuple(line for found in self.manifests for line in found.damage)

    def last(self) -> Generation:
        """The last commit.

        Raises:
            CorruptionError: a later record is damaged; the last whole commit is named, not taken.
            IoError: the store has no commit.
        """
        where = str(self.directories[0])
        if self.damage:
            whole = self.generations
            offer = (
                f"the last whole commit is generation {whole[-1].number}, step {whole[-1].step}: "
                "`overspill inspect --repair` drops what is damaged, and goes back to it"
                if whole
                else "no commit is complete; start from an export"
            )
            raise CorruptionError(f"{'; '.join(self.damage)}; {offer}", path=where)
        if not self.generations:
            raise IoError(
                f"{where}: the store here was never committed, so there is nothing to resume; "
                "wrap the model to start a new run",
                path=where,
            )
        return self.generations[-1]


@dataclass(frozen=True)
class OwnedStore(FoundStore):
    """A store that no other process can change: it was read while ``locks`` were held.

    ``IoEngine.reopen`` takes over the locks; otherwise the end of a ``with`` block releases them.
    """

    locks: Locks = field(repr=False)

    def __enter__(self) -> OwnedStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.locks.release()


def own_store(paths: Paths) -> OwnedStore:
    """Finds a store as ``find_store`` does, locks all its directories, and reads it again: what its
    last owner committed until then counts.

    Raises:
        IoError: another process owns it; else as ``find_store``.
    """
    directories = find_store(paths).directories
    locks = Locks(directories)
    try:
        store = find_store(directories)
        if store.directories != directories:
            raise IoError(
                f"{directories[0]}: another process has made a new store here; try again",
                path=str(directories[0]),
            )
        return OwnedStore(store.directories, store.manifests, locks)
    except BaseException:
        locks.release()
        raise


def find_store(paths: Paths) -> FoundStore:
    """The store of which one or more directories are given; the others are looked for where they
    were when it was made.

    Raises:
        IoError: there is no store, one of its directories is missing, or they are of several.
        CorruptionError: its layout is damaged.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    found = [_require(Path(path).absolute()) for path in given]
    layout, members = found[0].layout, dict[int, Found]()
    for each in found:
        if each.layout.store != layout.store:
            raise IoError(
                f"{each.path.parent} and {found[0].path.parent} hold parts of different stores; "
                "give the directories of one",
                path=str(each.path.parent),
            )
        before = members.setdefault(each.member, each)
        if before is not each and not _is_same(before.path.parent, each.path.parent):
            raise IoError(
                f"{before.path.parent} and {each.path.parent} both hold stripe {each.member + 1} "
                "of the same store: one is a copy; give the directories of one store",
                path=str(each.path.parent),
            )
    for number, place in enumerate(layout.directories):
        if number not in members:
            members[number] = _missing(Path(place), number, layout)
    ordered = tuple(members[number] for number in range(len(layout.directories)))
    _refuse_mixture(ordered)
    directories = tuple(each.path.parent for each in ordered)
    for directory, nbytes in zip(directories, layout.file_bytes, strict=True):
        _require_file(directory / STORE_NAME, nbytes)
    return FoundStore(directories, ordered)


def _require(directory: Path) -> Found:
    found = read_manifest(directory)
    if found is None:
        raise IoError(
            f"{directory}: there is no store here ({MANIFEST_NAME} is missing); give the "
            "directory that a run with nvme= and durable=True has used",
            path=str(directory),
        )
    return found


def _missing(directory: Path, number: int, layout: StoreLayout) -> Found:
    try:
        found = read_manifest(directory)
    except IoError:
        found = None
    if found is None or found.layout.store != layout.store or found.member != number:
        raise IoError(
            f"the store is striped over {len(layout.directories)} directories, and number "
            f"{number + 1}, which was {directory}, is missing; mount it there, or give all "
            "directories where they are now",
            path=str(directory),
        )
    return found


def _refuse_mixture(members: Sequence[Found]) -> None:
    """Raises if some stripes are the store's own and one is a copy of a stripe that is still there:
    its commits would be written over data that the commits of the other one speak of."""
    layout = members[0].layout
    moved = [
        (each, Path(place))
        for each, place in zip(members, layout.directories, strict=True)
        if not _is_same(each.path.parent, Path(place))
    ]
    if len(moved) == len(members):
        return
    for each, place in moved:
        try:
            there = read_manifest(place)
        except (IoError, CorruptionError):
            continue
        if there is None or (there.layout.store, there.member) != (layout.store, each.member):
            continue
        raise IoError(
            f"{each.path.parent} is a copy of {place}, whose store is still there and has its "
            f"other stripes in the same places ({', '.join(layout.directories)}): give the "
            "directories of the copies, all of them, or move what is no longer wanted away",
            path=str(each.path.parent),
        )


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _require_file(path: Path, nbytes: int) -> None:
    try:
        have = path.lstat().st_size
    except FileNotFoundError:
        have = -1
    if have < nbytes:
        state = "is missing" if have < 0 else f"has {have} bytes, and should have {nbytes}"
        raise IoError(
            f"{path}: the store file {state}; put it back from a copy, or start from an export",
            path=str(path),
        )
