"""Budgets that would fit, as an error names them: they do, and 10 % less does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.errors import format_budget, format_distinct
from tests.models import TinyLM, batch
from tests.parity.test_in_place import file_of

TINY = {"device_memory": "20KiB", "host_memory": "20KiB"}
CASES: dict[str, dict[str, Any]] = {
    "in memory": {"device": "cpu"},
    "on disk": {"device": "cpu", "nvme": True},
    "on a disk that is small": {"device": "cpu", "nvme": True, "nvme_memory": "20KiB"},
    "beside a device": {"device": "sim"},
    "beside a device and on disk": {"device": "sim", "nvme": True, "durable": False},
    "bf16": {"device": "sim", "nvme": True, "precision": "bf16"},
    "micro-steps": {"device": "sim", "accumulate": 2, "update": "step"},
    "kept activations": {"device": "sim", "activations": "keep", "tokens": 64},
    "activations in host memory": {"device": "sim", "activations": "host", "tokens": 64},
    "activations on disk": {
        "device": "sim", "activations": "nvme", "tokens": 64, "nvme": True, "nvme_memory": "20KiB",
    },
    "activations that compute keeps": {"device": "cpu", "activations": "keep", "tokens": 64},
    "packed": {"device": "sim", "frozen": "nf4"},
    "packed without a device": {"device": "cpu", "frozen": "nf4", "nvme": True},
    "in place": {"device": "cpu", "weights": True},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_they_fit_and_smaller_ones_do_not(case: str, tmp_path: Path) -> None:
    given = {**TINY, **CASES[case], "rates": overspill.Rates()}
    torch.manual_seed(0)
    model = TinyLM(width=64)
    if "frozen" in given or "weights" in given:
        model.blocks.requires_grad_(False)
    if given.get("nvme"):
        given["nvme"] = tmp_path
    if given.get("weights"):
        given["weights"] = file_of(model, tmp_path)
        given["ignore_weights"] = ["a"]
    if given["device"] == "cpu":
        del given["device_memory"]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    plan = overspill.plan(model, optimizer, **given)
    fitting = plan.detail.fitting
    assert not plan.fits
    assert fitting
    with pytest.raises(overspill.BudgetError) as caught:
        overspill.wrap(model, optimizer, **given)
    for option, size in fitting.items():
        assert f"{option}={size!r}" in str(caught.value)
        assert f"{option}={size!r}" in str(plan)
    for option, size in fitting.items():
        less = {**given, **fitting, option: int(int(size[:-3]) * 1024 * 0.9)}
        assert not overspill.plan(model, optimizer, **less).fits, option
    with overspill.wrap(model, optimizer, **{**given, **fitting}) as wrapped:
        for number in range(2 * given.get("accumulate", 1)):
            model(*batch(number, rows=2, length=32)).backward()
            if (number + 1) % given.get("accumulate", 1) == 0:
                wrapped.step()
                wrapped.zero_grad()


def test_nothing_is_named_where_all_fits() -> None:
    model = TinyLM()
    plan = overspill.plan(model, torch.optim.AdamW(model.parameters()), device="cpu")
    assert plan.fits
    assert not plan.detail.fitting


@pytest.mark.parametrize(("nbytes", "text"), [
    (0, "0B"), (1, "1B"), (40960, "40KiB"), (65535, "65535B"), (65537, "65KiB"),
    (100 << 20, "100MiB"), ((100 << 20) + 1, "101MiB"), (3 << 40, "3TiB"),
])  # fmt: skip
def test_a_budget_is_rounded_up(nbytes: int, text: str) -> None:
    assert format_budget(nbytes) == text
    read = overspill.config.parse_size(text, "host_memory").nbytes
    assert nbytes <= read <= 1.02 * nbytes


def test_amounts_that_differ_read_differently() -> None:
    assert format_distinct(1_572_868, 1_572_864) == ("1,572,868 bytes", "1,572,864 bytes")
    assert format_distinct(1 << 20, 1 << 20) == ("1 MiB", "1 MiB")
    assert format_distinct(2 << 20, 1 << 20) == ("2 MiB", "1 MiB")
