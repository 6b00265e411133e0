"""Ranges for torch's profiler, by unit and lane: what the engine computes and moves.

They also appear as NVTX ranges under ``torch.autograd.profiler.emit_nvtx``. While no profiler runs,
a range only costs the check of a flag.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from torch.profiler import record_function

from ..facts.trace import NO_RANGE
from ..private import torch_private


class ProfilerRanges:
    """Ranges named ``overspill <lane>: <name>``.

    A compute range begins and ends in separate calls. The profiler keeps ranges by thread, so
    another thread leaves it open instead of ending it.
    """

    def __init__(self) -> None:
        self._open: tuple[int, record_function] | None = None

    def begin(self, name: str) -> None:
        if torch_private.profiler_active():
            opened = record_function(f"overspill compute: {name}")
            opened.__enter__()
            self._open = (threading.get_ident(), opened)

    def end(self) -> None:
        if self._open is not None:
            thread, opened = self._open
            self._open = None
            if thread == threading.get_ident():
                opened.__exit__(None, None, None)

    def during(self, lane: str, name: str) -> AbstractContextManager[object]:
        if torch_private.profiler_active():
            return record_function(f"overspill {lane}: {name}")
        return NO_RANGE
