"""``python -m benchmarks longest``: the longest sequences that have room, by plan, as the table in
docs/fits.md.  Nothing is trained: these are sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from overspill.activations.tiles import TiledLayers, layers_in
from overspill.optim.registry import rules_for
from overspill.planning.choose import Workload
from overspill.planning.fitting import shortfall
from overspill.planning.partition import Partition, partition
from overspill.planning.plan import Budgets, Needs
from overspill.planning.planner import make_layout
from overspill.train.skeletons import skeleton, skeleton_adamw

PAGE = Path(__file__).parents[1] / "docs/fits.md"
BEGIN, END = "<!-- longest -->\n", "<!-- end of longest -->"
GIB = 1 << 30
CARDS = (8, 16, 24, 48, 80)  # GB
SHARE = 0.75  # of a card, that ``device_memory="auto"`` takes
HOST, DISK = 96 * GIB, 2000 * GIB
POLICIES = ("keep", "host", "nvme", "recompute", "auto")
LLAMA = {"model_type": "llama", "num_key_value_heads": 8}
QWEN = {**LLAMA, "model_type": "qwen2", "num_attention_heads": 40, "vocab_size": 152064}
MODELS: dict[str, dict[str, object]] = {
    "1 B": {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "num_attention_heads": 32, "vocab_size": 128256, "tie_word_embeddings": True},
    "8 B": {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "vocab_size": 128256},
    "14 B": {**QWEN, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48},
    "32 B": {**QWEN, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64},
}  # fmt: skip
MOST = 1 << 24  # tokens
EXACT = 1.02  # by which the length that is found may be short of the longest


class Model:
    """One model as a plan sees it: bf16 weights, AdamW, the loss in chunks.

    ``tiled``: its feed-forward layers run in tiles.
    """

    def __init__(self, name: str, *, tiled: bool) -> None:
        model = skeleton(MODELS[name])
        assert model is not None
        model.to(torch.bfloat16)
        optimizer = skeleton_adamw(model)
        groups = dict.fromkeys(model.parameters(), 0)
        tiles = TiledLayers((layer, lambda: 0) for layer in layers_in(model) if tiled)
        self.parts: Partition = partition(model, groups)
        tiles.remove()
        (rule,) = rules_for(optimizer)
        self.needs = Needs(
            lambda chunk: rule.state_fields(chunk.dtype, "split", "fp32"), 1, "next_forward", 0,
            recomputable=self.parts.recomputable,
        )  # fmt: skip

    def fits(self, tokens: int, card: int, policy: str) -> bool:
        """Whether one sequence of so many tokens has room."""
        budgets = Budgets(int(card * 1e9 * SHARE), HOST, DISK)
        sizes = Workload(tokens, logits=False).saved_bytes(self.parts.units)
        assert sizes is not None
        needs = replace(self.needs, activations=policy, saved_bytes=tuple(sizes))
        layout, _, missing = make_layout(self.parts, budgets, needs)
        if missing:
            return False
        return shortfall(layout, budgets, sizes, policy, self.parts.recomputable) is None

    def longest(self, card: int, policy: str) -> int:
        """Tokens; 0: not even one."""
        low, high = 0, 1024
        while high < MOST and self.fits(high, card, policy):
            low, high = high, 2 * high
        while high > max(low * EXACT, low + 1):
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle, card, policy) else (low, middle)
        return low


def told(tokens: int) -> str:
    """As people write lengths."""
    if tokens < 1024:
        return "-" if tokens < 128 else str(tokens)
    return f"{tokens / 1024:.0f}K" if tokens < 1 << 20 else f"{tokens / (1 << 20):.1f}M"


def rows(name: str) -> list[str]:
    """The lines of one model."""
    found = []
    for tiled, policies in ((False, POLICIES), (True, ("auto",))):
        model = Model(name, tiled=tiled)
        for policy in policies:
            cells = [told(model.longest(card, policy)) for card in CARDS]
            how = f"`{policy}`" + (", `tile`" if tiled else "")
            found.append(f"| {name} | {how} | {' | '.join(cells)} |")
    return found


def table() -> str:
    """All of it."""
    head = ["| model | `activations=` | " + " | ".join(f"{card} GB" for card in CARDS) + " |"]
    head.append("|---" * (2 + len(CARDS)) + "|")
    return "\n".join([*head, *(row for name in MODELS for row in rows(name))]) + "\n"


def main(_words: list[str]) -> int:
    """Writes the table into the page."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    made = table()
    PAGE.write_text(f"{before}{BEGIN}{made}{END}{after}", encoding="utf-8")
    print(made)
    return 0
