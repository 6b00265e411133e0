"""Hooks that stand on a user's model: all of them, or none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Removable(Protocol):
    """Hooks that can be taken away, or what else ends so."""

    def remove(self) -> None: ...


def remove_all(handles: list[Any]) -> None:
    """Takes hooks away, the last one first."""
    while handles:
        handles.pop().remove()


@contextmanager
def all_or_none(handles: list[Any]) -> Iterator[None]:
    """If the block, which adds to ``handles``, raises, their hooks are taken away."""
    try:
        yield
    except BaseException:
        remove_all(handles)
        raise
