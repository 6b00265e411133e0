"""Private PyTorch interfaces of activation checkpointing, and of operators below autograd.

Also the states of random number generators, which a second run of a forward restores.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils.checkpoint import _checkpoint_without_reentrant_generator, noop_context_fn

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def checkpoint(
    function: Callable[..., None], inputs: Sequence[torch.Tensor],
    contexts: Contexts = noop_context_fn,
) -> Generator[None, None, None]:  # fmt: skip
    """Return a non-reentrant checkpoint that starts at the first ``next`` and ends at the second.

    ``function`` recomputes from ``inputs`` what runs between the two.  ``contexts`` returns what
    surrounds the forward, and each recomputation.
    """
    made: Generator[None, None, None] = _checkpoint_without_reentrant_generator(
        function, True, contexts, "default", False, True, *inputs
    )
    return made


def take_modes_above(mode: TorchDispatchMode) -> list[TorchDispatchMode] | None:
    """Pop the modes above ``mode`` in this thread, innermost first; ``None``: it is not active."""
    if not any(each is mode for each in _get_current_dispatch_mode_stack()):
        return None
    above: list[TorchDispatchMode] = []
    while _get_current_dispatch_mode_stack()[-1] is not mode:
        above.append(_pop_mode())
    return above


def put_modes(modes: Sequence[TorchDispatchMode]) -> None:
    """Put back what ``take_modes_above`` returned."""
    for mode in reversed(modes):
        _push_mode(mode)


def counting_versions() -> AbstractContextManager[object]:
    """Return a context for code below autograd in which views share their version counters."""
    key = torch._C.DispatchKey.ADInplaceOrView
    guard: AbstractContextManager[object] = torch._C._SetExcludeDispatchKeyGuard(key, False)
    return guard


def operator_argument(
    operator: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Return an argument of an operator's call; ``None`` if it has none of this name."""
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == name:
            return args[place] if place < len(args) else kwargs.get(name, argument.default_value)
    return None


Random = tuple[torch.Tensor, torch.Tensor | None]


def random_states(device: torch.device) -> Random:
    """Return the states of torch's random number generators on the CPU and on a device."""
    if device.type == "cpu":
        return torch.get_rng_state(), None
    return torch.get_rng_state(), torch.get_device_module(device).get_rng_state(device)


def same_random_states(one: Random, other: Random) -> bool:
    """Return whether no numbers were drawn between two results of ``random_states``."""
    device = one[1] is None or other[1] is None or torch.equal(one[1], other[1])
    return device and torch.equal(one[0], other[0])


def restore_random_states(states: Random, device: torch.device) -> None:
    """Restore the result of ``random_states``."""
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.get_device_module(device).set_rng_state(states[1], device)
