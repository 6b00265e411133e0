"""How large a model can be: what each engine takes per parameter, and what fits a budget.

Memory per parameter is the slope between two sizes that are both trained, each in a process of its
own.  The largest model of a budget is found by the plan, which allocates nothing; at two budgets it
is then trained, and the next larger one must be refused.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import overspill
from overspill.facts.machine import Machine

from .arms import GIB, Plan, Worker, parameters, peer
from .bars import Bar, Panel, draw_bars, or_say
from .model import Shape, build
from .results import Column, Comparison, Outcome, number, outcome
from .runner import Row, run_interleaved

PEERS = ("torch-fp32", "deepspeed-zero2", "deepspeed-zero3", "deepspeed-nvme", "superoffload",
         "fsdp2")  # fmt: skip
DISK_BYTES = 1 << 40
MOST = 128  # the largest of the family has 103 B parameters
LIMIT_S = 240.0
ANY_RATES = overspill.Rates(  # how much fits does not depend on them
    dram_bytes_s=1e10, disk_read_bytes_s=1e9, disk_write_bytes_s=1e9, update_params_s=1e9,
    device_flops_s=1e12,
)  # fmt: skip


def shape_of(size: int) -> Shape:
    """The family: as many heads of 64 as layers, so 49152 size^3 parameters and the vocabulary."""
    return Shape(size, 64 * size, size, vocabulary=8192, batch=1, tokens=128)


def largest(options: Mapping[str, Any], host: int, disk: int | None) -> tuple[int, overspill.Plan]:
    """The largest size that fits so many bytes, and why the next one does not.

    0: not even the smallest fits.
    """

    def planned(size: int) -> overspill.Plan:
        model = build(shape_of(size), torch.bfloat16)
        machine = Machine(
            "edge", ANY_RATES, host_memory=str(host),
            nvme_memory=None if disk is None else str(disk),
        )  # fmt: skip
        given = {**options, "host_memory": host, "nvme_memory": disk or "auto"}
        return overspill.plan(
            model, torch.optim.AdamW(model.parameters()), machine=machine, **given
        )

    low, high = 0, 1
    while (beyond := planned(high)).fits and high < MOST:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        found = planned(middle)
        if found.fits:
            low = middle
        else:
            high, beyond = middle, found
    return low, beyond


# -- what a parameter takes -----------------------------------------------------------------------


def _slope(name: str, small: Row, large: Row) -> Row:
    """One row from the rows of two sizes: bytes a parameter and what does not grow."""
    error = small.error or large.error
    if error:
        return Row(name, large.facts, (), error=error)
    sizes = [row.facts["parameters"] for row in (small, large)]
    peaks = [row.samples[-1].seen["peak_rss_bytes"] for row in (small, large)]
    slope = (peaks[1] - peaks[0]) / (sizes[1] - sizes[0])
    facts = {
        **large.facts,
        "bytes_per_parameter": slope,
        "fixed_bytes": peaks[1] - slope * sizes[1],
    }
    return Row(name, facts, large.samples, median_s=large.median_s)


def _measured(sizes: tuple[int, int], peers: Sequence[str], folder: Path) -> Comparison:
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def worker(name: str, plan: Plan, store: str) -> Worker:
        disk = {"nvme": store, "durable": False, "host_memory": plan.host_memory}
        ours = {
            "torch, bf16": None,
            "overspill, in host memory": {"update": "backward"},
            "overspill, NVMe": {**disk, "update": "backward"},
            "overspill, NVMe, keep": {**disk, "update": "backward", "activations": "keep"},
        }
        if name in ours:
            return Worker(name, plan, device, ours[name])
        return peer(name, plan, Path(store), device)

    rows = []
    ours = "overspill, in host memory", "overspill, NVMe", "overspill, NVMe, keep"
    for name in ("torch, bf16", *ours, *peers):
        pair = []
        for size in sizes:
            plan = Plan(shape_of(size), "bf16", 1, 1, 2, host_memory=GIB >> 2, limit_s=LIMIT_S)
            with tempfile.TemporaryDirectory(dir=folder, prefix="store-") as store:
                pair += run_interleaved([worker(name, plan, store)], 1)
        rows.append(_slope(name, pair[0], pair[1]))
    counts = [parameters(shape_of(size)) / 1e6 for size in sizes]
    return Comparison(
        f"Host memory per parameter, from {counts[0]:.0f} M to {counts[1]:.0f} M, 128 tokens",
        {"sizes": sizes},
        rows,
        [
            ("a parameter", lambda r: number(r.facts.get("bytes_per_parameter"), " bytes")),
            ("beside", lambda r: _gib(r.facts.get("fixed_bytes"))),
            *((f"largest in {n} GiB", _most_in(n * GIB)) for n in (4, 16, 64)),
            ("step", lambda r: number(r.median_s, " s")),
            ("loss", lambda r: number(r.samples[-1].seen["loss"] if r.samples else None, "", 5)),
        ],
    )


def _most_in(budget: int) -> Any:
    def cell(row: Row) -> str:
        each = row.facts.get("bytes_per_parameter")
        if each is None or "nvme" in row.name.lower():  # there it is the disk that counts
            return "-"
        return f"{max(0.0, budget - row.facts['fixed_bytes']) / each / 1e9:.2f} B"

    return cell


def _gib(value: float | None) -> str:
    return number(None if value is None else value / GIB, " GiB")


# -- what fits by the plan ------------------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """Bytes that a plan may use, and options of ``wrap``."""

    name: str
    host: int
    disk: int | None = None
    options: Mapping[str, Any] | None = None

    def all_options(self, store: str) -> dict[str, Any]:
        """Of ``wrap``, without sizes."""
        nvme = {} if self.disk is None else {"nvme": store, "durable": False}
        return {"update": "backward", "device": "cpu", **nvme, **(self.options or {})}


def budgets(quick: bool) -> list[Budget]:
    """In host memory alone, in both formats; and with a disk."""
    made = []
    for gib in (1,) if quick else (1, 4, 16, 64):
        made += [
            Budget(f"{gib} GiB host", gib * GIB),
            Budget(f"{gib} GiB host, int8 moments", gib * GIB, None, {"moments": "int8"}),
            Budget(f"{gib} GiB host, 1 TiB NVMe", gib * GIB, DISK_BYTES),
        ]
    return made


def _planned(quick: bool, folder: Path) -> Comparison:
    rows = []
    for budget in budgets(quick):
        size, beyond = largest(budget.all_options(str(folder)), budget.host, budget.disk)
        short = beyond.shortfalls[0]
        facts = {
            "size": size, "parameters": parameters(shape_of(size)) if size else 0,
            "short": f"{short.tier.value}: {short.what}",
        }  # fmt: skip
        rows.append(Row(budget.name, facts, ()))
    return Comparison(
        "Largest model by the plan, bf16 weights with split master",
        {"disk_bytes": DISK_BYTES},
        rows,
        [
            ("parameters", lambda row: number(row.facts["parameters"] / 1e9, " B")),
            ("plain state", lambda row: _gib(16 * row.facts["parameters"])),
            ("layers x width", lambda row: f"{row.facts['size']} x {64 * row.facts['size']}"),
            ("the next one lacks", lambda row: str(row.facts["short"])),
        ],
    )


# -- at the edge ----------------------------------------------------------------------------------


def _at_the_edge(budget: Budget, folder: Path) -> list[Row]:
    """The largest by the plan, trained; and the next one, which must be refused."""
    rows = []
    with tempfile.TemporaryDirectory(dir=folder, prefix="store-") as store:
        options = budget.all_options(store)
        size, _ = largest(options, budget.host, budget.disk)
        sizes = {"host_memory": budget.host}
        if budget.disk is not None:
            sizes["nvme_memory"] = budget.disk
        for each in (size, size + 1):
            plan = Plan(shape_of(each), "bf16", 1, 1, 2, limit_s=LIMIT_S)
            named = f"{budget.name}, {parameters(plan.shape) / 1e6:.0f} M"
            (row,) = run_interleaved([Worker(named, plan, "cpu", {**options, **sizes})], 1)
            rows.append(row if each == size else _refused(row))
    return [
        replace(row, facts={**row.facts, "host_bytes": budget.host}, ratio=None) for row in rows
    ]


def _refused(row: Row) -> Row:
    if row.error is None:
        return replace(row, error="trained, although it does not fit by the plan")
    if "BudgetError" not in row.error:
        return row
    return replace(row, error=None, facts={"refused": row.error.partition("BudgetError: ")[2]})


def _edges(quick: bool, folder: Path) -> Comparison:
    host, small, disk = (64 << 20, 32 << 20, 256 << 20) if quick else (2 * GIB, GIB // 2, 8 * GIB)
    text = f"{small >> 20} MiB host, {disk / GIB:.3g} GiB NVMe"
    edges = [Budget(f"{host >> 20} MiB host", host), Budget(text, small, disk)]
    rows = [row for budget in edges for row in _at_the_edge(budget, folder)]

    def seen(row: Row, key: str) -> float | None:
        return row.samples[-1].seen.get(key) if row.samples else None

    def above(row: Row) -> str:
        peak = seen(row, "peak_rss_bytes")
        return _gib(None if peak is None else peak - row.facts["idle_rss_bytes"])

    columns: list[Column] = [
        ("host budget", lambda row: _gib(row.facts["host_bytes"])),
        ("memory beside Python and torch", above),
        ("step", lambda row: number(row.median_s, " s")),
        ("loss", lambda row: number(seen(row, "loss"), digits=5)),
        ("refused", lambda row: str(row.facts.get("refused", "-"))),
    ]
    return Comparison("At the edge: the largest by the plan, and the next", {}, rows, columns)


def run(*, quick: bool, folder: Path, peers: Sequence[str] = ()) -> Outcome:
    """Runs the suite.  ``peers``: as in ``step``; none: all that run here, with ``quick`` none."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    wanted: Sequence[str] = peers or (() if quick else PEERS)
    if len(wanted) == 1:
        wanted = {"all": PEERS, "none": ()}.get(wanted[0], wanted)
    sizes = (6, 10) if quick else (8, 14)
    made = [_measured(sizes, wanted, folder), _planned(quick, folder), _edges(quick, folder)]
    bars = [
        Bar(row.name, [row.facts["bytes_per_parameter"]], _most_in(16 * GIB)(row) + " in 16 GiB")
        for row in made[0].rows
        if row.error is None
    ]
    panel = Panel(made[0].title, bars)
    or_say(lambda: draw_bars([panel], "bytes a parameter", folder / "memory.png"))
    return outcome("memory", made, folder)
