"""Lists of hook handles on a user's model: all hooks are installed, or none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Removable(Protocol):
    """Hooks, or another resource, that ``remove`` releases."""

    def remove(self) -> None: ...


def remove_all(handles: list[Any]) -> None:
    """Remove hooks, the last one first."""
    while handles:
        handles.pop().remove()


@contextmanager
def all_or_none(handles: list[Any]) -> Iterator[None]:
    """Remove the hooks in ``handles``, to which the block adds, if the block raises."""
    try:
        yield
    except BaseException:
        remove_all(handles)
        raise
