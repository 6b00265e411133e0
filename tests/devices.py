"""The devices that tests run on.

They name two: ``CPU``, where host memory is the device, and ``SIM``, which has memory of its own.
With ``OVERSPILL_TEST_DEVICE`` set, to ``testdev`` (see ``tests/device``) or ``cuda``, both are that
one: what tests build is built there, and nothing else about them changes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

NAME = os.environ.get("OVERSPILL_TEST_DEVICE", "")
CPU = NAME or "cpu"
SIM = NAME or "sim"

if NAME == "testdev":
    from tests.device.install import install

    native = install()
    seed = os.environ.get("OVERSPILL_TEST_DELAYS")
    if seed is not None:
        native.set_delays(int(seed), 20, 2000)

DEVICE = torch.device(NAME or "cpu")
if NAME:
    torch.set_default_device(DEVICE)


# Of tests that are about a device of their own.
about_sim = pytest.mark.skipif(bool(NAME), reason="about the simulated device")
about_cpu = pytest.mark.skipif(bool(NAME), reason="about weights in host memory")
about_files = pytest.mark.skipif(bool(NAME), reason="about files alone")
about_forks = pytest.mark.skipif(bool(NAME), reason="forks: nothing of a device outlives that")


def forget_races() -> None:
    """Those of a test in which the user's threads touch the same weights at once."""
    if NAME == "testdev":
        torch.accelerator.synchronize()
        native.take_races()


@contextmanager
def link(bytes_s: float) -> Iterator[Any]:
    """Rates of a link that is so fast each way.  The simulated device keeps to them as an option;
    the test device's links do meanwhile; a GPU has its own."""
    from overspill import Rates

    if NAME == "testdev":
        native.set_rates(bytes_s, bytes_s)
    try:
        yield Rates(h2d_bytes_s=bytes_s, d2h_bytes_s=bytes_s)
    finally:
        if NAME == "testdev":
            native.set_rates(0.0, 0.0)


def normal(seed: int, *sizes: int) -> torch.Tensor:
    """Numbers drawn on the CPU, the same for the same seed wherever tests run."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*sizes, generator=draw, device="cpu").to(DEVICE)


class _OnHost(torch.optim.Optimizer):
    """One of our CPU optimizers for a model on a device: gradients go there, weights come back."""

    def __init__(self, kind: Callable[..., torch.optim.Optimizer], params: Any, **options: Any):
        super().__init__(params, options)
        groups = [
            {**group, "params": [p.detach().cpu().requires_grad_() for p in group["params"]]}
            for group in self.param_groups
        ]
        self._inner = kind(groups, **options)

    def step(self, closure: Any = None) -> None:
        for group, there in zip(self.param_groups, self._inner.param_groups, strict=True):
            there.update({name: value for name, value in group.items() if name != "params"})
            for p, twin in zip(group["params"], there["params"], strict=True):
                twin.grad = None if p.grad is None else p.grad.cpu()
                if not torch.equal(twin.detach(), p.detach().cpu()):  # somebody has edited it
                    twin.data.copy_(p.detach())
                if p in self.state:
                    self._inner.state[twin] = self.state[p]
                else:  # before the first step, and where somebody has deleted it
                    self._inner.state.pop(twin, None)
        self._inner.step()
        with torch.no_grad():
            for group, there in zip(self.param_groups, self._inner.param_groups, strict=True):
                for p, twin in zip(group["params"], there["params"], strict=True):
                    if twin in self._inner.state:
                        self.state[p] = self._inner.state[twin]
                    if twin.grad is not None:
                        p.copy_(twin)

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._inner.load_state_dict(state)


def plainly(kind: Callable[..., torch.optim.Optimizer], params: Any, **options: Any) -> Any:
    """One of ``overspill.optim``'s, with the model where it is: what a wrapped run must equal."""
    return _OnHost(kind, params, **options) if NAME else kind(params, **options)
