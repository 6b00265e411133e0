"""Repetition of a micro-batch that has run out of memory; see Note [Repeated micro-batches]."""

from __future__ import annotations

from ..activations.activation_tuner import ActivationTuner
from ..grads.gradients import GradientCollector
from ..movement.accelerators.base import Accelerator
from ..params.backward import Backward
from ..schedule.ledger import Ledger
from .forward_stack import ForwardStack

# Note [Repeated micro-batches]
# A forward or a backward that raises leaves the engine usable: hooks and units are closed, and what
# autograd has saved is dropped with its graph. A backward has delivered a part of its gradients by
# then. If the micro-batch is repeated, these gradients come again, with the same values, and are
# dropped (``GradientCollector.repeated``); the others are added. So nothing is counted twice, and
# no copy of the gradients is needed.
#
# The values are the same because weights and random numbers are, which ``with_room`` sets back.
# Under ``update="backward"``, weights that the failed backward has updated are not the same, so it
# cannot be repeated.


class Repeats:
    """What is needed to repeat the forward and backward of a micro-batch."""

    def __init__(
        self, forward_stack: ForwardStack, backward: Backward, collector: GradientCollector,
        ledger: Ledger, tuner: ActivationTuner, accelerator: Accelerator,
    ) -> None:  # fmt: skip
        self._forward_stack, self._backward, self._collector = forward_stack, backward, collector
        self._ledger, self._tuner, self._accelerator = ledger, tuner, accelerator
        self.ending = False  # a failed backward is being ended, to be repeated
        self._failed = False  # the last backward has raised, and was ended already

    def backward_over(self) -> bool:
        """Forget the micro-batch, whose backward has ended; return false if it has raised."""
        if self._backward.abandoning:
            self._failed = True  # another forward began before ``make_room``
            return False
        self.forget()
        return True

    def forget(self) -> None:
        """Forget the micro-batch: it will not be repeated."""
        self._failed = False
        self._collector.arrived.clear()
        self._collector.repeated.clear()

    def end_failed(self) -> None:
        """End a backward that raised, without delivering its gradients."""
        self.ending = True
        try:
            self._backward.abandon()
        finally:
            self.ending = False

    def make_room(self) -> bool:
        """See ``EngineHandle.make_room``."""
        made = self._tuner.make_room()
        failed = self._backward.running or self._failed
        if self._ledger.early:
            return False
        self._collector.require_whole()
        self._forward_stack.tidy()
        self.end_failed()
        self._accelerator.empty_cache()
        if failed:
            self._collector.repeat_arrived()
        return made
