"""Errors of the engine, which name the object, the tier, need and have, and a remedy."""

from __future__ import annotations

import logging
from collections.abc import Callable

from .io_engine.errors import (
    CorruptionError,
    IoError,
    OffloadError,
    format_budget,
    format_bytes,
    format_distinct,
)

__all__ = [
    "BudgetError",
    "CorruptionError",
    "IoError",
    "OffloadError",
    "clean_up",
    "format_budget",
    "format_bytes",
    "format_distinct",
]  # fmt: skip

log = logging.getLogger("overspill")


def clean_up(end: Callable[[], object], what: str, raised: BaseException | None) -> None:
    """Call ``end``; if an exception ``raised`` is propagating, log errors of ``end``.

    Otherwise they would replace that exception.
    """
    try:
        end()
    except Exception as error:
        if raised is None:
            raise
        log.error("overspill: after %s, %s failed: %s", type(raised).__name__, what, error)


class BudgetError(OffloadError):
    """A tier has too little memory for an object.

    Attributes: ``what`` (the object), ``tier`` (``"device"``, ``"host"``, ``"nvme"``),
    ``need_bytes``, ``have_bytes`` and ``remedy``.
    """

    def __init__(
        self, what: str, tier: str, need_bytes: int, have_bytes: int, of_bytes: int, remedy: str
    ) -> None:
        self.what, self.tier, self.remedy = what, tier, remedy
        self.need_bytes, self.have_bytes, self.of_bytes = need_bytes, have_bytes, of_bytes
        need, have = format_distinct(need_bytes, have_bytes)
        of = have if of_bytes == have_bytes else format_bytes(of_bytes)
        super().__init__(f"{what} needs {need} of {tier} memory; {have} of {of} is free; {remedy}")
