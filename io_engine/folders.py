"""Make files survive a power cut, and put a folder of new files in the place of another.

``exchange`` does it in one step. Where that is not possible, ``merge`` replaces the files one by
one. See Note [Atomic writes] in atomic_files.py, which decides and keeps a complete set.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
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


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2

Named = Callable[[str], bool]  # whether a file name is one of those meant


def others(draft: Path, target: Path, is_part: Named) -> list[str]:
    """List the files in ``target`` that the draft lacks and ``is_part`` does not match, as relative
    paths."""
    found = []
    for name in os.listdir(target) if target.is_dir() else ():
        one, other = draft / name, target / name
        if not os.path.lexists(one):
            found += [] if is_part(name) else [name]
        elif one.is_dir() and other.is_dir() and not other.is_symlink():
            found += [f"{name}/{each}" for each in others(one, other, lambda _: False)]
    return found


def exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; ``False``: the system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    names = os.fsencode(one), os.fsencode(other)
    return bool(call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)


def merge(draft: Path, target: Path, is_part: Named, is_entry: Named, *, links: bool) -> None:
    """Replace the files of a folder one by one; see ``replacing_folder`` of atomic_files.

    ``links``: keep the draft's files, as hard links to the new ones.
    """
    names = os.listdir(draft)
    present = [name for name in os.listdir(target) if name != draft.parent.name]
    for name in present:
        if is_entry(name) and (name in names or is_part(name)):
            (target / name).unlink()
    sync_folder(target)  # the removal must be durable before new files appear
    _move(draft, target, (name for name in names if not is_entry(name)), links)
    for name in present:
        if is_part(name) and name not in names and not is_entry(name):
            _remove(target / name)
    sync_folder(target)
    _move(draft, target, filter(is_entry, names), links)
    sync_folder(target)


def _move(source: Path, target: Path, names: Iterable[str], links: bool) -> None:
    for name in names:
        one, other = source / name, target / name
        if one.is_dir() and not one.is_symlink():
            other.mkdir(exist_ok=True)
            _move(one, other, os.listdir(one), links)
            sync_folder(other)
        elif links:
            _link(one, other)
        else:
            os.replace(one, other)


def _link(one: Path, other: Path) -> None:
    """Put a file in the place of another, and keep it in the draft."""
    second = one.with_name(secrets.token_hex(16))
    os.link(one, second, follow_symlinks=False)
    try:
        os.replace(second, other)
    except BaseException:
        second.unlink(missing_ok=True)
        raise


def has_links(folder: Path) -> bool:
    """Whether the file system of a folder has hard links."""
    one, second = folder / secrets.token_hex(16), folder / secrets.token_hex(16)
    one.touch()
    try:
        os.link(one, second)
    except OSError:
        return False
    finally:
        one.unlink()
        second.unlink(missing_ok=True)
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
