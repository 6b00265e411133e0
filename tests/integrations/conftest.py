"""Frameworks know the devices that torch comes with by name; here they are told of the test's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import accelerate
import pytest
import torch
from lightning.fabric.accelerators import CPUAccelerator as CpuOfFabric
from lightning.fabric.strategies import SingleDeviceStrategy as OfFabric
from lightning.pytorch.accelerators import CPUAccelerator as CpuOfTrainer
from lightning.pytorch.strategies import SingleDeviceStrategy as OfTrainer
from transformers import TrainingArguments

from tests.devices import DEVICE, NAME


@pytest.fixture(autouse=True)
def frameworks_know_the_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if NAME:
        found: Any = TrainingArguments.device
        placed = property(lambda args: (found.__get__(args), DEVICE)[1])
        monkeypatch.setattr(TrainingArguments, "device", placed)
        here = property(lambda each: DEVICE, lambda each, device: None)
        monkeypatch.setattr(accelerate.Accelerator, "device", here)
        for strategy in (OfTrainer, OfFabric):
            monkeypatch.setattr(strategy, "root_device", here)
        for kind in (CpuOfTrainer, CpuOfFabric):
            monkeypatch.setattr(kind, "setup_device", lambda each, device: None)
    with torch.device("cpu") if NAME else nullcontext():  # samplers draw there
        yield
