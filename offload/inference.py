"""What ``wrap`` gives where nothing is trained: weights are streamed, and nothing else."""

from __future__ import annotations

from .engine import Engine
from .engine_handle import EngineHandle


class OffloadedInference(EngineHandle):
    """A model whose weights live on several tiers, to compute with; what ``wrap`` gives without an
    optimizer.

    The model is called as it always is, and ``generate`` works.  A step, in ``plan``, ``stats`` and
    ``trace``, is one forward of the whole model, from the end of the one before.  A context
    manager; ``close`` also runs at interpreter exit, and when the model is not in use any more.

    Example::

        with overspill.wrap(model, weights=path, host_memory="8GiB", nvme="/scratch") as offloaded:
            with torch.no_grad():
                model.generate(**prompt)
            print(offloaded.stats.explain())
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
