"""A reader of a store's last commit has the store's owner put commits off.

# Note [Pinned commits]
#
# An owner that trains commits after every step, and the step after that overwrites the data of the
# commit before. A reader without locks, such as `overspill export`, is then outrun: what it reads
# is gone before it has ended.
#
# While `CommitPin` is held, the owner's steps go on, but are not committed: the last commit stays
# what it is, and its data is not written to. The pin is a shared `flock` of a file beside the
# store's manifest. The kernel ends it with the process, so a killed reader holds up nothing. The
# owner looks at it when it decides whether a step is committed. A commit that was decided on just
# before may still come, so a reader begins anew when the store has moved on; see `MOST_READS`. When
# one reader follows another without a pause, the owner commits once in between.
#
# Where the directory cannot be written, there is no pin, and the reader may be outrun.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

PIN_NAME = "overspill.reading"
MOST_READS = 5  # a commit may be under way when the pin comes, and `commit()` heeds none

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class CommitPin:
    """Keeps the last commit of the store in a directory from being overwritten, until ``close`` or
    the end of a ``with`` block.

    ``held`` is ``False`` where the directory cannot be written, or knows no locks.
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
            fcntl.flock(self._fd, fcntl.LOCK_SH)  # another holds it for an instant, to remove it
            if _is_current(self._fd, self._path):
                return
            self._give_up()

    def _give_up(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Let commits go on.  A second call does nothing."""
        if self.held:
            _remove_unheld(self._fd, self._path)
            self._give_up()

    def __enter__(self) -> CommitPin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Identity = tuple[int, int]  # of a pin: another reader's, that comes later, is another


def pin_of(directory: Path) -> Identity | None:
    """The pin that readers of a store hold, for its owner; ``None``: there is none.  What a killed
    reader left is removed."""
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
    """Remove the file unless another process has locked it; whether none has."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # no locks here
    try:
        if _is_current(fd, path):
            path.unlink()
    except OSError:
        pass  # it stays, and nobody holds it
    return True


def _is_current(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False
