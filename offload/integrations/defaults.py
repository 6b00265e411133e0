"""Options for trainers that a library creates by itself; see ``overspill.offloading``."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

from ..config import OffloadConfig


class _Defaults(NamedTuple):
    options: dict[str, Any]
    outer: _Defaults | None


_defaults: ContextVar[_Defaults | None] = ContextVar("overspill.offloading", default=None)


def default_options() -> dict[str, Any] | None:
    """Return the options of all blocks that the caller is in; ``None`` outside of blocks."""
    inner = _defaults.get()
    return None if inner is None else inner.options


class OptionsBlock:
    """A block whose options are added to those of the blocks around it.

    It can be entered again, and by several threads and tasks at once.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)

    def __enter__(self) -> None:
        """
        Raises:
            TypeError: an option is unknown.
            ValueError: an option has an invalid value.
        """
        whole = {**(default_options() or {}), **self._options}
        config = OffloadConfig.from_options(whole)
        # As they are parsed: an iterator can be read only once.
        parsed = {name: getattr(config, name) for name in whole}
        self._options = {name: parsed[name] for name in self._options}
        _defaults.set(_Defaults(parsed, _defaults.get()))

    def __exit__(self, *_: object) -> None:
        inner = _defaults.get()
        _defaults.set(None if inner is None else inner.outer)
