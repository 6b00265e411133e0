"""Updates during backward: which units may be updated then, and which operations they rule out."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ..activations.saved_tensor_hooks import SavedTensors
from ..config import OffloadConfig
from ..errors import BackwardUpdateError
from ..movement.updates import Updater
from ..params.before_use import UseCallbacks
from ..params.onloaded_units import OnloadedUnits
from ..params.resident_param_guard import ResidentParamGuard
from ..private import torch_private
from ..schedule.ledger import Ledger
from .update_waiter import UpdateWaiter


class Seals(Protocol):
    """The commits, as far as a step needs them: ``seal`` is called before weights change."""

    def seal(self) -> None: ...


Runs = AbstractContextManager[bool]  # a lock, held while a block runs


class Declared:
    """A context manager that holds a lock.

    Its ``__exit__`` is the lock's own, in C: no interrupt leaves the declaration in force for good,
    and no generator that is garbage-collected ends it late.
    """

    def __init__(self, check: Callable[[], None], runs: Runs) -> None:
        """Set up; ``check`` raises if the block cannot be entered."""
        self._check, self._runs = check, runs

    def __enter__(self) -> None:
        self._check()
        self._runs.__enter__()

    @property
    def __exit__(self) -> Callable[..., bool | None]:
        return self._runs.__exit__


class BackwardUpdatePolicy:
    """Decisions for ``update="backward"``; in the other modes no unit is updated early.

    Attributes:
        before_use: to call before gradients are changed.
    """

    def __init__(
        self,
        config: OffloadConfig,
        update: str,
        groups: Sequence[Mapping[str, Any]],
        ledger: Ledger,
        updater: Updater,
        onloaded_units: OnloadedUnits,
        saved: SavedTensors,
        resident_guard: ResidentParamGuard,
        update_waiter: UpdateWaiter,
        commits: Seals | None,
        before_use: UseCallbacks,
    ) -> None:
        self.before_use = before_use
        self._config, self._update, self._groups = config, update, groups
        self._ledger, self._updater = ledger, updater
        self._onloaded_units, self._saved, self._resident_guard = (
            onloaded_units,
            saved,
            resident_guard,
        )
        self._update_waiter, self._commits = update_waiter, commits
        self._declared: list[tuple[weakref.ref[Any], bool]] = []  # innermost last
        self._told_of_dropped = self._told_of_drop = False
        self._consumed: set[int] = set()  # parameters whose gradient was applied

    def may_update(self, unit: int, over: bool) -> bool:
        """Return whether a unit whose gradients are being gathered may be updated now.

        ``over``: no backward runs any more, so that graphs that still exist do not matter.
        """
        if self._update != "backward" or not self._final():
            return False
        users = self._onloaded_units.users[unit]  # itself, and units that share its weights
        if over:
            return True
        return not any(
            self._onloaded_units.uses[u] or self._saved.outlive_gradients(u) for u in users
        )

    def begin_early(self, unit: int, params: Sequence[int]) -> None:
        """Prepare the update of a unit during backward; ``params``: those with a gradient."""
        if self._commits is not None:
            self._commits.seal()
        self._update_waiter.wait_for_updates()
        if not self._ledger.early:
            self._updater.begin_step(self._groups)
        self._ledger.begin_early(unit, params)
        self._consumed.update(params)
        self._resident_guard.end_graphs([unit])

    def renew(self, index: int) -> None:
        """Forget that a parameter's gradient was applied: another one takes its place."""
        self._consumed.discard(index)

    def drop(self) -> None:
        """Forget which gradients were applied: all gradients are dropped."""
        self._consumed.clear()

    def consumed(self, params: Collection[int]) -> bool:
        """Return whether backward has already applied the gradient of one of the parameters."""
        return not self._consumed.isdisjoint(params)

    def refuse_consumed(self, params: Collection[int]) -> None:
        """Raise if backward has already applied the gradient of one of the parameters."""
        if self.consumed(params):
            raise BackwardUpdateError(
                "update='backward' has applied this gradient already; for several backward() per "
                "step set accumulate=N or use overspill.accumulate(optimizer, final=...); freeze a "
                "model that a loss only passes through (requires_grad_(False)); or use "
                "update='next_forward' to use gradients between backward and step"
            )

    def refuse_dropped(self, live: Callable[[int], bool]) -> None:
        """Raise if gradients were dropped that this step's backward has already applied.

        ``live``: whether the engine holds a parameter's gradient.
        """
        dropped = [
            unit
            for unit in sorted(self._ledger.early)
            if any(i in self._consumed and not live(i) for i in self._ledger.turns(unit))
        ]
        if dropped and not self._told_of_dropped:
            self._told_of_dropped = True
            raise BackwardUpdateError(
                f"update='backward' has applied the gradients of "
                f"{', '.join(map(self._resident_guard.name_of, dropped))} already, and they were "
                "dropped before step(); call step() before zero_grad(), or use "
                "update='next_forward'; another step() takes the step as it is, rollback() goes "
                "back to the last commit"
            )
        self._told_of_dropped = False

    def require_unused(self) -> None:
        """Raise if gradients are about to be dropped that this step's backward has already applied.

        Raises only once per step: after an exception in backward there may be no other way to go
        on.

        Raises:
            OffloadError: backward has applied them; nothing was dropped yet.
        """
        self.before_use()
        if not self._ledger.early:
            self._told_of_drop = False
        elif not self._told_of_drop and not torch_private.in_backward():
            self._onloaded_units.executor.health.check()  # a step that failed has not ended
            self._told_of_drop = True
            names = ", ".join(map(self._resident_guard.name_of, sorted(self._ledger.early)))
            raise BackwardUpdateError(
                f"update='backward' has already applied the gradients of {names}, so they cannot "
                "be dropped; call step() before zero_grad(), or optimizer.rollback() to undo this "
                "update (with a durable store). For a loss that only passes through this model (a "
                "discriminator that judges a generator), freeze the model meanwhile "
                "(requires_grad_(False)), or wrap it with update='next_forward'. To keep this "
                "update and drop the other gradients, call zero_grad() again"
            )

    def refuse_updated(self, unit: int) -> None:
        """Raise if a gradient comes for a unit that this step's backward has already updated."""
        if unit in self._ledger.early:
            raise BackwardUpdateError(
                f"update='backward' has updated {self._resident_guard.name_of(unit)!r} already in "
                "this step, with the gradients of the backward before, or of this one where a "
                "module that is used twice lies in reentrant checkpoints; call step() after it, "
                "also to skip that batch (or optimizer.rollback(), with a store), "
                "or use update='next_forward'"
            )

    def declared(self, final: bool) -> Declared:
        """Return a context in which every backward is, or is not, the last one of the step."""

        def check() -> None:
            if not final and self._update == "backward" and self._config.accumulate == 1:
                raise BackwardUpdateError(
                    "update='backward' keeps no gradients between micro-steps unless accumulate= "
                    "is given; pass accumulate=N, at least 2, to wrap"
                )

        return Declared(check, self.all_final(final))

    def all_final(self, final: bool = True) -> Runs:
        """Return the same context as ``declared``, without its check."""
        runs = threading.Lock()
        self._declared = [each for each in self._declared if each[0]() is not None]
        self._declared.append((weakref.ref(runs), final))
        return runs

    def _final(self) -> bool:
        """Return whether this backward is the last of the step: as declared, else by its number."""
        for runs, final in reversed(self._declared):
            if (lock := runs()) is not None and lock.locked():
                return bool(final)
        return self._ledger.micro_steps == self._config.accumulate - 1
