"""What FSDP2 keeps to itself, in one place: its parameters as they are sharded, and where."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..errors import OffloadError
from ..training import torch_private

_local = DTensor._local_tensor  # a slot: its own getter and setter
_data = torch.Tensor.data  # as well
_WATCHER = "_overspill_watcher"
_FSDP = "torch.distributed.fsdp."


class Watcher(Protocol):
    """Who is told before a shard is looked at."""

    def lend(self, *, looked_at: bool) -> None:
        """Its weights are to be current.  ``looked_at``: they may be changed, and no version tells
        of it."""


class Sharded(DTensor):
    """The class of a sharded parameter whose shard is an engine's: whoever looks at the shard gets
    the current weights."""

    __slots__ = ()

    @property
    def _local_tensor(self) -> torch.Tensor:  # type: ignore[override]
        self.__dict__[_WATCHER].lend(looked_at=not _by_fsdp())
        return _local.__get__(self)  # type: ignore[no-any-return,attr-defined]

    @_local_tensor.setter
    def _local_tensor(self, value: torch.Tensor) -> None:
        _local.__set__(self, value)  # type: ignore[attr-defined]

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        self.__dict__[_WATCHER].lend(looked_at=not _by_fsdp())
        return _data.__get__(self)  # type: ignore[no-any-return,attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _data.__set__(self, value)  # type: ignore[attr-defined]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with torch_private.without_overrides():
            found = func(*args, **(kwargs or {}))
        if _writes_lists(getattr(func, "__name__", "")):  # no version tells of that
            given = args[0] if args else (kwargs or {})["self"]
            torch.autograd.graph.increment_version([p for p in given if isinstance(p, cls)])
        return found


def _by_fsdp() -> bool:
    """Whether who asks for a parameter's shard is FSDP2, which gathers it and writes nothing."""
    asks = sys._getframe(2).f_globals.get("__name__", "")
    return isinstance(asks, str) and asks.startswith(_FSDP)


def _writes_lists(name: str) -> bool:
    """Whether an operation changes the tensors in its first list."""
    return name.startswith(("_foreach_", "_fused_")) and name.endswith("_")


class Shard:
    """One parameter as FSDP2 keeps it on this rank."""

    def __init__(self, name: str, of: Any) -> None:
        self.name, self._of = name, of

    @property
    def param(self) -> nn.Parameter:
        """The parameter that users see: a ``DTensor``."""
        found: nn.Parameter = self._of.sharded_param
        return found

    @property
    def in_place(self) -> bool:
        """Whether the module still has this parameter, where the engine has its shard."""
        info = self._of._module_info
        there = info.module._parameters.get(info.param_name)
        gathered = getattr(self._of, "_unsharded_param", None)  # the root's stay after evaluation
        return isinstance(self.param, Sharded) and (there is self.param or there is gathered)

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows."""
        return _local.__get__(self.param)  # type: ignore[no-any-return,attr-defined]

    @property
    def even(self) -> bool:
        """Whether this rank has as many rows as FSDP2 keeps room for."""
        return bool(self._of.padded_sharded_param_size == self._of.sharded_size)

    def first_row(self, rank: int) -> int:
        """Where a rank's rows begin in the whole parameter."""
        return min(rank * int(self._of.padded_sharded_param_size[0]), self.param.shape[0])

    @property
    def offloads(self) -> bool:
        """Whether FSDP2 itself keeps it in host memory."""
        return bool(self._of.offload_to_cpu)

    @property
    def version(self) -> tuple[int, int]:
        """Grows with every edit that torch knows of: of the whole, and of the shard itself."""
        return self.param._version, self.local._version

    def managed(self, watcher: Watcher) -> None:
        """``watcher`` is told before anyone looks at the shard."""
        p = self.param
        p.__dict__[_WATCHER] = watcher
        p.__class__ = Sharded  # type: ignore[assignment]

    def plain(self) -> None:
        """It is a parameter like any other again."""
        p = self.param
        p.__class__ = DTensor  # type: ignore[assignment]
        p.__dict__.pop(_WATCHER, None)

    def move_to(self, memory: torch.Tensor) -> None:
        """The shard lies in ``memory`` from now on, of the same shape; its bytes are there."""
        if self.even:
            memory = memory.data  # with a version of its own, that only users' edits move
            self._of._sharded_param_data = memory.view(-1)
            _local.__set__(self.param, memory)  # type: ignore[attr-defined]
        else:
            self.local.copy_(memory)

    def kept(self) -> tuple[torch.Tensor, ...]:
        """What ``restore`` needs to have it as it is now."""
        if self.even:
            return self.local, self._of._sharded_param_data
        return (self.local.detach().clone(),)

    def restore(self, kept: tuple[torch.Tensor, ...]) -> None:
        """It is as it was when it was ``kept``."""
        if len(kept) == 2:
            local, self._of._sharded_param_data = kept
            _local.__set__(self.param, local)  # type: ignore[attr-defined]
        else:
            self.local.detach().copy_(kept[0])

    def gradient(self) -> torch.Tensor | None:
        """This rank's part of ``p.grad``."""
        grad = self.param.grad
        if grad is None:
            return None
        return grad._local_tensor if isinstance(grad, DTensor) else grad

    def hold(self, gradient: torch.Tensor) -> None:
        """``p.grad`` has ``gradient`` as this rank's part."""
        grad = self.param.grad
        assert isinstance(grad, DTensor)
        grad._local_tensor = gradient

    def part_of(self, value: Any) -> Any:
        """See ``LocalShard``."""
        return value.to_local() if isinstance(value, DTensor) else value

    def like_whole(self, part: torch.Tensor) -> torch.Tensor:
        """A tensor that is sharded as the parameter is, of which ``part`` is this rank's."""
        p = self.param
        assert isinstance(p, DTensor)
        return DTensor.from_local(
            part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )


class ShardedModule:
    """A module that ``fully_shard`` was called on, with the parameters that it gathers."""

    def __init__(self, name: str, module: FSDPModule, names: dict[int, str]) -> None:
        self.name = name
        self.module: nn.Module = module  # type: ignore[assignment]
        self._state, self._groups = module._get_fsdp_state(), _groups_of(module)
        self.modules = [self.module]  # those that were given to fully_shard together
        if any(id(p.sharded_param) not in names for g in self._groups for p in g.fsdp_params):
            raise OffloadError(
                f"a parameter of module {name!r} was replaced after fully_shard, which still uses "
                "the old one; put that back, and copy the new values into it (p.data.copy_(new))"
            )
        self.shards = [
            Shard(names[id(each.sharded_param)], each)
            for group in self._groups for each in group.fsdp_params
        ]  # fmt: skip

    @property
    def process_groups(self) -> Iterator[dist.ProcessGroup]:
        """The ranks that share each of its groups of parameters."""
        for group in self._groups:
            yield group.mesh_info.shard_process_group

    @property
    def replicates(self) -> bool:
        """Whether shards are also replicated (a mesh of two dimensions)."""
        return any(group.mesh_info.mesh.ndim != 1 for group in self._groups)

    def spread(self) -> None:
        """What is gathered is let go, and gathered anew for the next use: the root's stays after a
        forward without gradients, and whatever was after one that raised."""
        _spread(self._groups)

    @property
    def brings(self) -> list[nn.Module]:
        """The modules whose weights its forward gathers ahead, besides its own."""
        return [state._modules[0] for state in self._state._states_to_forward_prefetch]

    def gathering(self, device: torch.device) -> AbstractContextManager[object]:
        """The stream that weights are taken on to be gathered is the present one."""
        context = getattr(self._state, "_comm_ctx", None)
        stream = getattr(context, "all_gather_copy_in_stream", None)
        if device.type == "cpu" or stream is None:
            return nullcontext()
        return torch.get_device_module(device).stream(stream)  # type: ignore[no-any-return]


def _groups_of(module: FSDPModule) -> list[Any]:
    """The groups of parameters that it gathers."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return list(groups)


def _spread(groups: Sequence[Any]) -> None:
    for group in groups:
        group.wait_for_unshard()  # what is on its way
        group._to_sharded()  # not ``reshard``, which keeps them for a forward that has not ended


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on a module of it, or a parameter is a ``DTensor``."""
    return any(isinstance(m, FSDPModule) for m in model.modules()) or any(
        isinstance(p, DTensor) for p in model.parameters()
    )


def ranks_of(model: nn.Module) -> dist.ProcessGroup | None:
    """Those that share the first of its groups of parameters; ``None``: it has none."""
    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
    return next(
        (group.mesh_info.shard_process_group for m in modules for group in _groups_of(m)), None
    )


def sharded_modules(model: nn.Module) -> list[ShardedModule]:
    """All modules that ``fully_shard`` was called on, the root first; nothing stays gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _spread(_groups_of(module))
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[int, ShardedModule] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state = id(module._get_fsdp_state())
            if state in found:
                found[state].modules.append(module)  # type: ignore[arg-type]
            else:
                found[state] = ShardedModule(name, module, names)
    return list(found.values())
