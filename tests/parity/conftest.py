"""Parity tests check every invariant after every signal."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def validated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERSPILL_VALIDATE", "1")
