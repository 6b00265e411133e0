"""The tiers of memory."""

from __future__ import annotations

import enum


class Tier(str, enum.Enum):
    """Where bytes live.  A ``str``, so ``optimizer.memory["host"]`` and ``[Tier.HOST]`` agree."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"
