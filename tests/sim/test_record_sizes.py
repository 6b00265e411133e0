"""How large records of state are: as budgets allow, larger where nothing goes to disk."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import overspill
from overspill.planning.subgroups import LARGEST_IN_MEMORY, LARGEST_NUMEL


def largest(**options: object) -> int:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(6400, 6400, bias=False) for _ in range(3))).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    plan = overspill.plan(model, optimizer, activations="keep", **options)
    assert plan.fits and plan.detail.layout is not None
    return max(s.count for group in plan.detail.layout.subgroups for s in group)


def test_large_ones_in_memory_beside_a_device() -> None:
    """Seeing to a record takes Python as long whatever its size, and a GPU's queue runs dry."""
    room = {"device": "sim", "host_memory": "8GiB"}
    assert largest(**room, device_memory="8GiB") == LARGEST_IN_MEMORY
    assert largest(device="cpu", host_memory="8GiB") == LARGEST_NUMEL


@pytest.mark.parametrize("device_memory", ["300MiB", "4GiB"])
def test_visits_find_room_for_them(device_memory: str) -> None:
    room = {"device": "sim", "host_memory": "8GiB", "device_memory": device_memory}
    found = largest(**room)
    assert LARGEST_NUMEL <= found <= LARGEST_IN_MEMORY
    assert (found > LARGEST_NUMEL) == (device_memory == "4GiB")


def test_parameters_that_no_module_runs_have_a_plan() -> None:
    alone = nn.ParameterList([nn.Parameter(torch.zeros(64))])
    plan = overspill.plan(alone, torch.optim.AdamW(alone.parameters()), device="sim")
    assert plan.fits


def test_small_ones_go_to_disk(tmp_path: object) -> None:
    room = {"device": "sim", "host_memory": "8GiB", "device_memory": "8GiB"}
    assert largest(**room, nvme=str(tmp_path)) == LARGEST_NUMEL
    small = {"device": "sim", "host_memory": "400MiB", "device_memory": "1GiB"}
    assert largest(**small, nvme=str(tmp_path)) < LARGEST_NUMEL
