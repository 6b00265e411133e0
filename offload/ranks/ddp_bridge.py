"""The connection between a replicated model and the engine that holds the rows of this rank.

Gradients go to the engine when a step is taken. Updated weights come from all ranks to the model
before it uses them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import GradientError, RankError
from ..params.param_handle import ParamHandle
from ..private import compile_private, module_private, torch_private
from ..private.handles import remove_all
from ..step.external_forward import ExternalForwardAdapter
from ..step.forward_stack import Inputs
from ..step.param_group_check import ParamGroupCheck
from .ddp import ReplicatedModule
from .gathering import GatheredUnit, Gatherer, Round
from .pending_param import manage_replica
from .shards import Shards

# Note [Rounds of gathered weights]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# After a step each rank has updated only its own rows. A *round* copies the rows of every unit from
# all ranks into the whole parameters. It passes through three states:
#
# - Owed: ``owe`` runs just before the engine's weights change. It hides the parameters (their class
#   becomes a ``PendingParam``) and marks their units as awaited. ``_owed`` holds the round.
# - Under way: ``begin`` queues the round on the gathering thread, stores it in ``_round`` and
#   clears ``_owed``. One C function makes these three calls, so a signal handler that raises leaves
#   the round either owed or under way.
# - Arrived, unit by unit: the first use of a parameter (a forward hook of its module, or
#   ``PendingParam``) calls ``arrive_unit``. It waits for the unit, shows its parameters, and the
#   unit is no longer awaited.
#
# A round is a sequence of collectives, so all ranks must run the same rounds in the same order. If
# an exception leaves a round owed, the next use of weights, or the next step, begins it.


class ReplicaBridge:
    """The hooks on a replicated model: set by ``attach``, removed by ``give_back``.

    Parameters and units are identified by their number in the model. A unit is *awaited* from a
    step until its weights have come from all ranks and are used. See Note [Rounds of gathered
    weights].
    """

    def __init__(
        self, ddp: DistributedDataParallel, modules: Sequence[ReplicatedModule], shards: Shards,
        external_forward: ExternalForwardAdapter, gatherer: Gatherer, group_check: ParamGroupCheck,
    ) -> None:  # fmt: skip
        """
        Args:
            group_check: checks the param groups of the whole model.
        """
        self._ddp, self._external_forward, self._gatherer, self._group_check = (
            ddp,
            external_forward,
            gatherer,
            group_check,
        )
        self.replicas = [replica for each in modules for replica in each.shards]
        ids = {id(replica.param) for replica in self.replicas}
        pairs = zip(shards.shards, shards.local, strict=True)
        self._local = {id(s.param): p for s, p in pairs if id(s.param) in ids}
        self._unit_of = [unit for unit, each in enumerate(modules) for _ in each.shards]
        self._members: list[list[int]] = [[] for _ in modules]
        for number, unit in enumerate(self._unit_of):
            self._members[unit].append(number)
        self._units = [self._gathered(each, shards, trained=True) for each in modules]
        self._whole = [self._gathered(each, shards, trained=False) for each in modules]
        self._awaited: set[int] = set()  # units whose weights are awaited
        self._owed: Sequence[GatheredUnit] | None = None  # the round that is not begun yet
        self._round: Round | None = None  # the last round that was begun
        self._versions: list[int] = []
        self._handles: list[Any] = []
        self._managed: list[ParamHandle] = []
        self._over = False
        self._modules, self._at_root = modules, module_private.has_compiled(ddp)

    def attach(self) -> None:
        """Manage the parameters, set the hooks and start the gathering thread.

        If this raises, ``give_back`` undoes it.
        """
        self._external_forward.until_closed(self._gatherer)
        self._gatherer.start()
        me, ddp = weakref.ref(self), self._ddp
        for number, replica in enumerate(self.replicas):
            self._managed.append(manage_replica(replica.param, number, replica.name, self))
        self._note_versions(range(len(self.replicas)))
        self._external_forward.never_offload(replica.whole for replica in self.replicas)
        before = ddp.register_forward_pre_hook(_root(me), prepend=True, with_kwargs=True)
        self._handles.append(before)
        self._handles.append(ddp.register_forward_hook(_root_over(me), always_call=True))
        if not self._at_root:
            for unit, each in enumerate(self._modules):
                hook = each.module.register_forward_pre_hook(_reader(me, unit), prepend=True)
                self._handles.append(hook)
        self._external_forward.look_outside(weakref.WeakMethod(self.take_edits))

    def _gathered(self, part: ReplicatedModule, shards: Shards, *, trained: bool) -> GatheredUnit:
        """Return what a round gathers of a unit: its trained parameters, or all of them."""
        index = {id(p): number for number, p in enumerate(self._external_forward.parts.parameters)}
        replicas = [r for r in part.shards if r.param.requires_grad or not trained]
        rows: list[torch.Tensor | None] = []
        units = set[int]()
        for replica in replicas:
            p = self._local.get(id(replica.param))
            rows.append(None if p is None else self._external_forward.weight(index[id(p)]))
            if p is not None:
                units.add(self._external_forward.parts.unit_of[index[id(p)]])
        return GatheredUnit(sorted(units), replicas, rows)

    # -- weights --------------------------------------------------------------------------------

    def owe(self, *, frozen: bool = False) -> None:
        """Mark all weights as awaited: the engine is about to change them.

        Every rank owes the same rounds and begins each of them: right away, or, after an exception
        in between, at the next use of weights. See Note [Rounds of gathered weights].

        Args:
            frozen: weights that are not trained change too.
        """
        self.begin()
        self._owed = self._whole if frozen else self._units
        for unit, gathered in enumerate(self._owed):
            if gathered.replicas:
                self._awaited.add(unit)
                self._hide(unit)
                torch_private.outdate(replica.param for replica in gathered.replicas)

    def _hide(self, unit: int) -> None:
        for number in self._members[unit]:
            self._managed[number].hide(self.replicas[number].param, self.replicas[number].whole)

    def begin(self) -> None:
        """Begin the round that is owed, if any."""
        if self._owed is not None:
            under_way, begin = self._gatherer.prepared(self._owed)
            # One C call makes all three calls, so that no signal handler runs in between.
            told: list[partial[Any]] = [
                partial(setattr, self, "_round", under_way), partial(setattr, self, "_owed", None),
                begin,
            ]  # fmt: skip
            tuple(map(partial.__call__, told))

    def arrive(self, number: int) -> None:
        """Wait for the current weights of a parameter before its use."""
        self.arrive_unit(self._unit_of[number])

    def arrive_unit(self, unit: int) -> None:
        """Wait for the current weights of a unit before their use."""
        if unit not in self._awaited:
            return
        self.begin()
        assert self._round is not None
        self._gatherer.wait(self._round, unit)
        for number in self._members[unit]:
            self._managed[number].show(self.replicas[number].param, self.replicas[number].whole)
        self._note_versions(self._members[unit])
        self._awaited.discard(unit)

    def arrive_all(self) -> None:
        """Wait for all current weights."""
        for unit in sorted(self._awaited):
            self.arrive_unit(unit)

    def read(self, number: int) -> torch.Tensor:
        """Return a copy of a parameter's weight."""
        self.arrive(number)
        return self.replicas[number].whole.clone()

    def name(self, number: int) -> str:
        """Return the name of a parameter."""
        return self.replicas[number].name

    def _note_versions(self, numbers: Sequence[int] | range) -> None:
        if not self._versions:
            self._versions = [0] * len(self.replicas)
        for number in numbers:
            self._versions[number] = torch_private.version_of(self.replicas[number].param)

    def take_edits(self) -> None:
        """Pass in-place changes of parameters since the last look to the engine.

        Every rank must have made the same changes, as ``DistributedDataParallel`` requires.
        """
        if self._over:
            return
        self._external_forward.require_managed()
        index = {id(p): number for number, p in enumerate(self._external_forward.parts.parameters)}
        edited: dict[int, torch.Tensor] = {}
        numbers = []
        for number, replica in enumerate(self.replicas):
            if self._unit_of[number] in self._awaited:
                continue
            if torch_private.version_of(replica.param) != self._versions[number]:
                numbers.append(number)
                p = self._local.get(id(replica.param))
                if p is not None:
                    edited[index[id(p)]] = replica.local.clone()
        if edited:
            self._external_forward.replace(edited)
        self._note_versions(numbers)

    # -- the loop -------------------------------------------------------------------------------

    def before_forward(self, inputs: Inputs) -> None:
        """Prepare for a forward of the whole model; ``inputs``: its arguments."""
        self._external_forward.require_managed()
        if self._at_root:
            self.arrive_all()
        if not torch_private.in_backward():
            if torch.is_grad_enabled():
                self._group_check.check()
            self.take_edits()
        self._external_forward.before_forward(inputs)

    def after_forward(self, output: Any) -> None:
        """Handle the end of that forward; ``output`` is ``None`` if it raised."""
        self._external_forward.after_forward(output)

    def before_reading(self) -> None:
        """Wait for all current weights."""
        self.arrive_all()

    def before_step(self) -> None:
        """Give this rank's rows of the gradients to the engine, before the step."""
        if torch_private.joins_uneven(self._ddp):
            raise RankError(
                "ddp.join() lets ranks take different numbers of steps, but each step needs all of "
                "them: give every rank as many batches"
            )
        self._group_check.check()
        self.arrive_all()
        self.take_edits()
        for replica in self.replicas:
            p, grad = self._local.get(id(replica.param)), replica.param.grad
            if grad is not None and grad.layout is not torch.strided:
                raise GradientError(f"the gradient of {replica.name!r} is sparse; use dense ones")
            if p is not None and p.requires_grad:
                p.grad = None if grad is None else replica.part_of(grad.detach())
        self.owe()

    def after_step(self) -> None:
        """Take the gradients back from the engine and begin to gather the weights."""
        for p in self._local.values():
            p.grad = None
        self.begin()
        if self._external_forward.at_once:
            self.arrive_all()

    def went_back(self) -> None:
        """Handle a step that was not taken: all weights, even frozen ones, are a commit's."""
        self.begin()
        self.arrive_all()
        self.owe(frozen=True)
        self.after_rollback()

    def before_rollback(self) -> None:
        """Prepare for weights of the last commit; without a commit they stay as they are."""
        self.arrive_all()
        self.take_edits()
        self.owe(frozen=True)

    def after_rollback(self) -> None:
        """Drop gradients and begin to gather the weights of the commit."""
        for replica in self.replicas:
            replica.param.grad = None
        self.begin()

    def before_exchange(self) -> None:
        """Take edits before weights and averages are exchanged, after which they are gathered."""
        self.arrive_all()
        self.take_edits()
        self.owe()

    def after_exchange(self) -> None:
        """Begin to gather what the weights are now."""
        self.begin()

    @property
    def failed(self) -> bool:
        """Whether a round has failed."""
        return self._gatherer.failed

    # -- the end --------------------------------------------------------------------------------

    def give_back(self) -> None:
        """Remove the hooks and make the parameters ordinary ones again, with their weights."""
        self._over = True
        remove_all(self._handles)
        self._gatherer.remove()
        for known, replica in zip(self._managed, self.replicas, strict=False):
            known.release(replica.param, replica.whole)


def _root(me: weakref.ref[ReplicaBridge]) -> Callable[[nn.Module, Any, Any], None]:
    @compile_private.not_compiled
    def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
        bridge = me()
        if bridge is not None:
            bridge.before_forward((args, kwargs))

    return before


def _root_over(me: weakref.ref[ReplicaBridge]) -> Callable[[nn.Module, Any, Any], None]:
    @compile_private.not_compiled
    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        bridge = me()
        if bridge is not None:
            bridge.after_forward(output)

    return after


def _reader(me: weakref.ref[ReplicaBridge], unit: int) -> Callable[[nn.Module, Any], None]:
    @compile_private.not_compiled
    def before(_module: nn.Module, _args: Any) -> None:
        bridge = me()
        if bridge is not None:
            bridge.arrive_unit(unit)

    return before
