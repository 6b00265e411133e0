"""Callbacks before a model, its gradients or its optimizer's state are used."""

from __future__ import annotations

import weakref
from collections.abc import Callable

Check = Callable[[], None]


class UseCallbacks:
    """Callbacks that run before user code reads or changes weights, gradients or state."""

    def __init__(self) -> None:
        self._checks: list[weakref.WeakMethod[Check]] = []

    def add(self, check: weakref.WeakMethod[Check]) -> None:
        """Add a callback, for as long as its object lives."""
        self._checks.append(check)

    def __call__(self) -> None:
        """Run the callbacks."""
        for reference in self._checks:
            if (check := reference()) is not None:
                check()
