"""Which accelerator a device's name means, and what is said of names that mean none."""

from __future__ import annotations

import pytest
import torch

from overspill.errors import OffloadError
from overspill.observe.rates import Rates
from overspill.runtime.accelerator import make_accelerator


@pytest.mark.parametrize(
    ("device", "kind"), [("cpu", "cpu"), (torch.device("cpu"), "cpu"), ("sim", "sim")]
)
def test_names(device: str | torch.device, kind: str) -> None:
    accelerator = make_accelerator(device, Rates(h2d_bytes_s=1e9))
    assert accelerator.kind == kind
    accelerator.close()


def test_without_a_gpu_the_default_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert make_accelerator(None, None).kind == "cpu"


@pytest.mark.parametrize("device", ["tpu", "", "cuda:x", "cuda:-1", "sim:0", "CPU", "meta"])
def test_other_names_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match="device must be 'cuda', 'cuda:<i>', 'cpu' or 'sim'"):
        make_accelerator(device, None)


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OffloadError, match=r"device 'cuda': .*; use device='cpu'"):
        make_accelerator("cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(OffloadError, match="'cuda:2' was asked for; 2 CUDA devices"):
        make_accelerator("cuda:2", None)
