"""A rank's shards as a model of their own, and an optimizer over them.

The shards are ordinary parameters, which an engine takes over like those of any model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..planning.regions import TensorRegion
from ..planning.stand_ins import DOT, StandIn, StandInModel
from ..planning.unit_discovery import ROOT as UNIT_OF_MODEL
from ..private import module_private
from .parts import LocalShard, SpreadModule, WholeParam

BUFFERS, ROOT = "(buffers)", "(model)"  # no module of the model has such a name


class Shards(StandInModel):
    """This rank's shards, grouped by part of the model. A shard without elements is left out.

    Parameters that are ``hooked`` are the model's own.

    Its buffers are the model's current ones at each access, so that they are committed with the
    weights.

    Attributes:
        shards: the shards that have elements on this rank.
        empty: the shards that have none.
        local: for each of ``shards``, its parameter in this model.
        units: the names of the submodules that hold these parameters.
    """

    def __init__(
        self, model: nn.Module, parts: Sequence[SpreadModule], *, ranks: int = 1,
        tensor_ranks: int = 1, hooked: Mapping[str, Sequence[WholeParam]] | None = None,
    ) -> None:  # fmt: skip
        """For ``hooked`` see ``ParallelStrategy``, for ``ranks`` and ``tensor_ranks`` the base."""
        super().__init__(model, ranks, tensor_ranks)
        self.shards: list[LocalShard] = []
        self.empty: list[LocalShard] = []
        self.local: list[nn.Parameter] = []
        self.units: list[str] = []
        for each in parts:
            node = StandIn(each.runs)
            for shard in each.shards:
                if shard.local.numel():
                    p = nn.Parameter(shard.local.data, requires_grad=shard.param.requires_grad)
                    node.register_parameter(shard.name.replace(".", DOT), p)
                    self.shards.append(shard)
                    self.local.append(p)
                    self.local_of[id(shard.param)] = p
                    self.regions[id(p)] = shard.region
                else:
                    self.empty.append(shard)
            for each_whole in (hooked or {}).get(each.name, ()):
                self._add_hooked(node, each_whole)
            if len(list(node.parameters())):
                self.units.append(each.name.replace(".", DOT) or ROOT)
                self.add_module(self.units[-1], node)
        self._of_model = model.named_modules
        self._share_buffers()

    def named_modules(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Module]]:
        """See ``nn.Module``. All its walks over modules and buffers begin here."""
        self._share_buffers()
        yield from super().named_modules(*args, **options)

    def _add_hooked(self, node: StandIn, whole: WholeParam) -> None:
        """Add a parameter of the model itself, which other units may read too."""
        p = whole.param
        node.register_parameter(whole.name.replace(".", DOT), p)
        if id(p) not in self.hooked:
            self.hooked.add(id(p))
            self.shards.append(whole)
            self.local.append(p)
            self.local_of[id(p)], self.regions[id(p)] = p, whole.region

    def frozen_regions(self) -> list[tuple[str, TensorRegion]]:
        """Return the regions of the parameters that are not trained, by name."""
        return [(s.name, s.region) for s in self.shards if not s.param.requires_grad]

    def _share_buffers(self) -> None:
        """Adopt the model's current buffers: a forward may have replaced the tensor of a name."""
        kept = _Buffers()
        for prefix, module in self._of_model():
            for name, buffer in module.named_buffers(recurse=False):
                path = (f"{prefix}.{name}" if prefix else name).replace(".", DOT)
                persistent = module_private.is_persistent(module, name)
                kept.register_buffer(path, buffer, persistent=persistent)
                kept.owners[path] = module, name
        self.add_module(BUFFERS, kept)  # replaces the previous one

    def forward(self) -> None:
        """Raise ``NotImplementedError``: the shards are not run as a model."""
        raise NotImplementedError


class _Buffers(nn.Module):
    """The buffers of the model's modules; assigning one here assigns it in its module too."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: dict[str, tuple[nn.Module, str]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("owners", {}):
            module, own = self.owners[name]
            setattr(module, own, value)


class ShardGroup(dict[str, Any]):
    """A param group over shards. All keys except ``params`` refer to the original group."""

    def __init__(self, whole: dict[str, Any], params: list[nn.Parameter]) -> None:
        super().__init__(whole)
        self._whole, self._params = whole, params

    def __getitem__(self, key: str) -> Any:
        return self._params if key == "params" else self._whole[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._whole[key] = value

    def __contains__(self, key: object) -> bool:
        return key in self._whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self._whole else default

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self._whole else self._whole.setdefault(key, default)

    def keys(self) -> Any:
        return self._whole.keys()

    def items(self) -> Any:
        return [(key, self[key]) for key in self._whole]

    def values(self) -> Any:
        return [self[key] for key in self._whole]


def gathered_bytes(shards: Shards, dtype: torch.dtype | None = None) -> int:
    """Estimate the device memory that FSDP2 uses for gathered weights and gradients.

    The root stays gathered. For the largest other module, count its weights three times (in use,
    the receive buffer of the next module, and the copy out of it) and its gradients twice (whole,
    and the input of the reduce-scatter).

    Args:
        dtype: of all weights; ``None``: each parameter's own.
    """

    def weights(node: StandIn, *, trained: bool = False) -> int:
        return sum(
            p.numel() * shards.ranks * (dtype or p.dtype).itemsize
            for p in node.parameters() if p.requires_grad or not trained
        )  # fmt: skip

    sizes = [(0, 0)]  # by module: weights and gradients
    for node in shards.children():
        if isinstance(node, StandIn):
            sizes.append((weights(node), weights(node, trained=True)))
            if node.runs.name == UNIT_OF_MODEL:
                sizes[0] = sizes.pop()
    (root, root_grads), *others = sizes
    largest = max((each for each, _ in others), default=0)
    grads = max((each for _, each in others), default=0)
    return root + root_grads + 3 * largest + 2 * grads


def optimizer_over(shards: Shards, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer like the given one over a rank's shards.

    It shares the hyper-parameters and has the shards' part of the existing state.
    """
    local = {id(s.param): p for s, p in zip(shards.shards, shards.local, strict=True)}
    groups = [
        ShardGroup(group, [local[id(p)] for p in group["params"] if id(p) in local])
        for group in optimizer.param_groups
    ]
    mine = copy.copy(optimizer)
    mine.param_groups = groups  # type: ignore[assignment]
    mine.state = type(optimizer.state)(
        optimizer.state.default_factory,
        {
            local[id(s.param)]: {k: s.part_of(v) for k, v in optimizer.state[s.param].items()}
            for s in shards.shards
            if s.param in optimizer.state
        },
    )  # type: ignore[assignment,call-arg]
    return mine
