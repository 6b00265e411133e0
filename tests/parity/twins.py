"""A wrapped model and its plain twin: what the tests here compare."""

from __future__ import annotations

from typing import Any

import torch

from tests.devices import SIM
from tests.models import TinyLM

NVME: dict[str, Any] = {
    "device": SIM, "device_memory": "700KiB", "host_memory": "1500KiB", "durable": False
}  # fmt: skip


def make(**changes: Any) -> TinyLM:
    torch.manual_seed(0)
    return TinyLM(**changes)


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], atol: float = 2e-5) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=atol, rtol=1e-4, msg=name)
