"""Between a sharded model and the engine that has its shards: what the one does, the other is
told.

FSDP2 gathers a module's weights when it is about to run: until then their update must be over.  It
leaves the reduced gradient of each shard in ``p.grad``: the engine takes it from there, and leaves
its stand-in, so that norms, scales and sums of whole gradients go on to the engine by themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import OffloadError
from ..training import torch_private
from ..training.external_forward import ExternalForwardAdapter
from ..training.gradient_tensor import OffloadedGradient
from ..training.handles import remove_all
from ..training.param_group_check import ParamGroupCheck
from .digest import digest
from .fsdp_private import Shard, ShardedModule
from .shards import Shards


class Bridge:
    """Hooks on a sharded model, from ``attach`` on; ``give_back`` takes them away."""

    def __init__(
        self, model: nn.Module, modules: Sequence[ShardedModule], shards: Shards,
        external_forward: ExternalForwardAdapter, group_check: ParamGroupCheck,
    ) -> None:  # fmt: skip
        """``group_check``: of the whole model."""
        self._external_forward, self._modules, self._group_check = (
            external_forward,
            modules,
            group_check,
        )
        self._shards = [shard for shard in shards.shards if isinstance(shard, Shard)]
        self._local = shards.local
        parts = external_forward.parts
        self._index = {id(p): index for index, p in enumerate(parts.parameters)}
        self._by_param = {id(shard.param): number for number, shard in enumerate(self._shards)}
        self._units: dict[int, tuple[int, ...]] = {}  # by module
        self._members: dict[int, tuple[int, ...]] = {}  # its shards
        for each in modules:
            numbers = [
                self._by_param[id(s.param)] for s in each.shards if id(s.param) in self._by_param
            ]
            for module in each.modules:
                self._members[id(module)] = tuple(numbers)
                self._units[id(module)] = tuple(sorted(set(map(self._unit_of, numbers))))
        self._versions: dict[int, tuple[int, int]] = {}  # of each shard, as the engine has it
        self._copied: dict[int, int] = {}  # the version of its unit that a copy is of
        # Of those that were lent, the version of their unit then, and a digest.
        self._lent: dict[int, tuple[int, int]] = {}
        self._handles: list[Any] = []
        self._over = False
        self._model = model
        # What shards were before, until all ranks have come so far.
        self._before: dict[int, tuple[torch.Tensor, ...]] | None = {}

    def attach(self) -> None:
        """Shards are the engine's from now on.  After an exception ``give_back`` undoes it."""
        me = weakref.ref(self)
        for shard, p in zip(self._shards, self._local, strict=True):
            self._take_over(me, shard, p)
        for each in self._modules:
            self._hook(me, each)
        self._handles.append(self._model.register_forward_pre_hook(_root(me), prepend=True))
        self._handles.append(self._model.register_forward_hook(_root_over(me), always_call=True))
        self._external_forward.look_outside(weakref.WeakMethod(self.take_edits))

    def begin(self) -> None:
        """There is one on every rank: nothing goes back to what was before."""
        self._before = None

    # -- weights --------------------------------------------------------------------------------

    def _take_over(self, me: weakref.ref[Bridge], shard: Shard, p: nn.Parameter) -> None:
        """The shard lies where the engine has it."""
        number = self._by_param[id(shard.param)]
        assert self._before is not None
        self._before[number] = shard.kept()
        shard.move_to(self._external_forward.weight(self._index[id(p)]))
        self._versions[number] = shard.version
        shard.managed(_Watcher(me, number))
        if p.requires_grad:
            hook = partial(_appeared, me, number)
            self._handles.append(shard.param.register_post_accumulate_grad_hook(hook))

    def _unit_of(self, number: int) -> int:
        index = self._index[id(self._local[number])]
        return self._external_forward.parts.unit_of[index]

    def _renew(self, number: int) -> None:
        """A shard that could not be moved is a copy of what the engine has, where that has changed
        since: what users have written to it meanwhile is theirs."""
        shard = self._shards[number]
        if shard.even or self._versions[number] != shard.version:
            return
        made = self._external_forward.version(self._unit_of(number))
        if self._copied.get(number) != made:
            index = self._index[id(self._local[number])]
            shard.move_to(self._external_forward.weight(index))
            self._versions[number], self._copied[number] = shard.version, made

    @torch_private.without_grad
    def lend(self, number: int, *, looked_at: bool) -> None:
        """A shard is handed out: its update is over first.  ``looked_at``: by someone who may
        change it so that no version tells of it."""
        unit = self._unit_of(number)
        self._external_forward.catch_up(unit)
        self._renew(number)
        if not looked_at:
            return
        made = self._external_forward.version(unit)
        if self._lent.get(number, (-1, 0))[0] != made:
            self._lent[number] = made, digest(self._shards[number].local)

    def _changed(self, number: int) -> bool:
        """Whether someone has changed a shard in place since the engine last looked."""
        shard, lent = self._shards[number], self._lent.pop(number, None)
        if shard.version != self._versions[number]:
            return True
        same = lent is not None and lent[0] == self._external_forward.version(self._unit_of(number))
        return same and lent is not None and lent[1] != digest(shard.local)

    def _hook(self, me: weakref.ref[Bridge], each: ShardedModule) -> None:
        def before(_module: nn.Module, _args: Any) -> None:
            bridge = me()
            if bridge is not None:
                bridge.before_gathering(each)

        for module in each.modules:
            self._handles.append(module.register_forward_pre_hook(before, prepend=True))

    def before_forward(self) -> None:
        """A forward of the whole model begins."""
        if not torch_private.in_backward():
            if torch.is_grad_enabled():
                self._group_check.check()
            self.take_edits()
        self._external_forward.before_forward()

    def after_forward(self, output: Any) -> None:
        """It has ended; ``None``: it has raised."""
        self._external_forward.after_forward(output)

    def before_gathering(self, each: ShardedModule) -> None:
        """The weights of a module, and of those that come with it, are about to be gathered."""
        device = self._external_forward.device
        with each.gathering(device):
            for module in (each.module, *each.brings):
                for unit in self._units.get(id(module), ()):
                    self._external_forward.catch_up(unit)
                for number in self._members.get(id(module), ()):
                    self._renew(number)

    def take_edits(self) -> None:
        """What was changed in a shard, in place, since the engine last looked is its weight.

        Raises:
            OffloadError: a parameter was replaced by another, or this step's backward has updated
                what was changed; that is said once.
        """
        if self._over:
            return
        edited: dict[int, torch.Tensor] = {}
        for number, shard in enumerate(self._shards):
            if id(shard.param) not in self._by_param or not shard.in_place:
                raise OffloadError(
                    f"parameter {shard.name!r} was replaced after the model was wrapped; put the "
                    "old one back, and copy the new values into it (p.data.copy_(new))"
                )
            if self._changed(number):
                index = self._index[id(self._local[number])]
                edited[index] = shard.local.detach().clone()
        if edited:
            self._accept()
            self._external_forward.replace(edited)

    def _accept(self) -> None:
        """What shards are now is known."""
        for number, shard in enumerate(self._shards):
            self._versions[number] = shard.version

    # -- gradients ------------------------------------------------------------------------------

    def appeared(self, number: int) -> None:
        """The reduced gradient of a shard has come, or was added."""
        self._mirror(number)
        shard, p = self._shards[number], self._local[number]
        self._external_forward.appeared(self._index[id(p)])
        if p.grad is not None:
            shard.hold(p.grad)

    def _mirror(self, number: int) -> None:
        """The engine sees the gradient that the user does."""
        shard, p = self._shards[number], self._local[number]
        gradient = shard.gradient()
        if gradient is not p.grad:
            p.grad = None
            p.grad = gradient

    def before_step(self) -> None:
        """Gradients are about to be applied."""
        self._group_check.check()
        self.take_edits()
        for number, p in enumerate(self._local):
            if p.requires_grad:
                self._mirror(number)

    def after_step(self) -> None:
        """What was a plain gradient of the user's is the engine's now."""
        for number, p in enumerate(self._local):
            if isinstance(p.grad, OffloadedGradient):
                self._shards[number].hold(p.grad)
            elif p.grad is None:  # the engine has gone back, and dropped them all
                self._shards[number].param.grad = None
        if self._external_forward.at_once:
            self._renew_copies()

    def _renew_copies(self) -> None:
        """Shards that are copies get their weights: not before these have come to the device."""
        numbers = [number for number, shard in enumerate(self._shards) if not shard.even]

        def renew() -> None:
            for number in numbers:
                self._renew(number)

        self._external_forward.copied(set(map(self._unit_of, numbers)), renew)

    def before_rollback(self) -> None:
        """Gradients and edits are about to be dropped."""

    def after_rollback(self) -> None:
        """They were."""
        self._lent.clear()
        self._accept()
        self._copied.clear()
        self.after_step()
        for each in self._modules:
            each.spread()

    def went_back(self) -> None:
        """A step was not taken: weights are those of a commit, and there is no gradient."""
        self.after_rollback()

    # -- the end --------------------------------------------------------------------------------

    def give_back(self) -> None:
        """Shards are FSDP2's own again: with what those of the engine's model hold, which are
        ordinary parameters again too; or as they were, if not all ranks had come so far."""
        remove_all(self._handles)
        self._over = True
        for number, shard in enumerate(self._shards):
            if self._before is not None and number not in self._before:
                continue
            shard.plain()
            if self._before is not None:
                shard.restore(self._before[number])
            else:
                shard.move_to(self._local[number].detach())
                shard.param.grad = None


class _Watcher:
    """Tells a bridge, as long as there is one, that someone looks at a shard."""

    __slots__ = ("_me", "_number")

    def __init__(self, me: weakref.ref[Bridge], number: int) -> None:
        self._me, self._number = me, number

    def lend(self, *, looked_at: bool) -> None:
        self._bridge().lend(self._number, looked_at=looked_at)

    def _bridge(self) -> Bridge:
        bridge = self._me()
        if bridge is None:  # its memory is gone
            raise OffloadError("the optimizer of this parameter was closed")
        return bridge


def _appeared(me: weakref.ref[Bridge], number: int, _p: torch.Tensor) -> None:
    bridge = me()
    if bridge is not None:
        bridge.appeared(number)


def _root(me: weakref.ref[Bridge]) -> Callable[[nn.Module, Any], None]:
    def before(_module: nn.Module, _args: Any) -> None:
        bridge = me()
        if bridge is not None:
            bridge.before_forward()

    return before


def _root_over(me: weakref.ref[Bridge]) -> Callable[[nn.Module, Any, Any], None]:
    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        bridge = me()
        if bridge is not None:
            bridge.after_forward(output)

    return after
