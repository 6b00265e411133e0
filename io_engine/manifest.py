"""The manifest of a durable store: which extents hold which item, and the commits.

There is one file next to each store file.  All begin with the layout; in the first directory it is
followed by commits.  A commit is one record, written after its data has been flushed, and then
flushed itself: from then on it holds.  A seal follows it, so that a commit that is damaged later
can be distinguished from one that was never finished.  Before the first commit that has to be kept,
a mark is flushed in every other directory, so that each shows by itself that it must be kept.

A seal is flushed along with the next write. If power fails before that, any of the sectors written
since the last flush may be there or not: the seal may be lost although the next commit is whole.
That is legal, and distinguished from damage by its place: one sector of zeroes, after a whole
commit, before the record whose number is higher by two.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import stat
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import CorruptionError, IoError, refused
from .ownership import require_sole_name
from .record_log import SECTOR, Hole, Log, encode, scan
from .transfer import block_count
from .types import Extent, Piece

MANIFEST_NAME = "overspill.manifest"
# 1: commits did not name the members of param groups; 2: stripes did not know of commits.
FORMAT = 3
LARGEST_LOG_BYTES = 1 << 20  # above this, and eight commits, the log is rewritten

Sums = NDArray[np.uint32]


class RecordKind(enum.IntEnum):
    """The kind of a record."""

    LAYOUT = 1
    COMMIT = 2
    SEAL = 3
    KEPT = 4  # in the other directories: the store has a commit to keep


@dataclass(frozen=True)
class StoredItem:
    """Something that is kept: its name, its bytes, and the extents that hold it in turn."""

    key: str
    nbytes: int
    extents: tuple[Extent, ...]


@dataclass(frozen=True)
class StoreLayout:
    """All about a store that never changes.

    ``description`` is the caller's: what the items mean.  ``checksum``: whether commits carry the
    CRC-32 of every block of ``block_bytes``.
    """

    store: str  # a name no other store has
    directories: tuple[str, ...]
    file_bytes: tuple[int, ...]
    block_bytes: int
    checksum: bool
    items: tuple[StoredItem, ...]
    description: Mapping[str, Any]

    @property
    def spare_bytes(self) -> int:
        """Room in the files that no item takes."""
        pieces = (piece for item in self.items for e in item.extents for piece in e.pieces)
        return sum(self.file_bytes) - sum(piece.nbytes for piece in pieces)

    def sums_of(self, extent: Extent) -> int:
        """How many checksums an extent has."""
        return block_count(extent, self.block_bytes) if self.checksum else 0


@dataclass(frozen=True)
class Generation:
    """One commit.

    ``roles`` has, by item, the number of the extent that holds it, or -1 for an item that was never
    written and reads as zeroes.  ``checksums`` are those of the extents as they were written.
    ``meta`` belongs to the caller.  ``kept``: this or an earlier commit has to be kept, so no new
    store may replace it.
    """

    number: int
    step: int
    roles: tuple[int, ...]
    checksums: tuple[Sums | None, ...] = field(repr=False)
    meta: bytes = field(repr=False)
    when_s: float = 0.0
    kept: bool = True


@dataclass(frozen=True)
class Found:
    """A manifest as it was read: ``member`` is the directory's number in the store."""

    path: Path
    member: int
    layout: StoreLayout
    generations: tuple[Generation, ...]
    log: Log

    @property
    def damage(self) -> tuple[str, ...]:
        """What is damaged, in words; none if all is whole."""
        return tuple(
            f"{self.path}: a record at offset {hole.offset} is damaged"
            for hole in self.log.holes
            if not _is_lost_seal(hole)
        )

    @property
    def kept(self) -> bool:
        """Whether there is a commit to keep: here, or in the first directory."""
        marked = any(record.kind == RecordKind.KEPT for record in self.log.records)
        if self.member and self.log.torn and not self.log.blank:
            return True  # this may have been a mark
        return marked or any(generation.kept for generation in self.generations)


def _is_lost_seal(hole: Hole) -> bool:
    """Whether what is missing can only be a seal that was never flushed."""
    return (
        hole.nbytes == SECTOR
        and hole.blank
        and hole.before is not None
        and hole.before.kind == RecordKind.COMMIT
        and hole.after.number == hole.before.number + 2
    )


# -- encoding ------------------------------------------------------------------------------------


def _layout_payload(layout: StoreLayout, member: int) -> bytes:
    items = [
        [i.key, i.nbytes, [[[p.file, p.offset, p.nbytes] for p in e.pieces] for e in i.extents]]
        for i in layout.items
    ]
    content = {
        "format": FORMAT, "store": layout.store, "member": member,
        "directories": layout.directories, "file_bytes": layout.file_bytes,
        "block_bytes": layout.block_bytes, "checksum": layout.checksum,
        "description": layout.description, "items": items,
    }  # fmt: skip
    return json.dumps(content, separators=(",", ":")).encode()


def _read_layout(path: Path, payload: bytes) -> tuple[StoreLayout, int]:
    content = json.loads(payload)
    if content["format"] != FORMAT:
        raise IoError(
            f"{path}: the store has format {content['format']}, this version reads {FORMAT}; "
            "export it with the version that wrote it, and import it here",
            path=str(path),
        )
    items, number = [], 0
    for key, nbytes, listed in content["items"]:
        extents = []
        for pieces in listed:
            extents.append(Extent(number, nbytes, tuple(Piece(*piece) for piece in pieces)))
            number += 1
        items.append(StoredItem(key, nbytes, tuple(extents)))
    layout = StoreLayout(
        content["store"], tuple(content["directories"]), tuple(content["file_bytes"]),
        content["block_bytes"], content["checksum"], tuple(items), content["description"],
    )  # fmt: skip
    return layout, content["member"]


_COMMIT = struct.Struct("<QQdIQ?")  # generation, step, time, items, bytes of meta, kept


def _commit_payload(layout: StoreLayout, generation: Generation) -> bytes:
    roles = np.array(generation.roles, np.int8)
    sums = [part for part in generation.checksums if part is not None]
    body = np.concatenate(sums) if sums else np.zeros(0, np.uint32)
    head = _COMMIT.pack(
        generation.number, generation.step, generation.when_s, len(roles), len(generation.meta),
        generation.kept,
    )  # fmt: skip
    return head + roles.tobytes() + generation.meta + body.astype("<u4").tobytes()


def _read_commit(layout: StoreLayout, payload: bytes) -> Generation:
    number, step, when_s, count, meta_bytes, kept = _COMMIT.unpack_from(payload)
    at = _COMMIT.size
    roles = tuple(int(r) for r in np.frombuffer(payload, np.int8, count, at))
    at += count
    meta = payload[at : at + meta_bytes]
    flat = np.frombuffer(payload, "<u4", offset=at + meta_bytes)
    checksums: list[Sums | None] = []
    start = 0
    for item, role in zip(layout.items, roles, strict=True):
        length = layout.sums_of(item.extents[role]) if role >= 0 else 0
        checksums.append(flat[start : start + length].astype(np.uint32) if length else None)
        start += length
    if start != flat.size:
        raise ValueError("a commit does not fit the layout")
    return Generation(number, step, roles, tuple(checksums), meta, when_s, kept)


def read_manifest(directory: Path) -> Found | None:
    """What the manifest in a directory says; ``None`` if there is none that was ever finished.

    Raises:
        IoError: it cannot be read, or is of another format version.
        CorruptionError: its layout is damaged, so that nothing can be made of it.
    """
    path = directory / MANIFEST_NAME
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(path, flags), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise IoError(f"{path}: is not a regular file; remove it", path=str(path))
            data = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise refused(path, "cannot read", error) from error
    log = scan(data)
    if not log.records or log.records[0].kind != RecordKind.LAYOUT:
        raise CorruptionError(
            f"{path}: the layout, its first record, is damaged; the store cannot be read without "
            "it; restore this one file from a copy, or start from an export",
            path=str(path),
        )
    layout, member = _read_layout(path, log.records[0].payload)
    generations = tuple(
        _read_commit(layout, record.payload)
        for record in log.records
        if record.kind == RecordKind.COMMIT
    )
    return Found(path, member, layout, generations, log)


# -- writing -------------------------------------------------------------------------------------


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_anew(path: Path, records: Sequence[tuple[int, int, bytes]]) -> os.stat_result:
    """Puts a log of (kind, number, payload) in the place of ``path``, whole or not at all; returns
    what the system says of the new file.  The caller has the directory's lock.

    Raises:
        IoError: it cannot be written; what was there before is as it was.
    """
    temporary = path.with_name(path.name + ".new")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        temporary.unlink(missing_ok=True)  # of an owner that was killed
        fd = os.open(temporary, flags, 0o600)
        try:
            _write_all(fd, b"".join(encode(*record) for record in records), 0)
            os.fsync(fd)
            made = os.fstat(fd)
        finally:
            os.close(fd)
        temporary.replace(path)
        _sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # a folder of that name, which stays
            temporary.unlink(missing_ok=True)
        raise refused(path, "cannot write", error) from error
    return made


def _open_log(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise refused(path, "cannot open", error) from error


def _require_sole_manifest(path: Path) -> None:
    fd = _open_log(path)
    try:
        require_sole_name(fd, path)
    finally:
        os.close(fd)


class Manifest:
    """The open log of a store's first directory: ``commit`` makes a generation the last one.

    The caller holds the locks of all directories of the store.
    """

    def __init__(
        self, path: Path, layout: StoreLayout, last: int, number: int, end: int,
        unmarked: Mapping[Path, tuple[int, int]], kept: bool,
    ) -> None:  # fmt: skip
        """Use ``create`` or ``reopen`` instead.

        ``unmarked``: the manifests of other directories without a mark for a commit to keep, each
        with its last record's number and its end.
        """
        self.path, self.layout, self.last = path, layout, last
        self._number, self._end, self._largest = number, end, 0
        self._unmarked, self._kept = dict(unmarked), kept
        # If other stores must have the same commit, this returns when they have it. Until then the
        # previous commit stays in the log, and the caller of `commit` must not overwrite its data.
        self.agree: Callable[[int, int], None] | None = None
        self._before: tuple[int, bytes] | None = None  # the last commit's number and payload
        self._fd = _open_log(path)

    @classmethod
    def create(cls, layout: StoreLayout) -> Manifest:
        """Writes the layout into every directory; there is no commit yet.

        Raises:
            IoError: a file cannot be written.
        """
        unmarked: dict[Path, tuple[int, int]] = {}
        for member in reversed(range(len(layout.directories))):
            path = Path(layout.directories[member]) / MANIFEST_NAME
            made = write_anew(path, [(RecordKind.LAYOUT, 1, _layout_payload(layout, member))])
            if member:
                unmarked[path] = 1, made.st_size
        return cls(path, layout, 0, 1, made.st_size, unmarked, False)

    @classmethod
    def reopen(cls, manifests: Sequence[Found]) -> Manifest:
        """Goes on after the last commit of a store; an unfinished record at its end is dropped.

        ``manifests``: of all its directories, read while their locks were held, which still are.

        Raises:
            CorruptionError: something is damaged; nothing is changed.
            IoError: the file cannot be written.
        """
        for found in manifests:
            if found.damage:
                raise CorruptionError(found.damage[0], path=str(found.path))
            _require_sole_manifest(found.path)
        first = manifests[0]
        last, newest = (
            first.generations[-1].number if first.generations else 0,
            first.log.records[-1],
        )
        unmarked = {
            found.path: (found.log.records[-1].number, found.log.end)
            for found in manifests[1:]
            if not found.kept
        }
        manifest = cls(
            first.path, first.layout, last, newest.number, newest.end, unmarked, first.kept
        )
        commits = [r.payload for r in first.log.records if r.kind == RecordKind.COMMIT]
        manifest._before = (last, commits[-1]) if commits else None
        try:
            os.ftruncate(manifest._fd, newest.end)
            if newest.kind == RecordKind.COMMIT:
                # No seal: if its flush failed, the kernel may show what the disk lacks.
                record = encode(newest.kind, newest.number, newest.payload)
                _write_all(manifest._fd, record, newest.offset)
                os.fdatasync(manifest._fd)
                manifest._append(RecordKind.SEAL, struct.pack("<Q", last))
        except OSError as error:
            manifest.close()
            raise refused(first.path, "cannot write", error) from error
        return manifest

    def commit(
        self, step: int, roles: Sequence[int], checksums: Sequence[Sums | None], meta: bytes, *,
        kept: bool = True,
    ) -> Generation:  # fmt: skip
        """Make ``roles`` the last generation.  Its data must have been flushed.

        ``kept``: the commit has to be kept, and so have all that follow.

        Raises:
            IoError: the record cannot be written or flushed; the previous generation stays the
                last.
        """
        kept = self._kept = kept or self._kept
        generation = Generation(
            self.last + 1, step, tuple(roles), tuple(checksums), meta, time.time(), kept
        )
        if kept:
            self._mark()
        payload = _commit_payload(self.layout, generation)
        if self._end > max(LARGEST_LOG_BYTES, 8 * self._largest):
            self._compact()
        try:
            self._append(RecordKind.COMMIT, payload)
            os.fdatasync(self._fd)
            self._require_place()
        except OSError as error:
            raise refused(self.path, "cannot commit", error) from error
        if self.agree is not None:
            self.agree(generation.number, step)
        try:
            self._append(RecordKind.SEAL, struct.pack("<Q", generation.number))
        except OSError as error:
            raise refused(self.path, "cannot commit", error) from error
        self.last, self._before = generation.number, (generation.number, payload)
        self._largest = max(self._largest, len(payload))
        return generation

    def _mark(self) -> None:
        """Tells the other directories of a commit to keep, before it is made."""
        for path, (number, end) in list(self._unmarked.items()):
            fd = _open_log(path)
            try:
                _write_all(fd, encode(RecordKind.KEPT, number + 1, b""), end)
                os.fdatasync(fd)
            except OSError as error:
                raise refused(path, "cannot commit", error) from error
            finally:
                os.close(fd)
            del self._unmarked[path]

    def _append(self, kind: RecordKind, payload: bytes) -> None:
        record = encode(kind, self._number + 1, payload)
        _write_all(self._fd, record, self._end)
        self._number, self._end = self._number + 1, self._end + len(record)

    def require_place(self) -> None:
        """
        Raises:
            IoError: the file was deleted, renamed or replaced.
        """
        try:
            self._require_place()
        except OSError as error:
            raise refused(self.path, "cannot commit", error) from error

    def _require_place(self) -> None:
        if not os.path.samestat(os.fstat(self._fd), os.lstat(self.path)):
            raise FileNotFoundError(2, "")

    def _compact(self) -> None:
        """Replace the log by a new file with only the layout and the last commit."""
        self.require_place()
        records = [(RecordKind.LAYOUT, _layout_payload(self.layout, 0))]
        if self._before is not None:
            last, payload = self._before
            records += [(RecordKind.COMMIT, payload), (RecordKind.SEAL, struct.pack("<Q", last))]
        numbered = [(kind, self._number + n, data) for n, (kind, data) in enumerate(records, 1)]
        write_anew(self.path, numbered)
        fd = _open_log(self.path)
        os.close(self._fd)
        self._fd, self._number = fd, self._number + len(records)
        self._end = os.fstat(fd).st_size

    def close(self) -> None:
        """Flushes the last seal, as far as that goes, and closes the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # the commit before it was flushed
                os.fdatasync(fd)
            os.close(fd)

    def remove(self) -> None:
        """Closes the file, and removes the manifests of a store that is not to stay."""
        self.close()
        for directory in self.layout.directories:
            path = Path(directory) / MANIFEST_NAME
            with contextlib.suppress(OSError, CorruptionError):
                found = read_manifest(path.parent)
                if found is not None and found.layout.store == self.layout.store:
                    path.unlink()
