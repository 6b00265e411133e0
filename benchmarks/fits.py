"""``python -m benchmarks fits [cards]``: what models need and how long their steps take on machines
that examples/machines describes, by plan, as the tables in docs/fits.md.  Nothing is trained.

With ``cards``, only the table by number of cards is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from overspill.errors import format_bytes
from overspill.facts.machine import Machine
from overspill.facts.tier import Tier
from overspill.planning.plan import Plan
from overspill.train.choices import LORA_RANK, Recipe, least_budget, model_for, recipes
from overspill.train.gains import planner
from overspill.train.shapes import find_model

from .conclusions import put
from .hollow import METHODS, write

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/fits.md"
MARKS = "<!-- fits: python -m benchmarks fits -->", "<!-- end of fits -->"
MODELS = ("llama-1b", "llama-3b", "llama-8b", "llama-13b", "llama-70b")
MACHINES = ("rtx3060", "rtx4090", "gh200", "h200")
TOKENS = 4096  # of a step, as one sequence
CARD_MARKS = "<!-- cards: python -m benchmarks fits cards -->", "<!-- end of cards -->"
CARDS_OF = (("llama-8b", "rtx4090"), ("llama-70b", "rtx4090"), ("llama-70b", "h200"))
NUMBERS = (1, 2, 4, 8)
CARD_TOKENS = 2048  # of a card and step, as one sequence
OPTIONS: dict[str, Any] = {"precision": "bf16", "nvme": ["/scratch"], "durable": False}
# Room without end, and the card of a desktop: for what is looked for in one tier alone.
AMPLE = {"device_memory": "1TiB", "host_memory": "64TiB", "nvme_memory": "64TB"}
CARD = {**AMPLE, "device_memory": "11GiB"}
HEAD = (
    "model", "what is trained", "card", "host memory", "with so much disk", "without a disk",
    *MACHINES,
)  # fmt: skip


def machines() -> list[Machine]:
    """Those of the table."""
    return [Machine.from_file(ROOT / f"examples/machines/{name}.toml") for name in MACHINES]


def ways(model: str, folder: Path) -> Iterator[Recipe]:
    """Ways to train, also over files that are quantised, which are written to ``folder``."""
    yield from recipes()
    for method in METHODS:
        files = folder / f"{model}-{method}"
        files.mkdir(parents=True)
        config: Any = find_model(model).config
        write(files, config, method)
        lora = f"LoRA, rank {LORA_RANK}, base in {method} files"
        yield Recipe(lora, {"weights": str(files)}, LORA_RANK)


def row(model: str, recipe: Recipe) -> str:
    """One line of the table."""
    make = planner(model_for(model, recipe.lora_rank, seq=TOKENS), {**OPTIONS, **recipe.options})
    desktop, *_ = machines()
    diskless = replace(desktop, nvme_memory=None)
    no_disk = {"nvme": None, "nvme_memory": "auto"}
    card = least_budget(make, desktop, TOKENS, Tier.DEVICE, AMPLE)
    host = least_budget(make, desktop, TOKENS, Tier.HOST, CARD)
    whole = None  # of a base in files, which are on a disk
    if "weights" not in recipe.options:
        whole = least_budget(make, diskless, TOKENS, Tier.HOST, {**CARD, **no_disk})
    cells = [model, recipe.name, _budget(card, Tier.DEVICE), _budget(host, Tier.HOST)]
    cells.append("-" if host is None else format_bytes(host.tier_bytes.get(Tier.NVME, 0)))
    cells.append(_budget(whole, Tier.HOST))
    cells.extend(_time(make(each, TOKENS, {"every_update": False})) for each in machines())
    return f"| {' | '.join(cells)} |"


def _budget(plan: Plan | None, tier: Tier) -> str:
    if plan is None or plan.detail.budgets is None:
        return "-"
    return format_bytes(getattr(plan.detail.budgets, tier.value))


def _time(plan: Plan) -> str:
    if not plan.fits or plan.step_s is None:
        return "-"
    return f"{plan.step_s:.2g} s" if plan.step_s < 10 else f"{plan.step_s:.0f} s"


def rows() -> Iterator[str]:
    """All lines, models from small to large."""
    with TemporaryDirectory() as folder:
        for model in MODELS:
            for recipe in ways(model, Path(folder)):
                yield row(model, recipe)


def cards() -> Iterator[str]:
    """A line for each model, way to train and machine, and a time for each number of cards."""
    for model, machine in CARDS_OF:
        target = Machine.from_file(ROOT / f"examples/machines/{machine}.toml")
        for recipe in recipes()[:3]:
            skeleton = model_for(model, recipe.lora_rank, seq=CARD_TOKENS)
            cells = [model, recipe.name, machine]
            for ranks in NUMBERS:
                make = planner(skeleton, {**OPTIONS, **recipe.options}, ranks=ranks)
                plan = make(target, CARD_TOKENS, {"every_update": False})
                fits = plan.fits and plan.step_s
                cells.append(f"{ranks * CARD_TOKENS / plan.step_s:,.0f}" if fits else "-")
            yield f"| {' | '.join(cells)} |"


def write_cards() -> None:
    """Writes the table by number of cards into the page."""
    head = ("model", "what is trained", "machine", *map(str, NUMBERS))
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for line in cards():
        print(line, flush=True)
        lines.append(line)
    put(PAGE, CARD_MARKS, "\n".join(lines))


def main(words: list[str]) -> int:
    """Writes the tables into the page.

    Raises:
        ValueError: a word is unknown.
    """
    if words not in ([], ["cards"]):
        raise ValueError(f"fits knows the word cards, not {' '.join(words)}")
    write_cards()
    if words:
        return 0
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for line in rows():
        print(line, flush=True)
        lines.append(line)
    put(PAGE, MARKS, "\n".join(lines))
    return 0
