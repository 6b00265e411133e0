"""One process owns a directory's store: the lock that says so, and what only its owner may do."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path

from .errors import IoError, refused

LOCK_NAME = "overspill.lock"

log = logging.getLogger("overspill.io_engine")


def remove_own(path: Path, fd: int) -> None:
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
            raise refused(directory, "cannot create a store here", error) from error

    def _take(self, directory: Path) -> int:
        while True:
            try:
                fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise refused(directory, "cannot create a store here", error) from error
            self._fd = fd
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                owner = self._owner()
                os.close(fd)
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise refused(self._path, "cannot lock", error) from error
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
            remove_own(self._path, fd)
            os.close(fd)
