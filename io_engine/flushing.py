"""Make files and folders survive a power cut."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_UNSYNCED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EACCES)  # a folder is not flushed


def sync_file(path: Path) -> None:
    """Make the contents of a file survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(folder: Path) -> None:
    """Make all files and folders in a folder survive a power cut."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            if not os.path.islink(os.path.join(place, name)):
                sync_file(Path(place, name))
        sync_folder(Path(place))


def sync_folder(folder: Path) -> None:
    """Make what was created, renamed or removed in a folder survive a power cut, where the file
    system can.

    Raises:
        OSError: the device failed.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in _UNSYNCED:
            raise
