"""Which accelerator a device's name means, and what is said of names that mean none."""

from __future__ import annotations

import pytest
import torch

from overspill.errors import OffloadError
from overspill.facts.rates import Rates
from overspill.movement.accelerators.make import make_accelerator


@pytest.mark.parametrize(
    ("device", "name"), [("cpu", "cpu"), (torch.device("cpu"), "cpu"), ("sim", "sim")]
)
def test_names(device: str | torch.device, name: str) -> None:
    accelerator = make_accelerator(device, Rates(h2d_bytes_s=1e9))
    assert accelerator.name == name
    accelerator.close()


def test_without_an_accelerator_the_default_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert make_accelerator(None, None).name == "cpu"


@pytest.mark.parametrize("device", ["tpu", "", "cuda:x", "cuda:-1", "sim:0", "CPU", "meta"])
def test_other_names_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match="device must be an accelerator of torch's such as 'cuda'"):
        make_accelerator(device, None)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_one_that_is_not_there(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    with pytest.raises(OffloadError, match=rf"device '{kind}': .*; use device='cpu'"):
        make_accelerator(kind, None)
    present = torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: present)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(OffloadError, match=f"'{kind}:2' was asked for; 2 {kind.upper()} devices"):
        make_accelerator(f"{kind}:2", None)
