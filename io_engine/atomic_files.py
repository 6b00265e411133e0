"""Write files and folders that appear complete or not at all.

# Note [Atomic writes]
#
# A process can be killed, and a disk can fill up, at any system call. A file that is written in
# place is then cut, empty, or full of zeros under its final name, and a reader takes it for whole.
# Everything overspill writes outside a store therefore takes the same path:
#
# 1. Create a draft folder beside the target, `.NAME.HEX.part`, with 128 random bits in its name,
#    and lock it with `flock`. Inside it, the draft has the target's own name, because torch and
#    matplotlib derive contents from the name.
# 2. Write the draft.
# 3. Flush it to the disk, so that a power cut cannot leave the name with no contents behind it.
# 4. Rename it to the target. The kernel makes one rename atomic.
# 5. Flush the target's folder, so that the rename survives a power cut.
#
# A folder that exists is exchanged with its draft in one step (`renameat2`). Where that is not
# possible (files of others in it, a mount point, the current directory, an old file system), its
# files are replaced one by one. So that no reader sees a mixture of two states, the files that a
# reader opens first (the entries) are removed first and placed last; see `replacing_folder`. If
# that fails, or the process is killed, no complete set is left there; but the draft has one: until
# the end its files are hard links to those that were placed. It is renamed to `NAME.HEX.complete`
# before the first file is replaced, stays after a failure, and the error names it.
#
# A killed writer leaves its draft behind, without the lock. The next writer of the same target
# removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from .errors import IoError, OffloadError, refused
from .flushing import sync_file, sync_folder, sync_tree

log = logging.getLogger("overspill")

FULL_BYTES = 1 << 20  # a disk with less is full
LONGEST_STEM = 200  # bytes of a name that fit in a draft's, of the 255 that Linux allows
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2

Named = Callable[[str], bool]  # whether a file name is one of those meant


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a draft path to write one file to; put the file in the place of ``path`` at the end.

    If the block raises, or the process dies, ``path`` stays as it was. The permissions of a file
    that is replaced are kept; a symbolic link is replaced, not followed.

    Raises:
        IoError: the file cannot be written: its folder does not exist, the disk is full, or
            ``path`` is a folder, a device or a pipe.
    """
    target = _absolute(path)
    _require_file(target)
    with _Draft(target) as draft:
        yield draft.path
        draft.publish_file()


@contextmanager
def replacing_folder(
    path: str | os.PathLike[str], *, is_part: Named = lambda name: False,
    is_entry: Named = lambda name: False, beside: Path | None = None,
) -> Iterator[Path]:  # fmt: skip
    """Yield a draft folder to fill; put it in the place of the folder ``path`` at the end.

    Args:
        path: the folder; it may exist, and its parents need not. Files in it that are neither in
            the draft nor a part stay there.
        is_part: whether a file of this name belongs to the set that is written. Parts of an earlier
            set that the draft does not have are removed.
        is_entry: whether a file of this name is one without which the set is not read, such as the
            index of shards. Where files must be replaced one by one, entries are removed first and
            placed last, so a killed writer leaves a set that cannot be opened, not a mixture.
        beside: folder for the draft, used if it is on the same file system; default: the folder
            that ``path`` is in.

    Raises:
        IoError: something cannot be written, or ``path`` is not a folder.
    """
    target = _absolute(path)
    if os.path.lexists(target) and not target.is_dir():
        raise _not_a_folder(target)
    make_folder(target.parent)
    place = target if _is_fixed(target) else target.parent
    if place != target and beside is not None and _same_device(beside, place):
        place = beside
    with _Draft(target, place) as draft:
        draft.path.mkdir()
        yield draft.path
        draft.publish_folder(is_part, is_entry)


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a small file, complete or not at all.

    A device or a pipe, such as ``/dev/stdout``, is written to directly.

    Raises:
        IoError: it cannot be written; what was there before is as it was.
    """
    target = _absolute(path)
    if _is_special(target):
        try:
            with target.open("wb") as file:
                file.write(data)
        except OSError as error:
            raise refused(target, "cannot write", error) from error
        return
    with replacing(target) as draft, draft.open("xb") as file:
        file.write(data)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a small file in UTF-8, as ``write_bytes`` does."""
    write_bytes(path, text.encode())


def free_bytes_at(path: Path) -> int:
    """Return the bytes that are free on the disk that ``path`` is on, or will be."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def make_folder(path: Path) -> None:
    """Create a folder and its parents, unless it exists.

    Raises:
        IoError: it cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise _not_a_folder(path) from error
    except NotADirectoryError as error:
        raise _not_a_folder(next(p for p in path.parents if p.exists())) from error
    except OSError as error:
        raise refused(path, "cannot create the folder", error) from error


def remove_abandoned(parent: Path, name: str) -> None:
    """Remove the drafts that killed writers left in a folder.

    A locked draft belongs to a running process and stays. A folder that only has such a name, but
    other contents, stays as well.

    Args:
        name: regular expression of the target's name.
    """
    stem = re.compile(name, re.DOTALL)
    pattern = re.compile(rf"\.(?:{name})\.[0-9a-f]{{32}}\.part", re.DOTALL)
    try:
        found = [each for each in os.listdir(parent) if pattern.fullmatch(each)]
    except OSError:
        return  # the folder does not exist, or cannot be read
    for each in found:
        draft = parent / each
        try:
            fd = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # a link, or not a folder: not a draft
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if all(stem.fullmatch(_stem(inner)) for inner in os.listdir(fd)):
                shutil.rmtree(draft, ignore_errors=True)
        except OSError:
            continue  # it is being written
        finally:
            os.close(fd)


class _Draft:
    """A draft of one target: ``path`` is written, and published or removed at the end.

    Errors inside the block that name the draft, or no file at all, name the target.
    """

    def __init__(self, target: Path, place: Path | None = None) -> None:
        self.target = target
        place = target.parent if place is None else place
        stem = _stem(target.name)
        remove_abandoned(place, re.escape(stem))
        try:
            self._outer, self._fd = _locked_folder(place, stem)
        except OSError as error:
            raise refused(target, "cannot write", error) from error
        self.path = self._outer / target.name
        self._merging = False  # whether the draft may be the only complete copy

    def __enter__(self) -> _Draft:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        named = self._named(error)  # first, while the draft still fills the disk
        if not self._merging:
            shutil.rmtree(self._outer, ignore_errors=True)
        os.close(self._fd)
        if named is not None:
            raise named from error

    def _named(self, error: BaseException | None) -> IoError | None:
        """Return an error that names the target, or ``None`` if ``error`` needs no other."""
        if self._merging and isinstance(error, Exception):
            return IoError(
                f"{self.target}: its files were being replaced, and are not complete ({error}); "
                f"the complete ones are in {self.path}: move them there, or write them again",
                path=str(self.target), errno=getattr(error, "errno", None) or errno.EIO,
            )  # fmt: skip
        if self._merging:
            log.error("overspill: the complete files for %s are in %s", self.target, self.path)
        elif isinstance(error, OSError):
            named = error.filename
            if named is None and error.errno in _OF_DISKS:
                named = str(self.path)
            if isinstance(named, str) and named.startswith(str(self._outer)):
                return refused(Path(self._renamed(named)), "cannot write", error)
        elif isinstance(error, IoError) and str(self._outer) in str(error):
            return IoError(
                self._renamed(str(error)), path=self._renamed(error.path), offset=error.offset,
                nbytes=error.nbytes, errno=error.errno,
            )  # fmt: skip
        elif isinstance(error, Exception) and not isinstance(error, OffloadError):
            # torch and safetensors have errors of their own for a disk that is full.
            return self._full(error)
        return None

    def _full(self, error: Exception) -> IoError | None:
        try:
            if shutil.disk_usage(self._outer).free >= FULL_BYTES:
                return None
        except OSError:
            return None  # somebody has removed the folder
        full = refused(self.target, "cannot write", OSError(errno.ENOSPC, ""))
        words = (str(error).splitlines() or [type(error).__name__])[0]
        return IoError(f"{full} ({words})", path=full.path, errno=full.errno)

    def _renamed(self, text: str) -> str:
        text = text.replace(str(self.path), str(self.target))
        return text.replace(str(self._outer), str(self._outer.parent))

    def publish_file(self) -> None:
        """Flush the draft and rename it to the target."""
        with contextlib.suppress(FileNotFoundError):
            before = os.lstat(self.target)
            if stat.S_ISREG(before.st_mode):
                os.chmod(self.path, stat.S_IMODE(before.st_mode))
        sync_file(self.path)
        os.replace(self.path, self.target)
        sync_folder(self.target.parent)

    def publish_folder(self, is_part: Named, is_entry: Named) -> None:
        """Flush the draft and put it in the place of the target."""
        sync_tree(self.path)
        with _locked(self.target):
            others = _others(self.path, self.target, is_part)
            if others or _is_fixed(self.target) or not self._exchange(is_part):
                self._keep()
                _merge(self.path, self.target, is_part, is_entry)
                self._merging = False
        sync_folder(self.target.parent)

    def _exchange(self, is_part: Named) -> bool:
        """Put the draft in the target's place in one rename; return whether that was possible."""
        try:
            os.rename(self.path, self.target)  # over nothing, or an empty folder
            return True
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                raise
        if not _exchange(self.path, self.target):
            return False
        for name in _others(self.target, self.path, is_part):  # created in the meantime
            os.rename(self.path / name, self.target / name)
        return True

    def _keep(self) -> None:
        """Give the draft a name by which nobody takes it for abandoned."""
        hidden = self._outer.name
        kept = self._outer.with_name(f"{hidden[1:].removesuffix('.part')}.complete")
        os.rename(self._outer, kept)
        self._outer, self.path = kept, kept / self.target.name
        sync_folder(kept.parent)
        self._merging = True


def _absolute(path: str | os.PathLike[str]) -> Path:
    target = Path(os.path.abspath(path))
    try:
        os.lstat(target)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # a name that is too long, a loop of links
        raise refused(target, "cannot write", error) from error
    return target


def _others(draft: Path, target: Path, is_part: Named) -> list[str]:
    """Return what is in the target, relative to it, and neither in the draft nor a part."""
    found = []
    for name in os.listdir(target) if target.is_dir() else ():
        one, other = draft / name, target / name
        if not os.path.lexists(one):
            found += [] if is_part(name) else [name]
        elif one.is_dir() and other.is_dir() and not other.is_symlink():
            found += [f"{name}/{each}" for each in _others(one, other, lambda _: False)]
    return found


def _stem(name: str) -> str:
    """The name, or a digest of one that would make the draft's name too long."""
    encoded = os.fsencode(name)
    return name if len(encoded) <= LONGEST_STEM else sha256(encoded).hexdigest()


def _locked_folder(place: Path, stem: str) -> tuple[Path, int]:
    """Create a folder under a name that is nobody else's, and lock it."""
    while True:
        folder = place / f".{stem}.{secrets.token_hex(16)}.part"
        folder.mkdir()
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another writer removed it as abandoned before it was locked
        with contextlib.suppress(OSError):  # a file system without locks: drafts stay there
            fcntl.flock(fd, fcntl.LOCK_EX)
        if folder.exists():
            return folder, fd
        os.close(fd)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time replace the files of a folder, if it exists."""
    fd = None
    while fd is None:
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            break
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        if not folder.is_dir() or not os.path.samestat(os.fstat(fd), os.stat(folder)):
            os.close(fd)  # it was exchanged while this waited
            fd = None
    try:
        yield
    finally:
        if fd is not None:
            os.close(fd)


def _require_file(target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        raise IoError(
            f"{target}: is a folder; name a file in it", path=str(target), errno=errno.EISDIR
        )
    if _is_special(target):
        raise IoError(
            f"{target}: is not a plain file; name another one", path=str(target), errno=errno.EINVAL
        )
    if not target.parent.is_dir():
        state = "is not a folder" if target.parent.exists() else "does not exist; create it"
        raise IoError(
            f"{target}: cannot write: {target.parent} {state}, or name another file",
            path=str(target),
            errno=errno.ENOENT,
        )


def _not_a_folder(path: Path) -> IoError:
    return IoError(
        f"{path}: is not a folder; name another one, or remove the file",
        path=str(path),
        errno=errno.ENOTDIR,
    )


def _is_special(target: Path) -> bool:
    """Whether a name stands for something that must not be replaced: a device, a pipe, or what
    ``/dev/stdout`` leads to."""
    try:
        mode = target.stat().st_mode
    except OSError:
        return False
    own = os.path.realpath(target.parent).split(os.sep)[1:3]
    of_system = own[:1] in (["dev"], ["proc"]) and own != ["dev", "shm"]
    return of_system or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _is_fixed(folder: Path) -> bool:
    """Whether a folder must not be renamed: it is a link, a file system is mounted there, or the
    current directory is in it, which would be a removed one afterwards."""
    if not folder.is_dir():
        return False
    if folder.is_symlink() or os.path.ismount(folder):
        return True
    try:
        return Path(os.path.realpath(folder)) in (here := Path.cwd()).parents or here == folder
    except OSError:
        return False  # it has been removed already


def _same_device(one: Path, other: Path) -> bool:
    try:
        return os.stat(one).st_dev == os.stat(other).st_dev
    except OSError:
        return False


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; ``False``: the system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    names = os.fsencode(one), os.fsencode(other)
    return bool(call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)


def _merge(draft: Path, target: Path, is_part: Named, is_entry: Named) -> None:
    """Replace the files of a folder one by one; see ``replacing_folder``."""
    names, present = os.listdir(draft), os.listdir(target)
    for name in present:
        if is_entry(name) and (name in names or is_part(name)):
            (target / name).unlink()
    sync_folder(target)  # the removal must be durable before new files appear
    _move(draft, target, (name for name in names if not is_entry(name)))
    for name in present:
        if is_part(name) and name not in names and not is_entry(name):
            _remove(target / name)
    sync_folder(target)
    _move(draft, target, filter(is_entry, names))
    sync_folder(target)


def _move(source: Path, target: Path, names: Iterable[str]) -> None:
    for name in names:
        one, other = source / name, target / name
        if one.is_dir() and not one.is_symlink():
            other.mkdir(exist_ok=True)
            _move(one, other, os.listdir(one))
            sync_folder(other)
        else:
            _place(one, other)


def _place(one: Path, other: Path) -> None:
    """Put a file in another's place, and keep it where the file system has hard links."""
    second = one.with_name(secrets.token_hex(16))
    try:
        os.link(one, second, follow_symlinks=False)
    except OSError:
        second = one
    os.replace(second, other)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
