"""What ``wrap`` gives where nothing is trained: weights are streamed, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .engine import Engine
from .facts.stats import MemoryStats, Stats
from .facts.tier import Tier
from .observe.export import save_trace
from .planning.plan import Plan


class OffloadedInference:
    """A model whose weights live on several tiers, to compute with; what ``wrap`` gives without an
    optimizer.

    The model is called as it always is, and ``generate`` works.  A context manager; ``close`` also
    runs at interpreter exit, and when the model is not in use any more.

    Example::

        with overspill.wrap(model, weights=path, host_memory="8GiB", nvme="/scratch") as offloaded:
            with torch.no_grad():
                model.generate(**prompt)
            print(offloaded.stats.explain())
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def plan(self) -> Plan:
        """The plan that is followed; its step is one forward of the whole model."""
        return self._engine.plan

    @property
    def stats(self) -> Stats:
        """Figures from the end of the last forward but one to that of the last."""
        return self._engine.stats

    @property
    def memory(self) -> Mapping[Tier, MemoryStats]:
        """Budget, held and peak bytes of every tier."""
        return self._engine.memory

    def trace(self, path: str | Path) -> None:
        """Writes the recorded forwards: Chrome trace JSON, or a picture of the lanes for
        ``.png``."""
        save_trace(self._engine.trace, Path(path))

    def close(self) -> None:
        """Ends all threads and frees all memory; the model cannot run any more (see ``unwrap``)."""
        self._engine.close()

    def __enter__(self) -> OffloadedInference:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
