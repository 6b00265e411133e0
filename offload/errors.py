"""Errors of the engine, which name the object, the tier, need and have, and a remedy."""

from __future__ import annotations

import logging
from collections.abc import Callable

from .io_engine.errors import (
    CorruptionError,
    HostMemoryError,
    IoError,
    LifecycleError,
    OffloadError,
    format_budget,
    format_bytes,
    format_distinct,
)

__all__ = [
    "ActivationError",
    "BackwardUpdateError",
    "BudgetError",
    "CorruptionError",
    "DeviceError",
    "ExportError",
    "GradientError",
    "HostMemoryError",
    "IoError",
    "LifecycleError",
    "ModelError",
    "OffloadError",
    "OptimizerStateError",
    "RankError",
    "ReportError",
    "StoreError",
    "WeightError",
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

    section = "memory-budgets"

    def __init__(
        self, what: str, tier: str, need_bytes: int, have_bytes: int, of_bytes: int, remedy: str
    ) -> None:
        self.what, self.tier, self.remedy = what, tier, remedy
        self.need_bytes, self.have_bytes, self.of_bytes = need_bytes, have_bytes, of_bytes
        need, have = format_distinct(need_bytes, have_bytes)
        of = have if of_bytes == have_bytes else format_bytes(of_bytes)
        super().__init__(f"{what} needs {need} of {tier} memory; {have} of {of} is free; {remedy}")

    def __reduce__(self) -> tuple[object, ...]:
        given = self.what, self.tier, self.need_bytes, self.have_bytes, self.of_bytes, self.remedy
        return type(self), given, self.__dict__


class ActivationError(OffloadError):
    """What autograd saved cannot be used, or a recomputation differs from the forward."""

    section = "activations"


class BackwardUpdateError(OffloadError):
    """``update="backward"`` has applied gradients that are needed once more."""

    section = "updates-in-backward"


class DeviceError(OffloadError):
    """The device is not there, or cannot be used."""

    section = "devices"


class ExportError(OffloadError):
    """An export cannot be written or read."""

    section = "exports"


class GradientError(OffloadError):
    """A gradient is not finite, or of a kind that the engine does not keep."""

    section = "gradients"


class ModelError(OffloadError):
    """A model, or a part of it, cannot be wrapped."""

    section = "models"


class OptimizerStateError(OffloadError):
    """The optimizer, its groups or its state were changed in a way that is not supported."""

    section = "optimizer-and-parameter-groups"


class RankError(OffloadError):
    """Ranks disagree, or do something that is for one rank."""

    section = "several-gpus"


class ReportError(OffloadError):
    """There is nothing to report, or a file of a run cannot be read."""

    section = "reports-and-traces"


class StoreError(OffloadError):
    """A store or a commit does not fit the model, or is not complete."""

    section = "stores-and-resuming"


class WeightError(OffloadError):
    """Weights were read, changed or replaced in a way that would be lost."""

    section = "weights"
