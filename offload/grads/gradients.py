"""Collection of gradients: taken from autograd, gathered by unit, and handed over."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any

import torch
from torch import nn

from ..errors import BackwardUpdateError, GradientError
from ..facts.tier import Tier
from ..movement.updates import Arrived, Updater
from ..params.backward import Backward
from ..params.onloaded_units import OnloadedUnits
from ..private import torch_private
from ..private.handles import all_or_none, remove_all
from ..schedule.arena import Place
from ..schedule.ledger import Ledger
from ..schedule.messages import GradLost
from ..schedule.units import PARAM_ALIGN
from .backward_update_policy import BackwardUpdatePolicy
from .gradient_tensor import OffloadedGradient

# Note [Collection of gradients]
# A post-accumulate hook takes each new gradient out of ``p.grad`` and puts an ``OffloadedGradient``
# there. The plain tensor stays in ``pending``, as ``fresh`` if it is the first one since ``p.grad``
# was ``None``, or as ``added`` if it adds to what the engine holds. Once all trained parameters of
# a unit have one, the unit is delivered: its gradients are gathered into one flat buffer, and the
# residency machine copies that out, merges it with earlier micro-steps, or updates the unit from
# it. A partly frozen unit waits until backward has left it, because backward still uses its frozen
# weights.
#
# ``p.grad`` decides at every moment which gradient counts. A pending gradient is dropped if
# ``p.grad`` is no longer the wrapper, as after a backward that raised. At the step, ``None`` skips
# a parameter, and a plain tensor that the user assigned is copied in.
#
# ``p.grad.zero_()`` writes nothing: the parameter is noted in ``zeroed``, and zeros are made only
# if nothing was added by the time of delivery. If an exception interrupts a delivery, the unit's
# gradients may be incomplete; ``torn`` records them, and using them raises.


class _Pending:
    """Gradients of a unit that are not gathered yet, by index, and the streams that made them."""

    __slots__ = ("added", "fresh", "streams")

    def __init__(self) -> None:
        self.fresh: dict[int, torch.Tensor] = {}
        self.added: dict[int, torch.Tensor] = {}
        self.streams: set[Hashable] = set()


class GradientCollector:
    """The gradients of one engine on their way from autograd to where they are kept.

    See Note [Collection of gradients]. When a unit is delivered, ``backward_updates`` decides
    whether to update it at once.

    Attributes:
        zeroed: parameters whose gradient was set to zero in place.
        torn: parameters of units whose delivery was interrupted by an exception.
        arrived: by parameter, how many gradients of the present micro-batch were taken in.
        repeated: how many of these come again in its repetition, and are dropped.
    """

    def __init__(
        self,
        ledger: Ledger,
        updater: Updater,
        onloaded_units: OnloadedUnits,
        backward: Backward,
        backward_updates: BackwardUpdatePolicy,
        transient: bool,
        make_grad: Callable[[int], OffloadedGradient],
    ) -> None:
        self.parts = parts = onloaded_units.parts
        self.executor, self.accelerator = onloaded_units.executor, onloaded_units.accelerator
        self._ledger, self._updater, self._onloaded_units = ledger, updater, onloaded_units
        self._backward, self._backward_updates = backward, backward_updates
        self._transient, self._make_grad = transient, make_grad
        # If nothing moves, the norms of all gradients are measured at once, which takes less time.
        self._defers = self.executor.layout.still
        self.pending: dict[int, _Pending] = {}
        self._wrappers: dict[int, OffloadedGradient] = {}
        self.trained: list[tuple[int, ...]] = [
            tuple(spec.index for chunk, spec in unit.params if chunk.group is not None)
            for unit in parts.units
        ]
        # Backward still uses their frozen weights after all trained ones have their gradients.
        self._partly_frozen = {
            unit.index
            for unit in parts.units
            if onloaded_units.streamed[unit.index]
            and any(not parts.units[i].runs for i in unit.shares)
        }
        self.zeroed: set[int] = set()
        self.torn: set[int] = set()
        self._torn_sums = False  # a part of earlier micro-steps was lost with a torn gradient
        self.arrived, self.repeated = Counter[int](), Counter[int]()
        self.taken: dict[int, int] = {}  # how often a fresh gradient came
        self.appeared_any = False  # since a caller last set it to ``False``
        self._told = [0] * len(parts.units)  # how often gradients were handed over
        # By unit, views of the place where its gradients always lie.
        self._own: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self._handles: list[Any] = []
        me = weakref.ref(self)
        with all_or_none(self._handles):
            for indices in self.trained:
                for index in indices:
                    self._hook(me, index)

    def _hook(self, me: weakref.ref[GradientCollector], index: int) -> None:
        def fired(p: torch.Tensor) -> None:
            collector = me()
            if collector is not None:
                collector.appeared(index, p)

        p = self.parts.parameters[index]
        self._handles.append(p.register_post_accumulate_grad_hook(fired))

    def remove(self) -> None:
        """Remove the hooks."""
        remove_all(self._handles)
        self._own.clear()

    # -- appearance -----------------------------------------------------------------------------

    def appeared(self, index: int, p: torch.Tensor) -> None:
        """Take the gradient that autograd has just accumulated into ``p.grad``."""
        grad = torch_private.grad_of(p)
        self._backward.opened()
        self.appeared_any = True
        if grad is None:
            return
        if grad.requires_grad and torch.is_grad_enabled():  # as autograd does for create_graph only
            raise GradientError(
                f"the gradient of parameter {self._name(index)!r} has a graph, after "
                "backward(create_graph=True), which overspill does not keep; for a penalty on "
                "gradients use torch.autograd.grad(loss, parameters, create_graph=True)"
            )
        if not isinstance(grad, OffloadedGradient):
            self._take(index, p, grad)
        unit = self.parts.unit_of[index]
        if self._complete(unit) and unit not in self._partly_frozen:
            self._backward.leave(unit)
            self.deliver(unit, over=False)

    def _complete(self, unit: int) -> bool:
        """Return whether every trained parameter of a unit has a pending gradient."""
        pending = self.pending.get(unit)
        return pending is not None and len(pending.fresh) + len(pending.added) == len(
            self.trained[unit]
        )

    def left(self, unit: int) -> None:
        """Deliver a partly frozen unit that backward has left for another one."""
        if unit in self._partly_frozen and self._complete(unit):
            self.deliver(unit, over=False)

    def _take(self, index: int, p: torch.Tensor, grad: torch.Tensor) -> None:
        """Replace a fresh gradient by the wrapper, and keep it until the unit is gathered."""
        if grad.layout is not torch.strided:
            raise GradientError(
                f"parameter {self._name(index)!r} got a {grad.layout} gradient; overspill keeps "
                "dense gradients only (for an embedding: sparse=False)"
            )
        unit = self.parts.unit_of[index]
        self._backward_updates.refuse_updated(unit)
        pending = self._pending_of(unit)
        pending.added.pop(index, None)  # from a backward that raised; dropped since
        pending.fresh[index] = grad.detach().resolve_conj()
        self._renew(index)
        self.arrived[index] = 1
        self.taken[index] = self.taken.get(index, 0) + 1
        if index not in self._wrappers:
            self._wrappers[index] = self._make_grad(index)
        elif sys.getrefcount(self._wrappers[index]) > 2:  # the user has kept the last one
            self._wrappers[index].gone = True
            self._wrappers[index] = self._make_grad(index)
        torch_private.set_grad(p, self._wrappers[index])

    def _pending_of(self, unit: int) -> _Pending:
        """Return a unit's pending gradients; the calling thread's stream is about to add one."""
        pending = self.pending.get(unit)
        if pending is None:
            pending = self.pending[unit] = _Pending()
        pending.streams.add(self.accelerator.stream())
        return pending

    def _renew(self, index: int) -> None:
        """Discard what is recorded about a parameter's earlier gradient."""
        self._ledger.renew(index)
        self.arrived.pop(index, None)
        self.repeated.pop(index, None)
        self.zeroed.discard(index)
        self._backward_updates.renew(index)
        self.torn.discard(index)
        self._torn_sums &= bool(self.torn)

    def zero(self, index: int) -> None:
        """Set a gradient to zero, as for ``p.grad.zero_()``, without writing zeros yet."""
        pending = self.pending.get(self.parts.unit_of[index])
        if pending is not None:
            pending.fresh.pop(index, None)
            pending.added.pop(index, None)
        self._renew(index)
        self.zeroed.add(index)

    def replace(self, index: int, value: torch.Tensor) -> None:
        """Replace a parameter's zeros by the gradient ``value``."""
        unit = self.parts.unit_of[index]
        self._backward_updates.refuse_updated(unit)
        self._renew(index)
        self._pending_of(unit).fresh[index] = value.detach().clone()

    def _zeroes(self, unit: int) -> None:
        """Turn zeros that nothing was added to into pending gradients, before delivery."""
        for index in self.zeroed.intersection(self.trained[unit]):
            if self.live(index):
                self.replace(index, torch.zeros_like(self.parts.parameters[index]))
            self.zeroed.discard(index)

    def add(self, index: int, grad: torch.Tensor) -> None:
        """Add to a gradient, as for ``p.grad.add_(grad)``, by which autograd accumulates."""
        if self.repeated[index] and torch_private.in_backward():
            self.repeated[index] -= 1
            return
        if index in self.zeroed:
            self.replace(index, grad)
            self.arrived[index] = 1
            return
        unit = self.parts.unit_of[index]
        self._backward_updates.refuse_updated(unit)
        pending = self._pending_of(unit)
        if index in pending.fresh:
            pending.fresh[index] = pending.fresh[index] + grad
        elif index in pending.added:
            pending.added[index] = pending.added[index] + grad
        else:
            pending.added[index] = grad.detach().resolve_conj().clone()
        self.arrived[index] += torch_private.in_backward()
        self._ledger.squares.pop(index, None)  # last: the norm is measured again at delivery

    def awaits(self, index: int) -> bool:
        """Return whether a gradient of this backward has appeared and is not gathered yet."""
        pending = self.pending.get(self.parts.unit_of[index])
        return pending is not None and (index in pending.fresh or index in pending.added)

    def _name(self, index: int) -> str:
        unit = self.parts.units[self.parts.unit_of[index]]
        return next(spec.name for _, spec in unit.params if spec.index == index)

    def live(self, index: int) -> bool:
        """Return whether ``p.grad`` is the wrapper, so that the engine holds its gradient."""
        grad = torch_private.grad_of(self.parts.parameters[index])
        return grad is not None and grad is self._wrappers.get(index)

    # -- delivery -------------------------------------------------------------------------------

    def deliver_all(self, *, over: bool = True) -> None:
        """Deliver all units with pending gradients; ``over``: backward has ended."""
        for unit in list(self.pending):
            self.deliver(unit, over=over)

    def deliver_now(self) -> None:
        """Deliver all pending gradients, because they are about to be read.

        Raises:
            OffloadError: a running backward applies its gradients as they come.
        """
        inside = torch_private.in_backward()
        if inside and self._transient and self.pending:  # before a part of a unit is updated
            raise BackwardUpdateError(
                "p.grad was read during a backward that applies gradients at once "
                "(update='backward'); use update='next_forward' if hooks need p.grad"
            )
        self.deliver_all(over=not inside)

    def deliver(self, unit: int, *, over: bool) -> None:
        """Gather one unit's gradients into its slot, and hand them over; ``over``: after backward.

        If gradients are not kept anywhere, they stay pending until the update may consume them.
        """
        self._zeroes(unit)
        pending = self._still_wanted(unit)
        if pending is None:
            return
        others = [
            i
            for i in self.trained[unit]
            if i not in pending.fresh and i not in pending.added and self.live(i)
        ]
        merge = bool(others or pending.added)
        update = not others and self._backward_updates.may_update(unit, over)
        if not update and self._transient:
            return
        try:
            if update:
                self._backward_updates.begin_early(unit, (*pending.fresh, *pending.added))
            del self.pending[unit]
            on_slot, in_place = self._hand_over(unit, pending, merge)
            if not on_slot and (merge or self.executor.layout.converts[unit]):
                self._updater.arrived(unit, Arrived(tuple(pending.fresh), tuple(pending.added)))
            self._told[unit] += 1
            self.executor.protocol.gathered(unit, merge=merge, update=update, in_place=in_place)
        except BaseException:
            # How far it came is unknown.
            self.torn.update(self.trained[unit])
            self._torn_sums |= merge
            self.pending.pop(unit, None)
            if not self.executor.health.failed:
                self.executor.engine_port.tell(GradLost(unit))
            raise

    def _still_wanted(self, unit: int) -> _Pending | None:
        """Return a unit's pending gradients, except dropped ones.

        A gradient was dropped if ``p.grad`` is no longer the wrapper, as after a backward that
        raised.
        """
        pending = self.pending[unit]
        for found in (pending.fresh, pending.added):
            for index in [i for i in found if not self.live(i)]:
                del found[index]
        if pending.fresh or pending.added:
            return pending
        del self.pending[unit]
        return None

    @torch_private.without_grad
    def _hand_over(self, unit: int, pending: _Pending, merge: bool) -> tuple[bool, bool]:
        """Gather into the place where the machine wants the gradients.

        Returns:
            Whether that is where they are kept, and whether nothing is left to be done there.
        """
        place = self.executor.engine_port.gradient_home(unit, self._told[unit])
        if place is None:
            place = self.executor.protocol.room(unit, merge=merge)
        on_slot = self._in_host_layout(unit)
        if self.accelerator.has_device_memory:
            self.executor.compute.wait_for(place, "copy_out")
            self.accelerator.used(self.executor.arenas.bytes_of(place))
        made = [*pending.fresh.values(), *pending.added.values()]
        self.accelerator.join(pending.streams, made)
        self._gather(unit, pending, place, on_slot)
        in_place = on_slot and (not self._ledger.measures or place.tier is Tier.HOST)
        home = self.executor.layout.homes[unit].grad_place
        if in_place and self._ledger.measures and not (self._defers and place == home):
            self._updater.measure(unit, place)
        if self.accelerator.has_device_memory:
            self.executor.compute.mark(place)
        self._onloaded_units.compute_over(unit)
        return on_slot, in_place

    def measure(self, indices: Iterable[int]) -> None:
        """Measure the norms of these delivered gradients that were not measured as they came."""
        missing = [i for i in indices if i not in self._ledger.squares]
        if missing and self._defers:
            self._updater.measure_at_home(missing)

    def require_whole(self) -> None:
        """Raise if gradients of earlier micro-steps were lost; see ``Repeats.make_room``."""
        if self.torn and self._torn_sums:
            raise GradientError(
                f"an exception interrupted the gradient of {self._name(min(self.torn))!r}, and "
                "with it those of earlier micro-steps were lost; call zero_grad(), and repeat all "
                "micro-batches of this step"
            )

    def repeat_arrived(self) -> None:
        """Drop the gradients that a failed backward has brought when they come again.

        One that was not taken in, because a hook before raised, is dropped now.
        """
        untaken = [index for indices in self.trained for index in indices if self._untaken(index)]
        for index in {*self.torn, *untaken}:
            torch_private.set_grad(self.parts.parameters[index], None)
            self._renew(index)
        self.repeated = Counter({i: n for i, n in self.arrived.items() if self.live(i)})

    def _untaken(self, index: int) -> bool:
        """Return whether a parameter with hooks of the user has a gradient that was not taken in.

        Without such hooks, only the user can have assigned a plain tensor.
        """
        p = self.parts.parameters[index]
        plain = type(torch_private.grad_of(p)) is torch.Tensor
        return plain and torch_private.post_accumulate_hooks(p) > 1

    def refuse_torn(self, params: Collection[int]) -> None:
        """Raise if an exception interrupted the gathering of one of these gradients."""
        lost = self.torn.intersection(params)
        if lost:
            raise GradientError(
                f"an exception interrupted the gradient of {self._name(min(lost))!r}, so it is not "
                "complete; call zero_grad(), and run forward and backward again"
            )

    def _in_host_layout(self, unit: int) -> bool:
        """Return whether gradients are gathered directly where they are kept."""
        home = self.executor.layout.homes[unit]
        return not self.accelerator.has_device_memory or home.grads is Tier.DEVICE

    def _gather(self, unit: int, pending: _Pending, place: Place, on_slot: bool) -> None:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for index, view in self._targets(unit, place, on_slot):
            value = pending.fresh.get(index, pending.added.get(index))
            if value is None:
                continue
            if on_slot and index not in pending.fresh:
                view.add_(value)
            else:
                targets.append(view)
                sources.append(value)
        if targets:
            torch._foreach_copy_(targets, sources)

    def _targets(self, unit: int, place: Place, on_slot: bool) -> list[tuple[int, torch.Tensor]]:
        """Return where each parameter's gradient goes in ``place``; zero the padding in between.

        The views of a place that always belongs to the unit are made once.
        """
        if unit in self._own:
            return self._own[unit]
        made: list[tuple[int, torch.Tensor]] = []
        for number, chunk in enumerate(self.parts.units[unit].chunks):
            if chunk.group is None:
                continue
            if on_slot:
                dtype = self._updater.grads.dtypes[unit][number]
                offset = self._updater.grads.offsets[unit][number]
            else:
                dtype, offset = chunk.dtype, chunk.grad_offset
            flat = self.executor.arenas.typed(place, offset, dtype, chunk.numel)
            border = PARAM_ALIGN // chunk.dtype.itemsize
            for spec in chunk.params:
                end = spec.offset + spec.numel
                if pad := -spec.numel % border:
                    flat[end : end + pad].zero_()
                made.append((spec.index, spec.shaped(flat[spec.offset : end])))
        if place == self.executor.layout.homes[unit].grad_place:
            self._own[unit] = made
        return made

    # -- at the step ----------------------------------------------------------------------------

    def take_user_grads(self) -> None:
        """Copy in gradients that the user has assigned to ``p.grad``, and pending zeros."""
        for indices in self.trained:
            for index in indices:
                p: nn.Parameter = self.parts.parameters[index]
                grad = torch_private.grad_of(p)
                if isinstance(grad, OffloadedGradient):
                    self._refuse_stranger(index, grad)
                elif grad is not None:
                    self._take(index, p, grad)
        for index in self.zeroed:
            if self.live(index):
                self.pending.setdefault(self.parts.unit_of[index], _Pending())
        self.deliver_all()

    def _refuse_stranger(self, index: int, grad: OffloadedGradient) -> None:
        if grad is not self._wrappers.get(index):
            raise GradientError(
                f"the gradient assigned to {self._name(index)!r} belongs to another parameter or "
                "to an earlier backward; assign a clone() of it"
            )

    def detach_memory(self) -> None:
        """Drop views of the memory of gradients, which are made again when they are needed."""
        self._own.clear()

    memory_freed = attach_memory = detach_memory  # see MemoryUser

    def drop(self) -> None:
        """Forget all gradients."""
        for indices in self.trained:
            for index in indices:
                torch_private.set_grad(self.parts.parameters[index], None)
        self.pending.clear()
        self.zeroed.clear()
        self._backward_updates.drop()
        self.torn.clear()
        self.arrived.clear()
        self.repeated.clear()

    def present(self, unit: int) -> frozenset[int]:
        """Return the unit's parameters that have a gradient."""
        return frozenset(i for i in self.trained[unit] if self.live(i))
