"""How to move bytes to and from a directory: what is asked for, found best, or else usual.

What a bench found best is kept for the next time, under ``$OVERSPILL_CACHE``, else
``~/.cache/overspill``, for the file system that the directory is on; delete the file to forget it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .atomic_files import make_folder, write_text
from .backend import DEFAULT_BLOCK_BYTES, DEPTHS, BackendFactory, Tuning, choose
from .errors import IoError
from .types import SECTOR_BYTES

MOST_BLOCK_BYTES = 1 << 30
MOST_DEPTH = 1024

log = logging.getLogger("overspill.io_engine")


def directory_list(
    directories: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
) -> list[Path]:
    """The directories of a store, absolute, each once.

    Raises:
        ValueError: there is none, or one is named twice.
    """
    if isinstance(directories, (str, os.PathLike)):
        directories = [directories]
    paths = [Path(directory).absolute() for directory in directories]
    if not paths:
        raise ValueError("the I/O engine needs at least one directory")
    if len({path.resolve() for path in paths}) != len(paths):
        raise ValueError(f"a directory is named twice: {', '.join(map(str, paths))}")
    return paths


def _about(directory: Path) -> dict[str, object]:
    """What the setting holds for: this machine and this file system."""
    return {"host": socket.gethostname(), "device": os.stat(directory).st_dev}


def settings_path(directory: Path) -> Path:
    """Where the setting for ``directory`` is kept, whether there is one or not."""
    digest = hashlib.sha256(json.dumps(_about(directory), sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("OVERSPILL_CACHE") or Path.home() / ".cache" / "overspill")
    return folder / f"io-{digest}.json"


def remember(directory: Path, tuning: Tuning) -> Path | None:
    """Keeps ``tuning`` for ``directory``; ``None`` (and a warning) if it cannot be kept."""
    path = settings_path(directory)
    content = {"about": _about(directory), "tuning": asdict(tuning)}
    try:
        make_folder(path.parent)
        write_text(path, json.dumps(content, indent=1) + "\n")
    except IoError as error:
        log.warning("cannot keep the best I/O setting: %s", error)
        return None
    return path


def remembered(directory: Path) -> Tuning | None:
    """The setting kept for ``directory``, if there is a sound one."""
    try:
        path = settings_path(directory)
        kept = json.loads(path.read_text(encoding="utf-8"))
        tuning = Tuning(**kept["tuning"])
        sound = (
            tuning.backend in DEPTHS
            and tuning.block_bytes % SECTOR_BYTES == 0
            and 0 < tuning.block_bytes <= MOST_BLOCK_BYTES
            and 1 <= tuning.queue_depth <= MOST_DEPTH
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("cannot use the kept I/O setting for %s: %s", directory, error)
        return None
    if not sound:
        log.warning("%s holds no sound I/O setting; delete it", path)
        return None
    return tuning


def choose_tuning(
    directories: Sequence[Path],
    backend: str | BackendFactory,
    block_bytes: int | None,
    queue_depth: int | None,
) -> Tuning:
    """The setting for an engine over ``directories``; what is ``None`` or ``"auto"`` is chosen.

    Raises:
        ValueError: a wish makes no sense.
        RuntimeError: the backend wished for cannot run here.
    """
    kept = _kept_for_all(directories) if backend == "auto" else None
    if kept is not None:
        name, why = kept.backend, "found best by a bench of this directory"
    elif isinstance(backend, str):
        name, why = choose(backend)
    else:
        name, why = "custom", "handed in"
    log.info("disk transfers by %s: %s", name, why)
    usual = kept or Tuning(name, DEFAULT_BLOCK_BYTES, DEPTHS.get(name, 4))
    block = usual.block_bytes if block_bytes is None else block_bytes
    if block <= 0 or block % SECTOR_BYTES or block > MOST_BLOCK_BYTES:
        raise ValueError(
            f"block_bytes must be a multiple of {SECTOR_BYTES} up to 1 GiB, not {block}"
        )
    depth = usual.queue_depth if queue_depth is None else queue_depth
    if not 1 <= depth <= MOST_DEPTH:
        raise ValueError(f"queue_depth must be 1 to {MOST_DEPTH}, not {depth}")
    return Tuning(name, block, depth)


def _kept_for_all(directories: Sequence[Path]) -> Tuning | None:
    """What is kept for every one of them alike, and can run here."""
    found = {remembered(directory) for directory in directories}
    kept = found.pop() if len(found) == 1 else None
    if kept is None:
        return None
    try:
        choose(kept.backend)
    except RuntimeError:
        return None
    return kept
