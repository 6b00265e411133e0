"""What torch's optimizers keep to themselves, in one place: hooks, and who steps for whom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def count_step(optimizer: torch.optim.Optimizer) -> None:
    """Schedulers of this optimizer take it that a step was made: another one steps for it."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def step_hooks(optimizer: torch.optim.Optimizer, *, before: bool) -> list[Callable[..., Any]]:
    """What was registered on an optimizer to be called before its steps, or after them."""
    hooks = optimizer._optimizer_step_pre_hooks if before else optimizer._optimizer_step_post_hooks
    return list(hooks.values())


_STATE_HOOKS = (
    "_state_dict_pre",
    "_state_dict_post",
    "_load_state_dict_pre",
    "_load_state_dict_post",
)


def move_state_hooks(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """What was registered on an optimizer to be called around its ``state_dict`` and
    ``load_state_dict`` is registered on another."""
    for kind in _STATE_HOOKS:
        getattr(target, f"_optimizer{kind}_hooks").update(
            getattr(source, f"_optimizer{kind}_hooks")
        )


def state_with_hooks(
    optimizer: torch.optim.Optimizer, give: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """A state dict, with what is registered to be called before and after."""
    for before in optimizer._optimizer_state_dict_pre_hooks.values():
        before(optimizer)
    state = give()
    for after in optimizer._optimizer_state_dict_post_hooks.values():
        changed = after(optimizer, state)
        state = state if changed is None else changed
    return state


def load_with_hooks(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any],
    load: Callable[[Mapping[str, Any]], None],
) -> None:  # fmt: skip
    """Loads a state dict, with what is registered to be called before and after."""
    found = dict(state)  # hooks may change it
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = before(optimizer, found)
        found = found if changed is None else changed
    load(found)
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)
