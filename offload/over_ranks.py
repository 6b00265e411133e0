"""Models that are spread over ranks; for other models, torch.distributed is not imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .errors import RankError
from .open_engines import engine_around
from .optimizer import OffloadedOptimizer, optimizer_of
from .paths import as_paths
from .planning.models import named_models
from .planning.plan import Plan
from .planning.stand_ins import StandInModel
from .plans import make_plan
from .ranks.stores import find_run

if TYPE_CHECKING:
    from .ranks.spread_optimizers import SpreadOptimizer

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def is_spread(model: nn.Module) -> bool:
    """Return whether a model is spread over ranks, without importing torch.distributed."""
    if "torch.distributed.tensor" not in sys.modules and not isinstance(
        model, nn.parallel.DistributedDataParallel
    ):
        return False
    from .ranks.sharding import is_spread as found

    return found(model)


def refuse_spread(model: nn.Module) -> None:
    """Raise if one of several models is spread over ranks.

    Raises:
        OffloadError: it is.
    """
    for name, each in named_models(model).items():
        if is_spread(each):
            raise RankError(
                f"model {name!r} is under FSDP2 or DDP, which is not possible in a dict of models; "
                "wrap it in a call of its own"
            )


def over_ranks_of(model: nn.Module) -> SpreadOptimizer | None:
    """Return what ``wrap`` returned for a model that is spread over ranks."""
    made = optimizer_of(model) if is_spread(model) else None
    if made is None:
        return None
    from .ranks.spread_optimizers import SpreadOptimizer

    assert isinstance(made, SpreadOptimizer)
    return made


def over_ranks_around(module: nn.Module) -> SpreadOptimizer | None:
    """Do as ``over_ranks_of``, for a model or a part of one."""
    made = over_ranks_of(module)
    engine = engine_around(module) if made is None else None
    if engine is not None and isinstance(engine.model, StandInModel):
        from .ranks.spread_optimizers import SpreadOptimizer

        assert isinstance(engine.made, SpreadOptimizer)
        made = engine.made
    return made


def resumed_of_ranks(
    model: nn.Module, path: Paths, optimizer: torch.optim.Optimizer | None, options: dict[str, Any]
) -> tuple[OffloadedOptimizer, Any] | None:
    """Resume a run of several ranks, or on several ranks; return ``None`` in all other cases."""
    folders = [each.absolute() for each in as_paths(path, "path")]
    if is_spread(model):
        from .ranks.resuming import resumed_shards

        return resumed_shards(model, folders, optimizer, options)
    if (run := find_run(folders)) is None or not run.ranks:
        return None
    from .ranks.resuming import resumed_whole

    return resumed_whole(model, run, folders, optimizer, options)


def plan_for(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, options: Mapping[str, Any],
    ranks: int, **how: Any,
) -> Plan:  # fmt: skip
    """Return a plan, of one rank if there are several; see ``make_plan`` and ``plan_of_rank``."""
    if ranks == 1 and not isinstance(ranks, bool):
        return make_plan(model, optimizer, options, **how)
    from .ranks.planned import plan_of_rank

    return plan_of_rank(model, optimizer, options, ranks, **how)
