"""The other side of ``process``: answers orders, one line of JSON each.  Imports nothing else of
ours: it also runs in the environments of the peers."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

Order = dict[str, Any]
Answer = dict[str, Any]
PR_SET_PDEATHSIG = 1
SHOW_STACKS = signal.SIGUSR1  # tells stderr where all threads are, before an arm is ended


@contextlib.contextmanager
def _answers() -> Iterator[Callable[[Answer], None]]:
    """A function that answers on stdout, which nobody else reaches meanwhile: what libraries
    print goes to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)

        def answer(content: Answer) -> None:
            out.write(json.dumps(content) + "\n")
            out.flush()

        yield answer


def _end_with_parent() -> None:
    """A suite that is killed leaves no arm behind (Linux; elsewhere an arm ends with its input)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(begin: Callable[[Order], tuple[Answer, Callable[[Order], Answer]]]) -> None:
    """Answers orders until stdin ends.

    ``begin`` takes the first order; it returns the answer to that one and what answers the others.
    An error is the last answer.
    """
    _end_with_parent()
    faulthandler.enable()
    faulthandler.register(SHOW_STACKS)
    with _answers() as answer:
        go: Callable[[Order], Answer] | None = None
        try:
            for line in sys.stdin:
                order = json.loads(line)
                if go is None:
                    first, go = begin(order)
                    answer(first)
                else:
                    answer(go(order))
        except Exception as error:  # it becomes a row of the suite
            answer({"error": f"{type(error).__name__}: {error}"})
            raise
