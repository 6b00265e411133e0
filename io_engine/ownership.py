"""One process owns a directory's store: the lock that says so, and what only its owner may do.

Nothing here follows a symbolic link: in a directory that others may write to, a planted one would
have the store truncate, lock or remove a file of theirs.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import stat
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from .errors import IoError, refused
from .pins import is_current

LOCK_NAME = "overspill.lock"

log = logging.getLogger("overspill.io_engine")


def remove_own(path: Path, mine: os.stat_result | None) -> None:
    """Unlink ``path`` if it still is the file of ``mine``.

    It is another file if a user deleted the file, or unmounted the directory, and another process
    continued there.  If a file cannot be removed, such as on a disk that failed, a warning is
    logged, so that closing goes on.
    """
    try:
        if mine is not None and os.path.samestat(mine, os.lstat(path)):
            path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("%s: cannot be removed: %s", path, os.strerror(error.errno or 0))


def require_sole_name(fd: int, path: Path) -> None:
    """Raises if a file that is to be written has a second name: a hard-linked copy of a store
    (``cp -al``) would be changed along with it.

    Raises:
        IoError: it has.
        OSError: it cannot be looked at.
    """
    if os.fstat(fd).st_nlink > 1:
        raise IoError(
            f"{path}: has another name (a hard link), so a copy of the store would be changed with "
            "it; replace one of them with a copy of its own (cp --remove-destination)",
            path=str(path),
        )


class DirectoryLock:
    """Ownership of a directory's store, held until ``release`` or the end of the process.

    ``previous`` names the last owner if it did not release: it died.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._path = directory / LOCK_NAME
        self._fd = -1
        self._take(directory)
        _held.add(self)
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()})
        try:
            self.previous = self._owner()
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text.encode(), 0)
        except OSError as error:
            self.release()
            raise refused(directory, "cannot create a store here", error) from error

    def _take(self, directory: Path) -> None:
        while True:
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                self._fd = os.open(self._path, flags, 0o600)
                self._require_own_file()
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.EISDIR):
                    raise refused(self._path, "cannot lock", error) from error
                raise refused(directory, "cannot create a store here", error) from error
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                owner, here = self._owner() or "another process", self._is_held_here()
                self.let_go()
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise refused(self._path, "cannot lock", error) from error
                if here:
                    who, end = f"this process ({owner})", "close its store"
                else:
                    who, end = owner, "end that process"
                raise IoError(
                    f"{directory}: the store here is in use by {who}; choose another directory, or "
                    f"{end} first",
                    path=str(directory),
                    errno=error.errno,
                ) from None
            if self._is_current():
                return
            self.let_go()  # its owner has just removed it

    def _require_own_file(self) -> None:
        """Raise if the lock is a pipe, a device, or a second name of another file."""
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            self.let_go()
            raise IoError(
                f"{self._path}: is not a regular file, or has several names (hard links), so it "
                "cannot be a lock; remove it, or choose another directory",
                path=str(self._path),
            )

    def require_current(self) -> None:
        """Raise if the lock file was deleted or replaced: another process may own the directory.

        Raises:
            IoError: it was.
        """
        if self._fd >= 0 and not self._is_current():
            raise IoError(
                f"{self._path}: the lock has been deleted or replaced while in use, so another "
                "process may write here too; end both, and resume one of them",
                path=str(self._path),
                errno=errno.ENOENT,
            )

    def _is_current(self) -> bool:
        return is_current(self._fd, self._path)

    def _is_held_here(self) -> bool:
        """Whether another lock of this process has the file."""
        mine = os.fstat(self._fd)
        others = [lock for lock in list(_held) if lock is not self and lock._fd >= 0]
        return any(os.path.samestat(mine, os.fstat(lock._fd)) for lock in others)

    def _owner(self) -> str:
        """``process 123 on host`` as the lock file has it; empty if it says nothing."""
        try:
            owner = json.loads(os.pread(self._fd, 4096, 0))
            return f"process {int(owner['pid'])} on {owner['host']}"
        except (ValueError, KeyError, TypeError):
            return ""

    def let_go(self) -> None:
        """Closes the lock file, no more."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def release(self) -> None:
        """Gives the directory up.  A second call does nothing."""
        if self._fd >= 0:
            remove_own(self._path, os.fstat(self._fd))
            self.let_go()


class Locks:
    """The locks of all directories of one store, acquired together or not at all.

    The code that opens the store's files takes them over with ``hand_over``; until then
    ``release``, or the end of a ``with`` block, releases them.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        """Locks every directory.

        Raises:
            IoError: another process owns one; none stays locked.
        """
        self._locks: list[DirectoryLock] = []
        try:
            for directory in directories:
                self._locks.append(DirectoryLock(directory))
        except BaseException:
            self.release()
            raise

    def hand_over(self) -> list[DirectoryLock]:
        """The locks, which are the caller's from now on."""
        locks, self._locks = self._locks, []
        return locks

    def release(self) -> None:
        """Release the locks that were not handed over."""
        for lock in self.hand_over():
            lock.release()

    def __enter__(self) -> Locks:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _forked() -> None:
    """Close lock files in a forked child.

    The lock belongs to the parent.  A descriptor left open here would keep it locked after the
    parent's death, for as long as the child lives.
    """
    for lock in list(_held):
        lock.let_go()


os.register_at_fork(after_in_child=_forked)
