"""What all tests share: a cache of their own, so that rates are measured once a run at most, and
one torch thread: models this small wait for a second one longer than it works."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch comes; processes of tests inherit it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script
    signal.signal(signal.SIGINT, signal.default_int_handler)


from tests.devices import NAME


@pytest.fixture(autouse=True)
def ordered() -> Iterator[None]:
    """On the test device: whatever two streams touch is ordered."""
    yield
    if NAME == "testdev":
        from tests.device.install import install

        races = install().take_races()
        assert not races, f"{len(races)} races, the first: {races[0]}"


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """No thread of an engine outlives its test: another test would find it."""
    yield
    if engine_threads():
        gc.collect()  # a model that nobody has closes its engine
        ends_s = time.monotonic() + 10
        while engine_threads() and time.monotonic() < ends_s:
            time.sleep(0.01)
        assert not engine_threads()


def engine_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if "overspill" in each.name]


# What is trained, lost and found again there is right in every placement; which one is best is
# asked in tests/sim and tests/unit, and drawn placements are trained by ``Preference``.
ABOUT_TRAINING = ("parity", "robust", "durable", "families", "integrations", "optimizers")


TABLE, PART = 5, 12  # a test of so many cases is a table: one of so many is tried in CI
SOAK = Path(__file__).with_name("soak.txt")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of tables of what is trained, CI tries a part in which each value occurs; soak tries all.

    So it does with what ``soak.txt`` names.
    """
    named = set(SOAK.read_text(encoding="utf-8").splitlines())
    for item in items:
        if item.nodeid in named:
            item.add_marker(pytest.mark.soak)
    tables: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.path.parent.name in (*ABOUT_TRAINING, "sim"):
            tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for table in tables.values():
        seen = set[tuple[str, str]]()
        for item in table if len(table) >= TABLE else ():
            values = {(name, repr(value)) for name, value in item.callspec.params.items()}
            if values <= seen and zlib.crc32(item.nodeid.encode()) % PART:
                item.add_marker(pytest.mark.soak)
            seen |= values


@pytest.fixture(autouse=True)
def first_placement(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual placement, and not the best of ten: to simulate these takes longer than to train
    what is so small.  ``searches``: not for that test."""
    searches = request.node.get_closest_marker("searches") is not None
    if request.path.parent.name not in ABOUT_TRAINING or searches:
        return
    from overspill.planning import choose

    best = choose._best_needs
    monkeypatch.setattr(
        choose, "_best_needs",
        lambda parts, budgets, needs, depth, rates, prefer: best(
            parts, budgets, needs, depth, None, prefer
        ),
    )  # fmt: skip


def pytest_collection_finish() -> None:
    """What is imported stays: collections, which many tests ask for, need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of all workers
    folder = folder / "cache"
    folder.mkdir(exist_ok=True)
    os.environ["OVERSPILL_CACHE"] = str(folder)
    return folder
