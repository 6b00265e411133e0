"""The object that ``wrap`` returns for a model that is not trained."""

from __future__ import annotations

from .engine import Engine
from .engine_handle import EngineHandle


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
