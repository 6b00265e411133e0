"""Errors of the I/O engine; the base class of all errors of overspill lives here, at the bottom."""

from __future__ import annotations

import copy
import errno as codes
import os
import sys
from pathlib import Path


class OffloadError(Exception):
    """Base of every error that overspill raises on purpose.

    Attributes:
        section: the section of docs/errors.md about such errors.
    """

    section = "other-errors"

    def __init__(self, message: object = "") -> None:
        super().__init__(message)
        if sys.version_info >= (3, 11):
            self.add_note(f"See docs/errors.md#{self.section}")


class LifecycleError(OffloadError):
    """What was called does not fit the state of its engine: closed, failed, in use or asleep."""

    section = "wrapping-and-closing"


class HostMemoryError(OffloadError):
    """The system does not give the host memory of a budget."""

    section = "memory-budgets"


class IoError(OffloadError):
    """A file operation failed for good.

    Attributes:
        path: the file or directory.
        offset: byte offset in the file, -1 if the failure is not about a place in it.
        nbytes: length of the operation in bytes, 0 if it has none.
        errno: the system's error number, 0 if the system reported none.
    """

    section = "files-and-disks"

    def __init__(
        self, message: str, *, path: str = "", offset: int = -1, nbytes: int = 0, errno: int = 0
    ) -> None:
        self.path, self.offset, self.nbytes, self.errno = path, offset, nbytes, errno
        super().__init__(message)

    def with_remedy(self, remedy: str) -> IoError:
        """Return the same error with a further remedy in its message."""
        return _rebuild(type(self), f"{self}; {remedy}", dict(self.__dict__))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), str(self), dict(self.__dict__))


class CorruptionError(IoError):
    """Bytes came back that are not the bytes that were written.

    Attributes: those of ``IoError``, and ``expected`` and ``found``, the CRC-32 of the block when
    it was written and as it was read (both 0 if the extent has no whole contents at all).
    """

    section = "damaged-data"

    def __init__(
        self,
        message: str,
        *,
        path: str = "",
        offset: int = -1,
        nbytes: int = 0,
        expected: int = 0,
        found: int = 0,
    ) -> None:
        super().__init__(message, path=path, offset=offset, nbytes=nbytes)
        self.expected, self.found = expected, found


def _rebuild(kind: type[IoError], message: str, attributes: dict[str, object]) -> IoError:
    error = kind(message)
    error.__dict__.update(copy.deepcopy(attributes))  # so that errors do not share their notes
    return error


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_REMEDIES = {
    codes.ENOSPC: "delete something there, or choose another place",
    codes.EDQUOT: "raise the disk quota, or choose another directory",
    codes.EFBIG: "raise the file size limit (ulimit -f)",
    codes.EROFS: "the file system has become read-only; see the kernel log",
    codes.EIO: "the device failed; see the kernel log and its health, and choose another directory",
    codes.EACCES: "give this user write permission, or choose another directory",
    codes.EPERM: "give this user write permission, or choose another directory",
    codes.ENOENT: "create the folder, or choose another one",
    codes.EISDIR: "a folder has the name of the file; remove it, or choose another directory",
    codes.ELOOP: "it is a symbolic link, and none is followed here; remove the link",
    codes.ECANCELED: "it was cancelled before it started",
}


def remedy_for(errno: int) -> str:
    """What a user can do about ``errno``."""
    return _REMEDIES.get(errno, "see the kernel log, or choose another directory")


def format_bytes(nbytes: float) -> str:
    """``nbytes`` with a binary unit and at most one decimal, as budgets are written: ``12 MiB``."""
    value, unit = float(nbytes), 0
    while abs(value) >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    text = f"{value:.1f}".rstrip("0").rstrip(".")
    return f"{text} {_UNITS[unit]}"


def format_distinct(one: int, other: int) -> tuple[str, str]:
    """Format two amounts, to the byte where they would read alike and are not."""
    texts = format_bytes(one), format_bytes(other)
    if texts[0] == texts[1] and one != other:
        return f"{one:,} bytes", f"{other:,} bytes"
    return texts


def format_budget(nbytes: int) -> str:
    """Format ``nbytes`` as a budget that is no smaller, and larger by 2% at most: ``1537KiB``."""
    size, unit = nbytes, 0
    while (size >= 64 * 1024 or (size and size % 1024 == 0)) and unit < len(_UNITS) - 1:
        size, unit = -(-size // 1024), unit + 1
    return f"{size}{_UNITS[unit]}"


def refused(path: Path, what: str, error: OSError, *, need_bytes: int = 0) -> IoError:
    """Build the error for a system call on ``path`` that failed, with a remedy.

    ``need_bytes``: how much was to be written, for a disk that is full; 0 if it is not known.
    """
    code = error.errno or 0
    room = _room(path, need_bytes) if code == codes.ENOSPC else ""
    return IoError(
        f"{path}: {what}: {os.strerror(code)}; {room}{remedy_for(code)}", path=str(path), errno=code
    )


def _room(path: Path, need_bytes: int) -> str:
    """Return "X are needed, and Y are free in PLACE; ", for a message."""
    place = next((each for each in (path, *path.parents) if each.is_dir()), None)
    if place is None:
        return ""
    system = os.statvfs(place)
    needed = f"{format_bytes(need_bytes)} are needed, and " if need_bytes else ""
    free = format_bytes(system.f_bavail * system.f_frsize)
    return f"{needed}{free} are free in {place}; "
