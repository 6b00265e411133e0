"""Parity tests check every invariant after every signal, and compare with a plain twin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import overspill
from tests.models import adamw
from tests.parity.twins import NVME, make


@pytest.fixture(autouse=True)
def validated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERSPILL_VALIDATE", "1")


@pytest.fixture
def pair(tmp_path: Path) -> Any:
    """A wrapped model with its optimizer, and a plain twin with its own."""
    plain, model = make(), make()
    optimizer = overspill.wrap(model, adamw(model), nvme=tmp_path, **NVME)
    yield model, optimizer, plain, adamw(plain)
    optimizer.close()
