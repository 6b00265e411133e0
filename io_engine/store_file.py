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
from .manifest import MANIFEST_NAME, Found, read_manifest
from .ownership import DirectoryLock, Locks, remove_own, require_sole_name
from .types import SECTOR_BYTES

STORE_NAME = "overspill.store"

log = logging.getLogger("overspill.io_engine")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def reserve(fd: int, nbytes: int, start: int = 0) -> bool:
    """Allocates a file's bytes after ``start``, so that it ends behind them at least; ``False``:
    not possible here.

    Not posix_fallocate: where there is no support it writes the whole file.

    Raises:
        OSError: no room, or the file is not open for writing.
    """
    while nbytes and _libc.fallocate(fd, 0, start, nbytes) != 0:
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


class StoreFile:
    """An open store file; ``path`` names it in messages, ``fd`` is its descriptor.

    ``lock``: of its directory, which it gives up when it is closed; ``None`` for a file without a
    name.  ``keep``: the file stays when it is closed.
    """

    def __init__(
        self, directory: Path, nbytes: int, lock: DirectoryLock | None, *, reopen: bool = False,
        sparse_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Creates and preallocates it.

        ``reopen``: it is there already, keeps what it holds, and stays when it is closed.
        ``sparse_bytes``: so many at its end take room when they are written.

        Raises:
            IoError: the directory is not writable, or has no room; nothing is left behind then.
        """
        self.directory, self.nbytes, self.ephemeral = directory, nbytes, lock is None
        self._own_bytes = nbytes  # without what ``grow`` has added
        self.keep = self._reopen = reopen
        self.path = directory / STORE_NAME
        self.direct = True
        self.fd = -1
        self._lock = lock
        try:
            if not reopen:
                _require_room(directory, nbytes - sparse_bytes, length=nbytes)
            self.fd = self._open()
            there = 0
            if reopen:
                require_sole_name(self.fd, self.path)
                self._cut()  # where it had grown when its process was killed
                there = os.fstat(self.fd).st_size
            self._preallocate(there, nbytes - sparse_bytes)
            self._probe_direct()
        except BaseException:
            self.close()
            raise

    @property
    def disk_bytes(self) -> int:
        """What the file takes on disk now."""
        return os.fstat(self.fd).st_blocks * 512 if self.fd >= 0 else 0

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return self._open_with(flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise self._refused(error) from error
        self._announce_buffered()
        try:
            if not self._reopen and not self.ephemeral:
                self.path.unlink(missing_ok=True)  # made before direct I/O was refused
            return self._open_with(flags)
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> IoError:
        if self._reopen:
            return refused(self.path, "cannot open", error)
        return refused(self.directory, "cannot create a store here", error)

    def _open_with(self, flags: int) -> int:
        if self._reopen:
            return os.open(self.path, flags)
        if not self.ephemeral:
            return os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o600)
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

    def _preallocate(self, start: int, stop: int) -> None:
        """Gives the file its length, and the bytes from ``start`` to ``stop`` their room."""
        nbytes = max(0, stop - start)
        try:
            if not reserve(self.fd, nbytes, start):
                log.warning("%s: the file system cannot reserve space ahead", self.directory)
            if os.fstat(self.fd).st_size < self.nbytes:
                os.ftruncate(self.fd, self.nbytes)
        except OSError as error:
            raise refused(self.directory, f"cannot reserve {nbytes} bytes", error) from error

    def _cut(self) -> None:
        if os.fstat(self.fd).st_size > self._own_bytes:
            os.ftruncate(self.fd, self._own_bytes)

    def reserve(self, offset: int, nbytes: int) -> None:
        """Gives a part of the file its room, where the file system can.

        Raises:
            IoError: there is none.
        """
        try:
            reserve(self.fd, nbytes, offset)
        except OSError as error:
            raise refused(self.directory, f"cannot reserve {nbytes} bytes", error) from error

    def grow(self, nbytes: int) -> int:
        """Makes the file longer by ``nbytes``, all of it reserved, until it is closed; where it
        ended before.

        Raises:
            IoError: there is no room.
        """
        before = self.nbytes
        _require_room(self.directory, nbytes, length=before + nbytes)
        self.nbytes = before + nbytes
        try:
            self._preallocate(before, self.nbytes)
        except BaseException:
            self.nbytes = before
            raise
        return before

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
        """Makes everything that has been written survive a power cut; the directory must still be
        locked.

        Raises:
            IoError: the device refuses, or the file has been deleted meanwhile.
        """
        try:
            os.fdatasync(self.fd)
            gone = not self.ephemeral and not self._is_in_place()
        except OSError as error:
            raise refused(self.path, "cannot flush", error) from error
        if self._lock is not None:
            self._lock.require_current()
        if gone:
            raise IoError(
                f"{self.path}: the store file has been deleted, renamed or replaced while in use; "
                "put it back, or open a new store in another directory",
                path=str(self.path),
                errno=errno.ENOENT,
            )

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self.fd), os.lstat(self.path))
        except FileNotFoundError:
            return False

    def close(self, *, keep_descriptor: bool = False) -> None:
        """Removes the file, unless it is to stay, and gives the directory up.  A second call does
        nothing.

        ``keep_descriptor``: threads are stuck in it; closed, its number might name another file.
        """
        fd, self.fd = self.fd, -1
        if fd >= 0:
            if not self.ephemeral and not self.keep:
                remove_own(self.path, os.fstat(fd))
            elif self.nbytes > self._own_bytes:
                os.ftruncate(fd, self._own_bytes)
            if not keep_descriptor:
                os.close(fd)
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def create_files(
    directories: Sequence[Path], sizes: Sequence[int], sparse: Sequence[int] | None = None, *,
    ephemeral: bool = False,
) -> list[StoreFile]:  # fmt: skip
    """Create a ``StoreFile`` in each directory; if one fails, none stays.

    ``sparse``: the bytes at the end of each that take up space only when they are written.

    Files that a dead process left are removed, but only once no directory turns out to hold a store
    to keep.

    Raises:
        IoError: a directory is missing, in use by another process, full, or holds a store.
    """
    for directory in directories:
        _require_directory(directory)
    sparse = sparse or [0] * len(sizes)
    if ephemeral:
        return _open_files(directories, sizes, sparse, [None] * len(directories))
    with Locks(directories) as locks:
        for directory in directories:
            _require_unkept(directory, directories)
        owned = locks.hand_over()
    try:
        for lock in owned:
            _remove_leftovers(lock)
    except BaseException:
        for lock in owned:
            lock.release()
        raise
    return _open_files(directories, sizes, sparse, owned)


def reopen_files(
    directories: Sequence[Path], sizes: Sequence[int], locks: Locks
) -> list[StoreFile]:
    """The files of a store whose ``locks`` are held; they are given up when it is closed."""
    sparse = [0] * len(sizes)  # what is there already stays as it is
    return _open_files(directories, sizes, sparse, locks.hand_over(), reopen=True)


def _open_files(
    directories: Sequence[Path], sizes: Sequence[int], sparse: Sequence[int],
    locks: Sequence[DirectoryLock | None], *, reopen: bool = False,
) -> list[StoreFile]:  # fmt: skip
    files: list[StoreFile] = []
    waiting = list(locks)  # of directories whose file is not open yet
    try:
        for path, nbytes, hole in zip(directories, sizes, sparse, strict=True):
            lock = waiting.pop(0)
            files.append(StoreFile(path, nbytes, lock, reopen=reopen, sparse_bytes=hole))
    except BaseException:
        for file in files:
            file.close()
        for lock in waiting:
            if lock is not None:
                lock.release()
        raise
    return files


def _require_unkept(directory: Path, locked: Sequence[Path]) -> None:
    """Raise if the directory holds a store, or a stripe of one, that has a commit to keep.

    A stripe with a mark whose commit was never finished has none.  That is known only if the first
    stripe can be read, which must be among the ``locked``.
    """
    found = read_manifest(directory)
    if found is None or not (found.damage or found.kept):
        return
    if found.member and not found.damage and _was_never_committed(found, locked):
        return
    files = f"{STORE_NAME} and {found.path.name}"
    places = found.layout.directories
    if found.member == 0:
        last = found.generations[-1].step if found.generations else 0
        what = f"holds a store committed at step {last}"
    else:
        what = (
            f"holds stripe {found.member + 1} of {len(places)} of the store that was committed in "
            f"{places[0]}"
        )
    raise IoError(
        f"{directory}: {what}; continue it with overspill.resume(model, {str(directory)!r}), "
        f"delete {files} in {'it' if len(places) == 1 else 'all of ' + ', '.join(places)}, or "
        "choose another directory. A program that saves checkpoints of its own can use "
        "durable=False, which keeps nothing here",
        path=str(directory),
        errno=errno.EEXIST,
    )


def _was_never_committed(stripe: Found, locked: Sequence[Path]) -> bool:
    home = Path(stripe.layout.directories[0])
    if not any(home == place.absolute() for place in locked):
        return False
    first = read_manifest(home)
    return (
        first is not None
        and first.layout.store == stripe.layout.store
        and not (first.damage or first.kept)
    )


def _remove_leftovers(lock: DirectoryLock) -> None:
    """Remove a store without a commit to keep; the caller has the lock and has checked this."""
    path = lock.directory / STORE_NAME
    try:
        (lock.directory / MANIFEST_NAME).unlink(missing_ok=True)
        nbytes = os.lstat(path).st_size
        log.warning(
            "%s: removing a store that %s left behind when it died (%d bytes)",
            path, lock.previous or "another process", nbytes,
        )  # fmt: skip
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise refused(path, "cannot be removed", error) from error


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


def _require_room(directory: Path, nbytes: int, *, length: int) -> None:
    """Raises if so many bytes more, in a file of that length, have no room."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit not in (resource.RLIM_INFINITY, -1) and length > limit:
        raise IoError(
            f"{directory}: the store needs a file of {length} bytes; this process may write files "
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
