"""overspill: training of models that do not fit in GPU memory, on one machine.

``wrap`` a model and its optimizer; weights, gradients and optimizer state then live on the GPU, in
host memory and on NVMe, and the training loop stays unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .io_engine.lazy import lazily

if TYPE_CHECKING:
    from . import errors as errors
    from . import io_engine as io_engine
    from . import optim as optim
    from .api import materialized, named_weights, plan, resume, unwrap, wrap
    from .config import OffloadConfig
    from .engine_handle import OffloadedInference
    from .errors import BudgetError, CorruptionError, IoError, OffloadError
    from .facts.machine import Machine
    from .facts.rates import Rates
    from .facts.stats import MemoryStats, Stats
    from .facts.tier import Tier
    from .integrations import offloading
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
    "OffloadedInference",
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
    "offloading",
    "plan",
    "resume",
    "unwrap",
    "wrap",
]

# Imported on first access: ``overspill inspect`` does not have to import torch.
_FROM = {
    "api": ("materialized", "named_weights", "plan", "resume", "unwrap", "wrap"),
    "config": ("OffloadConfig",),
    "errors": ("BudgetError", "CorruptionError", "IoError", "OffloadError"),
    "facts.machine": ("Machine",),
    "facts.rates": ("Rates",),
    "facts.stats": ("MemoryStats", "Stats"),
    "facts.tier": ("Tier",),
    "engine_handle": ("OffloadedInference",),
    "integrations": ("offloading",),
    "optimizer": ("OffloadedOptimizer", "accumulate", "ema"),
    "planning.plan": ("Plan",),
    "state.initial": ("empty_init",),
}
_MODULES = ("errors", "io_engine", "optim")

__getattr__, __dir__ = lazily(globals(), _FROM, _MODULES)
