"""One arm of the step suite, in a process of its own: trains some steps whenever it is told to.

Reads one JSON object a line: first what to train, then ``{"steps": n}``.  Answers each with one
JSON line.  What libraries print goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .machine import OtherWork
from .model import Gpt, Shape, batch_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Trainee:
    """A model with its optimizer.  ``options`` are those of ``overspill.wrap``; None: plain."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.shape, self._step = Shape(**spec["shape"]), 0
        options: dict[str, Any] | None = spec["options"]
        torch.manual_seed(0)
        self.model = Gpt(self.shape).to(DTYPES[spec["precision"]])
        device = spec["device"]
        self._device = torch.device("cpu" if device == "sim" else device)
        if options is None:
            self.model.to(self._device)
        adamw = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=options is None)
        self.optimizer: Any = adamw
        if options is not None:
            import overspill

            if isinstance(options.get("rates"), dict):
                options["rates"] = overspill.Rates(**options["rates"])
            self.optimizer = overspill.wrap(self.model, adamw, device=device, **options)

    def facts(self) -> dict[str, Any]:
        parameters = sum(p.numel() for p in self.model.parameters())
        return {"parameters": parameters, "shape": asdict(self.shape)}

    def step(self) -> float:
        """One training step; returns its loss."""
        tokens = batch_of(self.shape, self._step).to(self._device)
        self._step += 1
        loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def close(self) -> None:
        if hasattr(self.optimizer, "close"):
            self.optimizer.close()


def kernel_bytes() -> tuple[int, int]:
    """Bytes that this process has had read from and written to disks."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    values = dict(line.split(": ") for line in lines)
    return int(values["read_bytes"]), int(values["write_bytes"])


def timed(trainee: Trainee, steps: int) -> dict[str, Any]:
    """Runs ``steps`` steps; seconds, CPU seconds and bytes are per step."""
    read, written = kernel_bytes()
    cpu, started = time.process_time(), time.perf_counter()
    with OtherWork() as others:
        losses = [trainee.step() for _ in range(steps)]
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    after = kernel_bytes()
    seen = {
        "seconds": seconds / steps,
        "cpu_s": cpu / steps,
        "others": others.share,
        "loss": losses[-1],
        "read_bytes": (after[0] - read) // steps,
        "written_bytes": (after[1] - written) // steps,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    stats = getattr(trainee.optimizer, "stats", None)
    if stats is not None:
        seen["bound_s"] = stats.bound_s
    if torch.cuda.is_available():
        seen["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    return seen


@contextlib.contextmanager
def answers() -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that answers on stdout, which nobody else reaches meanwhile."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)

        def answer(content: dict[str, Any]) -> None:
            out.write(json.dumps(content) + "\n")
            out.flush()

        yield answer


def main() -> None:
    with answers() as answer:
        trainee: Trainee | None = None
        try:
            for line in sys.stdin:
                order = json.loads(line)
                if trainee is None:
                    trainee = Trainee(order)
                    answer(trainee.facts())
                else:
                    answer(timed(trainee, order["steps"]))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
            raise
        finally:
            if trainee is not None:
                trainee.close()


if __name__ == "__main__":
    main()
