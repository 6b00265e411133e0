"""What a model could be trained with on a machine: recipes, each with the budgets as they are and
with the least host memory that is enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from ..facts.machine import Machine
from ..facts.tier import Tier
from ..planning.plan import Plan
from ..planning.products import set_sequence
from .gains import Make, planner
from .shapes import SHAPES, plan_model, quantised_by
from .skeletons import add_lora

LEAST = 64 << 20  # bytes, where the search for the least budget begins
TRIES = 24
LORA_RANK = 16


@dataclass(frozen=True)
class Recipe:
    """A way to train: by name, with these options of ``wrap`` and LoRA of this rank, if any."""

    name: str
    options: Mapping[str, Any]
    lora_rank: int | None = None


@dataclass(frozen=True)
class Choice:
    """A way to train, under the budgets that are given, or with the least host memory."""

    recipe: Recipe
    plan: Plan
    least: bool = False


def recipes(lora_rank: int = LORA_RANK, name: str | None = None) -> list[Recipe]:
    """What is worth a look, from all parameters to the least that is trained.

    Args:
        name: the model; if its files are quantised, LoRA over them as they are is a recipe.
    """
    none = MappingProxyType[str, Any]({})
    lora = f"LoRA, rank {lora_rank}"
    method = None if name is None else quantised_by(name)
    over_files = Recipe(f"{lora}, base in {method} files", {"weights": name}, lora_rank)
    return [
        Recipe("all, fp32 moments", none),
        Recipe("all, int8 moments", {"moments": "int8"}),
        *([Recipe(lora, none, lora_rank)] if method is None else [over_files]),
        Recipe(f"{lora}, base in int8", {"frozen": "int8"}, lora_rank),
        Recipe(f"{lora}, base in nf4", {"frozen": "nf4"}, lora_rank),
    ]


def model_for(
    name: str, lora_rank: int | None, frozen: str | None = None, seq: int | None = None
) -> nn.Module:
    """The model of that name for a plan, its weights frozen beside LoRA, where a rank is given.

    Args:
        seq: tokens of a sequence, to count attention scores; ``None``: they are not counted.

    Raises:
        ValueError, OffloadError: as for ``plan_model``; no place for LoRA in it; a ``frozen``
            format where all is trained.
    """
    if frozen is not None and lora_rank is None:
        raise ValueError(f"frozen={frozen!r}: nothing is frozen; --lora-rank trains LoRA alone")
    model = plan_model(name)
    if lora_rank is not None:
        add_lora(model, lora_rank)
    if seq is not None:
        set_sequence(model, seq)
    return model


def choices(
    name: str, options: Mapping[str, Any], machine: Machine | None, tokens: int,
    lora_rank: int = LORA_RANK, seq: int | None = None, ranks: int = 1,
) -> list[Choice]:  # fmt: skip
    """Each way with the budgets that ``options`` give, and with the least host memory.

    Args:
        seq: see ``model_for``.
        ranks: see ``plan``.

    Raises:
        ValueError, BudgetError: as ``plan`` does.
    """
    found: list[Choice] = []
    for recipe in recipes(lora_rank, name):
        model = model_for(name, recipe.lora_rank, seq=seq)
        make = planner(model, {**options, **recipe.options}, ranks=ranks)
        quick = {"every_update": False}
        whole = make(machine, tokens, quick)
        found.append(Choice(recipe, whole))
        least = least_budget(make, machine, tokens, Tier.HOST) if whole.fits else None
        if least is not None:
            found.append(Choice(recipe, least, least=True))
    return found


def least_budget(
    make: Make, machine: Machine | None, tokens: int, tier: Tier,
    others: Mapping[str, Any] = MappingProxyType({}),
) -> Plan | None:  # fmt: skip
    """A plan with the least budget of a tier that is enough beside ``others``, to a few percent;
    ``None`` where none is."""
    budget, lacked = LEAST, 0
    for _ in range(TRIES):
        more = {**others, f"{tier.value}_memory": budget, "every_update": False}
        made = make(machine, tokens, {**more, "unless_short": True})
        if made.fits:
            return made
        lacks = sum(short.missing_bytes for short in made.shortfalls)
        here = any(short.tier is tier for short in made.shortfalls)
        if not here and lacks >= lacked > 0:
            return None  # more of it has not helped another tier, where activations were short
        budget, lacked = max(budget + lacks, int(1.02 * budget)), 0 if here else lacks
    return None


def largest(
    options: Mapping[str, Any], machine: Machine | None, tokens: int,
    lora_rank: int | None = None, seq: int | None = None, ranks: int = 1,
) -> tuple[str, Plan]:  # fmt: skip
    """The named shape with the most parameters that fits, or the smallest, which does not."""
    name, plan = "", None
    for name in reversed(_by_size()):
        model = model_for(name, lora_rank, options.get("frozen"), seq)
        make = planner(model, options, ranks=ranks)
        plan = make(machine, tokens, {"every_update": False})
        if plan.fits:
            break
    assert plan is not None
    return name, plan


def _by_size() -> Sequence[str]:
    def about(name: str) -> float:
        shape = SHAPES[name]
        return shape.layers * shape.width**2 + shape.vocabulary * shape.width

    return sorted(SHAPES, key=about)
