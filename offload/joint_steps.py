"""What ``wrap`` returns for a list of optimizers: one for each."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .engine import Engine
from .errors import OffloadError
from .optim.joint import JointOptimizer
from .optim.single_step import name_of, same_value, shared_copies
from .optimizer import OffloadedOptimizer
from .private.torch_private import in_backward
from .state.lazy_state import LazyState
from .state.state_matching import NAMES
from .state.torch_state import Make, OptimizerState

# Note [Several optimizers]
# Each optimizer of a list has a step of its own, as in plain PyTorch.  But a step of the engine
# passes over all units, its updates run behind the next forward, and a norm for clipping is that of
# all gradients.  So optimizers that are stepped one after the other, such as Muon for matrices and
# AdamW for the rest, share a step of the engine: ``step()`` of an optimizer only records it, with
# its present hyper-parameters, and the last one takes the engine's step for all.
#
# Where they take turns (a generator and its discriminator), the step is taken for those that wait
# as soon as the user's code uses anything that could show the difference: a forward, weights,
# gradients or state, also those of the other models.  See ``BeforeUse``.  Gradients that a loss has
# left with the others stay as they are.
#
# With ``update="backward"`` the gradients of all are applied as they come, so that steps apart are
# an error unless the others have no gradients.


@dataclass(frozen=True)
class _Waiting:
    """An optimizer whose ``step()`` was called, and not yet those of all others.

    Attributes:
        members: its parameters that have a gradient.
        groups: its hyper-parameters.
        marks: differ if a weight or gradient was changed since.
    """

    members: Sequence[torch.Tensor]
    groups: Sequence[dict[str, Any]]
    marks: Sequence[tuple[int, ...]]


class JointStep:
    """The steps of several optimizers, which are taken together.

    Attributes:
        parts: what ``wrap`` returns.
    """

    def __init__(self, engine: Engine, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._engine, self._optimizers = engine, optimizers
        self.parts: list[OffloadedOptimizer] = []
        self._given: dict[int, _Waiting] = {}  # by optimizer
        self._afterwards: list[Callable[[], None]] = []
        firsts = itertools.accumulate((len(o.param_groups) for o in optimizers), initial=0)
        self._groups = [  # their numbers, by optimizer
            range(first, first + len(o.param_groups))
            for first, o in zip(firsts, optimizers, strict=False)
        ]
        self._index = {id(p): index for index, p in enumerate(engine.parameters)}
        engine.check_before_use(weakref.WeakMethod(self.take_waiting))

    def take(self, number: int) -> None:
        """Note that ``step()`` of an optimizer was called; take the engine's step after the last.

        Raises:
            OffloadError: it was called twice, or what it applies was changed since.
        """
        if number in self._given:
            self.take_waiting()
        groups = self._optimizers[number].param_groups
        members = [p for g in groups for p in g["params"] if p.grad is not None]
        self._given[number] = _Waiting(members, shared_copies(groups), self._marks(members))
        if len(self._given) == len(self._optimizers):
            self._apply()

    def _marks(self, members: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
        changes = self._engine.write_changes()
        return [(*changes[self._index[id(p)]], id(p.grad)) for p in members]

    def _apply(self) -> None:
        """Take the engine's step, and then do what was put off, also after an error."""
        given, afterwards = self._given, self._afterwards
        self._given, self._afterwards = {}, []
        newer: list[tuple[dict[str, Any], dict[str, Any]]] = []
        try:
            for number, waiting in given.items():
                groups = self._optimizers[number].param_groups
                for group, old in zip(groups, waiting.groups, strict=True):
                    changed = {k for k in old if k in group and not same_value(group[k], old[k])}
                    newer.append((group, {k: group[k] for k in changed}))
                    group.update({k: old[k] for k in changed})
            chosen = [n for number in given for n in self._groups[number]]
            self._engine.step(partial(self._require_unchanged, given), chosen)
        finally:
            for group, values in newer:
                group.update(values)
            for work in afterwards:
                work()

    def _require_unchanged(self, given: Mapping[int, _Waiting]) -> None:
        for number, waiting in given.items():
            name = name_of(self._optimizers[number])
            if self._marks(waiting.members) != waiting.marks:
                raise OffloadError(
                    f"weights or gradients of {name} were changed through another tensor (a view, "
                    "or .data) between its step() and that of the other optimizers, which are "
                    "applied together; change them before the first step(), or after the last"
                )

    def after(self, number: int, work: Callable[[], None]) -> None:
        """Call ``work`` now, or after the engine's step if the optimizer waits for the others."""
        if number in self._given:
            self._afterwards.append(work)
        else:
            work()

    def take_waiting(self) -> None:
        """Take the engine's step for the optimizers that wait for others.

        Raises:
            OffloadError: a backward has begun, or has applied gradients of the others; no step is
                taken.
        """
        if not self._given:
            return
        if in_backward():
            given, self._given, afterwards, self._afterwards = self._given, {}, self._afterwards, []
            for work in afterwards:
                work()
            missing = [o for number, o in enumerate(self._optimizers) if number not in given]
            raise OffloadError(
                f"a backward has begun before step() of {', '.join(map(name_of, missing))} was "
                "called, and would add to gradients that are applied together; call backward() of "
                "all losses before the first step(). No step was taken"
            )
        self._apply()


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

    def __getitem__(self, p: torch.Tensor) -> dict[str, Any]:
        return super().__getitem__(self._require(p))

    def __setitem__(self, p: torch.Tensor, values: Mapping[str, Any]) -> None:
        super().__setitem__(self._require(p), values)

    def __delitem__(self, p: torch.Tensor) -> None:
        super().__delitem__(self._require(p))

    def _require(self, p: torch.Tensor) -> torch.Tensor:
        if id(p) not in self._own:
            raise KeyError(p)
        return p

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
        self._number, self._steps = number, steps

    @property
    def together(self) -> Sequence[OffloadedOptimizer]:
        """See ``OffloadedOptimizer.together``."""
        return self._steps.parts

    def _take_step(self) -> None:
        self._steps.take(self._number)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of its parameters, or set them to zero, once they are applied."""
        self._steps.after(self._number, partial(super().zero_grad, set_to_none))

    def _own_groups(self) -> slice:
        return slice(self._first, self._first + len(self.param_groups))

    def _state(self) -> dict[str, Any]:
        self._steps.take_waiting()
        return self._own_part(self._engine.state_dict())

    def streamed_state(self, make: Make) -> dict[str, Any]:
        """See ``OffloadedOptimizer.streamed_state``."""
        self._steps.take_waiting()
        return self._own_part(self._engine.streamed_state(make))

    def _own_part(self, whole: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of this optimizer, out of that of all."""
        groups = whole["param_groups"][self._own_groups()]
        start = min((n for group in groups for n in group["params"]), default=0)
        own = {n for group in groups for n in group["params"]}
        return {
            "state": {n - start: s for n, s in whole["state"].items() if n in own},
            "param_groups": [
                {**group, "params": [n - start for n in group["params"]]} for group in groups
            ],
            **({NAMES: whole[NAMES][self._own_groups()]} if NAMES in whole else {}),
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
        inner.state.clear()  # the engine has it
    for number in range(len(joint.optimizers)):
        steps.parts.append(OptimizerPart(engine, joint, number, steps))
    engine.model_holds(steps.parts[0])
    return list(steps.parts)
