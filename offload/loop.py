"""The engine's work at each event of the training loop: forward, backward, step, commit."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from .activations.activation_tuner import ActivationTuner
from .durable.commits import Commits
from .errors import LifecycleError, OffloadError
from .grads.backward_update_policy import BackwardUpdatePolicy, Declared
from .grads.gradients import GradientCollector
from .grads.held_gradients import HeldGradients
from .grads.update_waiter import UpdateWaiter
from .movement.runtime import Runtime
from .params.onloaded_units import OnloadedUnits
from .params.resident_param_guard import ResidentParamGuard
from .private.reentrancy import wait_for_others
from .private.torch_private import in_backward
from .private.trainer import Trainer
from .schedule.messages import Until
from .state.averages import Averages
from .state.materializing import Materializing
from .state.param_access import ParamAccess
from .state.torch_state import OptimizerState
from .step.forward_stack import ForwardStack
from .step.param_group_check import ParamGroupCheck
from .step.repeats import Repeats
from .step.stepping import Stepping

log = logging.getLogger("overspill")


class Loop:
    """Brings the engine's state up to date before it serves an event of the training loop."""

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Mapping[str, Any]],
        runtime: Runtime,
        trainer: Trainer,
        forward_stack: ForwardStack,
        onloaded_units: OnloadedUnits,
        resident_guard: ResidentParamGuard,
        update_waiter: UpdateWaiter,
        weights: ParamAccess,
        materializing: Materializing,
        averages: Averages,
        backward_updates: BackwardUpdatePolicy,
        collector: GradientCollector,
        held: HeldGradients,
        stepping: Stepping,
        commits: Commits | None,
        tuner: ActivationTuner,
        repeats: Repeats,
    ) -> None:
        self._before_use = weights.before_use
        self._runtime, self._trainer = runtime, trainer
        self._group_check = ParamGroupCheck(model, groups, durable=commits is not None)
        self._executor, self._direct, self._trace = (
            runtime.executor, runtime.direct, runtime.trace
        )  # fmt: skip
        self._forward_stack, self._onloaded_units = forward_stack, onloaded_units
        self._resident_guard, self._update_waiter = resident_guard, update_waiter
        self._weights, self._materializing, self._averages = weights, materializing, averages
        self._backward_updates, self._collector, self._held = backward_updates, collector, held
        self._stepping, self._commits, self.tuner = stepping, commits, tuner
        self._repeats = repeats
        runtime.sleeping.add_user(collector)

    def require(self) -> None:
        """Raise after ``close`` and after a failure."""
        self._executor.health.check()

    def require_usable(self) -> None:
        """Raise if the model cannot be trained now.

        That is after ``close``, after a failure, in ``materialized`` and ``averaged``, and in a
        thread other than the training thread.
        """
        self.require_editable()  # first: this ends blocks that an exception has left
        self._averages.require_ended()

    def require_editable(self) -> None:
        """Raise where ``require_usable`` does, but not in ``averaged``."""
        self._resident_guard.prepared.clear()  # callers may change weights
        self.require_managed()
        self._executor.health.check()
        self._trainer.require()

    def require_managed(self) -> None:
        """Raise while the model is materialized."""
        self._materializing.require_ended()

    def watch(self, state: OptimizerState) -> OptimizerState:
        """Write users' changes in copies of ``state`` back before it is used; return ``state``.

        Only a weak reference is kept: ``state`` refers to the model, and an autograd graph that a
        user keeps refers to this object.
        """
        self._watched = weakref.ref(state)
        return state

    @property
    def _state(self) -> OptimizerState:
        state = self._watched()
        assert state is not None, "the engine has it"
        return state

    def write_copies(self) -> None:
        """Write in-place changes of copies that users have, before the model is used."""
        self._weights.write_copies()
        self._state.write_copies()

    def quiesce(self) -> None:
        """Wait for all updates and transfers, and drop caches."""
        self.require_usable()
        self._before_use()
        self._forward_stack.tidy()
        self._state.write_back()
        self._weights.take_edits()
        self._weights.reconcile()
        self._update_waiter.wait_for_updates()
        self._direct.quiesce()

    # -- forward --------------------------------------------------------------------------------

    def check_before_use(self, check: weakref.WeakMethod[Callable[[], None]]) -> None:
        """See ``Engine.check_before_use``."""
        self._before_use.add(check)

    def before_forward(self) -> None:
        """Prepare for a forward of the whole model, outside of any backward."""
        self._resident_guard.prepared.clear()
        self._trainer.claim()
        self._before_use()
        self._direct.finish()
        if torch.is_grad_enabled():
            self._executor.health.require_commits()
            self._averages.require_ended()
            self._group_check.check()
        self.write_copies()
        self._onloaded_units.refuse_edits()
        if self._commits is not None:
            self._commits.require_whole()
            if torch.is_grad_enabled():
                self._commits.seal()

    def catch_up(self, unit: int) -> None:
        """Prepare for a module that is about to run and reads weights of the unit."""
        self.require()
        self._trainer.claim()
        self._before_use()
        self._direct.finish()
        self._weights.write_copies(self._onloaded_units.groups[unit])
        self._state.write_back()
        if torch.is_grad_enabled() and not in_backward():
            self._executor.health.require_commits()
            self._averages.require_ended()
            if self._commits is not None:
                self._commits.seal()  # if only parts of the model are called
        if self._onloaded_units.may_change(unit):
            self._end_writes()
        self._onloaded_units.will_run(unit)
        self._resident_guard.show(unit)
        if not in_backward():
            self._resident_guard.prepared[unit] = torch.is_grad_enabled()

    def catch_up_again(self, unit: int) -> None:
        """Call ``catch_up``, unless nothing can have changed since the last call for this unit."""
        before = self._resident_guard.prepared.get(unit)
        if before is not torch.is_grad_enabled() or in_backward() or self._weights.lent():
            self.catch_up(unit)
        else:
            self.require()
            self._trainer.claim()
            self._onloaded_units.use_here(self._onloaded_units.groups[unit])

    def _end_writes(self) -> None:
        """Wait until memory that compute uses is written to disk.

        See Note [Changes in forward].
        """
        self._update_waiter.wait_for_updates()
        protocol = self._executor.protocol
        if self._commits is not None and not protocol.open:  # `cut` is false for the first commit
            protocol.wait(Until.DURABLE)

    def after_forward(self) -> None:
        """Hide resident weights after a forward of the whole model."""
        self._resident_guard.hide_all()

    # -- backward and step ----------------------------------------------------------------------

    def backward_begins(self) -> None:
        """Prepare for a backward, when its first graph task begins."""
        self._resident_guard.prepared.clear()
        self._before_use()
        self._direct.finish()
        self._weights.reconcile()
        self._onloaded_units.let_go()  # a unit kept open for reading may be updated

    def backward_over(self) -> None:
        """Deliver gradients after a backward, when its last graph task has ended."""
        if self._executor.health.failed or self._runtime.closed:
            return
        self._resident_guard.hide_all()  # shown again by a checkpoint's recomputation
        appeared, self._collector.appeared_any = self._collector.appeared_any, False
        if self._repeats.ending:
            self._trace.compute_pause()
            return
        self._collector.deliver_all()
        self._held.renew()
        # Without gradients it was an unrelated autograd.grad.
        if appeared and self._repeats.backward_over():
            self._stepping.backward_over()
        self._trace.compute_pause()

    def step(self, groups: Container[int] | None) -> None:
        """See ``Engine.step``."""
        self._trainer.claim()
        self.require_usable()
        if not self._runtime.ledger.early:  # a step whose updates have begun must be completed
            self._executor.health.require_commits()
        self._forward_stack.tidy()
        self._direct.finish()
        self._group_check.check()
        self._onloaded_units.check_shown(self._resident_guard.hidden)
        self.write_copies()
        self._weights.refuse_joined()
        if self._commits is not None:
            self._commits.require_whole()
        self._trace.compute_pause()
        self._held.reconcile()
        self._stepping.step(groups)
        self._weights.reconcile()  # refreshes tensors over weights
        self._state.renew()
        self._repeats.forget()
        self.tuner.stepped()

    def declared(self, final: bool) -> Declared:
        """Declare every backward in this block to be (or not to be) the last one of the step."""
        return self._backward_updates.declared(final)

    def gradients_dropped(self) -> None:
        """See ``Engine.gradients_dropped``."""
        if not in_backward() and not self._runtime.ledger.early:
            self._repeats.end_failed()
            self._repeats.forget()
            self._runtime.ledger.micro_steps = 0

    def make_room(self) -> bool:
        """See ``EngineHandle.make_room``."""
        self.require_usable()
        if self._forward_stack.in_use:
            raise LifecycleError("make_room() cannot be called while the model runs, as in a hook")
        return self._repeats.make_room()

    # -- sleep ----------------------------------------------------------------------------------

    def sleep(self, *, host: bool) -> None:
        """See ``EngineHandle.sleep``."""
        self.require_usable()
        sleeping = self._runtime.sleeping
        if not sleeping.asleep:
            self.quiesce()
            if self._onloaded_units.in_use or self._forward_stack.in_use:
                raise LifecycleError("sleep() cannot be called while the model runs, as in a hook")
            if self._commits is not None:
                self._executor.health.require_commits()
                self._commits.commit()
            self._onloaded_units.let_go()
            self._resident_guard.hide_all()  # shown still if only a part of the model has run
            self._direct.quiesce()
        self._trace.compute_pause()
        sleeping.sleep(host=host)

    def wake(self) -> None:
        """See ``EngineHandle.wake``."""
        self.require_usable()
        self._runtime.sleeping.wake()

    # -- commits --------------------------------------------------------------------------------

    def commit(self, what: str) -> None:
        """Make the present state durable; ``what`` names the user's call in errors."""
        commits = self._require_commits(what)
        self._before_use()
        self._weights.take_edits()
        self.write_copies()
        commits.commit()

    def rollback(self) -> Any:
        """Return to the last commit, and return its ``extra``."""
        self._require_commits("rollback")
        with suppress(OffloadError):  # a step that waits would be rolled back, too
            self._before_use()
        self._state.forget_changes()
        extra = self._stepping.rollback()
        self._state.renew()
        return extra

    def _require_commits(self, what: str) -> Commits:
        self.require_usable()
        self._executor.health.require_commits()
        self._forward_stack.tidy()
        if self._commits is None:
            raise LifecycleError(
                f"{what}() needs a durable store; pass nvme= (a directory) to wrap, and leave "
                "durable=True"
            )
        return self._commits

    def restart(self) -> Any:
        """Restore random generators from the last commit, and return its ``extra``."""
        assert self._commits is not None
        return self._commits.restart()

    @property
    def entries_inside(self) -> int:
        """See ``ForwardStack.entries_inside``."""
        return self._forward_stack.entries_inside

    def leave(self) -> None:
        """Remove hooks that an interrupted forward has left on the calling thread."""
        self._forward_stack.forget()

    def end(self, state: OptimizerState) -> None:
        """Commit the last step if possible, from any thread, and refuse further use.

        Args:
            state: the optimizer state. It is passed in, since weak references to it are already
                cleared when the garbage collector closes the engine.
        """
        try:
            if not self._executor.health.failed:
                self._before_use()
        except OffloadError as error:
            log.warning("overspill: closed in the middle of a step: %s", error)
        self._trainer.closes()
        self._executor.health.closes()
        wait_for_others()
        if self._commits is None or self._executor.health.failed:
            return
        if self._executor.health.not_committed is not None:
            self._executor.health.raise_unseen()
            return
        self._materializing.end_if_over()
        if self._materializing.active:
            log.warning(
                "overspill: closed while the model is materialized; the store keeps the last commit"
            )
            return
        # The training thread's transfers are on a stream that this thread may not know.
        self._runtime.accelerator.synchronize()
        # An interrupted forward has left its unit open: pending updates may need its memory.
        self._onloaded_units.reset()
        self._averages.end()
        self._weights.take_edits()
        self._weights.write_copies()
        state.write_copies()
        self._commits.close()
