"""Folders of small files, for tests."""

from __future__ import annotations

from pathlib import Path


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def fill(folder: Path, value: str, *files: str) -> None:
    """Write files that contain ``value``."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(value)
