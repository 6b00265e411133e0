"""What an update costs on this machine, by rule and format: figures for a planner, in seconds.

The bound of an update is its bytes over the memory's measured rate for reading, changing and
writing back a buffer; a kernel that reaches it cannot be made faster, only be given fewer bytes.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .formats import Field, Master, Moments
from .kernels import native_isa, set_threads, threads
from .registry import MEASURED
from .rule import Rule

TRAFFIC_BYTES = 64 << 20
CPU = torch.device("cpu")
GROUP: Mapping[str, Any] = {
    "lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.9,
    "dampening": 0.0, "lr_decay": 0.0, "average_decay": 0.999,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A rule with formats.  Gradients come in the weights' dtype."""

    rule: str
    weights: torch.dtype
    master: Master
    moments: Moments


@dataclass(frozen=True)
class Cost:
    """What one case costs.  Rates are parameters per second, medians over the rounds.

    Attributes:
        moved_bytes: per parameter, read and written in a step (the least that the formats allow).
        held_bytes: per parameter at rest: weight, master and moments.
        one_thread, all_threads: with nothing else running.
        beside_traffic: all threads, while one more copies memory without pause.
        bound_share: the bytes' time at the memory's rate over the time taken, round by round.
    """

    case: Case
    moved_bytes: float
    held_bytes: float
    one_thread: float
    all_threads: float
    beside_traffic: float
    bound_share: float


@dataclass(frozen=True)
class UpdateCosts:
    """All cases, and what they were measured with.

    ``memory_bytes_s``: read and written bytes per second of a read-modify-write sweep with all
    threads.  ``traffic_bytes_s``: what the copying thread moved beside the updates.
    """

    isa: str
    threads: int
    numel: int
    memory_bytes_s: float
    traffic_bytes_s: float
    costs: tuple[Cost, ...]

    def of(self, case: Case) -> Cost:
        """The cost of a case.

        Raises:
            KeyError: it was not measured.
        """
        for cost in self.costs:
            if cost.case == case:
                return cost
        raise KeyError(case)


_HALF, _FULL = torch.bfloat16, torch.float32
CASES = (
    *(Case("adamw", _HALF, "split", moments) for moments in ("fp32", "bf16", "int8")),
    Case("adamw", _HALF, "fp32", "fp32"),
    Case("adamw", _FULL, None, "fp32"),
    *(Case("lion", _HALF, "split", moments) for moments in ("fp32", "bf16", "int8")),
    *(Case("momentum", _HALF, "split", moments) for moments in ("fp32", "bf16", "int8")),
    Case("adagrad", _HALF, "split", "fp32"),
    Case("sgd", _HALF, "split", "fp32"),
)


def case_of(rule: Rule, weights: torch.dtype, master: Master, moments: Moments) -> Case | None:
    """Return the case as which a rule with formats is measured, or ``None`` for a user's rule.

    Weight decay does not change the cost of an update, so Adam counts as AdamW.
    """
    for name, make in MEASURED.items():
        known = make()
        if (known.name, known.moments) == (rule.name, rule.moments):
            return Case(name, weights, master, moments)
    return None


def state_bytes(fields: Sequence[Field], numel: int) -> int:
    """Bytes of a rule's state for ``numel`` parameters."""
    return sum(field.elements(numel) * field.dtype.itemsize for field in fields)


def moved_bytes(case: Case, fields: Sequence[Field], numel: int) -> int:
    """Bytes that one step must read and write."""
    # With a whole master the weight is only written.
    weight = numel * case.weights.itemsize * (1 if case.master == "fp32" else 2)
    return 2 * state_bytes(fields, numel) + weight + numel * case.weights.itemsize


class MeasuredUpdate:
    """One case's buffers, on ``device``; ``run`` takes a step and returns its seconds."""

    def __init__(self, case: Case, numel: int, device: torch.device = CPU) -> None:
        self.device = device
        self.rule = MEASURED[case.rule]()
        group = GROUP if "momentum_buffer" in self.rule.moments else {**GROUP, "momentum": 0.0}
        fields = self.rule.state_fields(case.weights, case.master, case.moments)
        self.state = {
            f.name: torch.zeros(f.elements(numel), dtype=f.dtype, device=device) for f in fields
        }
        self.weight = torch.full((numel,), 0.01, dtype=case.weights, device=device)
        self.grad = torch.empty(numel, dtype=case.weights, device=device)
        for start in range(0, numel, 2**20):  # a pattern: drawing would take longer than measuring
            part = self.grad[start : start + 2**20]
            part.copy_(torch.sin(torch.arange(part.numel(), dtype=torch.float32, device="cpu")))
        self.scalars = self.rule.scalars(group, 1, 0.5)
        self.moved_bytes = moved_bytes(case, fields, numel) / numel
        self.held_bytes = state_bytes(fields, numel) / numel + case.weights.itemsize

    def run(self) -> float:
        started = time.perf_counter()
        self.rule.update(self.grad, self.weight, self.state, self.scalars)
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter() - started


class Traffic:
    """A thread that copies memory while ``running``; counts the bytes it read and wrote."""

    def __init__(self) -> None:
        self.moved_bytes, self.seconds = 0, 0.0
        self._pages = torch.ones(2, TRAFFIC_BYTES // 2, dtype=torch.uint8, device="cpu")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Copies without pause within the block."""
        stop, begun = threading.Event(), threading.Event()
        worker = threading.Thread(target=self._copy, args=(begun, stop), name="overspill-traffic")
        worker.start()
        try:
            begun.wait()
            yield
        finally:
            stop.set()
            worker.join()

    def _copy(self, begun: threading.Event, stop: threading.Event) -> None:
        source, target = self._pages[0], self._pages[1]
        part = 1 << 20
        started = time.perf_counter()
        while not stop.is_set():
            for begin in range(0, source.numel(), part):
                if stop.is_set():
                    break
                # Not torch's copy, which would bring threads of its own.
                ctypes.memmove(target.data_ptr() + begin, source.data_ptr() + begin, part)
                self.moved_bytes += 2 * part
                begun.set()
        self.seconds += time.perf_counter() - started


def _read_modify_write(values: Tensor) -> float:
    started = time.perf_counter()
    values.mul_(1.0)
    return time.perf_counter() - started


def device_update_rate(
    case: Case, device: torch.device, *, numel: int = 6_000_000, rounds: int = 5
) -> float:
    """Parameters per second that a case updates where all of it is on ``device``: the median."""
    update = MeasuredUpdate(case, numel, device)
    update.run()  # the first builds kernels
    return numel / statistics.median(update.run() for _ in range(rounds))


def update_costs(
    *,
    cases: Sequence[Case] = CASES,
    numel: int = 6_000_000,
    rounds: int = 5,
    count: int | None = None,
) -> UpdateCosts:
    """Measures ``cases`` one by one; about a third of a second each with the defaults on two cores.

    ``count``: of all threads; ``None``: as many as are set.  Takes up to 18 bytes of memory per
    parameter.  The number of threads is changed meanwhile and set back.

    Raises:
        ValueError: no rounds or no parameters, or formats that do not fit.
    """
    if numel < 1 or rounds < 1:
        raise ValueError(f"numel and rounds must be at least 1, not {numel} and {rounds}")
    before = threads()
    count = count or before
    values = torch.ones(2 * numel, device="cpu")
    traffic = Traffic()
    sweeps: list[float] = []
    try:
        costs = tuple(_cost(case, numel, rounds, count, values, traffic, sweeps) for case in cases)
    finally:
        set_threads(before)
    return UpdateCosts(
        isa=native_isa(),
        threads=count,
        numel=numel,
        memory_bytes_s=values.nbytes * 2 / statistics.median(sweeps) if sweeps else 0.0,
        traffic_bytes_s=traffic.moved_bytes / traffic.seconds if traffic.seconds else 0.0,
        costs=costs,
    )


def _cost(
    case: Case,
    numel: int,
    rounds: int,
    count: int,
    values: Tensor,
    traffic: Traffic,
    sweeps: list[float],
) -> Cost:
    update = MeasuredUpdate(case, numel)
    alone, beside, single, shares = [], [], [], []
    for taken in range(rounds + 1):
        set_threads(count)
        sweep = _read_modify_write(values)
        # Starts the threads, which takes longer than an update by many of them; and torch's own,
        # awake since the sweep, are asleep after it.
        update.run()
        seconds = update.run()
        with traffic.running():
            loaded = update.run()
        if taken == 0:
            continue  # the first touches pages
        sweeps.append(sweep)
        alone.append(seconds)
        beside.append(loaded)
        shares.append(update.moved_bytes * numel * sweep / (2 * values.nbytes) / seconds)
        if taken <= max(1, rounds // 2):
            set_threads(1)
            single.append(update.run())
    one, every, loaded_rate = (
        numel / statistics.median(times) for times in (single, alone, beside)
    )
    return Cost(
        case,
        moved_bytes=update.moved_bytes,
        held_bytes=update.held_bytes,
        one_thread=one,
        all_threads=every,
        beside_traffic=loaded_rate,
        bound_share=statistics.median(shares),
    )
