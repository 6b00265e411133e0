"""Do compact moments train as well?  A small GPT on real text, once per format, same data and seed.

The text is the source of the running Python's standard library, read as bytes.  Prints JSON: the
mean loss of the last 50 steps per format, and its ratio to fp32 moments.  ``--out DIR`` keeps that
and the curves as ``moments.json``, and draws ``moments.png``.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

import overspill.optim as optim

from .machine import facts

SEQUENCE = 128
WIDTH = 128
HEADS = 4
SMOOTHED = 50


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        shape = (batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = self.mix(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.widen(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def read_text() -> Tensor:
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def train(moments: optim.Moments, text: Tensor, steps: int, layers: int, seed: int) -> list[float]:
    torch.manual_seed(seed)
    model = Gpt(layers)
    optimizer = optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, moments=moments
    )
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 50)
        starts = torch.randint(len(text) - SEQUENCE - 1, (8,))
        batch = torch.stack([text[s : s + SEQUENCE + 1] for s in starts.tolist()])
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def smooth(curve: list[float], over: int) -> list[float]:
    """The mean of every ``over`` losses up to each step, of fewer at the start."""
    return [sum(curve[max(0, i - over + 1) : i + 1]) / min(over, i + 1) for i in range(len(curve))]


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Losses by step, and what compact moments add to or take from fp32's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    exact = smooth(curves["fp32"], SMOOTHED)
    for kind, curve in curves.items():
        mean = smooth(curve, SMOOTHED)
        above.plot(mean, label=f"{kind} moments", linewidth=1)
        below.plot([100 * (m / e - 1) for m, e in zip(mean, exact, strict=True)], linewidth=1)
    above.set_ylabel(f"loss, mean of {SMOOTHED} steps")
    above.legend(frameon=False)
    below.axhspan(-0.5, 0.5, alpha=0.1, color="gray")
    below.set_ylabel("% over fp32")
    below.set_ylim(-2, 2)
    below.set_xlabel("step")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="a folder for moments.json and moments.png")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    optim.set_threads(options.threads)
    text = read_text()
    curves = {
        kind: train(kind, text, options.steps, options.layers, options.seed)
        for kind in ("fp32", "bf16", "int8")
    }
    last = {kind: sum(curve[-50:]) / 50 for kind, curve in curves.items()}
    result = {
        "steps": options.steps,
        "layers": options.layers,
        "width": WIDTH,
        "parameters": sum(p.numel() for p in Gpt(options.layers).parameters()),
        "seed": options.seed,
        "last_50": last,
        "ratio_to_fp32": {kind: value / last["fp32"] for kind, value in last.items()},
    }
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        rounded = {kind: [round(loss, 5) for loss in curve] for kind, curve in curves.items()}
        content = {**result, "machine": facts(options.out), "losses": rounded}
        (options.out / "moments.json").write_text(json.dumps(content, default=str) + "\n")
        draw(curves, options.out / "moments.png")


if __name__ == "__main__":
    main()
