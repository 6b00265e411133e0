"""Files from which weights are read in place, and their description in a store."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import StoreError
from ..io_engine.file_ranges import FilePart, FileRanges, FileState, RangeReader, state_of


@dataclass(frozen=True)
class Sources:
    """The files from which weights are read in place.

    Attributes:
        ranges: by unit, the positions of its weights in the files and in its slot.
        states: the states of the files when ``ranges`` were determined; ``None``: use their current
            states.
        root: the path that the user gave as ``weights``, if it was one.
    """

    files: tuple[Path, ...] = ()
    ranges: Mapping[int, FileRanges] = field(default_factory=dict)
    states: tuple[FileState, ...] | None = None
    root: Path | None = None


NO_SOURCES = Sources()


def describe_sources(sources: Sources, in_place: Iterable[int]) -> dict[str, Any]:
    """Return the files and the ranges of the units that are read in place, as JSON values."""
    return {
        "root": None if sources.root is None else str(sources.root),
        "files": [
            {"path": str(path), "nbytes": state.nbytes, "mtime_ns": state.mtime_ns}
            for path, state in zip(sources.files, _states(sources), strict=True)
        ],
        "units": {
            str(unit): {
                "nbytes": sources.ranges[unit].nbytes,
                "parts": [[p.file, p.offset, p.nbytes, p.to] for p in sources.ranges[unit].parts],
            }
            for unit in sorted(in_place)
        },
    }


class SourceReader:
    """Reads whole units from the files, before an engine does.  Close it."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._reader: RangeReader | None = None

    def read(self, unit: int, buffer: NDArray[np.uint8]) -> None:
        """Read a unit.

        Raises:
            IoError: a file cannot be read.
            CorruptionError: a file was written to since its layout was read.
        """
        if self._reader is None:
            self._reader = RangeReader(self._sources.files, was=self._sources.states)
        self._reader.read(self._sources.ranges[unit], buffer).wait()

    def close(self) -> None:
        """Close the files and end the threads."""
        if self._reader is not None:
            self._reader.close()


def _states(sources: Sources) -> tuple[FileState, ...]:
    return tuple(map(state_of, sources.files)) if sources.states is None else sources.states


def described_sources(
    description: Mapping[str, Any], digests: Container[int],
    moved: Path | Mapping[str, Path] | None = None,
) -> Sources:  # fmt: skip
    """Return the sources that ``describe_sources`` has put into a store's description.

    Args:
        digests: the units for which a commit has a checksum.  Other units cannot be verified if
            their files were written to.
        moved: the folder that contains the files now, or the only file, or a dict of these.

    Raises:
        OffloadError: a file no longer exists, has another length, or may have other contents.
    """
    kept = description.get("sources")
    if not kept or not kept["units"]:
        return NO_SOURCES
    paths = [Path(file["path"]) for file in kept["files"]]
    root = Path(kept["root"]) if kept.get("root") else None  # older stores have none
    if isinstance(moved, Mapping):
        paths, root = _moved_by_model(description, moved), None
    elif moved is not None:
        paths, root = _moved(paths, moved, root), moved.absolute()
    for path, file in zip(paths, kept["files"], strict=True):
        found = path.stat().st_size if path.is_file() else None
        if found != file["nbytes"]:
            now = "is not there" if found is None else f"has {found} bytes"
            raise StoreError(
                f"{path} {now}, and the store has weights that are read from there, of "
                f"{file['nbytes']} bytes; put it back, or say with weights= (--weights) which "
                "folder has the same files now"
            )
    ranges = {
        int(unit): FileRanges(
            int(unit), each["nbytes"], tuple(FilePart(*part) for part in each["parts"])
        )
        for unit, each in kept["units"].items()
    }
    unseen = {part.file for u, each in ranges.items() if u not in digests for part in each.parts}
    for number in sorted(unseen):
        if state_of(paths[number]).mtime_ns != kept["files"][number]["mtime_ns"]:
            raise StoreError(
                f"{paths[number]} was written to since the store was made, and the last commit was "
                "before all weights in it were first read, so it is not known whether they are the "
                "same; restore the file with its time (cp -p), or wrap the model again"
            )
    return Sources(tuple(paths), ranges, root=root)


def _moved_by_model(description: Mapping[str, Any], moved: Mapping[str, Path]) -> list[Path]:
    """Return where a store's files are now, given the folder or the file of some of the models."""
    kept = description["sources"]
    paths = [Path(file["path"]) for file in kept["files"]]
    by_model: dict[str, set[int]] = {}
    for unit, each in kept["units"].items():
        names = [p["name"] for c in description["units"][int(unit)]["chunks"] for p in c["params"]]
        by_model.setdefault(names[0].partition(".")[0], set()).update(
            part[0] for part in each["parts"]
        )
    for model, place in moved.items():
        numbers = by_model.get(model, set())
        for number, path in zip(numbers, _moved([paths[n] for n in numbers], place), strict=True):
            paths[number] = path
    return paths


def _moved(paths: Sequence[Path], place: Path, root: Path | None = None) -> list[Path]:
    """Return the paths of files that are in the folder ``place`` now, or are this one file.

    Args:
        root: the folder that they were in, or the only file; ``None``: it is not known.
    """
    if place.is_file() and len(paths) == 1:
        return [place.absolute()]
    if root is not None and root in paths:
        root = root.parent
    if root is None or not all(path.is_relative_to(root) for path in paths):
        root = Path(os.path.commonpath([path.parent for path in paths])) if paths else Path()
    return [place.absolute() / path.relative_to(root) for path in paths]
