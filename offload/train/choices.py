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
from .gains import planner
from .shapes import SHAPES, plan_model
from .skeletons import add_lora

LEAST_HOST = 64 << 20  # where the search for the least budget begins
TRIES = 8
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


def recipes(lora_rank: int = LORA_RANK) -> list[Recipe]:
    """What is worth a look, from all parameters to the least that is trained."""
    none = MappingProxyType[str, Any]({})
    lora = f"LoRA, rank {lora_rank}"
    return [
        Recipe("all, fp32 moments", none),
        Recipe("all, int8 moments", {"moments": "int8"}),
        Recipe(lora, none, lora_rank),
        Recipe(f"{lora}, base in int8", {"frozen": "int8"}, lora_rank),
        Recipe(f"{lora}, base in nf4", {"frozen": "nf4"}, lora_rank),
    ]


def model_for(name: str, lora_rank: int | None) -> nn.Module:
    """The model of that name for a plan, its weights frozen beside LoRA, where a rank is given.

    Raises:
        ValueError, OffloadError: as for ``plan_model``; no place for LoRA in it.
    """
    model = plan_model(name)
    if lora_rank is not None:
        add_lora(model, lora_rank)
    return model


def choices(
    name: str, options: Mapping[str, Any], machine: Machine | None, tokens: int,
    lora_rank: int = LORA_RANK,
) -> list[Choice]:  # fmt: skip
    """Each way with the budgets that ``options`` give, and with the least host memory.

    Raises:
        ValueError, BudgetError: as ``plan`` does.
    """
    found: list[Choice] = []
    for recipe in recipes(lora_rank):
        make = planner(model_for(name, recipe.lora_rank), {**options, **recipe.options})
        quick = {"every_update": False}
        whole = make(machine, tokens, quick)
        found.append(Choice(recipe, whole))
        budget = LEAST_HOST
        for _ in range(TRIES if whole.fits else 0):
            least = make(machine, tokens, {**quick, "host_memory": budget})
            short = [s.need_bytes for s in least.shortfalls if s.tier is Tier.HOST]
            if least.fits:
                found.append(Choice(recipe, least, least=True))
            if not short:
                break
            budget = max(*short, budget + 1, int(1.02 * budget))
    return found


def largest(options: Mapping[str, Any], machine: Machine | None, tokens: int) -> tuple[str, Plan]:
    """The named shape with the most parameters that fits, or the smallest, which does not."""
    name, plan = "", None
    for name in reversed(_by_size()):
        plan = planner(plan_model(name), options)(machine, tokens, {"every_update": False})
        if plan.fits:
            break
    assert plan is not None
    return name, plan


def _by_size() -> Sequence[str]:
    def about(name: str) -> float:
        shape = SHAPES[name]
        return shape.layers * shape.width**2 + shape.vocabulary * shape.width

    return sorted(SHAPES, key=about)
