"""The tiers of memory."""

from __future__ import annotations

import enum


class Tier(str, enum.Enum):
    """Where bytes live.  A ``str``, so ``optimizer.memory["host"]`` and ``[Tier.HOST]`` agree."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"

    __hash__ = str.__hash__  # Enum's own is slow, and is not that of the text
