"""``p.grad`` between backward and step: a tensor without memory whose gradient the engine holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from . import torch_private


@dataclass(frozen=True)
class GradientAccess:
    """How the wrapper reaches its gradient: all by parameter index."""

    add: Callable[[int, torch.Tensor], None]
    read: Callable[[int], torch.Tensor]
    write: Callable[[int, torch.Tensor], None]


class OffloadedGradient(torch.Tensor):
    """Stands for the gradient of parameter ``number``.

    Adding to it (autograd's accumulation) goes to the engine.  Any other operation reads the
    gradient, runs on the plain tensor, and writes back what it changed, one gradient at a time.
    """

    number: int
    access: GradientAccess

    @staticmethod
    def __new__(
        cls: type[OffloadedGradient],
        like: torch.Tensor,
        dtype: torch.dtype,
        index: int,
        access: GradientAccess,
    ) -> OffloadedGradient:
        made = cast(OffloadedGradient, torch_private.make_wrapper(cls, like, dtype))
        made.number, made.access = index, access
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"OffloadedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.add_.Tensor and _is_plain_sum(args, kwargs):
            args[0].access.add(args[0].number, args[1])
            return args[0]
        if func.namespace == "aten" and torch_private.operation_name(func).startswith(
            "aten::_foreach"
        ):
            return _one_by_one(func, args, kwargs)
        return _on_plain(func, args, kwargs)


def _is_plain_sum(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    wrapped, other = args[0], args[1]
    return (
        isinstance(wrapped, OffloadedGradient)
        and not isinstance(other, OffloadedGradient)
        and other.shape == wrapped.shape
        and kwargs.get("alpha", 1) == 1
    )


def _on_plain(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs ``func`` on the plain gradients, and writes back those that it mutates."""
    plain: dict[int, torch.Tensor] = {}

    def load(value: Any) -> Any:
        if not isinstance(value, OffloadedGradient):
            return value
        if value.number not in plain:
            plain[value.number] = value.access.read(value.number)
        return plain[value.number]

    result = func(*torch_private.tree_map(load, args), **torch_private.tree_map(load, dict(kwargs)))
    written: dict[int, OffloadedGradient] = {}
    for value in torch_private.mutated_arguments(func, args):
        for leaf in torch_private.tree_leaves(value):
            if isinstance(leaf, OffloadedGradient):
                written[leaf.number] = leaf
    for index, wrapper in written.items():
        wrapper.access.write(index, plain[index])
    back = {id(plain[index]): wrapper for index, wrapper in written.items()}
    return torch_private.tree_map(lambda r: back.get(id(r), r), result)


def _one_by_one(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A list operation, run on one-element lists, so that one gradient is in memory at a time."""
    count = len(args[0])
    results: list[Any] = []
    for i in range(count):
        single = [[a[i]] if isinstance(a, (list, tuple)) and len(a) == count else a for a in args]
        result = _on_plain(func, single, kwargs)
        if isinstance(result, (list, tuple)):
            results.extend(result)
    return results or None
