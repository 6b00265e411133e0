"""Between a replicated model and the engine that has the rows of this rank: gradients go to the one
when a step is taken, updated weights to the other, before it uses them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import OffloadError
from ..training import module_private, torch_private
from ..training.external_forward import ExternalForwardAdapter
from ..training.handles import remove_all
from ..training.param_group_check import ParamGroupCheck
from ..training.param_handle import ParamHandle
from .ddp import ReplicatedModule
from .gathering import GatheredUnit, Gatherer, Round
from .pending_param import manage_replica
from .shards import Shards


class ReplicaBridge:
    """Hooks on a replicated model, from ``attach`` on; parameters and units by their number in it.

    A parameter is *awaited* from a step on until its unit has come from all ranks and somebody
    uses it.
    """

    def __init__(
        self, ddp: DistributedDataParallel, modules: Sequence[ReplicatedModule], shards: Shards,
        external_forward: ExternalForwardAdapter, gatherer: Gatherer, group_check: ParamGroupCheck,
    ) -> None:  # fmt: skip
        """``group_check``: of the whole model."""
        self._ddp, self._external_forward, self._gatherer, self._group_check = (
            ddp,
            external_forward,
            gatherer,
            group_check,
        )
        self._local = {id(s.param): p for s, p in zip(shards.shards, shards.local, strict=True)}
        self.replicas = [replica for each in modules for replica in each.shards]
        self._unit_of = [unit for unit, each in enumerate(modules) for _ in each.shards]
        self._members: list[list[int]] = [[] for _ in modules]
        for number, unit in enumerate(self._unit_of):
            self._members[unit].append(number)
        self._units = [self._gathered(each, shards, trained=True) for each in modules]
        self._whole = [self._gathered(each, shards, trained=False) for each in modules]
        self._awaited: set[int] = set()  # units
        self._owed: Sequence[GatheredUnit] | None = None  # not begun yet
        self._round: Round | None = None  # the last that was
        self._versions: list[int] = []
        self._handles: list[Any] = []
        self._managed: list[ParamHandle] = []
        self._over = False
        self._modules, self._at_root = modules, module_private.has_compiled(ddp)

    def attach(self) -> None:
        """Parameters may be awaited from now on.  After an exception ``give_back`` undoes it."""
        self._external_forward.until_closed(self._gatherer)
        self._gatherer.start()
        me, ddp = weakref.ref(self), self._ddp
        for number, replica in enumerate(self.replicas):
            self._managed.append(manage_replica(replica.param, number, replica.name, self))
        self._note_versions(range(len(self.replicas)))
        self._handles.append(ddp.register_forward_pre_hook(_root(me), prepend=True))
        self._handles.append(ddp.register_forward_hook(_root_over(me), always_call=True))
        if not self._at_root:
            for unit, each in enumerate(self._modules):
                hook = each.module.register_forward_pre_hook(_reader(me, unit), prepend=True)
                self._handles.append(hook)
        self._external_forward.look_outside(weakref.WeakMethod(self.take_edits))

    def _gathered(self, part: ReplicatedModule, shards: Shards, *, trained: bool) -> GatheredUnit:
        """What of a unit changes in a step (``trained``), or all of it."""
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
        """The engine is about to have other weights than the model, ``frozen`` ones too: they are
        awaited from now on.  Every rank owes as many rounds, and comes to each: right away, or,
        where an exception came in between, when weights are used next."""
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
        """What is owed begins."""
        if self._owed is not None:
            under_way, begin = self._gatherer.prepared(self._owed)
            # Owed or under way: C makes the calls, and no signal handler runs in between.
            told: list[partial[Any]] = [
                partial(setattr, self, "_round", under_way), partial(setattr, self, "_owed", None),
                begin,
            ]  # fmt: skip
            tuple(map(partial.__call__, told))

    def arrive(self, number: int) -> None:
        """Somebody uses a parameter."""
        self.arrive_unit(self._unit_of[number])

    def arrive_unit(self, unit: int) -> None:
        """Somebody uses a unit's parameters."""
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
        """All weights are current."""
        for unit in sorted(self._awaited):
            self.arrive_unit(unit)

    def read(self, number: int) -> torch.Tensor:
        """A copy of a parameter's weight."""
        self.arrive(number)
        return self.replicas[number].whole.clone()

    def name(self, number: int) -> str:
        """Of a parameter."""
        return self.replicas[number].name

    def _note_versions(self, numbers: Sequence[int] | range) -> None:
        if not self._versions:
            self._versions = [0] * len(self.replicas)
        for number in numbers:
            self._versions[number] = torch_private.version_of(self.replicas[number].param)

    def take_edits(self) -> None:
        """What was changed in a parameter, in place, since the engine last looked is its weight:
        every rank has changed it in the same way, as that model asks."""
        if self._over:
            return
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

    def before_forward(self) -> None:
        """A forward of the whole model begins."""
        if self._at_root:
            self.arrive_all()
        if not torch_private.in_backward():
            if torch.is_grad_enabled():
                self._group_check.check()
            self.take_edits()
        self._external_forward.before_forward()

    def after_forward(self, output: Any) -> None:
        """It has ended; ``None``: it has raised."""
        self._external_forward.after_forward(output)

    def before_step(self) -> None:
        """Gradients are about to be applied: this rank's rows of them are the engine's."""
        if torch_private.joins_uneven(self._ddp):
            raise OffloadError(
                "ddp.join() lets ranks take different numbers of steps, but each step needs all of "
                "them: give every rank as many batches"
            )
        self._group_check.check()
        self.arrive_all()
        self.take_edits()
        for replica in self.replicas:
            p, grad = self._local.get(id(replica.param)), replica.param.grad
            if grad is not None and grad.layout is not torch.strided:
                raise OffloadError(f"the gradient of {replica.name!r} is sparse; use dense ones")
            if p is not None and p.requires_grad:
                p.grad = None if grad is None else replica.part_of(grad.detach())
        self.owe()

    def after_step(self) -> None:
        """They are the user's again, and weights are on their way."""
        for p in self._local.values():
            p.grad = None
        self.begin()
        if self._external_forward.at_once:
            self.arrive_all()

    def went_back(self) -> None:
        """No step was taken: all weights are those of a commit, those that are not trained too."""
        self.begin()
        self.arrive_all()
        self.owe(frozen=True)
        self.after_rollback()

    def before_rollback(self) -> None:
        """Weights are about to be those of a commit; if there is none, they are what they are."""
        self.arrive_all()
        self.take_edits()
        self.owe(frozen=True)

    def after_rollback(self) -> None:
        """They are, and come."""
        for replica in self.replicas:
            replica.param.grad = None
        self.begin()

    @property
    def failed(self) -> bool:
        """Whether weights did not come once."""
        return self._gatherer.failed

    # -- the end --------------------------------------------------------------------------------

    def give_back(self) -> None:
        """Parameters are ordinary ones again, with their weights."""
        self._over = True
        remove_all(self._handles)
        self._gatherer.remove()
        for known, replica in zip(self._managed, self.replicas, strict=False):
            known.release(replica.param, replica.whole)


def _root(me: weakref.ref[ReplicaBridge]) -> Callable[[nn.Module, Any], None]:
    @torch_private.not_compiled
    def before(_module: nn.Module, _args: Any) -> None:
        bridge = me()
        if bridge is not None:
            bridge.before_forward()

    return before


def _root_over(me: weakref.ref[ReplicaBridge]) -> Callable[[nn.Module, Any, Any], None]:
    @torch_private.not_compiled
    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        bridge = me()
        if bridge is not None:
            bridge.after_forward(output)

    return after


def _reader(me: weakref.ref[ReplicaBridge], unit: int) -> Callable[[nn.Module, Any], None]:
    @torch_private.not_compiled
    def before(_module: nn.Module, _args: Any) -> None:
        bridge = me()
        if bridge is not None:
            bridge.arrive_unit(unit)

    return before
