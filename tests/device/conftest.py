"""Only in a run whose device is the test device: ``OVERSPILL_TEST_DEVICE=testdev``."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.devices import NAME

collect_ignore_glob = [] if NAME == "testdev" else ["test_*.py"]


@pytest.fixture
def native() -> Iterator[ModuleType]:
    """The device's own door; its settings are those of a new device afterwards."""
    from tests.device.install import install

    module = install()
    yield module
    module.break_down("")
    module.set_delays(0, 0, 0)
    module.set_rates(0.0, 0.0)
    module.set_budget(4 << 30)
    module.fail_allocation(0)
    module.set_lockable_bytes((1 << 63) - 1)
