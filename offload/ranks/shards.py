"""A rank's shards as a model of their own: ordinary parameters, which an engine takes over as it
does any model's, and an optimizer over them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..training import module_private
from .parts import LocalShard, SpreadModule

_DOT = "/"  # in names of modules, which may have none of the others
BUFFERS, ROOT = "(buffers)", "(model)"  # no module has such a name


class Shards(nn.Module):
    """Holds this rank's shards, by part of the model.  A shard without rows is left out.

    Its buffers are the model's, whatever they are when they are asked for, so that they are
    committed with the weights.
    """

    stands_in = True  # see ``OriginalWeights``: what it has is the model's

    def __init__(self, model: nn.Module, parts: Sequence[SpreadModule]) -> None:
        super().__init__()
        self.shards: list[LocalShard] = []
        self.empty: list[LocalShard] = []  # of which this rank has no rows
        self.local: list[nn.Parameter] = []
        self.units: list[str] = []
        for each in parts:
            node = nn.Module()
            for shard in each.shards:
                if shard.local.numel():
                    p = nn.Parameter(shard.local.data, requires_grad=shard.param.requires_grad)
                    node.register_parameter(shard.name.replace(".", _DOT), p)
                    self.shards.append(shard)
                    self.local.append(p)
                else:
                    self.empty.append(shard)
            if len(list(node.parameters())):
                self.units.append(each.name.replace(".", _DOT) or ROOT)
                self.add_module(self.units[-1], node)
        self._of_model = model.named_modules
        self._share_buffers()

    def named_modules(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Module]]:
        """See ``nn.Module``, whose walks over modules and buffers all begin here."""
        self._share_buffers()
        yield from super().named_modules(*args, **options)

    def _share_buffers(self) -> None:
        """A forward may have given a name another tensor."""
        kept = _Buffers()
        for prefix, module in self._of_model():
            for name, buffer in module.named_buffers(recurse=False):
                path = (f"{prefix}.{name}" if prefix else name).replace(".", _DOT)
                persistent = module_private.is_persistent(module, name)
                kept.register_buffer(path, buffer, persistent=persistent)
                kept.owners[path] = module, name
        self.add_module(BUFFERS, kept)  # in the place of the last one

    def forward(self) -> None:
        """Nothing runs here."""
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
    """A param group whose parameters are the shards of another's; all else is that one's own."""

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


def optimizer_over(shards: Shards, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer like the given one, over a rank's shards, with its hyper-parameters and what
    state it has."""
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
