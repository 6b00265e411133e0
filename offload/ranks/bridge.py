"""The connection between a model that FSDP2 has sharded and the engine that holds its shards.

FSDP2 gathers a module's weights when the module is about to run, in forward and in backward. Their
update must be over before that, and shards that are not resident come to the device for it, and
leave when FSDP2 has read them. FSDP2 leaves the reduced gradient of each shard in ``p.grad``. The
engine takes it from there and puts its own tensor in its place, so that norms, scales and sums of
whole gradients reach the engine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from ..errors import LifecycleError, WeightError
from ..grads.gradient_tensor import OffloadedGradient
from ..private import torch_private
from ..private.handles import remove_all
from ..step.external_forward import ExternalForwardAdapter
from ..step.forward_stack import Inputs
from ..step.param_group_check import ParamGroupCheck
from .fsdp_private import Kept, Shard, ShardedModule
from .shards import Shards

_CHUNK = 1 << 20  # words
_ODD = 0x5851F42D4C957F2D


def digest(tensor: torch.Tensor) -> int:
    """Return a checksum of a contiguous tensor's bytes and their positions.

    Two different tensors have the same one with a probability of about 2**-31. It takes one pass
    and 24 MiB of extra memory.
    """
    words = tensor.detach().reshape(-1).view(torch.uint8)
    if words.numel() % 4 == 0 and words.data_ptr() % 4 == 0:
        words = words.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in words.split(_CHUNK):
        factors = _factors(tensor.device)[: part.numel()]
        total = total * _ODD + (part.to(torch.int64) * factors).sum()
    return int(total)


@cache
def _factors(device: torch.device) -> torch.Tensor:
    """Return random factors. They are odd, so that no word is multiplied to zero."""
    made = torch.Generator().manual_seed(0)
    return (torch.randint(-(1 << 62), 1 << 62, (_CHUNK,), generator=made) * 2 + 1).to(device)


# Note [Edits of shards]
# ~~~~~~~~~~~~~~~~~~~~~~
# A shard that is not resident has no memory: users get copies, whose changes the engine adopts
# (Note [Tensors over parameters] in ``state/lent_copies.py``). The rest is about resident ones.
#
# The shard of a parameter lies in the engine's memory, so FSDP2 reads the engine's weights without
# a copy. Exception: where a rank has fewer rows than FSDP2 allocates (``Shard.even`` is false), the
# shard stays in FSDP2's memory and is a copy. ``_renew`` refreshes it if the unit's weights have
# changed since (``_copied``), but never over an edit of the user.
#
# Users may change a shard in place, under ``no_grad`` or through ``.data``. The engine must then
# adopt the new value. ``take_edits`` looks for such changes before a forward, before a step, and
# before all weights are read. It detects them in two ways:
#
# - The version of the parameter or of the shard differs from ``_versions``.
# - Writes through ``.data`` change neither version. ``lend`` therefore records a digest when any
#   code but FSDP2 gets the shard. The digest is compared as long as the unit's weights have not
#   changed otherwise (``ExternalForwardAdapter.version``), because the user may still have the
#   tensor. Forwards without gradients read the edited memory anyway, and compare nothing.
#
# Where the shard lies in the engine's memory, the value from before the edit is lost. So 16-bit
# shards get new masters as a whole: those of unchanged elements are rounded once.


class Bridge:
    """The hooks on a sharded model: set by ``attach``, removed by ``give_back``."""

    def __init__(
        self, model: nn.Module, modules: Sequence[ShardedModule], shards: Shards,
        external_forward: ExternalForwardAdapter, group_check: ParamGroupCheck,
    ) -> None:  # fmt: skip
        """
        Args:
            group_check: checks the param groups of the whole model.
        """
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
        self._units: dict[int, tuple[int, ...]] = {}  # by sharded module
        self._members: dict[int, tuple[int, ...]] = {}  # likewise, its shards
        for each in modules:
            numbers = [
                self._by_param[id(s.param)] for s in each.shards if id(s.param) in self._by_param
            ]
            self._members[id(each)] = tuple(numbers)
            self._units[id(each)] = tuple(sorted(set(map(self._unit_of, numbers))))
        # By shard; see Note [Edits of shards].
        self._versions: dict[int, tuple[int, int]] = {}  # its version when the engine last looked
        self._copied: dict[int, int] = {}  # the version of its unit that a copy was made from
        self._lent: dict[int, tuple[int, int]] = {}  # version of its unit and digest, when lent
        self._onloaded: list[int] = []  # units, while FSDP2 reads their shards
        self._laid: list[int] = []  # shards that lie over the memory of these units
        self._handles: list[Any] = []
        self._over = False
        self._model = model
        # The original shards, until all ranks have an engine.
        self._before: dict[int, Kept] | None = {}

    def attach(self) -> None:
        """Move the shards to the engine's memory and set the hooks.

        If this raises, ``give_back`` undoes it.
        """
        me = weakref.ref(self)
        for shard, p in zip(self._shards, self._local, strict=True):
            self._take_over(me, shard, p)
        for each in self._modules:
            self._hook(me, each)
            each.run_first()
        before = self._model.register_forward_pre_hook(_root(me), prepend=True, with_kwargs=True)
        self._handles.append(before)
        self._handles.append(self._model.register_forward_hook(_root_over(me), always_call=True))
        self._external_forward.look_outside(weakref.WeakMethod(self.take_edits))

    def begin(self) -> None:
        """Drop the original shards: every rank has an engine, and nothing will be undone."""
        self._before = None

    # -- weights --------------------------------------------------------------------------------

    def _take_over(self, me: weakref.ref[Bridge], shard: Shard, p: nn.Parameter) -> None:
        """Move a shard to the engine's memory; one that is not resident has none of its own."""
        number = self._by_param[id(shard.param)]
        assert self._before is not None
        self._before[number] = shard.kept()
        if self._resident(number):
            shard.move_to(self._external_forward.weight(self._index[id(p)]))
        else:
            shard.leave_memory()
        self._versions[number] = shard.version
        shard.managed(_Watcher(me, number))
        if p.requires_grad:
            hook = partial(_appeared, me, number)
            self._handles.append(shard.param.register_post_accumulate_grad_hook(hook))

    def _unit_of(self, number: int) -> int:
        index = self._index[id(self._local[number])]
        return self._external_forward.parts.unit_of[index]

    def _resident(self, number: int) -> bool:
        """Return whether the shard stays on the device, in the engine's memory."""
        return self._external_forward.resident(self._unit_of(number))

    def _renew(self, number: int) -> None:
        """Refresh a shard that is a copy, if the engine's weights have changed since.

        What users have written to it meanwhile is kept.
        """
        shard = self._shards[number]
        if shard.even or self._versions[number] != shard.version:
            return
        made = self._external_forward.version(self._unit_of(number))
        if self._copied.get(number) != made:
            index = self._index[id(self._local[number])]
            shard.move_to(self._external_forward.weight(index))
            self._versions[number], self._copied[number] = shard.version, made

    @torch_private.without_grad
    def lend(self, number: int, *, looked_at: bool) -> torch.Tensor | None:
        """Make a shard current before its use: wait for its update.

        Args:
            looked_at: the user gets it, and may change it without a change of its version.

        Returns:
            The weights of a shard that is not resident: a copy, whose changes the engine adopts.
            FSDP2 only asks for their shape.
        """
        unit, shard = self._unit_of(number), self._shards[number]
        if not self._external_forward.resident(unit):
            if not looked_at:
                return shard.local
            return self._local[number].data
        self._external_forward.catch_up(unit)
        self._renew(number)
        if not looked_at:
            return None
        self._external_forward.wait_for_commit()
        made = self._external_forward.version(unit)
        if self._lent.get(number, (-1, 0))[0] != made:
            self._lent[number] = made, digest(shard.local)
        return None

    def _watched(self, number: int) -> bool:
        """Return whether the user may have a tensor over the current weights of a shard."""
        lent = self._lent.get(number)
        return lent is not None and lent[0] == self._external_forward.version(self._unit_of(number))

    def _changed(self, number: int, *, compare: bool) -> bool:
        """Return whether the user has changed a shard in place since the engine last looked."""
        shard = self._shards[number]
        if shard.version != self._versions[number]:
            return True
        return compare and self._watched(number) and self._lent[number][1] != digest(shard.local)

    def _hook(self, me: weakref.ref[Bridge], each: ShardedModule) -> None:
        def before() -> None:
            if (bridge := me()) is not None:
                bridge.before_gathering(each)

        def after() -> None:
            if (bridge := me()) is not None:
                bridge.after_gathering(each)

        def gathered(weights: Iterable[torch.Tensor]) -> None:
            if (bridge := me()) is not None:
                bridge._external_forward.never_offload(weights)

        self._handles += each.around_gathers(self._external_forward.device, before, after, gathered)

    def before_forward(self, inputs: Inputs) -> None:
        """Prepare for a forward of the whole model; ``inputs``: its arguments."""
        self._external_forward.require_managed()
        if not torch_private.in_backward():
            if torch.is_grad_enabled():
                self._group_check.check()
                self._drop_gradients()
            self._take_edits(compare=torch.is_grad_enabled())
        self._external_forward.before_forward(inputs)

    def after_forward(self, output: Any) -> None:
        """Handle the end of that forward; ``output`` is ``None`` if it raised."""
        self._external_forward.after_forward(output)

    def before_gathering(self, each: ShardedModule) -> None:
        """Bring the current weights of a module to the device, for FSDP2 to read them."""
        outer = self._external_forward
        outer.require_managed()
        self._onloaded.clear()  # what an interrupt left, the engine has offloaded
        self._take_off()
        for unit in self._units.get(id(each), ()):
            outer.catch_up(unit)
            outer.onload(unit)
            self._onloaded.append(unit)
        for number in self._members.get(id(each), ()):
            if self._resident(number):
                self._renew(number)
            else:
                index = self._index[id(self._local[number])]
                self._laid.append(number)
                self._shards[number].lay_over(outer.weight(index))

    def _take_off(self) -> None:
        """Undo ``lay_over``, so that the slots of these units can be used again."""
        while self._laid:
            self._shards[self._laid.pop()].lay_over(None)

    def after_gathering(self, each: ShardedModule) -> None:
        """Free the memory of shards that are not resident: FSDP2 has read them."""
        try:
            self._take_off()
        finally:
            while self._onloaded:
                self._external_forward.offload(self._onloaded.pop())

    def take_edits(self) -> None:
        """Pass in-place changes of shards since the last look to the engine.

        See Note [Edits of shards].
        """
        self._take_edits(compare=True)

    def _take_edits(self, *, compare: bool) -> None:
        """Do as ``take_edits``; ``compare`` digests, too.

        Raises:
            OffloadError: a parameter was replaced by another, or this step's backward has updated
                what was changed. The latter is reported once.
        """
        if self._over:
            return
        self._external_forward.require_managed()
        edited: dict[int, torch.Tensor] = {}
        for number, shard in enumerate(self._shards):
            if id(shard.param) not in self._by_param or not shard.in_place:
                raise WeightError(
                    f"parameter {shard.name!r} was replaced after the model was wrapped; put the "
                    "old one back, and copy the new values into it (p.data.copy_(new))"
                )
            if self._resident(number) and self._changed(number, compare=compare):
                index = self._index[id(self._local[number])]
                edited[index] = shard.local.detach().clone()
        if edited:
            watched = list(filter(self._watched, self._lent))
            self._accept()
            lost = {
                self._index[id(p)] for shard, p in zip(self._shards, self._local, strict=True)
                if shard.even  # it lies over the engine's memory
            }  # fmt: skip
            try:
                self._external_forward.replace(edited, lost=lost)
            finally:
                for number in watched:  # users may still have these tensors, too
                    made = self._external_forward.version(self._unit_of(number))
                    self._lent[number] = made, digest(self._shards[number].local)

    def _accept(self) -> None:
        """Record the current versions of all shards."""
        for number, shard in enumerate(self._shards):
            self._versions[number] = shard.version

    # -- gradients ------------------------------------------------------------------------------

    def appeared(self, number: int) -> None:
        """Handle a reduced gradient of a shard that was set or accumulated."""
        self._mirror(number)
        shard, p = self._shards[number], self._local[number]
        if p.grad is not None:  # HSDP allocates it on another stream than this
            self._external_forward.accelerator.keep(p.grad)
        self._external_forward.appeared(self._index[id(p)])
        if p.grad is not None:
            shard.hold(p.grad)

    def _drop_gradients(self) -> None:
        """Drop the engine's gradients where the user has dropped those of the model."""
        for number, p in enumerate(self._local):
            if p.grad is not None and self._shards[number].gradient() is None:
                p.grad = None

    def _mirror(self, number: int) -> None:
        """Give the engine's parameter the gradient of the user's."""
        shard, p = self._shards[number], self._local[number]
        gradient = shard.gradient()
        if gradient is not p.grad:
            p.grad = None
            p.grad = gradient

    def before_reading(self) -> None:
        """Reshard gathered weights, so that modules have the sharded parameters."""
        for each in self._modules:
            each.spread()

    def before_step(self) -> None:
        """Take edits and gradients, before the step."""
        self._group_check.check()
        self.take_edits()
        for number, p in enumerate(self._local):
            if p.requires_grad:
                self._mirror(number)

    def after_step(self) -> None:
        """Set ``p.grad`` of the user's parameters to the engine's tensors."""
        for number, p in enumerate(self._local):
            if isinstance(p.grad, OffloadedGradient):
                self._shards[number].hold(p.grad)
            elif p.grad is None:  # the engine was rolled back and has dropped all gradients
                self._shards[number].param.grad = None
        if self._external_forward.at_once:
            self._renew_copies()

    def _renew_copies(self) -> None:
        """Refresh the shards that are copies, once their weights are on the device."""
        numbers = [
            number for number, shard in enumerate(self._shards)
            if self._resident(number) and not shard.even
        ]  # fmt: skip

        def renew() -> None:
            for number in numbers:
                self._renew(number)

        self._external_forward.copied(set(map(self._unit_of, numbers)), renew)

    def before_rollback(self) -> None:
        """Do nothing: ``after_rollback`` drops edits and gradients."""

    def after_rollback(self) -> None:
        """Drop edits and gradients, and reshard gathered weights."""
        self.after_exchange()
        self.after_step()

    def before_exchange(self) -> None:
        """Take edits before weights and averages are exchanged."""
        self.take_edits()

    def after_exchange(self) -> None:
        """Drop what was known of replaced weights, and reshard gathered ones."""
        self._lent.clear()
        self._accept()
        self._copied.clear()
        self.before_reading()

    def went_back(self) -> None:
        """Handle a step that was not taken: weights are those of a commit, without gradients."""
        self.after_rollback()

    # -- the end --------------------------------------------------------------------------------

    def give_back(self) -> None:
        """Remove the hooks and return the shards to FSDP2.

        They get the weights of the engine's model, whose parameters are ordinary again. If not all
        ranks have got an engine, they become what they were before.
        """
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
    """Reports to the bridge, while it exists, that code is about to read a shard."""

    __slots__ = ("_me", "_number")

    def __init__(self, me: weakref.ref[Bridge], number: int) -> None:
        self._me, self._number = me, number

    def lend(self, *, looked_at: bool) -> torch.Tensor | None:
        return self._bridge().lend(self._number, looked_at=looked_at)

    def _bridge(self) -> Bridge:
        bridge = self._me()
        if bridge is None:  # its memory is freed
            raise LifecycleError("the optimizer of this parameter was closed")
        return bridge


def _appeared(me: weakref.ref[Bridge], number: int, _p: torch.Tensor) -> None:
    bridge = me()
    if bridge is not None:
        bridge.appeared(number)


def _root(me: weakref.ref[Bridge]) -> Callable[[nn.Module, Any, Any], None]:
    def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
        bridge = me()
        if bridge is not None:
            bridge.before_forward((args, kwargs))

    return before


def _root_over(me: weakref.ref[Bridge]) -> Callable[[nn.Module, Any, Any], None]:
    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        bridge = me()
        if bridge is not None:
            bridge.after_forward(output)

    return after
