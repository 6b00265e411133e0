"""What all tests share: a cache of their own, so that rates are measured once a run at most, and
one torch thread: models this small wait for a second one longer than it works."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch comes; processes of tests inherit it


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    os.environ["OVERSPILL_CACHE"] = str(folder)
    return folder
