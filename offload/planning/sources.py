"""Files that weights are read from in place, and what a store says of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import OffloadError
from ..io_engine.ranges import FilePart, FileRanges


@dataclass(frozen=True)
class Sources:
    """``ranges``: by unit, where its weights lie in the files, and in its slot."""

    files: tuple[Path, ...] = ()
    ranges: Mapping[int, FileRanges] = field(default_factory=dict)


NO_SOURCES = Sources()


def describe_sources(sources: Sources, in_place: Iterable[int]) -> dict[str, Any]:
    """As plain JSON values, for those units that are read in place."""
    return {
        "files": [{"path": str(p), "nbytes": p.stat().st_size} for p in sources.files],
        "units": {
            str(unit): {
                "nbytes": sources.ranges[unit].nbytes,
                "parts": [[p.file, p.offset, p.nbytes, p.to] for p in sources.ranges[unit].parts],
            }
            for unit in sorted(in_place)
        },
    }


def described_sources(description: Mapping[str, Any], moved: Path | None = None) -> Sources:
    """What ``describe_sources`` has put into a store's description.

    ``moved``: the folder that has the files now, or the one file.

    Raises:
        OffloadError: a file is not there any more, or has another length.
    """
    kept = description.get("sources")
    if not kept or not kept["units"]:
        return NO_SOURCES
    paths = [Path(file["path"]) for file in kept["files"]]
    if moved is not None and moved.is_file() and len(paths) == 1:
        paths = [moved.absolute()]
    elif moved is not None:
        root = os.path.commonpath([path.parent for path in paths])
        paths = [moved.absolute() / path.relative_to(root) for path in paths]
    for path, file in zip(paths, kept["files"], strict=True):
        found = path.stat().st_size if path.is_file() else None
        if found != file["nbytes"]:
            now = "is not there" if found is None else f"has {found} bytes"
            raise OffloadError(
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
    return Sources(tuple(paths), ranges)
