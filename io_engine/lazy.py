"""Names of a package that are imported when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazily(
    space: dict[str, Any], names: Mapping[str, Sequence[str]], modules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__``.

    Args:
        space: its ``globals()``, where a name stays once it was imported.
        names: by module of it, the names that come from there.
        modules: that are asked for by their own names.
    """
    package = space["__name__"]

    def get(name: str) -> Any:
        if name in modules:
            return import_module(f".{name}", package)
        for module, found in names.items():
            if name in found:
                value = space[name] = getattr(import_module(f".{module}", package), name)
                return value
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def listed() -> list[str]:
        return sorted({*space, *(n for found in names.values() for n in found), *modules})

    return get, listed
