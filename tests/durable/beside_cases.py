"""A run with steps as fast as possible; run as a program.

``python -m tests.durable.beside_cases STORE OPTIONS``: each step lowers every weight by one, so the
weights of a commit are all alike, and say of which step they are. Ends when its input is closed,
after the last step was committed.
"""

from __future__ import annotations

import json
import select
import sys
from typing import Any

import torch
from torch import nn

import overspill

WIDTH, LAYERS = 256, 6


def build() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    return model


def main(store: str, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    model = build()
    calls = options.pop("calls", 0)  # commit() after so many steps
    inner = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    with overspill.wrap(
        model, inner, nvme=store, device="cpu", host_memory="1600KiB", rates=overspill.Rates(),
        **options,
    ) as optimizer:  # fmt: skip
        while not select.select([sys.stdin], [], [], 0)[0]:
            for layer in model:
                (layer.weight.sum() * (0.5 if optimizer.step_count else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if calls and optimizer.step_count % calls == 0:
                optimizer.commit()
            if optimizer.step_count == max(20, calls + 1):
                print("steps", flush=True)
        print(optimizer.step_count, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
