"""Checks that a rule updates every element by itself: the engine cuts buffers anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .rule import Rule

COUNT, CUT, STEPS = 1024, 256, 3
_FORMATS = (torch.float32, torch.bfloat16, torch.float16)


def check_elementwise(name: str, make: Callable[[], Rule], group: Mapping[str, Any]) -> None:
    """Update a small buffer as a whole and in two pieces, and compare the bits.

    Args:
        name: of the optimizer, for the message.
        make: gives the rule, a new one each time.
        group: hyper-parameters.

    Raises:
        ValueError: the results differ, so that training would depend on where buffers are cut.
    """
    wholes = [_trial(make(), group, [COUNT]) for _ in range(2)]
    if not _same(*wholes):
        raise ValueError(
            f"the rule of {name} gives other values when it is run again on the same ones (does it "
            "draw random numbers, or keep memory of its own?); overspill could not resume it"
        )
    if not _same(wholes[0], _trial(make(), group, [CUT, COUNT - CUT])):
        raise ValueError(
            f"the rule of {name} is not elementwise: a buffer gets other values when it is updated "
            "in two pieces, and the engine updates pieces of parameters, and several parameters at "
            "once. A rule cannot use norms, matrix products or other functions of whole "
            "parameters; max_grad_norm= clips gradients by their norm"
        )


def _trial(rule: Rule, group: Mapping[str, Any], pieces: list[int]) -> list[Tensor]:
    """Take some steps on ``COUNT`` drawn elements, in pieces; return weights and state."""
    dtype, fields = _formats(rule)
    draw = torch.Generator().manual_seed(0)

    def drawn() -> Tensor:
        sizes = torch.linspace(-2, 2, COUNT, device="cpu").exp()  # the pieces differ in size
        return (torch.randn(COUNT, generator=draw, device="cpu") * sizes).to(dtype)

    weight = drawn()
    starts = rule.initial(group)
    state = {
        field.name: torch.full((COUNT,), starts.get(field.name, 0.0), device="cpu").to(field.dtype)
        for field in fields
    }
    for step in range(1, STEPS + 1):
        grad, at = drawn(), 0
        for count in pieces:
            part = slice(at, at + count)
            values = {name: value[part] for name, value in state.items()}
            rule.update(grad[part], weight[part], values, rule.scalars(group, step), at)
            at += count
    return [weight, *state.values()]


def _formats(rule: Rule) -> tuple[torch.dtype, tuple[Any, ...]]:
    """The first dtype of weights that the rule serves, with the fields of its state."""
    for dtype in _FORMATS:
        master = None if dtype == torch.float32 else "fp32"
        try:
            return dtype, rule.state_fields(dtype, master, "fp32")  # type: ignore[arg-type]
        except ValueError as error:
            refused = error
    raise refused


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )
