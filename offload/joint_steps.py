"""What ``wrap`` returns for a list of optimizers: one for each."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from .engine import Engine
from .optim.joint import JointOptimizer
from .optim.single_step import same_value, shared_copies
from .optimizer import OffloadedOptimizer
from .private import torch_private
from .state.lazy_state import LazyState
from .state.state_matching import NAMES
from .state.torch_state import Make, OptimizerState

log = logging.getLogger("overspill")

# Note [Several optimizers]
# Each optimizer of a list takes a step of its own, as in plain PyTorch: a step of the engine that
# updates the parameters in its param groups.  Gradients of the others stay as they are.
#
# With ``update="backward"``, backward has applied the gradients of all by the time of the first
# ``step()``.  The engine's step then completes the updates of all at once, so ``step()`` of an
# optimizer only records it, with its present hyper-parameters, and the last one takes the engine's
# step.  ``zero_grad()`` of an optimizer whose step is recorded runs after that.  Any other use of
# the models applies the recorded steps first, which raises an error if backward has applied
# gradients of the others; see ``UseCallbacks``.


class OptimizerSteps:
    """The steps of several optimizers.  See Note [Several optimizers].

    Attributes:
        parts: what ``wrap`` returns.
        groups: by optimizer, the numbers of its param groups among those of all.
    """

    def __init__(self, engine: Engine, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._engine, self._optimizers = engine, optimizers
        self.parts: list[OffloadedOptimizer] = []
        # By optimizer whose step() was called, its hyper-parameters.
        self._recorded: dict[int, Sequence[dict[str, Any]]] = {}
        self._deferred: list[Callable[[], None]] = []
        self._failed = set[int]()  # those of them whose step could not be taken yet
        self._returns = engine.returns
        firsts = itertools.accumulate((len(o.param_groups) for o in optimizers), initial=0)
        self.groups = [  # their numbers, by optimizer
            range(first, first + len(o.param_groups))
            for first, o in zip(firsts, optimizers, strict=False)
        ]
        # A resumed run counts the steps before, too.
        self._before = [
            0 if engine.step_count else self._steps_of(n) for n in range(len(optimizers))
        ]
        plan = engine.plan
        self._joint = plan.detail.update == "backward"
        if self._joint:
            engine.check_before_use(weakref.WeakMethod(self.apply_recorded))

    def step(self, number: int) -> None:
        """Take the step of an optimizer; with ``update="backward"``, that of all after the last.

        Raises:
            OffloadError: it was called twice, and the others, whose gradients backward has applied,
                were not.
        """
        if not self._joint:
            self._engine.step(self.groups[number])
            return
        if number in self._recorded and number not in self._failed:
            self.apply_recorded()
        self._failed.discard(number)
        self._returns = self._engine.returns
        self._recorded[number] = shared_copies(self._optimizers[number].param_groups)
        if len(self._recorded) == len(self._optimizers):
            self._apply()

    def count(self, number: int) -> int:
        """Return the number of steps that an optimizer has taken."""
        return self._steps_of(number) - self._before[number]

    def _steps_of(self, number: int) -> int:
        groups = self._optimizers[number].param_groups
        return self._engine.most_steps([p for group in groups for p in group["params"]])

    def _apply(self) -> None:
        """Take the engine's step, and then do what was put off.

        After an error without a step, all stays recorded, and ``step()`` may be called again.
        """
        recorded, deferred, count = self._recorded, self._deferred, self._engine.step_count
        self._recorded, self._deferred = {}, []  # first, because the engine's step uses weights
        newer: list[tuple[dict[str, Any], dict[str, Any]]] = []
        try:
            for number, kept in recorded.items():
                groups = self._optimizers[number].param_groups
                for group, old in zip(groups, kept, strict=True):
                    changed = {k for k in old if k in group and not same_value(group[k], old[k])}
                    newer.append((group, {k: group[k] for k in changed}))
                    group.update({k: old[k] for k in changed})
            chosen = [n for number in recorded for n in self.groups[number]]
            self._engine.step(chosen)
        except BaseException:
            if self._engine.step_count == count:
                self._recorded, self._deferred, self._failed = recorded, deferred, set(recorded)
            raise
        finally:
            for group, values in newer:
                group.update(values)
        for work in deferred:
            work()

    def run_after_step(self, number: int, work: Callable[[], None]) -> None:
        """Call ``work`` now, or after the engine's step if the optimizer's own is recorded."""
        if number in self._recorded:
            self._deferred.append(work)
        else:
            work()

    def apply_recorded(self) -> None:
        """Take the engine's step for the optimizers whose ``step()`` was recorded.

        Raises:
            OffloadError: backward has applied gradients of the others; no step is taken.
        """
        if self._returns != self._engine.returns:  # a rollback has undone what was recorded
            self._recorded, self._deferred, self._failed = {}, [], set()
        if self._recorded:
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
        self, engine: Engine, joint: JointOptimizer, number: int, steps: OptimizerSteps
    ) -> None:
        inner = joint.optimizers[number]
        super().__init__(engine, inner)
        self.__dict__["state"] = PartState(engine.state, inner)
        self._number, self._steps = number, steps

    @property
    def all_optimizers(self) -> Sequence[OffloadedOptimizer]:
        """See ``OffloadedOptimizer.all_optimizers``."""
        return self._steps.parts

    @property
    def step_count(self) -> int:
        """The number of steps that it has taken, including those before ``resume``."""
        return self._steps.count(self._number)

    @torch_private.without_grad
    def _take_step(self) -> None:
        self._steps.step(self._number)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of its parameters, or set them to zero, once they are applied."""
        self._steps.run_after_step(self._number, partial(super().zero_grad, set_to_none))

    def _own_groups(self) -> slice:
        own = self._steps.groups[self._number]
        return slice(own.start, own.stop)

    def _state(self) -> dict[str, Any]:
        self._steps.apply_recorded()
        return self._own_part(self._engine.state_dict())

    def streamed_state(self, make: Make) -> dict[str, Any]:
        """See ``OffloadedOptimizer.streamed_state``."""
        self._steps.apply_recorded()
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
        if len(state["param_groups"]) == self._steps.groups[-1].stop != len(self.param_groups):
            state = self._own_part(state)  # of an export, which has the state of all
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
    steps = OptimizerSteps(engine, joint.optimizers)
    for inner in joint.optimizers:
        inner.state.clear()  # the engine has it
    for number in range(len(joint.optimizers)):
        steps.parts.append(OptimizerPart(engine, joint, number, steps))
    engine.model_holds(steps.parts[0])
    counts = [part.step_count for part in steps.parts]
    if max(counts) - min(counts) == 1:  # after a crash, not by a schedule of several steps
        log.warning(
            "overspill: the optimizers have taken %s steps: if each steps once per iteration, the "
            "last iteration was committed after some of them. See docs/optimizers.md for commits "
            "of whole iterations", " and ".join(map(str, counts)),
        )  # fmt: skip
    return list(steps.parts)
