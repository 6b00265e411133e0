"""overspill: training of models that do not fit in GPU memory, on one machine.

``wrap`` a model and its optimizer; weights, gradients and optimizer state then live on the GPU, in
host memory and on NVMe, and the training loop stays as it is.
"""

from __future__ import annotations

from .api import materialized, named_weights, plan, resume, unwrap, wrap
from .config import OffloadConfig
from .errors import BudgetError, CorruptionError, IoError, OffloadError
from .facts.machine import Machine
from .facts.rates import Rates
from .facts.stats import MemoryStats, Stats
from .facts.tier import Tier
from .optimizer import OffloadedOptimizer, accumulate, ema
from .planning.plan import Plan
from .state.initial import empty_init

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CorruptionError",
    "IoError",
    "Machine",
    "MemoryStats",
    "OffloadConfig",
    "OffloadError",
    "OffloadedOptimizer",
    "Plan",
    "Rates",
    "Stats",
    "Tier",
    "accumulate",
    "ema",
    "empty_init",
    "materialized",
    "named_weights",
    "plan",
    "resume",
    "unwrap",
    "wrap",
]
