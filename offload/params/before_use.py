"""What has to be done before a model, its gradients or its optimizer's state are used."""

from __future__ import annotations

import weakref
from collections.abc import Callable

Check = Callable[[], None]


class BeforeUse:
    """Calls to make before the user's code reads or changes anything between steps."""

    def __init__(self) -> None:
        self._checks: list[weakref.WeakMethod[Check]] = []

    def also(self, check: weakref.WeakMethod[Check]) -> None:
        """Call ``check``, too, as long as its object lives."""
        self._checks.append(check)

    def __call__(self) -> None:
        """Make the calls."""
        for reference in self._checks:
            if (check := reference()) is not None:
                check()
