"""overspill: training of models that do not fit in GPU memory, on one machine.

``wrap`` a model and its optimizer; weights, gradients and optimizer state then live on the GPU, in
host memory and on NVMe, and the training loop stays as it is.
"""

from __future__ import annotations

from .config import OffloadConfig, Tier
from .durable.resume import resume
from .errors import BudgetError, CorruptionError, IoError, OffloadError
from .loading import empty_init
from .model_state import materialized
from .observe.rates import Rates
from .observe.stats import Stats
from .optimizer import accumulate
from .schedule.plan import Plan
from .wrapping import plan, unwrap, wrap

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CorruptionError",
    "IoError",
    "OffloadConfig",
    "OffloadError",
    "Plan",
    "Rates",
    "Stats",
    "Tier",
    "accumulate",
    "empty_init",
    "materialized",
    "plan",
    "resume",
    "unwrap",
    "wrap",
]
