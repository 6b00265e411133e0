"""Integrations with the training loops of frameworks: one module each, imported by name.

``transformers`` is for Trainer and its subclasses; ``accelerate`` and ``lightning`` are for these
frameworks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any


def offloading(**options: Any) -> AbstractContextManager[None]:
    """Give ``options`` of ``wrap`` to every trainer that is created inside the block.

    This is for libraries that create a ``transformers.Trainer``, or a subclass, by themselves::

        with overspill.offloading(host_memory="24GiB", nvme="/scratch/run"):
            library.finetune(model, dataset)

    It concerns the current thread or task (``contextvars``), and trainers keep the options after
    the block.  Blocks can be nested: options of the inner one replace those of the outer one, and
    a trainer's own ``overspill=`` replaces both.  A class with a ``__new__`` that does not call
    that of ``Trainer`` is not offloaded.

    Entering the block raises ``TypeError`` or ``ValueError`` if an option is unknown or invalid.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    from .transformers import with_options

    return with_options(options)
