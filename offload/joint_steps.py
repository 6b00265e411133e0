"""What ``wrap`` returns for a list of optimizers: one each, which take their steps together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from .engine import Engine
from .errors import OffloadError
from .optim.joint import JointOptimizer
from .optim.single_step import name_of
from .optimizer import OffloadedOptimizer
from .state.lazy_state import LazyState
from .state.state_matching import NAMES
from .state.torch_state import OptimizerState

# Note [Several optimizers over one model]
# The engine has one step, whose updates run behind the next forward, and whose commit has the state
# of all parameters.  So the optimizers of a list take their steps together: the engine's step is
# taken once ``step()`` of each of them was called, in any order.  As all see the gradients of the
# same backward, and no parameter is in two of them, the result is that of separate steps.  What
# would make a difference raises an error: a forward that trains in between, a second step of one,
# and gradients that were dropped in between.  ``zero_grad()`` of an optimizer that waits for the
# others takes effect after the engine's step.


class JointStep:
    """The steps of several optimizers, which are taken together."""

    def __init__(self, engine: Engine, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._engine, self._optimizers = engine, optimizers
        self._given: dict[int, list[torch.Tensor]] = {}  # by optimizer, parameters with gradients
        self._afterwards: list[Callable[[], None]] = []
        engine.check_before_training(weakref.WeakMethod(self.require_complete))

    def take(self, number: int) -> None:
        """Note that ``step()`` of an optimizer was called; take the engine's step after the last.

        Raises:
            OffloadError: it was called twice, or gradients are gone since.
        """
        if number in self._given:
            self.require_complete()
        params = (p for g in self._optimizers[number].param_groups for p in g["params"])
        self._given[number] = [p for p in params if p.grad is not None]
        if len(self._given) < len(self._optimizers):
            return
        given, self._given = self._given, {}
        for each, members in given.items():
            if any(p.grad is None for p in members):
                raise OffloadError(
                    f"gradients of {name_of(self._optimizers[each])} were dropped between its "
                    "step() and that of the other optimizers, which are applied together; call "
                    "model.zero_grad() after the last step()"
                )
        afterwards, self._afterwards = self._afterwards, []
        self._engine.step()
        for work in afterwards:
            work()

    def after(self, number: int, work: Callable[[], None]) -> None:
        """Call ``work`` now, or after the engine's step if the optimizer waits for the others."""
        if number in self._given:
            self._afterwards.append(work)
        else:
            work()

    def require_complete(self) -> None:
        """Raise ``OffloadError`` if only some of the optimizers were stepped."""
        if not self._given:
            return
        missing = [o for number, o in enumerate(self._optimizers) if number not in self._given]
        self._given, self._afterwards = {}, []
        raise OffloadError(
            f"step() of {', '.join(map(name_of, missing))} is missing: the optimizers that were "
            "wrapped together take their steps together; call step() of each of them after every "
            "backward (leave gradients None to keep parameters as they are). No step was taken"
        )


class PartState(LazyState):
    """The state of the parameters of one of several optimizers."""

    def __init__(self, state: OptimizerState, inner: torch.optim.Optimizer) -> None:
        super().__init__(state)
        self._own = {id(p) for group in inner.param_groups for p in group["params"]}

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (p for p in super().__iter__() if id(p) in self._own)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, p: object) -> bool:
        return id(p) in self._own and super().__contains__(p)

    def clear(self) -> None:
        """Reset the optimizer's parameters to the state before their first step."""
        for p in list(self):
            del self[p]


class OptimizerPart(OffloadedOptimizer):
    """One of several optimizers that were wrapped together.

    ``state``, ``state_dict`` and ``zero_grad`` are about its own parameters.  Commits, exports and
    figures are those of the whole model.
    """

    def __init__(
        self, engine: Engine, joint: JointOptimizer, number: int, steps: JointStep
    ) -> None:
        inner = joint.optimizers[number]
        super().__init__(engine, inner)
        self.__dict__["state"] = PartState(engine.state, inner)
        groups = [len(each.param_groups) for each in joint.optimizers]
        self._first = sum(groups[:number])
        self._joint, self._number, self._steps = joint, number, steps

    def _take_step(self) -> None:
        self._steps.take(self._number)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of its parameters, or set them to zero, once they are applied."""
        self._steps.after(self._number, partial(super().zero_grad, set_to_none))

    def _own_groups(self) -> slice:
        return slice(self._first, self._first + len(self.param_groups))

    def _state(self) -> dict[str, Any]:
        whole = self._engine.state_dict()
        groups = whole["param_groups"][self._own_groups()]
        start = min((n for group in groups for n in group["params"]), default=0)
        own = {n for group in groups for n in group["params"]}
        return {
            "state": {n - start: s for n, s in whole["state"].items() if n in own},
            "param_groups": [
                {**group, "params": [n - start for n in group["params"]]} for group in groups
            ],
            NAMES: whole[NAMES][self._own_groups()],
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        if len(state["param_groups"]) != len(self.param_groups):
            raise ValueError(
                f"the state has {len(state['param_groups'])} param groups, the optimizer "
                f"{len(self.param_groups)}"
            )
        whole = self._engine.state_dict()
        old = whole["param_groups"][self._own_groups()]
        numbers = [n for group in old for n in group["params"]]
        given = [n for group in state["param_groups"] for n in group["params"]]
        if len(numbers) != len(given):
            raise ValueError(
                f"the state has {len(given)} parameters, the optimizer has {len(numbers)}"
            )
        place = dict(zip(given, numbers, strict=True))
        kept = {n: s for n, s in whole["state"].items() if n not in set(numbers)}
        new = {place[n]: s for n, s in state["state"].items()}
        groups = [
            {**group, "params": [place[n] for n in group["params"]]}
            for group in state["param_groups"]
        ]
        whole["param_groups"][self._own_groups()] = groups
        if NAMES in state:
            whole[NAMES][self._own_groups()] = state[NAMES]
        self._engine.load_state({**whole, "state": {**kept, **new}})


def in_parts(
    made: OffloadedOptimizer, joint: torch.optim.Optimizer | None
) -> OffloadedOptimizer | list[OffloadedOptimizer]:
    """Return what was made; if it is for several optimizers, a list with one for each."""
    if not isinstance(joint, JointOptimizer):
        return made
    engine = made._engine
    steps = JointStep(engine, joint.optimizers)
    for inner in joint.optimizers:
        inner.state.clear()
    return [OptimizerPart(engine, joint, n, steps) for n in range(len(joint.optimizers))]
