"""Engines over every way to move bytes: uring, threads, aiofiles, and the simulated disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from overspill.io_engine import IoEngine
from overspill.io_engine.backend import choose
from overspill.io_engine.native import NATIVE
from tests.faults import Faults, faulty_disk
from tests.io_parts import MIB, Open


@pytest.fixture(params=["uring", "threads", "aiofiles", "simulated"])
def backend(request: pytest.FixtureRequest) -> object:
    if request.param == "simulated":
        if NATIVE is None:
            pytest.skip("no native extension")
        return faulty_disk(Faults(seed=1))
    try:
        choose(request.param)
    except RuntimeError as error:
        pytest.skip(str(error))
    return request.param


@pytest.fixture
def open_engine(backend: object, tmp_path: Path) -> Iterator[Open]:
    engines = []

    def start(capacity_bytes: int = 8 * MIB, **options: object) -> IoEngine:
        options = {"backend": backend, "block_bytes": 64 << 10, **options}
        engines.append(IoEngine(tmp_path, capacity_bytes, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
