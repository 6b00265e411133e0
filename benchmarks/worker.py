"""One arm of the step suite, in a process of its own: trains some steps whenever it is told to.

The first order says what to train, every other one ``{"steps": n}`` or
``{"trace": path}`` or ``{"about": true}`` or ``{"compute_s": seconds}``.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .machine import OtherWork
from .model import Shape, batch_of, build
from .serving import serve
from .trainees import DTYPES, make


class Training:
    """One arm's model and trainee, and where in the tokens it is."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._shape, self._step = Shape(**spec["shape"]), 0
        self._rank, self._ranks = spec.get("rank", 0), spec.get("ranks", 1)
        if self._ranks > 1:
            _be_one_of(self._rank, self._ranks, spec["port"])
        self._after_forward = 0  # bytes resident, at most
        if torch.cuda.is_available():
            torch.cuda.init()  # its share of memory belongs to no arm
        self._idle_rss_bytes = peak_rss_bytes()
        model = build(self._shape, DTYPES[spec["precision"]])
        self.parameters = sum(p.numel() for p in model.parameters())
        self.trainee = make(spec["engine"], model, spec["device"], spec["options"])

    def facts(self) -> dict[str, Any]:
        packages = {name: _version(name) for name in ("torch", "deepspeed", "torchao")}
        return {
            "parameters": self.parameters,
            "idle_rss_bytes": self._idle_rss_bytes,
            "shape": asdict(self._shape),
            "packages": {name: version for name, version in packages.items() if version},
            "memory_bytes": self._memory_bytes(),
        }

    def _memory_bytes(self) -> int:
        """Weights and state that have their home in host memory; 0 where no plan says so."""
        plan = getattr(self.trainee.optimizer, "plan", None)
        if plan is None or plan.detail.layout is None:
            return 0
        places = [p for h in plan.detail.layout.homes for p in (h.host_place, *h.state_places)]
        return sum(place.nbytes for place in places if place is not None)

    def step(self, batch: int) -> float:
        """One training step with so many sequences; returns its loss."""
        tokens = batch_of(replace(self._shape, batch=batch), self._step)[self._rank :: self._ranks]
        self._step += 1
        return self.trainee.step(tokens, self._note_forward)

    def _note_forward(self) -> None:
        self._after_forward = max(self._after_forward, rss_bytes())

    def timed(self, steps: int, lead_in: int = 0, batch: int | None = None) -> dict[str, Any]:
        """Runs ``steps`` steps; seconds, CPU seconds and bytes are per step.

        ``lead_in`` steps run before, untimed: what a step leaves to be done during the next one is
        then not done for nothing while the other arms have their turns.  ``batch``: sequences a
        step, if not those of the shape.
        """
        batch = batch or self._shape.batch
        for _ in range(lead_in):
            self.step(batch)
        read, written = kernel_bytes()
        threads = thread_seconds()
        cpu, started = time.process_time(), time.perf_counter()
        optimizer_s = self.trainee.optimizer_s
        with OtherWork() as others:
            losses = [self.step(batch) for _ in range(steps)]
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        after = kernel_bytes()
        seen = {
            "seconds": seconds / steps,
            "cpu_s": cpu / steps,
            "optimizer_s": (self.trainee.optimizer_s - optimizer_s) / steps,
            "others": others.share,
            "loss": losses[-1],
            "read_bytes": (after[0] - read) // steps,
            "written_bytes": (after[1] - written) // steps,
            "peak_rss_bytes": peak_rss_bytes(),
            "after_forward_bytes": self._after_forward,
            "threads_s": {
                name: (total - threads.get(name, 0.0)) / steps
                for name, total in thread_seconds().items()
                if total > threads.get(name, 0.0)
            },
        }
        stats = getattr(self.trainee.optimizer, "stats", None)
        if stats is not None:
            seen["bound_s"] = stats.bound_s
            seen["lanes"] = {name: asdict(lane) for name, lane in stats.lanes.items()}
        if torch.cuda.is_available():
            seen["peak_device_bytes"] = torch.cuda.max_memory_allocated()
        return seen

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """What an order asks for: some steps, the lanes of the last ones in a file, what the plan
        is and counts on, or its bound with so much compute."""
        if "trace" in order:
            self.trainee.optimizer.trace(order["trace"])
            return {}
        if "about" in order:
            plan = self.trainee.optimizer.plan
            return {"plan": str(plan), "rates": asdict(plan.detail.rates)}
        if "compute_s" in order:
            return {"plan_bound_s": _bound_s(self.trainee.optimizer.plan, order["compute_s"])}
        return self.timed(**order)


def _bound_s(plan: Any, compute_s: float) -> float:
    from overspill.planning.bounds import step_bound  # a peer's environment has none

    made = plan.detail
    bound = step_bound(
        made.layout, plan.link_bytes, made.rates, update=made.update, compute_s=compute_s
    )
    return bound.seconds


def _be_one_of(rank: int, ranks: int, port: int) -> None:
    """The environment of a group of processes on this machine, which share its cores."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
    )  # fmt: skip
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))


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


def thread_seconds() -> dict[str, float]:
    """Seconds of the processors that each Python thread has had, those of one name together."""
    ticks, had = os.sysconf("SC_CLK_TCK"), dict[str, float]()
    for thread in threading.enumerate():
        try:
            about = Path(f"/proc/self/task/{thread.native_id}/stat").read_text(encoding="utf-8")
        except OSError:  # it has ended
            continue
        user, system = about.rpartition(")")[2].split()[11:13]
        had[thread.name] = had.get(thread.name, 0.0) + (int(user) + int(system)) / ticks
    return had


def peak_rss_bytes() -> int:
    """The most memory that this process has had.  ``getrusage`` would begin with what the process
    that started this one had."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def rss_bytes() -> int:
    """Memory that this process has now, files mapped into it left out."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon:"))


def begin(order: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], Any]]:
    """Makes what is to be trained.  Closed at exit, also after an error."""
    training = Training(order)
    atexit.register(training.trainee.close)
    return training.facts(), training.answer


if __name__ == "__main__":
    serve(begin)
