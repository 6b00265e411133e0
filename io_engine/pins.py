"""Pin a store's last commit while it is read, so that its owner does not overwrite it.

# Note [Pinned commits]
#
# A training run commits after every step, and the next step overwrites the data of the commit
# before. `overspill export` reads without locking the store, so the run would overwrite what it
# reads.
#
# While a `CommitPin` is held, the owner keeps training but does not commit, so the last commit and
# its data stay. The pin is a shared `flock` on a file beside the manifest. The kernel releases it
# when the process ends, so a killed reader blocks nothing. The owner checks for a pin when it
# decides whether to commit a step. A commit decided on just before the pin was taken still
# happens, and so does an explicit `commit()`; the reader then starts again, at most `MOST_READS`
# times. If one reader follows another without a pause, the owner commits once in between.
#
# If the directory is not writable there is no pin, and the read may fail.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

PIN_NAME = "overspill.reading"
MOST_READS = 5  # a commit may be in progress when the pin is taken, and `commit()` ignores pins

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class CommitPin:
    """Pin the last commit of a store until ``close``, or the end of a ``with`` block.

    ``held`` is ``False`` if the directory is not writable or its file system has no locks.
    """

    def __init__(self, directory: Path) -> None:
        self._path, self._fd = directory / PIN_NAME, -1
        try:
            self._take()
        except OSError:
            self._give_up()

    @property
    def held(self) -> bool:
        return self._fd >= 0

    def _take(self) -> None:
        while True:
            self._fd = os.open(self._path, _FLAGS | os.O_CREAT, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_SH)  # waits while another process removes the file
            if is_current(self._fd, self._path):
                return
            self._give_up()

    def _give_up(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Release the pin.  A second call does nothing."""
        if self.held:
            _remove_unheld(self._fd, self._path)
            self._give_up()

    def __enter__(self) -> CommitPin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Identity = tuple[int, int]  # of one pin file: inode and mtime; a later reader's differs


def pin_of(directory: Path) -> Identity | None:
    """Return the identity of the pin that readers of a store hold, or ``None``.

    A pin file that a killed reader left is removed.
    """
    path = directory / PIN_NAME
    try:
        fd = os.open(path, _FLAGS)
    except OSError:
        return None  # nearly always
    try:
        if _remove_unheld(fd, path):
            return None
        found = os.fstat(fd)
        return found.st_ino, found.st_mtime_ns
    finally:
        os.close(fd)


def _remove_unheld(fd: int, path: Path) -> bool:
    """Remove the file unless another process holds its lock; return whether none does."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # no locks here
    try:
        if is_current(fd, path):
            path.unlink()
    except OSError:
        pass  # it stays, but is not locked
    return True


def is_current(fd: int, path: Path) -> bool:
    """Return whether ``path`` still names the file that was opened; links are not followed."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False
