"""What all tests share: a cache of their own, so that rates are measured once a run at most."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    os.environ["OVERSPILL_CACHE"] = str(folder)
    return folder
