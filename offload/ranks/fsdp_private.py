"""The private interfaces of FSDP2, in one place: its sharded parameters and their memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..errors import WeightError
from ..planning.regions import TensorRegion
from ..planning.unit_discovery import ROOT, FoundUnit
from ..private import torch_private
from ..private.handles import Removable

_local = DTensor._local_tensor  # the slot's descriptor, with getter and setter
_data = torch.Tensor.data  # likewise
_WATCHER = "_overspill_watcher"
_FSDP = "torch.distributed.fsdp."
Kept = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # the state of a shard


class Watcher(Protocol):
    """Receives a call before a shard is read."""

    def lend(self, *, looked_at: bool) -> torch.Tensor | None:
        """Make the shard's weights current; return them if the shard is not where they are.

        Args:
            looked_at: the caller may change them without a change of their version.
        """


class Sharded(DTensor):
    """The class of a sharded parameter whose shard an engine holds.

    Reading the shard makes its weights current first.
    """

    __slots__ = ()

    @property
    def _local_tensor(self) -> torch.Tensor:  # type: ignore[override]
        lent = self.__dict__[_WATCHER].lend(looked_at=not _by_fsdp())
        return _local.__get__(self) if lent is None else lent  # type: ignore[no-any-return,attr-defined]

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
        if _writes_lists(getattr(func, "__name__", "")):  # these do not change versions
            given = args[0] if args else (kwargs or {})["self"]
            torch.autograd.graph.increment_version([p for p in given if isinstance(p, cls)])
        return found


def _keep() -> None:
    """Do nothing, in place of a method."""


def _by_fsdp() -> bool:
    """Return whether the caller is FSDP2, which gathers a shard and writes nothing to it."""
    asks = sys._getframe(2).f_globals.get("__name__", "")
    return isinstance(asks, str) and asks.startswith(_FSDP)


def _writes_lists(name: str) -> bool:
    """Return whether an operation changes the tensors in its first list."""
    return name.startswith(("_foreach_", "_fused_")) and name.endswith("_")


class Shard:
    """One parameter as FSDP2 holds it on this rank."""

    def __init__(self, name: str, of: Any) -> None:
        self.name, self._of = name, of

    @property
    def param(self) -> nn.Parameter:
        """The parameter that users see: a ``DTensor``."""
        found: nn.Parameter = self._of.sharded_param
        return found

    @property
    def in_place(self) -> bool:
        """Whether the module still has this parameter, and the engine still has its shard."""
        info = self._of._module_info
        there = info.module._parameters.get(info.param_name)
        # The root's parameters stay gathered after evaluation.
        gathered = getattr(self._of, "_unsharded_param", None)
        return isinstance(self.param, Sharded) and (there is self.param or there is gathered)

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows; on ``meta`` after ``leave_memory``."""
        return _local.__get__(self.param)  # type: ignore[no-any-return,attr-defined]

    @property
    def even(self) -> bool:
        """Whether this rank has as many rows as FSDP2 allocates, so that there is no padding."""
        return bool(self._of.padded_sharded_param_size == self._of.sharded_size)

    @cached_property
    def region(self) -> TensorRegion:
        """See ``LocalShard``."""
        p: Any = self.param
        shape, first = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
        return TensorRegion(tuple(first), tuple(shape), tuple(p.shape))

    @property
    def ranks(self) -> int:
        """See ``LocalShard``."""
        p: Any = self.param
        return math.prod(
            p.device_mesh.size(dim) for dim, place in enumerate(p.placements)
            if not place.is_replicate()
        )  # fmt: skip

    @property
    def of_dtensor(self) -> bool:
        """Whether the parameter was a ``DTensor`` before it was sharded."""
        return bool(self._of.is_dtensor)

    @property
    def members(self) -> tuple[list[int], list[int]]:
        """The global ranks that have shards of it, and those over which FSDP2 spreads it."""
        p: Any = self.param
        return _members(p.device_mesh), _members(self._of.mesh_info.mesh)

    @property
    def version(self) -> tuple[int, int]:
        """The versions of the parameter and of the shard, which torch increments with each edit."""
        return self.param._version, self.local._version

    def managed(self, watcher: Watcher) -> None:
        """Call ``watcher`` from now on before the shard is read."""
        p = self.param
        p.__dict__[_WATCHER] = watcher
        p.__class__ = Sharded  # type: ignore[assignment]
        self._of.reset_sharded_param = _keep  # FSDP2 adopts neither other memory nor another ``p``

    def plain(self) -> None:
        """Make it an ordinary parameter again."""
        p = self.param
        p.__class__ = DTensor  # type: ignore[assignment]
        p.__dict__.pop(_WATCHER, None)
        self._of.__dict__.pop("reset_sharded_param", None)

    def put(self, memory: torch.Tensor, device: torch.device) -> None:
        """Let the parameter report ``device`` and have this memory, until an engine takes it."""
        _put(self._of, memory, device)

    def move_to(self, memory: torch.Tensor) -> None:
        """Move the shard to ``memory`` of the same shape, which holds its bytes already.

        If the shard is padded, it stays where it is and gets a copy of these bytes.
        """
        if self.even:
            memory = memory.data  # an alias with its own version, which only users' edits change
            self._of._sharded_param_data = memory.view(-1)
            _local.__set__(self.param, memory)  # type: ignore[attr-defined]
            return
        if self._of._sharded_param_data.numel() != self._padded_numel or (
            self.local.device != memory.device
        ):
            padded = self._padded(memory)
            self._of._sharded_param_data = padded.view(-1)
            _local.__set__(self.param, padded[: len(memory)])  # type: ignore[attr-defined]
        self.local.copy_(memory)

    @property
    def _padded_numel(self) -> int:
        return math.prod(self._of.padded_sharded_param_size)

    def _padded(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.new_zeros(self._of.padded_sharded_param_size)

    def leave_memory(self) -> None:
        """Have no memory; ``lend`` returns what users read, and ``lay_over`` what FSDP2 does."""
        nothing = self.local.to("meta")
        _local.__set__(self.param, nothing)  # type: ignore[attr-defined]
        self._of._sharded_param_data = nothing.view(-1)

    def lay_over(self, memory: torch.Tensor | None) -> None:
        """Let FSDP2 gather these rows; ``None``: none, until the next call."""
        if memory is None:
            self._of._sharded_param_data = self.local.view(-1)
        elif self.even:
            self._of._sharded_param_data = memory.data.view(-1)
        else:
            padded = self._padded(memory)
            padded[: len(memory)].copy_(memory)
            self._of._sharded_param_data = padded.view(-1)

    def kept(self) -> Kept:
        """Return the current state for ``restore``."""
        copy = None if self.even else self.local.detach().clone()  # ``move_to`` writes over it
        return self.local, self._of._sharded_param_data, copy

    def restore(self, kept: Kept) -> None:
        """Restore the state that ``kept`` returned."""
        local, self._of._sharded_param_data, copy = kept
        _local.__set__(self.param, local)  # type: ignore[attr-defined]
        if copy is not None:
            local.detach().copy_(copy)

    def gradient(self) -> torch.Tensor | None:
        """Return this rank's part of ``p.grad``."""
        grad = self.param.grad
        if grad is None:
            return None
        return grad._local_tensor if isinstance(grad, DTensor) else grad

    def hold(self, gradient: torch.Tensor) -> None:
        """Set this rank's part of ``p.grad``."""
        grad = self.param.grad
        assert isinstance(grad, DTensor)
        grad._local_tensor = gradient

    def part_of(self, value: Any) -> Any:
        """Return this rank's part of a ``DTensor``; see ``LocalShard``."""
        return value.to_local() if isinstance(value, DTensor) else value

    def like_whole(self, part: torch.Tensor) -> torch.Tensor:
        """Return a tensor sharded like the parameter, of which ``part`` is this rank's."""
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
        self.modules = [self.module]  # the modules that were given to fully_shard together
        if any(id(p.sharded_param) not in names for g in self._groups for p in g.fsdp_params):
            raise WeightError(
                f"a parameter of module {name!r} was replaced after fully_shard, which still uses "
                "the old one; put that back, and copy the new values into it (p.data.copy_(new))"
            )
        self.shards = [
            Shard(names[id(each.sharded_param)], each)
            for group in self._groups for each in group.fsdp_params
        ]  # fmt: skip

    @property
    def runs(self) -> FoundUnit:
        """The unit that computes with its parameters: the module, if it gathers all of them."""
        inside = {id(p) for p in self.module.parameters()}
        mine = {id(shard.param) for shard in self.shards}
        whole = len(self.modules) == 1 and inside == mine
        own = frozenset() if whole else frozenset(shard.param for shard in self.shards)
        module = self.module if len(self.modules) == 1 else nn.ModuleList(self.modules)
        return FoundUnit(self.name or ROOT, module, not whole, own)

    @property
    def shard_sizes(self) -> set[int]:
        """The numbers of ranks from which its groups of parameters are gathered."""
        return {group.mesh_info.shard_mesh_size for group in self._groups}

    def spread(self) -> None:
        """Reshard the module's parameters, so that the next use gathers them again.

        The root's stay gathered after a forward without gradients, and any module's after a forward
        that raised.
        """
        _spread(self._groups)

    def renew_dtypes(self) -> None:
        """Let FSDP2 gather and reduce in the present dtypes of the shards."""
        for group in self._groups:
            for p in group.fsdp_params:
                p.all_gather_outputs = []
                p.__dict__.pop("_unsharded_param", None)
            group._init_mp_dtypes()

    def run_first(self) -> None:
        """Let FSDP2 gather weights and cast inputs first; recomputations begin with later hooks."""
        if len(self.modules) == 1:
            own = self._state._pre_forward_hook_handle.id
            hooks: Any = self.module._forward_pre_hooks
            hooks.move_to_end(own, last=False)

    def around_gathers(
        self, device: torch.device, before: Callable[[], None], after: Callable[[], None],
        gathered: Callable[[Iterable[torch.Tensor]], None],
    ) -> list[Removable]:  # fmt: skip
        """Call ``before`` and ``after`` around every reading of the shards by FSDP2, on the stream
        that reads them; and ``gathered`` with the parameters that it has made of them."""
        return [_Gathers(group, device, before, after, gathered) for group in self._groups]


class _Gathers:
    """Calls around the methods of a group of parameters in which FSDP2 reads their shards.

    With several ranks that is ``unshard``, which copies them into the message of the collective,
    and with one rank ``wait_for_unshard``, which copies them to where they are used.
    """

    def __init__(
        self, group: Any, device: torch.device, before: Callable[[], None],
        after: Callable[[], None], gathered: Callable[[Iterable[torch.Tensor]], None],
    ) -> None:  # fmt: skip
        self._group, self._device, self._before, self._after = group, device, before, after
        self._gathered = gathered
        self._alone = group.mesh_info.shard_mesh_size == 1
        group.unshard, group.wait_for_unshard = self._unshard, self._wait_for_unshard

    def remove(self) -> None:
        """Call nothing any more."""
        for name in ("unshard", "wait_for_unshard"):
            self._group.__dict__.pop(name, None)

    def _unshard(self, async_op: bool = False) -> None:
        group = self._group
        if self._alone or group._all_gather_result is not None or group.is_unsharded:
            type(group).unshard(group, async_op)
        else:
            self._reading(
                lambda: type(group).unshard(group, async_op), lambda: self._stream(async_op)
            )

    def _wait_for_unshard(self) -> None:
        group = self._group
        if group._all_gather_result is None:
            type(group).wait_for_unshard(group)
            return
        if self._alone:
            self._reading(lambda: type(group).wait_for_unshard(group), nullcontext)
        else:
            type(group).wait_for_unshard(group)
        self._gathered(p._unsharded_param for p in group.fsdp_params)

    def _stream(self, async_op: bool) -> AbstractContextManager[object]:
        """Return a context that selects the stream on which ``unshard`` reads the shards."""
        if self._device.type == "cpu":
            return nullcontext()
        context, state = self._group.comm_ctx, self._group._training_state
        stream, _ = context.get_all_gather_streams(async_op, state)
        return torch.get_device_module(self._device).stream(stream)  # type: ignore[no-any-return]

    def _reading(
        self, read: Callable[[], None], stream: Callable[[], AbstractContextManager[object]]
    ) -> None:
        try:
            with stream():
                self._before()
            read()
        finally:
            with stream():
                self._after()


def _groups_of(module: FSDPModule) -> list[Any]:
    """Return the groups of parameters that a module gathers."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return list(groups)


def _spread(groups: Sequence[Any]) -> None:
    for group in groups:
        group.wait_for_unshard()  # a prefetch may be in progress
        group._to_sharded()  # not ``reshard``, which may keep them for an unfinished forward


class HostPolicy:
    """FSDP2's ``CPUOffloadPolicy`` of a model: it keeps shards and their gradients in host memory,
    and copies shards to the device to gather them.

    Attributes:
        device: where the model computes; ``None`` if there is no such policy.
    """

    def __init__(self, model: nn.Module) -> None:
        groups = [g for m in model.modules() if isinstance(m, FSDPModule) for g in _groups_of(m)]
        self._groups = [
            (group, group.offload_policy) for group in groups
            if isinstance(group.offload_policy, CPUOffloadPolicy)
        ]  # fmt: skip
        self._pinned = [(p, p.pin_memory) for group, _ in self._groups for p in group.fsdp_params]
        self.device: torch.device | None = self._groups[0][0].device if self._groups else None

    def drop(self) -> None:
        """Let shards count as being on the device; an engine takes them from host memory."""
        for group, _ in self._groups:
            group.offload_policy = OffloadPolicy()
        for p, _ in self._pinned:
            p.offload_to_cpu = p.pin_memory = False
            _put(p, _local.__get__(p.sharded_param), p.device)  # type: ignore[attr-defined]

    def restore(self) -> None:
        """Undo ``drop``."""
        for group, policy in self._groups:
            group.offload_policy = policy
        for p, pinned in self._pinned:
            p.offload_to_cpu, p.pin_memory = True, pinned
            _move(p, torch.device("cpu"))


def _move(of: Any, device: torch.device) -> None:
    """Move a sharded parameter, which stays the same object, to a device."""
    p: nn.Parameter = of.sharded_param
    if p.is_meta or p.device == device:
        return
    moved = nn.Parameter(p.detach().to(device), p.requires_grad)
    if p.grad is not None:
        moved.grad = p.grad.to(device)
    torch.utils.swap_tensors(p, moved)
    of.reset_sharded_param()


def _put(of: Any, memory: torch.Tensor, device: torch.device) -> None:
    p: nn.Parameter = of.sharded_param
    if not memory.numel():  # no engine takes it over
        memory = torch.empty_like(memory, device=device)
    # A tensor without memory of its own, on the device that the parameter is to report.
    seen = torch.empty((), dtype=memory.dtype, device=device).expand(memory.shape)
    made = DTensor(seen, p._spec, requires_grad=p.requires_grad)  # type: ignore[attr-defined,call-arg]
    made._local_tensor = memory
    made._is_param = True
    if p.grad is not None:
        made.grad = p.grad.to(device, memory.dtype)
    torch.utils.swap_tensors(p, made)
    flat = memory.reshape(-1)
    if not memory.numel():  # FSDP2 gathers padding from a rank without rows
        flat = memory.new_zeros(of.padded_sharded_param_size).view(-1)
    of._sharded_param_data = flat


def is_sharded(model: nn.Module) -> bool:
    """Return whether a module was given to ``fully_shard``, or a parameter is a ``DTensor``."""
    return any(isinstance(m, FSDPModule) for m in model.modules()) or any(
        isinstance(p, DTensor) for p in model.parameters()
    )


def ranks_of(model: nn.Module) -> list[int] | None:
    """Return all ranks of the model: those of the parameter that is on the largest mesh.

    ``None``: FSDP2 has no parameter of it.
    """
    found = [
        _members(p.sharded_param.device_mesh)
        for module in model.modules() if isinstance(module, FSDPModule)
        for group in _groups_of(module) for p in group.fsdp_params
    ]  # fmt: skip
    return max(found, key=len, default=None)


def _members(mesh: DeviceMesh) -> list[int]:
    return mesh.mesh.flatten().tolist()


def sharded_modules(model: nn.Module) -> list[ShardedModule]:
    """Return all modules that ``fully_shard`` was called on, the root first, and reshard them."""
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
