"""Runs everything that makes, cuts, replaces or removes files of a store; run as a program.

``python file_cases.py FOLDER`` prints, as JSON, a list of [file, what, lock]: names as in the table
of docs/durability.md, and which lock the process held at that instant.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import overspill
from overspill.durable.export import export_store
from overspill.durable.inspect import repair_store
from overspill.io_engine import manifest
from overspill.io_engine.ownership import LOCK_NAME
from overspill.io_engine.pins import PIN_NAME
from tests.resumed import adamw, build, options, train

KINDS = {
    r"overspill\.lock": "overspill.lock",
    r"overspill\.store": "overspill.store",
    r"overspill\.store\.\d+\.\d+": "overspill.store.PID.TIME",
    r"overspill\.manifest": "overspill.manifest",
    r"overspill\.manifest\.new": "overspill.manifest.new",
    r"\.out\.[0-9a-f]{32}\.part": ".OUT.HEX.part",
    r"out\.[0-9a-f]{32}\.complete": "OUT.HEX.complete",
    r"out": "OUT",
}
DRAFT = re.compile(r"\.out\.\w{32}\.part|out\.\w{32}\.complete")


class Watch:
    """An audit hook: sees every call of this process that changes a directory or a length."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen, self.deaf = folder, set[tuple[str, str, str]](), False
        self.stores: list[list[Path]] = []  # directories that are one store, as far as is known

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.deaf:
            return
        self.deaf = True
        try:
            self._see(event, args)
        finally:
            self.deaf = False

    def _see(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if isinstance(path, (str, bytes, os.PathLike)) and flags & (os.O_CREAT | os.O_TRUNC):
                place = Path(os.fsdecode(path))
                if flags & os.O_TMPFILE != os.O_TMPFILE and not os.path.lexists(place):
                    self._note(place, "create")
                elif flags & os.O_TRUNC:
                    self._note(place, "cut")
        elif event == "os.mkdir" and not os.path.lexists(args[0]):
            self._note(Path(args[0]), "create")
        elif event == "os.truncate":
            fd, nbytes = args
            place = Path(os.readlink(f"/proc/self/fd/{fd}") if isinstance(fd, int) else fd)
            if place.exists() and place.stat().st_size >= nbytes:
                self._note(place, "cut")
        elif event in ("os.remove", "os.rmdir"):
            path, folder = args
            if folder >= 0:
                path = Path(os.readlink(f"/proc/self/fd/{folder}")) / path
            if os.path.lexists(path):
                self._note(Path(path), "remove")
        elif event == "os.rename":
            one, other = Path(args[0]), Path(args[1])
            self._note(other, "rename" if DRAFT.fullmatch(other.name) else "replace", one)
        elif event == "os.link" and _drafts(Path(args[1])):
            pass  # in a draft
        elif event in ("os.link", "os.symlink"):
            raise AssertionError(f"{event} {args}: nothing links")

    def _note(self, path: Path, what: str, source: Path | None = None) -> None:
        path = path.absolute()
        if self.folder not in path.parents:
            return
        if drafts := _drafts(path):  # a file in a draft: the folder is what the table speaks of
            assert self._locked(drafts[0]), f"{path}: its draft is not locked"
            return
        if source is not None and _drafts(source) and path.parent.name == "out":
            path = path.parent  # one of its files
        name = next((k for p, k in KINDS.items() if re.fullmatch(p, path.name)), path.name)
        self.seen.add((name, what, self._lock_of(path, source)))

    def _lock_of(self, path: Path, source: Path | None) -> str:
        if source is not None and any(map(self._locked, (source, *_drafts(source)))):
            return "the draft's own"
        if path.is_dir() and self._locked(path):
            return "the folder's own"
        if path.name in (LOCK_NAME, PIN_NAME):
            return "this one" if self._locked(path) else "none yet"
        if not self._locked(path.parent / LOCK_NAME):
            return "none: a unique name"
        together = next((each for each in self.stores if path.parent in each), [path.parent])
        if all(self._locked(place / LOCK_NAME) for place in together):
            return "all of the store's"
        return "its directory's"

    def _locked(self, path: Path) -> bool:
        """Whether somebody, who can only be this process, has the lock."""
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False


def _drafts(path: Path) -> list[Path]:
    """The drafts that a file is in."""
    return [each for each in path.parents if DRAFT.fullmatch(each.name)]


def killed(body: Callable[[], None]) -> None:
    """Runs it in a child that dies at its end, with all that it has open."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def cases(folder: Path, watch: Watch) -> None:
    a, b, c, d, e = (folder / name for name in "abcde")
    watch.stores = [[a, b], [c], [d]]
    manifest.LARGEST_LOG_BYTES = 0
    begin = {key: value for key, value in options("").items() if key != "nvme"}

    def begun(*places: Path, **more: Any) -> tuple[Any, Any]:
        model = build()
        return model, overspill.wrap(model, adamw(model), nvme=list(places), **begin, **more)

    def die_untrained() -> None:
        begun(a, b)

    def die_amid_a_record() -> None:
        with (a / manifest.MANIFEST_NAME).open("ab") as log:
            log.write(b"\x01" * 5000)
        (a / f"{manifest.MANIFEST_NAME}.new").write_bytes(b"half")

    killed(die_untrained)
    begun(a, b)[1].close()  # takes over what is left, and leaves nothing
    model, optimizer = begun(a, b)
    train(model, optimizer, 12)  # the log is written anew on the way
    optimizer.close()
    killed(die_amid_a_record)
    model = build()
    optimizer, _ = overspill.resume(model, b, adamw(model), **begin)
    train(model, optimizer, 22)
    optimizer.close()
    watch.stores = [[a, b], [c, d]]
    model = build()
    optimizer, _ = overspill.resume(model, a, adamw(model), nvme=[c, d], **begin)
    train(model, optimizer, 25)
    optimizer.close()
    found = manifest.read_manifest(c)
    assert found is not None
    commits = [each for each in found.log.records if each.kind == manifest.RecordKind.COMMIT]
    with (c / manifest.MANIFEST_NAME).open("r+b") as log:
        log.seek(commits[-2].offset)
        log.write(b"\x01" * 64)
    repair_store(c)

    def die_exporting() -> None:
        watch.deaf = True
        draft = folder / f".out.{'0' * 32}.part" / "out"
        draft.mkdir(parents=True)
        (draft / "model.safetensors").write_bytes(b"half")

    killed(die_exporting)
    export_store(a, folder / "out")
    before = Path.cwd()
    os.chdir(folder / "here" / "out")  # it cannot be exchanged
    export_store(a, Path("."))
    os.chdir(before)
    assert (folder / "here" / "out" / "model.safetensors").exists()
    whole, os.fsync = os.fsync, refuse
    with contextlib.suppress(OSError, overspill.OffloadError):
        export_store(a, folder / "deeper" / "out")
    os.fsync = whole
    real, os.open = os.open, no_nameless(os.open)
    begun(e, durable=False)[1].close()
    os.open = real
    assert not any(e.iterdir())


def refuse(fd: int) -> None:
    raise OSError(errno.EIO, "the disk is gone")


def no_nameless(real: Callable[..., int]) -> Any:
    """``os.open`` as on a file system that has no nameless files."""

    def opened(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no nameless files")
        return real(path, flags, *more, **named)

    return opened


def main(folder: Path) -> None:
    for name in ("a", "b", "c", "d", "e", "deeper", "here/out"):
        (folder / name).mkdir(parents=True)
    watch = Watch(folder.absolute())
    sys.addaudithook(watch)
    cases(folder.absolute(), watch)
    print(json.dumps(sorted(watch.seen)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
