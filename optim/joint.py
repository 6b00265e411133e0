"""Several optimizers of one model as one, with the param groups of the first before the others'."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class JointOptimizer(torch.optim.Optimizer):
    """The groups and the state of several optimizers; each group is the optimizer's own dict.

    Raises:
        ValueError: there are none, a parameter is in two of them, or only some have names.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if not optimizers:
            raise ValueError("the list of optimizers is empty; pass None to train nothing")
        self.optimizers = tuple(optimizers)
        self.owner: dict[Tensor, torch.optim.Optimizer] = {}
        named = ["param_names" in group for each in optimizers for group in each.param_groups]
        if any(named) and not all(named):
            raise ValueError(
                "some of the optimizers were built from model.named_parameters(), and others were "
                "not; build all of them in the same way"
            )
        for number, optimizer in enumerate(optimizers):
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                if p in self.owner:
                    first = self.optimizers.index(self.owner[p])
                    raise ValueError(
                        f"a parameter of shape {tuple(p.shape)} is in optimizers {first} and "
                        f"{number} of the list; leave it to one of them"
                    )
                self.owner[p] = optimizer
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        for optimizer in optimizers:
            self.state.update(optimizer.state)
