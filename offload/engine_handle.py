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
from .private.reentrancy import refuse_reentry


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

    def sleep(self, *, host: bool = False) -> None:
        """Give memory back until the next use, such as to generate with another engine.

        Waits for updates and transfers, commits if there is a durable store, and frees the device
        memory; with ``host`` also the host memory.  What was in device memory is copied to host
        memory, or to ``nvme`` if its budget has no room; what was in host memory to ``nvme``.
        The copies vanish with the process.

        The next forward, step or edit takes the memory back, as ``wake`` does.  Meanwhile weights
        can be read: ``overspill.named_weights(model)`` passes them to another engine.

        Example::

            optimizer.sleep()
            rollout.load(overspill.named_weights(model))  # an engine that generates, say
            samples = rollout.generate(prompts)
            rollout.sleep()
            loss = policy_loss(model, samples)  # wakes

        Raises:
            BudgetError: no budget has room for the copies; nothing changes.
            IoError: the disk has no room for the copies; nothing changes.
            OffloadError: the model runs, a graph or another tensor still refers to its weights, or
                ``host`` needs ``nvme=``; nothing changes.
        """
        refuse_reentry()
        if not isinstance(host, bool):
            raise TypeError(f"host must be True or False, got {host!r}")
        self._engine.sleep(host=host)

    def wake(self) -> None:
        """Take back the memory that ``sleep`` has given back, as the next use would.

        Raises:
            OffloadError: there is not enough memory now; nothing is lost, and a later call, or use,
                can succeed.
        """
        refuse_reentry()
        self._engine.wake()

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
