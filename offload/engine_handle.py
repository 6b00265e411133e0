"""The common interface of what ``wrap`` returns: figures of the engine, and ``close``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from .engine import Engine
from .errors import clean_up
from .facts.stats import MemoryStats, Stats
from .facts.tier import Tier
from .observe.export import save_trace
from .paths import as_path
from .planning.plan import Plan


class EngineHandle:
    """A context manager that closes the engine."""

    _engine: Engine

    @property
    def plan(self) -> Plan:
        """The plan that this run follows."""
        return self._engine.plan

    @property
    def stats(self) -> Stats:
        """Figures of the last step."""
        return self._engine.stats

    @property
    def memory(self) -> Mapping[Tier, MemoryStats]:
        """Budget, held and peak bytes of every tier."""
        return self._engine.memory

    def trace(self, path: str | Path) -> None:
        """Write the recorded steps: Chrome trace JSON, or a picture of the lanes for ``.png``."""
        save_trace(self._engine.trace, as_path(path, "path"))

    def close(self) -> None:
        """End all threads and free all memory; the model cannot run any more (see ``unwrap``)."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        clean_up(self.close, "close()", raised)
