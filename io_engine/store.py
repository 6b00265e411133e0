"""One store file in one directory: checked, locked, preallocated, opened for direct I/O."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import resource
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from .errors import IoError, refused
from .manifest import read_manifest
from .ownership import DirectoryLock, remove_own
from .types import SECTOR_BYTES

STORE_NAME = "overspill.store"

log = logging.getLogger("overspill.io_engine")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def reserve(fd: int, nbytes: int) -> bool:
    """Allocates a file's bytes, so that it has that length at least; ``False``: not possible here.

    Not posix_fallocate: where there is no support it writes the whole file.

    Raises:
        OSError: no room, or the file is not open for writing.
    """
    while _libc.fallocate(fd, 0, 0, nbytes) != 0:
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


class StoreFile:
    """An open store file; ``path`` names it in messages, ``fd`` is its descriptor."""

    def __init__(
        self, directory: Path, nbytes: int, *, ephemeral: bool = False, reopen: bool = False,
        read_only: bool = False,
    ) -> None:  # fmt: skip
        """Creates and preallocates it.

        ``reopen``: it is there already, keeps what it holds, and stays when it is closed.

        Raises:
            IoError: the directory is missing, not writable, locked by another process, or has no
                room; nothing is left behind then.
        """
        self.directory, self.nbytes, self.ephemeral = directory, nbytes, ephemeral
        self.keep, self._reopen, self._read_only = reopen, reopen, read_only
        self.path = directory / STORE_NAME
        self.direct = True
        self.fd = -1
        self._lock: DirectoryLock | None = None
        _require_directory(directory)
        try:
            if not ephemeral:
                self._lock = DirectoryLock(directory)
                if not reopen:
                    self._reclaim(self._lock.previous)
            if not reopen:
                _require_room(directory, nbytes)
            self.fd = self._open()
            if not read_only:
                self._preallocate()
            self._probe_direct()
        except BaseException:
            self.close()
            raise

    def _reclaim(self, owner: str) -> None:
        found = read_manifest(self.directory)
        if found is not None:
            if found.damage or any(each.step for each in found.generations):
                last = found.generations[-1].step if found.generations else 0
                raise IoError(
                    f"{self.directory}: holds a store committed at step {last}; continue it with "
                    f"overspill.resume(model, {str(self.directory)!r}), delete {self.path.name} "
                    f"and {found.path.name} there, or choose another directory",
                    path=str(self.directory),
                    errno=errno.EEXIST,
                )
            found.path.unlink()
        if self.path.exists():
            log.warning(
                "%s: removing a store that %s left behind when it died (%d bytes)",
                self.path, owner or "another process", self.path.stat().st_size,
            )  # fmt: skip
            self.path.unlink()

    def _open(self) -> int:
        flags = (os.O_RDONLY if self._read_only else os.O_RDWR) | os.O_CLOEXEC
        try:
            return self._open_with(flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise refused(self.directory, "cannot create a store here", error) from error
        self._announce_buffered()
        try:
            return self._open_with(flags)
        except OSError as error:
            raise refused(self.directory, "cannot create a store here", error) from error

    def _open_with(self, flags: int) -> int:
        if self._reopen:
            return os.open(self.path, flags)
        if not self.ephemeral:
            return os.open(self.path, flags | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            return os.open(self.directory, flags | os.O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
                raise
        # No nameless files here: one with a name, for an instant.
        name = self.directory / f"{STORE_NAME}.{os.getpid()}.{time.monotonic_ns()}"
        fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600)
        name.unlink()
        return fd

    def _announce_buffered(self) -> None:
        self.direct = False
        log.warning(
            "%s: the file system has no direct I/O; transfers go through the page cache, slower "
            "and with more CPU",
            self.directory,
        )

    def _preallocate(self) -> None:
        try:
            if reserve(self.fd, self.nbytes):
                return
        except OSError as error:
            raise refused(self.directory, f"cannot reserve {self.nbytes} bytes", error) from error
        log.warning("%s: the file system cannot reserve space ahead", self.directory)
        os.ftruncate(self.fd, self.nbytes)

    def _probe_direct(self) -> None:
        """Some file systems take the flag, and refuse the transfer."""
        if not self.direct:
            return
        with mmap.mmap(-1, SECTOR_BYTES) as memory:
            try:
                os.preadv(self.fd, [memory], 0)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise refused(self.path, "cannot read", error) from error
                flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
                fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                self._announce_buffered()

    def flush(self) -> None:
        """Makes everything that has been written survive a power cut.

        Raises:
            IoError: the device refuses, or the file has been deleted meanwhile.
        """
        try:
            os.fdatasync(self.fd)
            links = os.fstat(self.fd).st_nlink
        except OSError as error:
            raise refused(self.path, "cannot flush", error) from error
        if links == 0 and not self.ephemeral:
            raise IoError(
                f"{self.path}: the store file has been deleted while in use; its contents end with "
                "this process: save elsewhere, and open a new store",
                path=str(self.path),
                errno=errno.ENOENT,
            )

    def close(self, *, keep_descriptor: bool = False) -> None:
        """Removes the file, unless it is to stay, and gives the directory up.  A second call does
        nothing.

        ``keep_descriptor``: threads are stuck in it; closed, its number might name another file.
        """
        fd, self.fd = self.fd, -1
        if fd >= 0:
            if not self.ephemeral and not self.keep:
                remove_own(self.path, fd)
            if not keep_descriptor:
                os.close(fd)
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def open_files(
    directories: Sequence[Path], sizes: Sequence[int], *, ephemeral: bool = False,
    reopen: bool = False, read_only: bool = False,
) -> list[StoreFile]:  # fmt: skip
    """A ``StoreFile`` in each directory; where one fails, none stays open."""
    files: list[StoreFile] = []
    try:
        for path, nbytes in zip(directories, sizes, strict=True):
            files.append(
                StoreFile(path, nbytes, ephemeral=ephemeral, reopen=reopen, read_only=read_only)
            )
    except BaseException:
        for file in files:
            file.close()
        raise
    return files


def _require_directory(directory: Path) -> None:
    try:
        is_directory = stat.S_ISDIR(directory.stat().st_mode)
    except FileNotFoundError:
        raise IoError(
            f"{directory}: does not exist; create it, or choose another directory",
            path=str(directory),
            errno=errno.ENOENT,
        ) from None
    except OSError as error:
        raise refused(directory, "cannot look at it", error) from error
    if not is_directory:
        raise IoError(
            f"{directory}: is not a directory; choose one",
            path=str(directory),
            errno=errno.ENOTDIR,
        )


def _require_room(directory: Path, nbytes: int) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit not in (resource.RLIM_INFINITY, -1) and nbytes > limit:
        raise IoError(
            f"{directory}: the store needs a file of {nbytes} bytes; this process may write files "
            f"of {limit} bytes; raise the limit (ulimit -f), or use more directories",
            path=str(directory),
            errno=errno.EFBIG,
        )
    try:
        system = os.statvfs(directory)
    except OSError as error:
        raise refused(directory, "cannot tell the free space", error) from error
    free = system.f_bavail * system.f_frsize
    if system.f_blocks and nbytes > free:  # ramfs has no size, and tells none
        raise IoError(
            f"{directory}: the store needs {nbytes} bytes; {free} are free; free some, choose "
            "another directory, or lower nvme_memory",
            path=str(directory),
            errno=errno.ENOSPC,
        )
