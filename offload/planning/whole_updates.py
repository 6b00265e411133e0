"""Updates of whole parameters: their work, and the memory that they need besides records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..optim import Master, Moments, Rule
from ..optim.coupled import CoupledRule
from ..optim.rule import is_whole
from ..optim.streamed import StreamedRule
from ..optim.update_cost import UpdateCost, update_cost
from ..schedule.units import Chunk
from ..schedule.visits import MATRIX_FLOPS
from .partition import Partition
from .subgroups import UpdateWork


class UpdateBytes(NamedTuple):
    """Memory in bytes that updates need besides records, weights and gradients.

    Attributes:
        matrices: whether the device updates any.
    """

    host: int
    device: int
    matrices: bool


class WholeUpdates:
    """The updates by rules for whole parameters.

    Args:
        groups: the param groups of the rules.
        master_of: returns how weights of a dtype keep their master.
    """

    def __init__(
        self, rules: Sequence[Rule], groups: Sequence[Mapping[str, Any]],
        master_of: Callable[[torch.dtype], Master], moments: Moments,
    ) -> None:  # fmt: skip
        self._rules, self._groups = rules, groups
        self._master_of, self._moments = master_of, moments
        self._known: dict[tuple[int, tuple[int, ...], torch.dtype], UpdateCost] = {}

    def cost_of(self, chunk: Chunk) -> UpdateCost | None:
        """Return the work of a parameter's update; ``None`` if a kernel updates it in parts."""
        if chunk.group is None or not chunk.whole:
            return None
        return self._cost(chunk.group, chunk.params[0].shape, chunk.dtype)

    def _cost(self, group: int, shape: tuple[int, ...], dtype: torch.dtype) -> UpdateCost:
        key, rule = (group, shape, dtype), self._rules[group]
        assert is_whole(rule)
        if key not in self._known:
            rule.scalars(self._groups[group], 1)  # raises for wrong options
            master = self._master_of(dtype)
            self._known[key] = update_cost(
                rule, self._groups[group], shape, dtype, master, self._moments
            )
        return self._known[key]

    def work_of(self, chunk: Chunk) -> UpdateWork | None:
        """Return the work of a parameter's update, and whether a device should do it.

        Coupled optimizers step all parameters at once, in host memory.
        """
        if (cost := self.cost_of(chunk)) is None or chunk.group is None:
            return None
        coupled = isinstance(self._rules[chunk.group], CoupledRule)
        matrix = not coupled and cost.flops > MATRIX_FLOPS * chunk.numel
        return UpdateWork(cost.flops, cost.moved_bytes, matrix)

    def products(self, dtype: torch.dtype | None) -> torch.dtype | None:
        """Return the dtype of the update's matrix products; ``None`` if it has none.

        Args:
            dtype: of all weights; ``None``: each parameter's own.
        """
        costs = [UpdateCost()]
        for number, rule in enumerate(self._rules):
            if is_whole(rule) and (params := self._groups[number]["params"]):
                largest = max(params, key=torch.Tensor.numel)
                if largest.is_floating_point():
                    kind = dtype or largest.dtype
                    costs.append(self._cost(number, tuple(largest.shape), kind))
        return max(costs, key=lambda cost: cost.flops).dtype

    def memory(self, parts: Partition, *, device: bool) -> UpdateBytes:
        """Return the memory for the largest update on each side.

        That is a copy of the gradient in fp32, the master if the weight is in another dtype, and
        the temporaries of the update.  For coupled optimizers, it is also the exact weights,
        gradients and states of all, and another copy of the state of the largest.

        Args:
            device: whether updates with many matrix products run on the device.
        """
        here = there = together = 0
        matrices = False
        for chunk in _trained(parts):
            if (cost := self.cost_of(chunk)) is None or (work := self.work_of(chunk)) is None:
                continue
            assert chunk.group is not None
            rule, nbytes = self._rules[chunk.group], cost.temporary_bytes
            if isinstance(rule, StreamedRule):
                nbytes += chunk.numel * (4 if chunk.dtype == torch.float32 else 8)
            if isinstance(rule, CoupledRule):
                record = rule.format_of(chunk.params[0].shape).nbytes
                together += chunk.numel * 8 + record
                nbytes += record
            if device and work.matrix:
                there, matrices = max(there, nbytes), True
            else:
                here = max(here, nbytes)
        return UpdateBytes(here + together, there, matrices)


def _trained(parts: Partition) -> list[Chunk]:
    return [chunk for unit in parts.units for chunk in unit.chunks if chunk.group is not None]
