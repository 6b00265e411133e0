"""Private interfaces of torch's optimizers, in one place: hooks and the step mark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def count_step(optimizer: torch.optim.Optimizer) -> None:
    """Mark a step of this optimizer, for its schedulers, that another optimizer makes."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def step_hooks(optimizer: torch.optim.Optimizer, *, before: bool) -> list[Callable[..., Any]]:
    """Return the hooks that an optimizer calls before its steps, or after them."""
    hooks = optimizer._optimizer_step_pre_hooks if before else optimizer._optimizer_step_post_hooks
    return list(hooks.values())


_STATE_HOOKS = (
    "_state_dict_pre",
    "_state_dict_post",
    "_load_state_dict_pre",
    "_load_state_dict_post",
)


def move_state_hooks(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Register an optimizer's ``state_dict`` and ``load_state_dict`` hooks on another one."""
    for kind in _STATE_HOOKS:
        getattr(target, f"_optimizer{kind}_hooks").update(
            getattr(source, f"_optimizer{kind}_hooks")
        )


def state_with_hooks(
    optimizer: torch.optim.Optimizer, give: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Return the state dict of ``give``, and run the hooks registered before and after it."""
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
    """Load a state dict by ``load``, and run the hooks registered before and after it."""
    found = dict(state)  # hooks may change it
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = before(optimizer, found)
        found = found if changed is None else changed
    load(found)
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)
