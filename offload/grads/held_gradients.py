"""Access through ``p.grad`` to the gradients that the engine holds between backward and step.

See Note [Collection of gradients] in ``gradients.py``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch

from ..config import OffloadConfig
from ..errors import BackwardUpdateError
from ..movement.accelerators.base import Accelerator
from ..movement.direct import DirectAccess
from ..movement.pools import Arenas
from ..movement.updates import Updater
from ..optim.norm import sum_of_squares
from ..planning.partition import Partition
from ..private import torch_private
from ..schedule.ledger import Ledger
from ..schedule.messages import Key, Kind
from ..schedule.units import ParamSpec
from .backward_update_policy import BackwardUpdatePolicy
from .gradients import GradientCollector

log = logging.getLogger("overspill")


class _Loan(torch_private.Watched):
    """A copy of a gradient that users have views of; ``taken`` identifies the gradient."""

    def __init__(self, copy: torch.Tensor, taken: int) -> None:
        super().__init__(copy)
        self.taken = taken


class HeldGradients:
    """Access to held gradients, one at a time; norms and scales read no gradient.

    Sums of squares are computed in fp64 as gradients arrive, and give the norms. The update applies
    a scale in the pass that it makes anyway, in fp32, before it rounds to a narrower gradient.
    """

    def __init__(
        self,
        config: OffloadConfig,
        parts: Partition,
        ledger: Ledger,
        accelerator: Accelerator,
        direct: DirectAccess,
        arenas: Arenas,
        updater: Updater,
        collector: GradientCollector,
        backward_updates: BackwardUpdatePolicy,
    ) -> None:
        self._config, self._parts, self._ledger = config, parts, ledger
        self._accelerator = accelerator
        self._direct, self._arenas, self._updater = direct, arenas, updater
        self._collector, self._backward_updates = collector, backward_updates
        self._warned = False
        self._loans: dict[int, _Loan] = {}

    def _refuse_lost(self, numbers: Sequence[int]) -> None:
        """Raise if one of the gradients was used up by an update, or is incomplete."""
        self._backward_updates.refuse_consumed(numbers)
        self._collector.refuse_torn(numbers)

    # -- one gradient ---------------------------------------------------------------------------

    def add(self, number: int, grad: torch.Tensor) -> None:
        """Add ``grad`` to the gradient of an earlier backward, for autograd."""
        self._backward_updates.before_use()
        self.reconcile()
        self._refuse_lost([number])
        if number in self._ledger.scales:
            self.write(number, self.read(number))
        low = self._parts.parameters[number].dtype == torch.bfloat16
        again = self._collector.awaits(number) or number in self._collector.zeroed
        if low and self._config.accumulate == 1 and not self._warned and not again:
            self._warned = True
            log.warning(
                "overspill: gradients are accumulated in bfloat16, as torch does; pass "
                "accumulate=N (micro-steps per step) to wrap to accumulate in fp32"
            )
        self._collector.add(number, grad)

    def zero(self, number: int) -> None:
        """Set a gradient to zero, as for ``p.grad.zero_()`` or ``zero_grad(set_to_none=False)``."""
        self._backward_updates.require_unused()
        self._collector.zero(number)
        if (loan := self._loans.get(number)) is not None:
            loan.tensor.zero_()
            loan.accept()

    def read(self, number: int) -> torch.Tensor:
        self.reconcile()
        return self._read(number)

    def _read(self, number: int) -> torch.Tensor:
        if number in self._collector.zeroed:
            return torch.zeros_like(self._parts.parameters[number])
        flat, spec = self._flat(number)
        copy = spec.shaped(flat).to(self._accelerator.device, copy=True)
        scale = self._ledger.scales.get(number, 1.0)
        return copy if scale == 1.0 else copy.mul_(scale)

    def exact(self, number: int, factor: float) -> torch.Tensor:
        """Return a copy of a gradient as it is kept, in fp32 on the CPU, times a factor."""
        if number in self._collector.zeroed:
            like = self._parts.parameters[number]
            return torch.zeros_like(like, dtype=torch.float32, device="cpu")
        flat, spec = self._flat(number)
        copy = flat.to(device="cpu", dtype=torch.float32, copy=True)
        return spec.shaped(copy if factor == 1.0 else copy.mul_(factor))

    def write(self, number: int, value: torch.Tensor) -> None:
        self._backward_updates.before_use()
        self._write(number, value)
        if (loan := self._loans.get(number)) is not None:
            if not torch_private.same_memory(loan.tensor, value):
                loan.tensor.copy_(value)
            loan.accept()

    def _write(self, number: int, value: torch.Tensor) -> None:
        if number in self._collector.zeroed:
            self._collector.replace(number, value)
            return
        flat, spec = self._flat(number)
        spec.shaped(flat).copy_(value)
        self._ledger.scales.pop(number, None)
        self._ledger.squares[number] = sum_of_squares(flat.cpu())
        self._direct.store(Key(Kind.GRADS, self._parts.unit_of[number]))

    def _flat(self, number: int) -> tuple[torch.Tensor, ParamSpec]:
        """Return the parameter's flat gradient where it is kept, once everything has arrived."""
        unit = self._parts.unit_of[number]
        self._refuse_lost([number])
        self._collector.deliver_now()
        self._collector.executor.protocol.await_gradients()
        self._direct.quiesce()
        place = self._direct.bring(Key(Kind.GRADS, unit))
        grads = self._updater.grads
        for chunk_number, chunk in enumerate(self._parts.units[unit].chunks):
            for spec in chunk.params:
                if spec.index == number:
                    whole = self._arenas.typed(
                        place, grads.offsets[unit][chunk_number], grads.dtypes[unit][chunk_number],
                        chunk.numel,
                    )  # fmt: skip
                    return whole[spec.offset : spec.offset + spec.numel], spec
        raise KeyError(number)

    # -- views that users hold -----------------------------------------------------------------

    def borrow(self, number: int) -> torch.Tensor:
        """Return a copy of the gradient, as ``read`` does, or the copy that users have views of."""
        self.reconcile()
        loan = self._loans.get(number)
        return self._read(number) if loan is None else loan.tensor.detach()

    def lend(self, number: int, copy: torch.Tensor) -> None:
        """Record that a view of the borrowed ``copy`` exists, which may be written to."""
        if number not in self._loans:
            taken = self._collector.taken.get(number, 0)
            self._loans[number] = _Loan(copy.detach(), taken)

    def reconcile(self) -> None:
        """Write changes of views back to the gradients, and forget views that are not needed.

        A view is not needed once another gradient has taken its place, or no other tensor uses its
        memory.
        """
        for number, loan in list(self._loans.items()):
            current = loan.taken == self._collector.taken.get(number, 0)
            if not (current and self._collector.live(number)):
                del self._loans[number]
                continue
            if loan.changed:
                self._write(number, loan.tensor)
                loan.accept()
            if torch_private.is_alone(loan.tensor):
                del self._loans[number]

    def renew(self) -> None:
        """Update views to the gradients that another backward has produced."""
        self.reconcile()
        for number, loan in self._loans.items():
            loan.tensor.copy_(self._read(number))
            loan.accept()

    # -- norms and scales -----------------------------------------------------------------------

    def norms(self, numbers: Sequence[int]) -> list[float]:
        """Return the L2 norm of each gradient as it is now.

        This includes gradients that ``update="backward"`` has applied already, because trainers log
        norms. The first call reads the gradients; later norms are computed as gradients arrive.
        """
        self.reconcile()
        self._collector.refuse_torn(numbers)
        self._ledger.ask_norms()
        self._collector.deliver_now()
        self._collector.executor.protocol.await_gradients()
        if self._backward_updates.consumed([n for n in numbers if n not in self._ledger.squares]):
            raise BackwardUpdateError(
                "update='backward' has applied these gradients before their norms were requested "
                "for the first time; norms are computed from now on: ask after the next backward()"
            )
        self._collector.measure(n for n in numbers if n not in self._collector.zeroed)
        found: list[float] = []
        for number in numbers:
            if number in self._collector.zeroed:
                found.append(0.0)
                continue
            if number not in self._ledger.squares:
                self._ledger.squares[number] = sum_of_squares(self._flat(number)[0].cpu())
            scale = self._ledger.scales.get(number, 1.0)
            found.append(math.sqrt(self._ledger.squares[number]) * abs(scale))
        return found

    def scale(self, numbers: Sequence[int], factor: float) -> None:
        """Multiply gradients by ``factor`` when the update reads them."""
        self._backward_updates.before_use()
        self.reconcile()
        if factor != 1.0:  # clipping with a norm below the limit changes nothing
            self._backward_updates.refuse_consumed(numbers)
        self._collector.refuse_torn(numbers)
        self._collector.deliver_now()
        for number in numbers:
            if (loan := self._loans.get(number)) is not None:
                loan.tensor.mul_(factor)
                loan.accept()
            if factor != 1.0 and number not in self._collector.zeroed:
                before = self._ledger.scales.get(number, 1.0)
                self._ledger.scales[number] = before * factor
