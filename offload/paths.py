"""Validation of paths that users pass."""

from __future__ import annotations

import os
from pathlib import Path


def as_path(value: object, name: str) -> Path:
    """Return a path that was given as ``name``.

    Raises:
        TypeError: it is neither a string nor a path.
        ValueError: it is an empty string, which would silently mean the current directory.
    """
    if not isinstance(value, (str, os.PathLike)) or isinstance(os.fspath(value), bytes):
        raise TypeError(f"{name} must be a path (str or pathlib.Path), got {value!r}")
    if not os.fspath(value):
        raise ValueError(f"{name} is an empty path; write '.' for the current directory")
    return Path(value)


def as_paths(value: object, name: str) -> tuple[Path, ...]:
    """Return one or several paths that were given as ``name``.

    Raises:
        TypeError: it is neither a path nor a list of paths.
        ValueError: the list, or a path in it, is empty.
    """
    if not isinstance(value, (list, tuple)):
        return (as_path(value, name),)
    if not value:
        raise ValueError(f"{name} is an empty list; give at least one directory")
    return tuple(as_path(each, name) for each in value)
