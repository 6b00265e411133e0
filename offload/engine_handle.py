"""The common interface of what ``wrap`` returns: figures of the engine, and ``close``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch
from typing_extensions import Self

from .engine import Engine
from .errors import clean_up
from .facts.stats import MemoryStats, Stats
from .facts.tier import Tier
from .observe.trace_files import save_trace
from .paths import as_path
from .planning.plan import Plan
from .private import checkpoint_private
from .private.reentrancy import refuse_reentry

T = TypeVar("T")
MOST_TRIES = 4  # of a micro-batch in ``with_room``


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
        """Free the device memory, and with ``host`` the host memory, until the next use.

        Waits for updates and transfers, and commits if there is a durable store.  What the freed
        memory holds is copied: from the device to host memory, or to ``nvme`` if ``host_memory``
        has no room for it; with ``host``, all of it to ``nvme``.  Copies on disk are lost with the
        process.

        The next forward, step or edit takes the memory back, as ``wake`` does.  Weights can be read
        meanwhile, with ``overspill.named_weights`` one at a time.

        Example::

            optimizer.sleep()
            samples = generate(overspill.named_weights(model), prompts)  # by vLLM, say
            policy_loss(model, samples).backward()  # takes the memory back

        Raises:
            BudgetError, IoError: there is no room for the copies; except for the commit, nothing
                has changed.
            OffloadError: the model runs, a graph or another tensor still refers to its weights,
                ``host`` needs ``nvme=``, ``update="backward"`` has begun a step, the model is
                materialized, or this is not the training thread; nothing has changed.  Or the model
                is under FSDP2 or DDP.
        """
        refuse_reentry()
        if not isinstance(host, bool):
            raise TypeError(f"host must be True or False, got {host!r}")
        self._engine.sleep(host=host)

    def wake(self) -> None:
        """Take back the memory that ``sleep`` has freed, as the next use would.

        Raises:
            OffloadError: there is not enough memory now.  Nothing is lost, and a later call, or the
                next use, can succeed.
            IoError, CorruptionError: a copy on disk cannot be read.  With a durable store, call
                ``close()`` and ``overspill.resume``.
        """
        refuse_reentry()
        self._engine.wake()

    def with_room(self, run: Callable[[], T]) -> T:
        """Return what ``run`` computes: the forward and backward of one micro-batch.

        If it raises ``torch.OutOfMemoryError``, call ``make_room``, set torch's random numbers back
        to where they were, and run it again, up to three times.

        Example::

            def run():
                loss = model(**batch).loss
                loss.backward()
                return loss.detach()

            loss = optimizer.with_room(run)

        Raises:
            torch.OutOfMemoryError: there is still too little memory.  Gradients of a part of the
                model may have been added; drop them with ``zero_grad()`` to skip the step.
        """
        device = self._engine.device
        drawn = checkpoint_private.random_states(device)
        for _ in range(MOST_TRIES - 1):
            try:
                return run()
            except torch.OutOfMemoryError as error:
                message = str(error)
            # Outside of the block above, where the error's frames would keep the graph.
            try:
                made = self.make_room()
            except Exception as error:
                raise error from torch.OutOfMemoryError(message)
            if not made:
                raise torch.OutOfMemoryError(message)
            checkpoint_private.restore_random_states(drawn, device)
        return run()

    def make_room(self) -> bool:
        """Keep fewer activations on the device from now on, after a forward or backward has raised
        ``torch.OutOfMemoryError``.

        Lower the room for activations to three quarters of what was kept, for the rest of the run,
        under ``activations="auto"`` choose again which units are recomputed, and free memory that
        PyTorch caches.  Call it outside of the ``except`` block, whose exception holds the graph.

        Also prepare a repetition of the same micro-batch, with the same forward and backward:
        gradients that the failed backward has already delivered are not added a second time.  For
        another micro-batch call ``zero_grad()`` first.  ``with_room`` does all of this, and also
        repeats random numbers.

        Returns:
            Whether to repeat the micro-batch: fewer activations will stay.  ``False`` if nothing
            can be lowered (``activations="keep"``), or if ``update="backward"`` has updated units
            already: then ``step()`` takes the step as it is.

        Raises:
            OffloadError: gradients of earlier micro-steps were lost; call ``zero_grad()`` and
                repeat the whole step.  Or the model runs, this is not the training thread, or the
                model is under FSDP2 or DDP.
        """
        refuse_reentry()
        return self._engine.make_room()

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


class OffloadedInference(EngineHandle):
    """A model for inference whose weights live on several tiers.

    The model is called as usual, and ``generate`` works.  A step, in ``plan``, ``stats`` and
    ``trace``, is one forward of the whole model, measured from the end of the previous one.  This
    is a context manager; ``close`` also runs at interpreter exit, and when the model is no longer
    in use.

    Example::

        with overspill.wrap(model, weights=path, host_memory="8GiB", nvme="/scratch") as offloaded:
            with torch.no_grad():
                model.generate(**prompt)
            print(offloaded.stats.explain())
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
