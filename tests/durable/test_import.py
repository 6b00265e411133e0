"""An export goes back in: weights, moments and masters, streamed from its files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import overspill
from tests.devices import CPU
from tests.models import TinyLM, train


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_training_goes_on_from_an_export(tmp_path: Path, precision: str) -> None:
    """``wrap(weights=)`` and ``load_state_dict`` of a mapped file give the same bits."""
    (tmp_path / "store").mkdir()
    torch.manual_seed(0)
    model = TinyLM()
    with overspill.wrap(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3), device=CPU,
        nvme=tmp_path / "store", host_memory="64MiB", precision=precision,
    ) as optimizer:  # fmt: skip
        train(model, optimizer, 2)
        optimizer.save(tmp_path / "out")
        train(model, optimizer, 2)
        expected = {name: value.clone() for name, value in model.state_dict().items()}
    with overspill.empty_init():
        other = TinyLM()
    with overspill.wrap(
        other, torch.optim.AdamW(other.parameters()), device=CPU, host_memory="64MiB",
        precision=precision, weights=tmp_path / "out",
    ) as optimizer:  # fmt: skip
        mapped = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True, mmap=True)
        optimizer.load_state_dict(mapped)
        train(other, optimizer, 2)
        found = other.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
