"""A pytest plugin that tells of a failure at once: a suite that is ended later has told it."""

from __future__ import annotations

import pytest


class AtOnce:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and told is not None:
            told.write_line(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(AtOnce(config))
