"""The trial of an optimizer without a rule: can it be stepped one parameter at a time?"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .single_step import (
    Group,
    UnsuitableError,
    bare,
    changed_attribute,
    copied,
    group_of,
    name_of,
    options_of,
    refuse_attributes,
    same_value,
    step,
)
from .streamed import RECORD, Quiet, StreamedRule, drawn

STEPS = 30
# The larger ones have state that does not count as small: 8-bit formats begin at 4,096 elements.
_SHAPES: dict[int, list[tuple[int, ...]]] = {
    1: [(5,), (24,), (3,)],
    2: [(6, 4), (4, 6), (72, 60)],
    3: [(3, 2, 4), (5, 6, 4)],
    4: [(4, 3, 2, 2), (5, 4, 3, 2)],
}
# Some steps have gradients much larger or smaller than others, to pass thresholds.
_SIZES = {7: 1e4, 12: 1e-5, 17: 1e4}
# By step, the number of a parameter in its group that has no gradient.
_WITHOUT = {4: 1, 6: 0, 9: 1}

# They estimate something over all parameters, which a short trial may not show.
COUPLED = ("prodigy", "dadapt", "dadaptation", "adaptd")


def trial(optimizer: torch.optim.Optimizer) -> tuple[StreamedRule, ...]:
    """Return the rule of every param group, after it was tried on small parameters.

    Raises:
        UnsuitableError: the optimizer cannot be stepped parameter by parameter.
    """
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.is_complex():
            raise UnsuitableError("complex parameters are not possible with it")
    name = name_of(optimizer).lower()
    if any(word in name for word in COUPLED):
        raise UnsuitableError("it estimates its step size over all parameters at once")
    refuse_attributes(optimizer)
    try:
        rules = tuple(StreamedRule(optimizer, group) for group in optimizer.param_groups)
    except Exception as error:
        raise UnsuitableError(
            f"its attributes cannot be copied ({type(error).__name__}: {error})"
        ) from error
    shapes = [_shapes_like(group) for group in optimizer.param_groups]
    with Quiet():
        before = _generators()
        plain = _plain_run(optimizer, rules, shapes)
        if not _same_states(_generators(), before):
            _restore(before)
            raise UnsuitableError(
                "it draws random numbers from global generators, so that results would depend on "
                "the order of updates"
            )
        for number, (rule, sizes) in enumerate(zip(rules, shapes, strict=True)):
            _try(rule, sizes, *plain[number])
    return rules


def _shapes_like(group: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Return shapes of small parameters that have as many dimensions as those of a group."""
    dims = sorted({max(p.dim(), 1) for p in group["params"]})
    return [s for dim in dims for s in _SHAPES.get(dim, [(2,) * dim, (1, *(2,) * (dim - 1))])]


def _plain_run(
    optimizer: torch.optim.Optimizer, rules: Sequence[StreamedRule],
    shapes: Sequence[Sequence[tuple[int, ...]]],
) -> list[tuple[list[Tensor], Group]]:  # fmt: skip
    """Train with the optimizer itself; return the weights and hyper-parameters of every group."""
    own = bare(optimizer, apart=True)
    for group, rule, sizes in zip(optimizer.param_groups, rules, shapes, strict=True):
        params = [nn.Parameter(drawn(shape, i, "cpu")) for i, shape in enumerate(sizes)]
        own.param_groups.append(group_of(rule.options, params, named="param_names" in group))
        if rule.first_state:
            own.state.update({p: copy.deepcopy(rule.first_state) for p in params})
    before = {name: copied(value) for name, value in own.__dict__.items()}
    try:
        for number in range(1, STEPS + 1):
            for group in own.param_groups:
                for i, p in enumerate(group["params"]):
                    p.grad = _gradient(tuple(p.shape), i, number)
            step(own)
    except Exception as error:
        raise UnsuitableError(
            f"its step fails on small parameters ({type(error).__name__}: {error})"
        ) from error
    params = [p for group in own.param_groups for p in group["params"]]
    if (name := changed_attribute(before, own, params)) is not None:
        raise UnsuitableError(
            f"it keeps state outside of its state and param_groups, in its attribute {name!r}"
        )
    return [([p.detach() for p in g["params"]], options_of(g)) for g in own.param_groups]


def _try(
    rule: StreamedRule, shapes: Sequence[tuple[int, ...]], weights: list[Tensor], options: Group
) -> None:
    """Train the same parameters one by one, and compare."""
    first = [drawn(s, i, "cpu") for i, s in enumerate(shapes)]
    if shapes and all(torch.equal(a, b) for a, b in zip(first, weights, strict=True)):
        raise UnsuitableError("its step changes no weights with the options that it has")
    try:
        _settle(rule, shapes)
        mine, group = first, rule.options
        records = [rule.stored(copy.deepcopy(rule.first_state), s) for s in shapes]
        for number in range(1, STEPS + 1):
            scalars = rule.scalars(group, number)
            for i, (shape, weight) in enumerate(zip(shapes, mine, strict=True)):
                if (grad := _gradient(shape, i, number)) is not None:
                    rule.update(grad, weight, {RECORD: records[i]}, scalars)
            group = {**group, **rule.advance(group, active=True)}
    except Exception as error:
        raise UnsuitableError(
            f"its step fails on one parameter alone ({type(error).__name__}: {error})"
        ) from error
    same = all(same_value(a, b) for a, b in zip(mine, weights, strict=True))
    if not same or group.keys() != options.keys():
        raise UnsuitableError(
            "a parameter that is stepped alone gets other values: the optimizer couples "
            "parameters, changes those without a gradient, or keeps state outside of its state and "
            "param_groups"
        )
    if not all(same_value(group[name], value) for name, value in options.items()):
        raise UnsuitableError("what it writes to its param groups depends on all parameters")


def _settle(rule: StreamedRule, shapes: Sequence[tuple[int, ...]]) -> None:
    """Find how many steps the state takes to reach its size, and whether ``meta`` shows it."""
    rule.steps_to_settle = STEPS
    most = [rule.format_on("cpu", shape) for shape in shapes]
    for count in range(1, STEPS + 1):
        rule.steps_to_settle = count
        if [rule.format_on("cpu", shape) for shape in shapes] == most:
            break
    try:
        rule.finds_without_memory = [rule.format_on("meta", shape) for shape in shapes] == most
    except Exception:
        rule.finds_without_memory = False
    rule.keep_formats(dict(zip(shapes, most, strict=True)))


def _gradient(shape: tuple[int, ...], number: int, step: int) -> Tensor | None:
    """Return a gradient, or none; those of different parameters and steps differ in size."""
    if _WITHOUT.get(step) == number:
        return None
    size = 10.0 ** (number % 5 - 2) * _SIZES.get(step, 1.0)
    return drawn(shape, 1000 * step + number, "cpu") * size


def _generators() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _same_states(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    (python, numpys, torchs), (python_then, numpys_then, torchs_then) = one, other
    same = (np.array_equal(a, b) for a, b in zip(numpys, numpys_then, strict=True))
    return python == python_then and torch.equal(torchs, torchs_then) and all(same)


def _restore(states: tuple[Any, ...]) -> None:
    python, numpys, torchs = states
    random.setstate(python)
    np.random.set_state(numpys)
    torch.set_rng_state(torchs)
