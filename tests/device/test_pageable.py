"""Host memory that the driver or a limit refuses to page-lock stays pageable."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import overspill
from overspill.activations import offloader
from overspill.doctor.device import page_locking
from overspill.doctor.finding import State
from overspill.movement import pools
from overspill.movement.accelerators.streams import StreamsAccelerator
from overspill.movement.accelerators.vendors import LOCK_REMEDY, VENDORS
from tests.models import TinyLM, adamw, train, weights

MIB = 1 << 20
RATES = overspill.Rates()
STREAMED: dict[str, Any] = {
    "device": "testdev", "device_memory": "700KiB", "host_memory": "64MiB", "durable": False,
    "rates": RATES,
}  # fmt: skip
ARENA_ONLY: dict[str, Any] = {**STREAMED, "host_memory": "1500KiB", "activations": "keep"}
ON_HOST: dict[str, Any] = {**STREAMED, "activations": "host"}


class Refusing:
    """A vendor that locks ``limit`` bytes and refuses the rest, as a limit of the system does."""

    def __init__(self, limit: int) -> None:
        self.limit, self.locked, self.refused, self.sizes = limit, dict[int, int](), 0, list[int]()
        self._vendor = VENDORS["testdev"]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Refusing:
        changed = replace(self._vendor, register=self.register, unregister=self.unregister)
        monkeypatch.setitem(VENDORS, "testdev", changed)
        return self

    def register(self, address: int, nbytes: int, device: torch.device) -> None:
        if sum(self.locked.values()) + nbytes > self.limit:
            self.refused += 1
            raise RuntimeError("CUDA error 2")
        assert self._vendor.register is not None
        self._vendor.register(address, nbytes, device)
        self.locked[address] = nbytes
        self.sizes.append(nbytes)

    def unregister(self, address: int) -> None:
        assert self._vendor.unregister is not None
        self._vendor.unregister(address)
        del self.locked[address]


def trained(path: Path, **options: Any) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Losses and weights of three steps, and the plan and the counted bytes at their end."""
    torch.manual_seed(0)
    model = TinyLM().cpu()
    path.mkdir()
    with overspill.wrap(model, adamw(model), nvme=path, **options) as optimizer:
        losses = train(model, optimizer, 3)
        return losses, weights(model), optimizer.plan


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, logger="overspill")
    return lambda: [r.getMessage() for r in caplog.records if "page-locked" in r.getMessage()]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations move, and take host memory in pieces that a small model fills several of."""
    monkeypatch.setattr(pools, "ANNEX_PIECE", 64 << 10)
    monkeypatch.setattr(offloader, "LEAST_BYTES", 1 << 10)


@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
@pytest.mark.parametrize("options", [ARENA_ONLY, ON_HOST], ids=["arena", "activations"])
@pytest.mark.parametrize("pieces", [0, 1, 2])
def test_what_cannot_be_locked_stays_pageable(
    pieces: int, options: dict[str, Any], update: str, small_pieces: None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]],
) -> None:  # fmt: skip
    """The first piece is the arena, the next ones are taken by activations as they come."""
    vendor = Refusing(1 << 40).install(monkeypatch)
    wanted = trained(tmp_path / "locked", update=update, **options)
    assert len(vendor.sizes) == 1 if options is ARENA_ONLY else len(vendor.sizes) > 3
    assert not warnings() and not wanted[2].detail.pageable_bytes
    assert "page-locked" not in str(wanted[2])
    vendor.limit = sum(vendor.sizes[:pieces])
    losses, found, plan = trained(tmp_path / "pageable", update=update, **options)
    assert losses == wanted[0]
    assert all(torch.equal(value, found[name]) for name, value in wanted[1].items())
    assert not vendor.locked, "all that was locked is given back"
    if vendor.refused:
        (told,) = warnings()
        assert "testdev:0 (CUDA error 2)" in told and told.endswith(LOCK_REMEDY)
        assert plan.detail.pageable_bytes > 0
        assert "of host memory cannot be page-locked" in str(plan)
    else:
        assert not warnings() and not plan.detail.pageable_bytes
    assert vendor.refused or (options is ARENA_ONLY and pieces)


def test_activations_meet_the_limit_after_some_steps(
    small_pieces: None, native: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    warnings: Callable[[], list[str]],
) -> None:  # fmt: skip
    """The run went on until then, and was stopped."""
    torch.manual_seed(0)
    model = TinyLM().cpu()
    vendor = Refusing(1 << 40).install(monkeypatch)
    with overspill.wrap(model, adamw(model), nvme=tmp_path, **ON_HOST) as optimizer:
        arena = sum(vendor.locked.values())
        vendor.limit = arena + (128 << 10)
        assert not warnings() and not optimizer.plan.detail.pageable_bytes
        train(model, optimizer, 3)
        assert vendor.locked and vendor.refused > 1 and len(warnings()) == 1
        assert sum(vendor.locked.values()) <= vendor.limit
        pageable = optimizer.plan.detail.pageable_bytes
        assert pageable > 0
        train(model, optimizer, 2)
        assert optimizer.plan.detail.pageable_bytes == pageable, "each piece is tried once"
    assert not vendor.locked


def test_the_remedy_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    """``or lower host_memory``."""
    vendor = Refusing(1100 << 10).install(monkeypatch)
    trained(tmp_path / "more", **ARENA_ONLY)
    assert vendor.refused and len(warnings()) == 1
    vendor.refused = 0
    *_, plan = trained(tmp_path / "less", **{**ARENA_ONLY, "host_memory": "1MiB"})
    assert not vendor.refused and not plan.detail.pageable_bytes and len(warnings()) == 1


def test_nothing_at_all_can_be_locked(
    native: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by PyTorch either, which measuring the link asks."""
    wanted = trained(tmp_path / "locked", **ON_HOST)
    monkeypatch.setenv("OVERSPILL_CACHE", str(tmp_path / "cache"))
    native.set_lockable_bytes(0)
    options = {name: value for name, value in ON_HOST.items() if name != "rates"}
    losses, found, plan = trained(tmp_path / "pageable", **options)
    assert losses == wanted[0]
    assert all(torch.equal(value, found[name]) for name, value in wanted[1].items())
    rates = plan.detail.rates
    assert rates.h2d_bytes_s and rates.d2h_bytes_s


def test_a_device_without_a_way_to_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    wanted = trained(tmp_path / "locked", **ON_HOST)
    changed = replace(VENDORS["testdev"], register=None, unregister=None)
    monkeypatch.setitem(VENDORS, "testdev", changed)
    for number in range(2):
        losses, _, plan = trained(tmp_path / str(number), **ON_HOST)
        assert losses == wanted[0] and plan.detail.pageable_bytes
        assert len(warnings()) == number + 1, "once for each engine"


def test_doctor_tries_it(native: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("testdev:0")
    locked = native.registered_bytes()
    found = page_locking(device)
    assert found.state is State.GOOD and found.figures is not None
    assert found.figures["locked_bytes"] == found.figures["tried_bytes"] >= 64 * MIB
    for limit, can in ((0, 0), (200 * MIB, 192 * MIB)):
        Refusing(limit).install(monkeypatch)
        found = page_locking(device)
        assert found.state is State.SLOW and found.remedy == LOCK_REMEDY
        assert "CUDA error 2" in found.found and found.figures is not None
        assert found.figures["locked_bytes"] == can
        monkeypatch.undo()
    monkeypatch.setitem(VENDORS, "testdev", replace(VENDORS["testdev"], register=None))
    assert page_locking(device).state is State.SLOW
    assert native.registered_bytes() == locked


def test_copies_are_cut_at_the_borders_of_what_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses a copy that lies only partly in a locked piece."""
    page = 4096
    memory = torch.zeros(8 * page, dtype=torch.uint8, device="cpu")
    start, there = memory.data_ptr(), torch.empty(8 * page, dtype=torch.uint8, device="testdev")
    vendor = Refusing(5 * page).install(monkeypatch)
    accelerator = StreamsAccelerator(torch.device("testdev:0"))
    try:
        assert accelerator.page_lock(start + page, 2 * page)
        assert accelerator.page_lock(start + 3 * page, page)
        assert accelerator.page_lock(start + 6 * page, 2 * page)
        assert not accelerator.page_lock(start + 5 * page, page) and vendor.refused == 1
        cases = [(0, 8, [1, 2, 1, 2, 2]), (1, 3, [2]), (4, 6, [2]), (2, 7, [1, 1, 2, 1])]
        for first, last, cuts in cases:
            host, device = memory[first * page : last * page], there[first * page : last * page]
            pieces = accelerator._pieces(host, device)
            assert [one.numel() // page for one, _ in pieces] == cuts
            assert [one.numel() for one, _ in pieces] == [other.numel() for _, other in pieces]
    finally:
        accelerator.close()
