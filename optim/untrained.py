"""Stands where an optimizer would, where nothing is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch


class NoOptimizer(torch.optim.Optimizer):
    """It has no parameters."""

    def __init__(self) -> None:  # torch's own refuses to have none
        self.param_groups: list[dict[str, Any]] = []
        self.state: Any = {}
        self.defaults: dict[str, Any] = {}

    def step(self, closure: Callable[[], float] | None = None) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("nothing is trained")
