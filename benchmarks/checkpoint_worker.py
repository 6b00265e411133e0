"""What the checkpoint suite does with a store, in a process of its own: the first order says which
store and model, the second what to do."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import overspill
from overspill import resume
from overspill.durable.export import export_store
from overspill.durable.inspect import inspect_store

from .machine import OtherWork
from .model import Shape, batch_of, build, fill
from .serving import serve
from .trainees import LEARNING_RATE
from .worker import peak_rss_bytes

Answer = dict[str, Any]


class Job:
    """One store and the model that it is of."""

    def __init__(self, order: Answer) -> None:
        self._shape, self._store = Shape(**order["shape"]), order["store"]
        self._options = {"host_memory": order["host_memory"]}

    def _step(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        model(batch_of(self._shape, number)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def train(self) -> Answer:
        """One step of a new model, so that no state is zero, and its commit."""
        model = build(self._shape, torch.bfloat16)
        adamw = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        with overspill.wrap(
            model, adamw, init=fill, nvme=self._store, **self._options
        ) as optimizer:
            self._step(model, optimizer, 0)
        found = inspect_store(self._store, verify=False)
        return {"held_bytes": found.commits[-1].nbytes}

    def export(self, out: str) -> Answer:
        """Seconds of an export, the most memory it added, and the bytes it wrote."""
        before = _reset_peak_bytes()
        cpu = time.process_time()
        with OtherWork() as others:
            started = time.perf_counter()
            made = export_store(self._store, Path(out))
            seconds = time.perf_counter() - started
        shutil.rmtree(out)
        return {
            "seconds": seconds, "others": others.share, "cpu_s": time.process_time() - cpu,
            "grown_bytes": peak_rss_bytes() - before, "written_bytes": sum(made.files.values()),
        }  # fmt: skip

    def resume(self) -> Answer:
        """Seconds until training can go on, and to come back after one more step."""
        with overspill.empty_init():
            model = build(self._shape, torch.bfloat16)
        with OtherWork() as others:
            started = time.perf_counter()
            optimizer, _ = resume(model, self._store, **self._options)
            resumed = time.perf_counter()
            self._step(model, optimizer, 1)
            stepped = time.perf_counter()
            optimizer.rollback()
            rolled = time.perf_counter()
        with optimizer:
            return {
                "resume_s": resumed - started, "step_s": stepped - resumed,
                "rollback_s": rolled - stepped, "others": others.share,
                "peak_rss_bytes": peak_rss_bytes(),
            }  # fmt: skip

    def answer(self, order: Answer) -> Answer:
        """Does what is asked for."""
        done: Answer = getattr(self, order.pop("do"))(**order)
        return done


def _reset_peak_bytes() -> int:
    """Lets the peak of memory begin anew, and returns it."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return peak_rss_bytes()


def begin(order: Answer) -> tuple[Answer, Callable[[Answer], Answer]]:
    """Takes the store and the model's shape."""
    return {}, Job(order).answer


if __name__ == "__main__":
    serve(begin)
