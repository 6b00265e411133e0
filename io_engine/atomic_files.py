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
# reader opens first (the entries) are removed first and placed last; see `replacing_folder`. Before
# the first file is replaced, the draft is renamed to `NAME.HEX.complete`. Files are placed as hard
# links, so the draft stays complete. If merging fails or the process is killed, the draft remains
# until the user removes it. Without hard links files are moved, and only files not placed yet
# remain in the draft.
#
# A killed writer leaves its draft behind, without the lock. The next writer of the same target
# removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from .errors import IoError, OffloadError, refused
from .folders import Named, exchange, has_links, merge, others, sync_file, sync_folder, sync_tree
from .pins import is_current

log = logging.getLogger("overspill")

FULL_BYTES = 1 << 20  # a disk with less is full
LONGEST_STEM = 200  # bytes of a name that fit in a draft's, of the 255 that Linux allows
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a draft path to write one file to; put the file in the place of ``path`` at the end.

    If the block raises, or the process dies, ``path`` stays as it was. The permissions of a file
    that is replaced are kept; a symbolic link is replaced, not followed.

    Raises:
        IoError: the file cannot be written: its folder does not exist, the disk is full, or
            ``path`` is a folder, a device or a pipe.
    """
    target = _target_of(path)
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
    target = _target_of(path)
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
    target = _target_of(path)
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
        self._kept = ""  # what to say of a draft that must stay

    def __enter__(self) -> _Draft:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        named = self._named(error)  # first, while the draft still fills the disk
        if not self._kept:
            shutil.rmtree(self._outer, ignore_errors=True)
        elif named is None:
            log.error("overspill: %s: interrupted; %s", self.target, self._kept)
        os.close(self._fd)
        if named is not None:
            raise named from error

    def _named(self, error: BaseException | None) -> IoError | None:
        """Return an error that names the target, or ``None`` if ``error`` needs no other."""
        if self._kept:
            return IoError(
                f"{self.target}: cannot replace its files ({error}); {self._kept}",
                path=str(self.target), errno=getattr(error, "errno", None) or errno.EIO,
            ) if isinstance(error, Exception) else None  # fmt: skip
        if isinstance(error, OSError):
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
            return None  # the draft folder was removed
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
        done = False
        while not done:
            with _locked(self.target) as exists:
                if exists:
                    self._replace_folder(is_part, is_entry)
                done = exists or self._rename_folder()
        sync_folder(self.target.parent)

    def _rename_folder(self) -> bool:
        """Rename the draft to the target; ``False``: another writer has just created that."""
        try:
            os.rename(self.path, self.target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        return True

    def _replace_folder(self, is_part: Named, is_entry: Named) -> None:
        """Put the draft in the place of a folder that exists: whole, or file by file."""
        kept = f"{self._outer.name[1:].removesuffix('.part')}.complete"
        stays = _is_fixed(self.target) or others(self.path, self.target, is_part)
        if not stays and exchange(self.path, self.target):
            self._return_others(is_part, kept)
            return
        abandoned = self._outer.name
        self._rename_to(kept)
        links = has_links(self._outer)
        left = "a complete set of files is" if links else "the remaining files are"
        self._kept = (
            f"it is incomplete, and {left} in {self.path}: move them to {self.target}, or write it "
            "again"
        )
        merge(self.path, self.target, is_part, is_entry, links=links)
        self._rename_to(abandoned)  # so that, half removed, it is not taken for complete
        self._kept = ""

    def _return_others(self, is_part: Named, kept: str) -> None:
        """Move files that others created just before the exchange back to the target."""
        try:
            for name in others(self.target, self.path, is_part):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self.path / name, self.target / name)
        except BaseException:
            self._rename_to(kept)
            self._kept = (
                f"the new files are there, and files that others had created meanwhile are in "
                f"{self.path}: move them back"
            )
            raise

    def _rename_to(self, name: str) -> None:
        renamed = self._outer.with_name(name)
        os.rename(self._outer, renamed)
        self._outer, self.path = renamed, renamed / self.target.name
        sync_folder(renamed.parent)


def _target_of(path: str | os.PathLike[str]) -> Path:
    target = Path(os.path.abspath(path))
    try:
        os.lstat(target)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # a name that is too long, a loop of links
        raise refused(target, "cannot write", error) from error
    return target


def _stem(name: str) -> str:
    """The name, or a digest of one that would make the draft's name too long."""
    encoded = os.fsencode(name)
    return name if len(encoded) <= LONGEST_STEM else sha256(encoded).hexdigest()


def _locked_folder(place: Path, stem: str) -> tuple[Path, int]:
    """Create a folder under a unique name, and lock it."""
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
def _locked(folder: Path) -> Iterator[bool]:
    """Let one process at a time replace the files of a folder; give whether it exists."""
    while True:
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            yield False
            return
        except OSError as error:
            raise refused(folder, "cannot write", error) from error
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_EX)
            if is_current(fd, Path(os.path.realpath(folder))):
                yield True
                return
            # another writer exchanged the folder during the wait
        finally:
            os.close(fd)


def _require_file(target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        raise IoError(
            f"{target}: is a folder; name a file in it", path=str(target), errno=errno.EISDIR
        )
    if _is_special(target):
        raise IoError(
            f"{target}: is not a regular file; name another one",
            path=str(target),
            errno=errno.EINVAL,
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
    """Whether a folder must not be renamed: it is a link, a file system is mounted there, or it
    contains the current directory, which an exchange would remove."""
    if not folder.is_dir():
        return False
    if folder.is_symlink() or os.path.ismount(folder):
        return True
    try:
        return Path.cwd().is_relative_to(os.path.realpath(folder))
    except OSError:
        return False  # the current directory was removed


def _same_device(one: Path, other: Path) -> bool:
    try:
        return os.stat(one).st_dev == os.stat(other).st_dev
    except OSError:
        return False
