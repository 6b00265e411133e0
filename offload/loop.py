"""What happens where the user's loop comes by: at a forward, in a backward, at a step."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .durable.commits import Commits
from .errors import OffloadError
from .movement.runtime import Runtime
from .planning.costs import Costs
from .schedule.messages import Until
from .state.averages import Averages
from .state.materializing import Materializing
from .state.param_access import ParamAccess
from .state.torch_state import OptimizerState
from .training.activation_tuner import ActivationTuner
from .training.backward_update_policy import BackwardUpdatePolicy, Declared
from .training.forward_stack import ForwardStack
from .training.gradients import GradientCollector
from .training.held_gradients import HeldGradients
from .training.onloaded_units import OnloadedUnits
from .training.param_group_check import ParamGroupCheck
from .training.reentrancy import wait_for_others
from .training.resident_param_guard import ResidentParamGuard
from .training.stepping import Stepping
from .training.torch_private import in_backward
from .training.trainer import Trainer
from .training.update_waiter import UpdateWaiter

log = logging.getLogger("overspill")


class Loop:
    """Brings everything up to date before what the loop asks for is done."""

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
    ) -> None:
        self._runtime, self._trainer = runtime, trainer
        self._group_check = ParamGroupCheck(model, groups, durable=commits is not None)
        self._executor, self._direct, self._trace = (
            runtime.executor, runtime.direct, runtime.trace
        )  # fmt: skip
        self._forward_stack, self._onloaded_units = forward_stack, onloaded_units
        self._resident_guard, self._update_waiter = resident_guard, update_waiter
        self._weights, self._materializing, self._averages = weights, materializing, averages
        self._backward_updates, self._collector, self._held = backward_updates, collector, held
        self._stepping, self._commits, self._tuner = stepping, commits, tuner

    def require(self) -> None:
        """Raises after ``close`` and after a failure."""
        self._executor.health.check()

    def require_usable(self) -> None:
        """Raises after ``close``, after a failure, inside ``materialized`` and ``averaged``, and in
        a thread that does not train."""
        self._materializing.require_ended()
        self._averages.require_ended()
        self._executor.health.check()
        self._trainer.require()

    def watch(self, state: OptimizerState) -> OptimizerState:
        """Write what users change in copies of ``state`` back before it is used; returns it.

        Not kept alive: it knows the model, and a graph that somebody has kept knows this.
        """
        self._watched = weakref.ref(state)
        return state

    @property
    def _state(self) -> OptimizerState:
        state = self._watched()
        assert state is not None, "the engine has it"
        return state

    def write_copies(self) -> None:
        """Write what was changed in place in copies that others have, before the model is used."""
        self._weights.write_copies()
        self._state.write_copies()

    def quiesce(self) -> None:
        """Waits for all updates, and until nothing moves; caches are dropped."""
        self.require_usable()
        self._forward_stack.tidy()
        self._state.write_back()
        self._weights.take_edits()
        self._weights.reconcile()
        self._update_waiter.wait_for_updates()
        self._direct.quiesce()

    # -- forward --------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """A forward of the whole model begins, outside of any backward."""
        self._trainer.claim()
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
        """A module is about to run that reads weights of the unit."""
        self._trainer.claim()
        self._direct.finish()
        self._weights.reconcile(self._onloaded_units.groups[unit])
        self._state.write_back()
        if torch.is_grad_enabled() and not in_backward():
            self._executor.health.require_commits()
            self._averages.require_ended()
            if self._commits is not None:
                self._commits.seal()  # where parts of the model are called, and not the whole
        if self._onloaded_units.may_change(unit):
            self._end_writes()
        self._onloaded_units.will_run(unit)
        self._resident_guard.show(unit)

    def _end_writes(self) -> None:
        """Wait for what is being written to disk from memory that compute uses: see Note [Changes
        in forward]."""
        self._update_waiter.wait_for_updates()
        protocol = self._executor.protocol
        if self._commits is not None and not protocol.open:  # `cut` is false for the first commit
            protocol.wait(Until.DURABLE)

    def after_forward(self) -> None:
        """A forward of the whole model has ended."""
        self._resident_guard.hide_all()

    # -- backward and step ----------------------------------------------------------------------

    def backward_begins(self) -> None:
        """The first of the graph tasks of a backward runs."""
        self._weights.reconcile()
        self._onloaded_units.let_go()  # what readers keep may be updated

    def backward_over(self) -> None:
        """The last of them has ended."""
        if self._executor.health.failed or self._runtime.closed:
            return
        self._resident_guard.hide_all()  # what a checkpoint has shown again
        self._collector.deliver_all()
        self._held.renew()
        if self._collector.appeared_any:  # else it was an autograd.grad of something else
            self._collector.appeared_any = False
            self._stepping.backward_over()
        self._trace.compute_pause()

    def step(self) -> None:
        """Updates every parameter that has a gradient."""
        self._trainer.claim()
        self.require_usable()
        if not self._runtime.ledger.early:  # a step whose updates have begun must be completed
            self._executor.health.require_commits()
        self._forward_stack.tidy()
        self._direct.finish()
        self._group_check.check()
        self._onloaded_units.check_shown(self._resident_guard.hidden)
        self._weights.write_copies()
        self._weights.refuse_joined()
        self._state.write_copies()
        if self._commits is not None:
            self._commits.require_whole()
        self._trace.compute_pause()
        self._held.reconcile()
        self._stepping.step()
        self._weights.reconcile()  # whoever has a tensor over a weight sees what it is now
        self._state.renew()
        self._tuner.stepped()

    def declared(self, final: bool) -> Declared:
        """Inside, every backward is (or is not) the last one of the step."""
        return self._backward_updates.declared(final)

    # -- commits --------------------------------------------------------------------------------

    def adapted(self) -> tuple[frozenset[int], Costs] | None:
        """See ``ActivationTuner``."""
        return self._tuner.adapted()

    def commit(self, what: str) -> None:
        """Makes the present state durable; ``what`` the user has called."""
        commits = self._require_commits(what)
        self._weights.take_edits()
        self.write_copies()
        commits.commit()

    def rollback(self) -> Any:
        """Goes back to the last commit, and returns its ``extra``."""
        self._require_commits("rollback")
        self._state.forget_changes()
        extra = self._stepping.rollback()
        self._state.renew()
        return extra

    def _require_commits(self, what: str) -> Commits:
        self.require_usable()
        self._executor.health.require_commits()
        self._forward_stack.tidy()
        if self._commits is None:
            raise OffloadError(
                f"{what}() needs a durable store; pass nvme= (a directory) to wrap, and leave "
                "durable=True"
            )
        return self._commits

    def restart(self) -> Any:
        """Training goes on from the last commit: sets random generators, returns ``extra``."""
        assert self._commits is not None
        return self._commits.restart()

    def leave(self) -> None:
        """Takes the hooks of a forward that an exception has ended from the calling thread."""
        self._forward_stack.forget()

    def end(self, state: OptimizerState) -> None:
        """The calling thread ends all, whoever trains: the last step is committed, if it can be.

        Args:
            state: the optimizer state. It is passed in, since weak references to it are already
                cleared when the garbage collector closes the engine.
        """
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
        # What the training thread has on its way is on a stream that this one may not know.
        self._runtime.accelerator.synchronize()
        # A forward that was interrupted has its unit open: pending updates may need the room.
        self._onloaded_units.reset()
        self._averages.end()
        self._weights.take_edits()
        self._weights.write_copies()
        state.write_copies()
        self._commits.close()
