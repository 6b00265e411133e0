"""Every writer on a disk that is full; run as a program in a mount namespace of its own.

``python -m tests.durable.full_disk_cases FOLDER [NAME ...]`` mounts a small disk at FOLDER, writes
the first content, fills the disk, and has the second one written. The error must name the target,
what is free, and a remedy; the first content must be there still.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from overspill.errors import IoError, OffloadError
from tests.durable.writers import WRITERS, Writer, import_all

# These write something else first, which fails and raises its own error.
EARLIER = ("save", "bench io picture")
SILENT = ("calibration", "settings")  # caches: a warning, and no error


def fill(folder: Path) -> None:
    """Leave nothing."""
    system = os.statvfs(folder)
    with (folder / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, system.f_bavail * system.f_frsize)


def try_writer(name: str, writer: Writer, folder: Path) -> None:
    os.chdir(folder)
    writer.prepare(1)()
    before = writer.read(folder) if writer.again else None
    if not writer.again:
        subprocess.run(["rm", "-rf", writer.target], check=True)
    write: Any = writer.prepare(2)
    fill(folder)
    try:
        write()
    except OffloadError as error:
        assert name not in SILENT
        words = str(error)
        assert isinstance(error, IoError) or "make room" in words, words
        assert writer.target in words and ".part" not in words, words
        full = " are free " in words and "delete something there, or choose another" in words
        assert full or "make room" in words, words
        print(f"{name}: {words}", flush=True)
    except (ValueError, OSError) as error:
        assert name in ("job", "rates") and writer.target in str(error), error
        print(f"{name}: {error}", flush=True)
    else:
        assert name in SILENT, "nothing was raised"
        print(f"{name}: silent", flush=True)
    (folder / "filler").unlink()
    assert writer.read(folder) == before, "what was there has changed"
    left = [each for each in folder.rglob("*") if each.name.endswith(".part")]
    assert not left, left


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    import_all()
    for name in names or [each for each in WRITERS if each not in EARLIER]:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "none", str(folder)], check=True)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                try_writer(name, WRITERS[name], folder)
                code = 0
            except BaseException as error:
                import traceback

                traceback.print_exception(error)
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, name
        subprocess.run(["umount", "-l", str(folder)], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2:])
