"""CUDA's registration of host memory, with a runtime that refuses and keeps its last error."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from overspill.movement.accelerators.vendors import VENDORS, Vendor


class Runtime:
    """The runtime library: a call that fails leaves an error, which the next kernel launch of the
    thread finds, clears and raises."""

    class cudaError:
        success = 0

    def __init__(self, code: int) -> None:
        self.code, self.pending = code, 0

    def _called(self, *_: int) -> int:
        self.pending = self.pending or self.code
        return self.code

    cudaHostRegister = cudaHostUnregister = _called

    def empty(self, *_: Any, **__: Any) -> Runtime:
        return self

    def fill_(self, _: int) -> None:
        pending, self.pending = self.pending, 0
        if pending:
            raise RuntimeError(f"CUDA error {pending}")


@pytest.fixture
def cuda() -> Vendor:
    return VENDORS["cuda"]


def installed(monkeypatch: pytest.MonkeyPatch, code: int) -> Runtime:
    runtime = Runtime(code)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch, "empty", runtime.empty)
    return runtime


def test_a_refused_registration_leaves_no_error(
    cuda: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next kernel of the user would be reported as failed."""
    runtime = installed(monkeypatch, 2)
    assert cuda.register is not None and cuda.unregister is not None
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        cuda.register(4096, 4096, torch.device("cuda:0"))
    assert not runtime.pending
    cuda.unregister(4096)
    assert not runtime.pending


def test_a_registration_that_works_launches_nothing(
    cuda: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = installed(monkeypatch, 0)
    runtime.pending = 7  # somebody else's, which is not ours to clear
    assert cuda.register is not None and cuda.unregister is not None
    cuda.register(4096, 4096, torch.device("cuda:0"))
    cuda.unregister(4096)
    assert runtime.pending == 7
