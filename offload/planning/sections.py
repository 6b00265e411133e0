"""Stacks of expert matrices, split into sections: modules that are onloaded one by one.

A model that has all experts of a layer in one parameter needs room for all of them at once.  Each
section is a parameter with some of the experts, and a separate unit.  Outside the model, in state
dicts and files, the stack keeps its own name and shape.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")

_NAME = "section_of_experts"  # name of the parameter; no other parameter has this name
_SECTION = re.compile(rf"(.+)\.(\d+)\.{_NAME}")


class LowRank(NamedTuple):
    """What an adapter adds to matrices: ``scaling * left @ right``, of shapes (experts, rows, rank)
    and (experts, rank, columns)."""

    left: torch.Tensor
    right: torch.Tensor
    scaling: float


class Section(nn.Module):
    """Some experts of a stack.

    Attributes:
        experts: their numbers, beginning with ``first``.
        rows_per_token: about how many rows are routed to them per token.
    """

    section_of_experts: nn.Parameter

    def __init__(
        self, section: nn.Parameter, first: int, rows_per_token: float, product: Callable[..., Any]
    ) -> None:
        """``product``: computes the output from the matrices and the arguments of the call."""
        super().__init__()
        self.section_of_experts = section
        self.first, self.rows_per_token, self._product = first, rows_per_token, product
        self.experts = range(first, first + len(section))

    @property
    def section(self) -> nn.Parameter:
        """The matrices of the experts, of shape (experts, rows, columns)."""
        return self.section_of_experts

    def forward(self, *rows: torch.Tensor, added: LowRank | None = None, **how: Any) -> Any:
        """Multiply the rows routed to the experts by their matrices.

        Args:
            added: is added to the matrices.  The sum is computed again in backward, since it is as
                large as the section.
        """
        if added is None:
            return self._product(self.section, *rows, **how)
        left, right, scaling = added
        run = partial(self._by_sum, scaling, how)
        if not torch.is_grad_enabled():
            return run(left, right, *rows)
        return checkpoint(run, left, right, *rows, use_reentrant=False, preserve_rng_state=False)

    def _by_sum(
        self, scaling: float, how: Mapping[str, Any], left: torch.Tensor, right: torch.Tensor,
        *rows: torch.Tensor,
    ) -> Any:  # fmt: skip
        # As peft computes it: in the dtype of the weights, under autocast too.
        with torch.autocast(self.section.device.type, enabled=False):
            matrices = torch.baddbmm(self.section, left, right, alpha=scaling)
        return self._product(matrices, *rows, **how)

    def extra_repr(self) -> str:
        return f"experts {self.first} to {self.experts.stop - 1} of {tuple(self.section.shape)}"


# Called by the module that has a stack, with itself, the experts that it uses now, and the experts
# that the next such module in the model will probably use (``None``: unknown).
Announce = Callable[[nn.Module, Collection[int], Collection[int] | None], None]


class Sections(nn.ModuleList):
    """A stack split into sections, which replaces its parameter.

    Attributes:
        announce: called with the experts that are used; see ``Announce``.
        transient: attributes that copies do not have: they belong to an engine or to a forward.
    """

    transient = ("announce", "_added")
    announce: Announce | None = None
    _added: Mapping[int, LowRank] = {}  # by first expert of a section

    def __init__(
        self, stack: nn.Parameter, experts: int, rows_per_token: float, product: Callable[..., Any]
    ) -> None:
        """Copy a stack into sections.

        Args:
            experts: the number of experts per section.
            rows_per_token: of the whole stack.
        """
        sections = []
        for first in range(0, len(stack), experts):
            rows = stack.detach()[first : first + experts]
            part = nn.Parameter(_copy_of(rows), requires_grad=stack.requires_grad)
            if stack.grad is not None:
                part.grad = _copy_of(stack.grad[first : first + experts])
            share = len(part) / len(stack)
            sections.append(Section(part, first, rows_per_token * share, product))
        super().__init__(sections)
        self.register_state_dict_post_hook(_join_in)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the transient ones."""
        return {name: value for name, value in vars(self).items() if name not in self.transient}

    def __iter__(self) -> Iterator[Section]:  # type: ignore[override]
        return super().__iter__()  # type: ignore[return-value]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stack."""
        parts = [each.section for each in self]
        return sum(map(len, parts)), *parts[0].shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stack."""
        return next(iter(self)).section.dtype

    @property
    def device(self) -> torch.device:
        """Where compute sees the stack."""
        return next(iter(self)).section.device

    def add(self, left: torch.Tensor, right: torch.Tensor, scaling: float) -> None:
        """Add a product of low rank to the matrices until ``add_nothing``; see ``LowRank``."""
        sizes = [len(each.experts) for each in self]
        self._added = {
            section.first: LowRank(mine, also_mine, scaling)
            for section, mine, also_mine in zip(
                self, left.split(sizes), right.split(sizes), strict=True
            )
        }

    def add_nothing(self) -> None:
        """End ``add``."""
        self._added = {}

    def added_to(self, section: Section) -> LowRank | None:
        """Return what is added to the matrices of a section."""
        return self._added.get(section.first)

    def joined(self) -> nn.Parameter:
        """Return the stack as one parameter, with its gradient if all sections have one."""
        parts = [each.section for each in self]
        whole = nn.Parameter(
            torch.cat([p.detach() for p in parts]), any(p.requires_grad for p in parts)
        )
        grads = [p.grad for p in parts if p.grad is not None]
        if len(grads) == len(parts):
            whole.grad = torch.cat(grads)
        return whole


def _copy_of(rows: torch.Tensor) -> torch.Tensor:
    return rows.clone(memory_format=torch.contiguous_format)


def stacks_of(module: nn.Module) -> dict[str, Sections]:
    """Return, by name, the split stacks that are direct children of the module."""
    return {name: m for name, m in module.named_children() if isinstance(m, Sections)}


def has_sections(model: nn.Module) -> bool:
    """Return whether any stack of the model is split into sections."""
    return any(isinstance(module, Sections) for module in model.modules())


# -- by the names of a state dict ------------------------------------------------------------------


def section_name(stack: str, number: int) -> str:
    """Return the name of the parameter of a section, for a stack of that name."""
    return f"{stack}.{number}.{_NAME}"


def is_section(name: str) -> bool:
    """Return whether a parameter of that name is a section."""
    return _SECTION.fullmatch(name) is not None


def joined(values: Mapping[str, T], join: Callable[[str, Sequence[T]], T]) -> dict[str, T]:
    """Return values by name, with the values of each stack's sections joined into one.

    Args:
        join: called with the name of a stack and the values of its sections in their order.

    Raises:
        ValueError: a stack lacks a section, or is also there as a whole.
    """
    found: dict[str, dict[int, T]] = {}
    for name, value in values.items():
        section = _SECTION.fullmatch(name)
        stack, number = (name, -1) if section is None else (section[1], int(section[2]))
        found.setdefault(stack, {})[number] = value
    torn = [
        name for name, parts in found.items() if sorted(parts) not in ([-1], [*range(len(parts))])
    ]
    if torn:
        raise ValueError(f"{torn[0]} has not all of its sections, or is there as a whole too")
    return {
        name: parts[-1] if -1 in parts else join(name, [parts[i] for i in range(len(parts))])
        for name, parts in found.items()
    }


def _join_in(stack: nn.Module, state: dict[str, Any], prefix: str, _meta: Any) -> None:
    """Join the sections of a stack in a state dict, as a state dict post-hook."""
    name = prefix.removesuffix(".")
    names = [section_name(name, number) for number in range(len(list(stack.children())))]
    parts: list[torch.Tensor] = [state[name] for name in names if name in state]
    if len(parts) < len(names) or isinstance(parts[0], nn.Parameter):  # keep_vars
        return
    for each in names:
        del state[each]
    state[name] = torch.cat(parts)


def split_in(
    module: nn.Module, state: dict[str, Any], prefix: str, meta: Mapping[str, Any], _strict: bool,
    _missing: list[str], _unexpected: list[str], errors: list[str],
) -> None:  # fmt: skip
    """Split the stacks in a state dict into sections before a module loads it, as a pre-hook."""
    for name, stack in module.named_modules(prefix=prefix.removesuffix(".")):
        whole = state.get(name) if isinstance(stack, Sections) else None
        if not isinstance(whole, torch.Tensor):
            continue
        del state[name]
        if tuple(whole.shape) != stack.shape:
            errors.append(
                f"size mismatch for {name}: {tuple(whole.shape)} in the checkpoint, "
                f"{stack.shape} in the model"
            )
        for number, section in enumerate(stack):
            part = whole[section.first : section.experts.stop]
            # Parameters that share memory would count as tied: each change would affect all.
            kept = _copy_of(part) if meta.get("assign_to_params_buffers") else part
            state[section_name(name, number)] = kept
