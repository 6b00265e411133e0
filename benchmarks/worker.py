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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .machine import OtherWork
from .model import Gpt, Shape, batch_of
from .trainees import DTYPES, make


class Training:
    """One arm's model and trainee, and where in the tokens it is."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._shape, self._step = Shape(**spec["shape"]), 0
        torch.manual_seed(0)
        with _memory(spec["options"].pop("empty_init", False)):
            model = Gpt(self._shape).to(DTYPES[spec["precision"]])
        self.parameters = sum(p.numel() for p in model.parameters())
        self.trainee = make(spec["engine"], model, spec["device"], spec["options"])

    def facts(self) -> dict[str, Any]:
        packages = {name: _version(name) for name in ("torch", "deepspeed", "torchao")}
        return {
            "parameters": self.parameters,
            "shape": asdict(self._shape),
            "packages": {name: version for name, version in packages.items() if version},
        }

    def step(self) -> float:
        """One training step; returns its loss."""
        tokens = batch_of(self._shape, self._step)
        self._step += 1
        return self.trainee.step(tokens)


def _memory(empty: bool) -> contextlib.AbstractContextManager[None]:
    """Where the model is built: nowhere, if ``empty``; the engine then initializes its units."""
    if not empty:
        return contextlib.nullcontext()
    import overspill

    return overspill.empty_init()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def kernel_bytes() -> tuple[int, int]:
    """Bytes that this process has had read from and written to disks."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    values = dict(line.split(": ") for line in lines)
    return int(values["read_bytes"]), int(values["write_bytes"])


def timed(training: Training, steps: int, lead_in: int = 0) -> dict[str, Any]:
    """Runs ``steps`` steps; seconds, CPU seconds and bytes are per step.

    ``lead_in`` steps run before, untimed: what a step leaves to be done during the next one is
    then not done for nothing while the other arms have their turns.
    """
    for _ in range(lead_in):
        training.step()
    read, written = kernel_bytes()
    cpu, started = time.process_time(), time.perf_counter()
    with OtherWork() as others:
        losses = [training.step() for _ in range(steps)]
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
    stats = getattr(training.trainee.optimizer, "stats", None)
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
        training: Training | None = None
        try:
            for line in sys.stdin:
                order = json.loads(line)
                if training is None:
                    training = Training(order)
                    answer(training.facts())
                else:
                    answer(timed(training, **order))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
            raise
        finally:
            if training is not None:
                training.trainee.close()


if __name__ == "__main__":
    main()
