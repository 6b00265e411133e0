"""The trial of an optimizer without a rule: which copies of its parameters can it step?"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .coupled import CoupledOptimizer, CoupledRule, Member
from .single_step import (
    Group,
    UnsuitableError,
    bare,
    changed_attribute,
    copied,
    options_of,
    refuse_attributes,
    same_value,
    shared_copies,
    step,
    with_params,
)
from .state_record import tensors_in
from .streamed import RECORD, Generators, Quiet, StreamedRule, drawn, generators, restore

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

# Parts of the names of classes that estimate one step size for all parameters, which a short trial
# may not show.
COUPLED = ("prodigy", "dadapt", "adaptd")

Shapes = Sequence[tuple[int, ...]]


def trial(optimizer: torch.optim.Optimizer) -> tuple[StreamedRule, ...]:
    """Return the rule of every param group, after it was tried on small parameters.

    The rules are coupled if the optimizer cannot be stepped one parameter at a time.

    Raises:
        UnsuitableError: the optimizer cannot be stepped on copies of its parameters either.
    """
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.is_complex():
            raise UnsuitableError("complex parameters are not possible with it")
    refuse_attributes(optimizer)
    try:
        rules = tuple(StreamedRule(optimizer, group) for group in optimizer.param_groups)
        together = CoupledOptimizer(optimizer)
    except Exception as error:
        raise UnsuitableError(
            f"a copy of it cannot be made ({type(error).__name__}: {error})"
        ) from error
    shapes = [_shapes_like(group) for group in optimizer.param_groups]
    with Quiet():
        before = generators()
        options = _options(optimizer, rules)
        plain, own = _plain_run(optimizer, rules, shapes, options)
        draws = not _same_states(generators(), before)
        known = any(word in type(optimizer).__qualname__.lower() for word in COUPLED)
        if not (known or draws):
            with suppress(UnsuitableError):
                for number, (rule, sizes) in enumerate(zip(rules, shapes, strict=True)):
                    _try(rule, sizes, *plain[number])
                return rules
        restore(before)
        try:
            _try_together(together, shapes, plain, options)
        except UnsuitableError as error:
            for key in (each for each in own.state if not isinstance(each, Tensor)):
                raise UnsuitableError(
                    f"it keeps state that belongs to no parameter, under {key!r}"
                ) from error
            raise
    return together.rules


def _shapes_like(group: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Return shapes of small parameters that have as many dimensions as those of a group."""
    dims = sorted({max(p.dim(), 1) for p in group["params"]})
    return [s for dim in dims for s in _SHAPES.get(dim, [(2,) * dim, (1, *(2,) * (dim - 1))])]


def _options(optimizer: torch.optim.Optimizer, rules: Sequence[StreamedRule]) -> list[Group]:
    """Return the hyper-parameters for a trial; groups share what those of the optimizer share."""
    found = shared_copies(optimizer.param_groups)
    for group, rule in zip(found, rules, strict=True):
        options = rule.options.items()
        group.update({k: v for k, v in options if k not in group or not same_value(group[k], v)})
    return found


def _plain_run(
    optimizer: torch.optim.Optimizer, rules: Sequence[StreamedRule],
    shapes: Sequence[Shapes], options: Sequence[Group],
) -> tuple[list[tuple[list[Tensor], Group]], torch.optim.Optimizer]:  # fmt: skip
    """Train with the optimizer itself.

    Args:
        options: hyper-parameters at the beginning.

    Returns:
        The weights and hyper-parameters of every group, and the copy of the optimizer.
    """
    own = bare(optimizer, apart=True)
    for group, rule, sizes in zip(shared_copies(options), rules, shapes, strict=True):
        params = [nn.Parameter(drawn(shape, i, "cpu")) for i, shape in enumerate(sizes)]
        own.param_groups.append(with_params(group, params, named=rule.named))
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
    kinds = {type(t) for state in own.state.values() for t in tensors_in(state)}
    if others := kinds - {Tensor, nn.Parameter}:
        kind = min(others, key=lambda each: each.__qualname__)
        raise UnsuitableError(
            f"it keeps its state in tensors of its own class {kind.__module__}.{kind.__qualname__}"
        )
    params = [p for group in own.param_groups for p in group["params"]]
    if (name := changed_attribute(before, own, params)) is not None:
        raise UnsuitableError(
            f"it keeps state outside of its state and param_groups, in its attribute {name!r}"
        )
    return [([p.detach() for p in g["params"]], options_of(g)) for g in own.param_groups], own


def _try(rule: StreamedRule, shapes: Shapes, weights: list[Tensor], options: Group) -> None:
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
    if not all(same_value(a, b) for a, b in zip(mine, weights, strict=True)):
        raise UnsuitableError(
            "a parameter that is stepped alone gets other values: the optimizer couples "
            "parameters, changes those without a gradient, or keeps state outside of its state and "
            "param_groups"
        )
    same = group.keys() == options.keys()
    if not same or not all(same_value(group[name], value) for name, value in options.items()):
        raise UnsuitableError("what it writes to its param groups depends on all parameters")


def _try_together(
    optimizer: CoupledOptimizer, shapes: Sequence[Shapes],
    plain: Sequence[tuple[list[Tensor], Group]], groups: list[Group],
) -> None:  # fmt: skip
    """Train the same parameters with a new copy of the optimizer for every step, and compare.

    Args:
        groups: hyper-parameters at the beginning.
    """
    kept: list[list[tuple[Tensor, Tensor]]] = []  # weights and records, as an engine has them
    try:
        for rule, sizes in zip(optimizer.rules, shapes, strict=True):
            with Quiet():
                _settle(rule, sizes)
            kept.append([
                (drawn(s, i, "cpu"), rule.stored(copy.deepcopy(rule.first_state), s))
                for i, s in enumerate(sizes)
            ])  # fmt: skip
        for number in range(1, STEPS + 1):
            members = [
                [_member(rule, i, *each, number) for i, each in enumerate(of_group)]
                for rule, of_group in zip(optimizer.rules, kept, strict=True)
            ]
            after = optimizer.step(groups, members)
            groups = [{**old, **new} for old, new in zip(groups, after, strict=True)]
            for rule, of_group in zip(optimizer.rules, kept, strict=True):
                for i in list(rule.results):
                    rule.write(i, of_group[i][0], {RECORD: of_group[i][1]})
    except Exception as error:
        raise UnsuitableError(
            f"its step fails on copies of its parameters ({type(error).__name__}: {error})"
        ) from error
    for group, of_group, (weights, options) in zip(groups, kept, plain, strict=True):
        mine = [weight for weight, _ in of_group]
        first = [drawn(tuple(w.shape), i, "cpu") for i, w in enumerate(mine)]
        if mine and all(map(same_value, weights, first)):
            raise UnsuitableError("its step changes no weights with the options that it has")
        same = all(map(same_value, mine, weights)) and group.keys() == options.keys()
        if not same or not all(same_value(group[name], options[name]) for name in options):
            raise UnsuitableError(
                "a copy of it with the same state and param_groups gives other values: it changes "
                "parameters without a gradient, or keeps state elsewhere"
            )


def _member(rule: CoupledRule, index: int, weight: Tensor, record: Tensor, step: int) -> Member:
    param, shape = nn.Parameter(weight.clone()), tuple(weight.shape)
    param.grad = _gradient(shape, index, step)
    return Member(shape, index, param, rule.copy_of(record, param))


def _settle(rule: StreamedRule, shapes: Shapes) -> None:
    """Find how many steps the state takes to reach its size, and whether ``meta`` shows it."""
    found = [rule.formats_on("cpu", shape, STEPS) for shape in shapes]
    rule.steps_to_settle = 1 + max((f.index(f[-1]) for f in found), default=0)
    try:
        rule.finds_without_memory = found == [rule.formats_on("meta", s, STEPS) for s in shapes]
    except Exception:
        rule.finds_without_memory = False
    rule.keep_formats({shape: f[-1] for shape, f in zip(shapes, found, strict=True)})


def _gradient(shape: tuple[int, ...], number: int, step: int) -> Tensor | None:
    """Return a gradient, or none; those of different parameters and steps differ in size."""
    if _WITHOUT.get(step) == number:
        return None
    size = 10.0 ** (number % 5 - 2) * _SIZES.get(step, 1.0)
    return drawn(shape, 1000 * step + number, "cpu") * size


def _same_states(one: Generators, other: Generators) -> bool:
    (python, numpys, torchs), (python_then, numpys_then, torchs_then) = one, other
    same = (np.array_equal(a, b) for a, b in zip(numpys, numpys_then, strict=True))
    return python == python_then and torch.equal(torchs, torchs_then) and all(same)
