"""Which rule serves which optimizer: every rule registers itself, those of others included."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from .averaged import DECAY, AveragedRule, averaged
from .elementwise import check_elementwise
from .formats import UNSIGNED_MOMENTS
from .joint import JointOptimizer
from .rule import Rule, is_whole
from .single_step import UnsuitableError, attributes_of, name_of
from .streamed import StreamedRule
from .streamed_trial import trial
from .untrained import NoOptimizer

Group = Mapping[str, Any]
Maker = Callable[[Group], Rule]

MAKERS: dict[type[torch.optim.Optimizer], Maker] = {}
# By name, rules with all that they may keep: what ``overspill.optim.bench`` measures.
MEASURED: dict[str, Callable[[], Rule]] = {}


def register(
    kind: type[torch.optim.Optimizer],
    make: Maker,
    *,
    unsigned: Sequence[str] = (),
    measured: Mapping[str, Callable[[], Rule]] | None = None,
) -> None:
    """Let ``wrap`` accept optimizers of a kind: ``make`` gives the rule of a param group.

    An optimizer without a rule runs its own step, if it can: see Note [Streamed optimizers].

    A rule is elementwise, unless it says ``whole = True``: what an element becomes may depend on
    that element's gradient, weight and state alone, not on its neighbours (no norms, no matrix
    products).  The engine updates parameters in pieces of up to some 16 million elements, and
    several small ones at once.  This is checked here, with the optimizer's default options where it
    has them for all, and again at ``wrap`` with the options in use, by updating a small buffer as a
    whole and in two pieces.  A whole rule gets each parameter in its shape: see ``WholeRule``.

    Args:
        kind: this very class; a subclass may step differently, and is registered for itself.
        make: called with a param group, with the options that it has then.  See ``Rule``.
        unsigned: moments that are never below zero, by name: in int8 they have twice the codes.
        measured: names of rules whose costs ``overspill bench optim`` tells.

    Example::

        class SignRule:  # see overspill.optim.Rule: name, moments, state_fields, update and so on
            ...

        overspill.optim.register(Sign, lambda group: SignRule())
        optimizer = overspill.wrap(model, Sign(model.parameters(), lr=1e-4))

    Raises:
        TypeError: ``kind`` is no class of optimizers.
        ValueError: it is registered already, another rule has a moment of that name with a sign, or
            the rule is not elementwise.
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise TypeError(f"register takes a class of torch optimizers, not {kind!r}")
    if kind in MAKERS:
        raise ValueError(f"{kind.__module__}.{kind.__qualname__} has a rule already")
    signed = {name for rule in MEASURED.values() for name in rule().moments} - UNSIGNED_MOMENTS
    if taken := sorted(signed.intersection(unsigned)):
        raise ValueError(f"another rule's moment {taken[0]!r} has a sign; name yours differently")
    if not _is_own(make) and (group := _defaults(kind)) is not None:
        _check(kind, make, group)
    MAKERS[kind] = make
    UNSIGNED_MOMENTS.update(unsigned)
    for name, known in (measured or {}).items():
        MEASURED[name] = known
        MEASURED[f"{name} and average"] = partial(_averaged, known)


def _is_own(make: Maker) -> bool:
    """Whether a rule is one of this package's, which its tests check."""
    return str(getattr(make, "__module__", "")).startswith(__name__.rpartition(".")[0])


def _defaults(kind: type[torch.optim.Optimizer]) -> Group | None:
    """The default options of an optimizer, ``None`` where some have no default."""
    try:
        with torch.device("cpu"):
            made: Any = kind([torch.nn.Parameter(torch.zeros(1))])  # type: ignore[call-arg]
    except Exception:
        return None
    return {name: value for name, value in made.param_groups[0].items() if name != "params"}


def _check(kind: type[torch.optim.Optimizer], make: Maker, group: Group) -> None:
    if is_whole(make(group)):
        return
    name = f"{kind.__module__}.{kind.__qualname__}"
    check_elementwise(name, partial(make, group), group)


def _averaged(make: Callable[[], Rule]) -> Rule:
    return AveragedRule(make())


def _names() -> str:
    """What is accepted, as one reads it."""
    found: dict[str, list[str]] = {}
    for kind in MAKERS:
        parts = kind.__module__.split(".")
        known = {"torch": "torch.optim", "overspill": "overspill.optim"}
        found.setdefault(known.get(parts[0], kind.__module__), []).append(kind.__qualname__)
    return " and ".join(
        f"{module}.{{{', '.join(sorted(names))}}}" for module, names in found.items()
    )


def rules_for(optimizer: torch.optim.Optimizer) -> tuple[Rule, ...]:
    """The rule of each param group, by the options that the group has now.

    Raises:
        TypeError: the optimizer's class has no rule (subclasses may step differently, so they do
            not count as their base) and its step cannot be run on one parameter at a time; or it
            uses ``capturable`` or ``differentiable``.
        ValueError: a rule of others is not elementwise.
    """
    if isinstance(optimizer, NoOptimizer):
        return ()
    if isinstance(optimizer, JointOptimizer):
        return tuple(rule for each in optimizer.optimizers for rule in rules_for(each))
    for key in ("capturable", "differentiable"):
        if any(bool(group.get(key)) for group in optimizer.param_groups):
            raise TypeError(
                f"{key}=True is not possible, since updates run outside of CUDA graphs and "
                "autograd; set it to False"
            )
    maker = MAKERS.get(type(optimizer))
    if maker is None:
        return _streamed(optimizer)
    if not _is_own(maker):
        for group in optimizer.param_groups:
            _check(type(optimizer), maker, group)
    return tuple(averaged(maker(group), group) for group in optimizer.param_groups)


# By optimizer, its rules and the options that they were tried with.
_TRIED: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[str, tuple[StreamedRule, ...]]] = (
    weakref.WeakKeyDictionary()
)


def _streamed(optimizer: torch.optim.Optimizer) -> tuple[Rule, ...]:
    """Return the rules of an optimizer that is stepped one parameter at a time.

    Raises:
        TypeError: it cannot be.
    """
    if any(DECAY in group for group in optimizer.param_groups):
        raise TypeError(
            f"overspill.ema is not possible with {name_of(optimizer)}, which has no rule of its "
            f"own here; it is with {_names()}"
        )
    if type(optimizer).__module__.startswith("torchao."):
        raise TypeError(
            f"{name_of(optimizer)} cannot be used: it keeps its state in tensors of its own "
            "classes, which only torch.compile can update. Use torch.optim.AdamW, with "
            "moments='int8' for state of about the same size"
        )
    dims = [sorted({p.dim() for p in group["params"]}) for group in optimizer.param_groups]
    plain = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    options = repr((plain, dims, attributes_of(optimizer)))
    known = _TRIED.get(optimizer)
    if known is None or known[0] != options:
        try:
            known = options, trial(optimizer)
        except UnsuitableError as error:
            raise TypeError(
                f"{name_of(optimizer)} cannot be used: {error}. Use an optimizer whose step needs "
                f"only gradients, its state and its param_groups, such as {_names()}"
            ) from error
        _TRIED[optimizer] = known
    return known[1]
