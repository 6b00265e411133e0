"""What a rule is: the state it keeps, its scalars for one step, and the update of a flat buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeGuard

import torch
from torch import Tensor

from . import cuda_kernels, kernels, reference
from .compact import noise_key
from .formats import Field, Master, Moments, master_fields, moment_fields


@dataclass(frozen=True)
class StepScalars:
    """Everything that one step does not share with the next, for one parameter group.

    ``coefficients`` are the rule's numbers in the order of its kernel, computed in double precision
    and rounded to fp32 once, in the kernel.  The first is the factor of the gradient.
    """

    step: int
    coefficients: tuple[float, ...]
    noise_key: int


class Rule(Protocol):
    """An update rule over flat buffers."""

    @property
    def name(self) -> str: ...

    @property
    def moments(self) -> tuple[str, ...]:
        """The names of the moments, as torch's optimizers call them."""
        ...

    def state_fields(
        self, weight_dtype: torch.dtype, master: Master, moments: Moments
    ) -> tuple[Field, ...]:
        """The state besides the weight, in order: the master's field, then each moment's.

        Raises:
            ValueError: the formats do not fit the dtype or the rule.
        """
        ...

    def steps_taken(self, state: Mapping[str, Any]) -> int:
        """How many steps a parameter's state, in torch's format, has seen (0 for an empty one)."""
        ...

    def initial(self, group: Mapping[str, Any]) -> dict[str, float]:
        """Moments that do not start at zero, and their first value."""
        ...

    def scalars(self, group: Mapping[str, Any], step: int, grad_scale: float = 1.0) -> StepScalars:
        """The scalars of step ``step`` (from 1) with the group's present hyper-parameters.

        Args:
            grad_scale: factor of the gradient (unscaling times clipping).
        """
        ...

    def update(
        self,
        grad: Tensor,
        weight: Tensor,
        state: Mapping[str, Tensor],
        scalars: StepScalars,
        position: int = 0,
    ) -> bool:
        """Updates ``weight`` and ``state`` in place, in one pass.  The engine calls it from two
        threads, one after the other; updates of the rules in this package also side by side.

        Args:
            grad, weight: flat, contiguous, equally long; fp32, bf16 or fp16; on one device.
            state: the tensors of ``state_fields``, by name, as long as their fields say.
            position: index of the first element in its whole buffer; a multiple of 256 with int8
                moments, of 32 with bf16 moments.  It keys the rounding noise of compact moments, so
                that the result does not depend on how the buffer is cut.

        Returns:
            Whether every value written is finite.
        """
        ...


class WholeRule(Rule, Protocol):
    """A rule that updates whole parameters, in their shape, and none of them in parts.

    ``grad``, ``weight`` and state as large as the weight have the parameter's shape in ``update``.
    """

    whole: bool

    def state_fields(
        self, weight_dtype: torch.dtype, master: Master, moments: Moments,
        shape: tuple[int, ...] = (),
    ) -> tuple[Field, ...]:  # fmt: skip
        """The state of a parameter of this shape; see ``Rule.state_fields``."""
        ...


def is_whole(rule: Rule) -> TypeGuard[WholeRule]:
    """Return whether a rule updates whole parameters."""
    return bool(getattr(rule, "whole", False))


class ElementwiseRule:
    """A rule that looks at one element after the other; one of its own adds a name, a formula and
    the coefficients of a step.

    A native kernel of the same name runs where it serves the tensors; else the formula does.
    """

    name: ClassVar[str]

    def __init__(self, kernel: str, moments: tuple[str, ...], formula: reference.Formula) -> None:
        self._kernel, self._moments, self.formula = kernel, moments, formula

    def coefficients(
        self, group: Mapping[str, Any], step: int, grad_scale: float
    ) -> tuple[float, ...]:
        """The formula's numbers for one step (from 1), ``grad_scale`` the first of them."""
        raise NotImplementedError

    def scalars(self, group: Mapping[str, Any], step: int, grad_scale: float = 1.0) -> StepScalars:
        if step < 1:
            raise ValueError(f"steps count from 1, not {step}")
        signed = -grad_scale if group.get("maximize") else grad_scale  # which is exact
        return StepScalars(step, self.coefficients(group, step, signed), noise_key(step))

    @property
    def moments(self) -> tuple[str, ...]:
        return self._moments

    def state_fields(
        self, weight_dtype: torch.dtype, master: Master, moments: Moments
    ) -> tuple[Field, ...]:
        fields = master_fields(weight_dtype, master)
        for name in self._moments:
            fields += moment_fields(name, moments)
        return fields

    def steps_taken(self, state: Mapping[str, Any]) -> int:
        if "step" in state:
            return int(state["step"])
        # torch's SGD counts no steps: its buffer is there, or it is not.
        return int(any(state.get(name) is not None for name in self._moments))

    def initial(self, group: Mapping[str, Any]) -> dict[str, float]:
        return {}

    def update(
        self,
        grad: Tensor,
        weight: Tensor,
        state: Mapping[str, Tensor],
        scalars: StepScalars,
        position: int = 0,
    ) -> bool:
        tensors = grad, weight, state, self._moments
        rest = scalars.coefficients, scalars.noise_key, position
        if kernels.serves(self._kernel, weight):
            return kernels.update(self._kernel, *tensors, *rest)
        if cuda_kernels.serves(self._kernel, weight):
            return cuda_kernels.update(self._kernel, *tensors, *rest)
        return reference.update(self.formula, *tensors, *rest)


def number(group: Mapping[str, Any], key: str) -> float:
    """A hyper-parameter as a float (it may be a one-element tensor).

    Raises:
        ValueError: it is not finite.
    """
    value = float(group[key])
    if not math.isfinite(value):
        raise ValueError(f"{key} must be finite, not {value}")
    return value
