"""Options for trainers that a library creates by itself; see ``overspill.offloading``."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar, Token
from typing import Any

from ..config import OffloadConfig

_defaults: ContextVar[dict[str, Any] | None] = ContextVar("overspill.offloading", default=None)


def default_options() -> dict[str, Any] | None:
    """Return the options of all blocks that the caller is in; ``None`` outside of blocks."""
    return _defaults.get()


class OptionsBlock:
    """A block whose options replace those of the blocks around it."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """
        Raises:
            TypeError: an option is unknown.
            ValueError: an option has an invalid value.
        """
        self._options = {**(default_options() or {}), **options}
        OffloadConfig.from_options(self._options)
        self._tokens: list[Token[dict[str, Any] | None]] = []

    def __enter__(self) -> None:
        self._tokens.append(_defaults.set(self._options))

    def __exit__(self, *_: object) -> None:
        _defaults.reset(self._tokens.pop())
