"""The memory suite: slopes from two sizes, the largest model by the plan, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import memory
from benchmarks.arms import parameters
from benchmarks.runner import Row, Sample

MIB = 1 << 20


def trained(count: int, peak: int) -> Row:
    return Row("x", {"parameters": count}, (Sample(1.0, {"peak_rss_bytes": peak}),), median_s=1.0)


def test_memory_by_parameter_is_a_slope() -> None:
    row = memory._slope("x", trained(10, 1140), trained(20, 1280))
    assert row.facts["bytes_per_parameter"] == 14.0
    assert row.facts["fixed_bytes"] == 1000.0
    failed = memory._slope("x", trained(10, 1140), Row("x", {}, (), error="no"))
    assert failed.error == "no"


@pytest.mark.parametrize("disk", [None, 1 << 30])
def test_the_largest_is_the_last_that_fits(disk: int | None) -> None:
    options: dict[str, Any] = {"update": "backward", "device": "cpu"}
    if disk is not None:
        options |= {"nvme": "/tmp", "durable": False}
    size, beyond = memory.largest(options, 256 * MIB, disk)
    assert 2 <= size < 30 and not beyond.fits
    assert beyond.shortfalls[0].tier.value == ("host" if disk is None else "nvme")
    # State, gradients of one unit and staging: not less than 12 bytes a parameter, nor twice that.
    if disk is None:
        assert 256 * MIB / 24 < parameters(memory.shape_of(size)) < 256 * MIB / 12


def test_nothing_fits_next_to_no_memory() -> None:
    size, _ = memory.largest({"update": "backward", "device": "cpu"}, MIB, None)
    assert size == 0


def test_only_a_refusal_for_lack_of_room_is_one() -> None:
    refused = memory._refused(Row("x", {}, (), error="RuntimeError: BudgetError: needs 2"))
    assert refused.error is None and refused.facts["refused"] == "needs 2"
    assert memory._refused(Row("x", {}, (), error="MemoryError: ")).error == "MemoryError: "
    error = memory._refused(trained(1, 1)).error
    assert error is not None and "trained" in error
