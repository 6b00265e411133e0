"""One store file in one directory: checked, locked, preallocated, opened for direct I/O."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import logging
import mmap
import os
import resource
import socket
import stat
import time
from pathlib import Path

from .errors import IoError, remedy_for
from .manifest import read_manifest
from .types import SECTOR_BYTES

STORE_NAME = "overspill.store"
LOCK_NAME = "overspill.lock"

log = logging.getLogger("overspill.io_engine")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def _fail(path: Path, what: str, error: OSError) -> IoError:
    code = error.errno or 0
    return IoError(
        f"{path}: {what}: {os.strerror(code)}; {remedy_for(code)}", path=str(path), errno=code
    )


def _remove(path: Path, fd: int) -> None:
    """Unlinks the file that ``fd`` has open, unless ``path`` has come to name another one.

    It has when a user deleted the file, or unmounted the directory, and another process went on
    there.  What cannot be removed, on a disk that failed, is said: closing goes on.
    """
    try:
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("%s: cannot be removed: %s", path, os.strerror(error.errno or 0))


class DirectoryLock:
    """Ownership of a directory's store, held until ``release`` or the end of the process."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_NAME
        self._fd = self._take(directory)
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()})
        try:
            self.previous = self._owner()
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text.encode(), 0)
        except OSError as error:
            self.release()
            raise _fail(directory, "cannot create a store here", error) from error

    def _take(self, directory: Path) -> int:
        while True:
            try:
                fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise _fail(directory, "cannot create a store here", error) from error
            self._fd = fd
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                owner = self._owner()
                os.close(fd)
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise _fail(self._path, "cannot lock", error) from error
                raise IoError(
                    f"{directory}: the store here is in use by {owner or 'another process'}; "
                    "choose another directory, or end that process first",
                    path=str(directory),
                    errno=error.errno,
                ) from None
            if self._is_current(fd):
                return fd
            os.close(fd)  # its owner has just removed it

    def _is_current(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _owner(self) -> str:
        """``process 123 on host`` as the lock file has it; empty if it says nothing."""
        try:
            owner = json.loads(os.pread(self._fd, 4096, 0))
            return f"process {int(owner['pid'])} on {owner['host']}"
        except (ValueError, KeyError, TypeError):
            return ""

    def release(self) -> None:
        """Gives the directory up.  A second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            _remove(self._path, fd)
            os.close(fd)


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
                raise _fail(self.directory, "cannot create a store here", error) from error
        self._announce_buffered()
        try:
            return self._open_with(flags)
        except OSError as error:
            raise _fail(self.directory, "cannot create a store here", error) from error

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
        # Not posix_fallocate: where there is no support it writes the whole file.
        while _libc.fallocate(self.fd, 0, 0, self.nbytes) != 0:
            code = ctypes.get_errno()
            if code == errno.EINTR:
                continue
            if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise _fail(
                    self.directory, f"cannot reserve {self.nbytes} bytes", OSError(code, "")
                )
            log.warning("%s: the file system cannot reserve space ahead", self.directory)
            os.ftruncate(self.fd, self.nbytes)
            return

    def _probe_direct(self) -> None:
        """Some file systems take the flag, and refuse the transfer."""
        if not self.direct:
            return
        with mmap.mmap(-1, SECTOR_BYTES) as memory:
            try:
                os.preadv(self.fd, [memory], 0)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise _fail(self.path, "cannot read", error) from error
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
            raise _fail(self.path, "cannot flush", error) from error
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
                _remove(self.path, fd)
            if not keep_descriptor:
                os.close(fd)
        if self._lock is not None:
            self._lock.release()
            self._lock = None


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
        raise _fail(directory, "cannot look at it", error) from error
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
        raise _fail(directory, "cannot tell the free space", error) from error
    free = system.f_bavail * system.f_frsize
    if system.f_blocks and nbytes > free:  # ramfs has no size, and tells none
        raise IoError(
            f"{directory}: the store needs {nbytes} bytes; {free} are free; free some, choose "
            "another directory, or lower nvme_memory",
            path=str(directory),
            errno=errno.ENOSPC,
        )
