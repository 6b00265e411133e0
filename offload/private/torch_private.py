"""Private PyTorch interfaces that the engine uses.

They were tested with the versions in ``TRIED``; ``tests/unit/test_torch_private.py`` calls each.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.autograd import Variable
from torch.autograd.graph import _engine_run_backward
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from .reentrancy import callers, is_engine

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]

TRIED = ("2.11", "2.13", "2.15")

log = logging.getLogger("overspill")

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


@functools.cache
def tell_if_untried(version: str) -> None:
    """Warn, once, if overspill was not tested with this release of torch."""
    if ".".join(version.split(".")[:2]) not in TRIED:
        log.warning(
            "overspill was tried with torch %s, and this is %s: compare the first losses with a "
            "run in memory, or run its tests (pytest tests/parity tests/unit)",
            ", ".join(TRIED), version,
        )  # fmt: skip


def push_saved_tensor_hooks(pack: Pack, unpack: Unpack) -> None:
    """Push a pair of hooks, which becomes the innermost one of this thread."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)  # type: ignore[attr-defined]


def pop_saved_tensor_hooks() -> None:
    """Remove the innermost pair of hooks."""
    torch._C._autograd._pop_saved_tensors_default_hooks()  # type: ignore[attr-defined]


def top_saved_tensor_hooks() -> tuple[Pack, Unpack] | None:
    """Return the innermost pair of hooks of this thread, or ``None``."""
    pair = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    return None if pair is None else (pair[0], pair[1])


def of_checkpoint(pair: tuple[Pack, Unpack]) -> bool:
    """Return whether a pair of hooks belongs to ``torch.utils.checkpoint``."""
    return getattr(pair[0], "__module__", "") == "torch.utils.checkpoint"


def in_checkpoint() -> bool:
    """Return whether ``torch.utils.checkpoint`` sees what autograd saves now."""
    pair = top_saved_tensor_hooks() if saved_tensor_hooks_allowed() else None
    return pair is not None and of_checkpoint(pair)


def saved_tensor_hooks_allowed() -> bool:
    """Return whether hooks may be pushed here."""
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]


# Returns the number of the backward pass that this thread runs, or -1 outside of one.
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Return whether this thread runs a backward pass."""
    return current_graph_task() >= 0


def for_node_of_torch() -> bool:
    """Return whether the saved tensor is unpacked for a node of torch's own.

    Such a node only computes with the tensor. A Function written in Python may return it as a
    gradient, or keep it. Call this from a function that the unpack hook calls.
    """
    try:
        frame = sys._getframe(3)  # skip this function, its caller and the hook
    except ValueError:
        return True  # a thread of autograd
    return frame.f_code is _engine_run_backward.__code__


def graph_clock() -> int:
    """Return the sequence number that the next node of this thread's graph will have."""
    return int(torch._C._autograd._get_sequence_nr())  # type: ignore[attr-defined]


def made_since(t: torch.Tensor, clock: int) -> bool:
    """Return whether ``t`` is the result of a node made since ``graph_clock`` gave ``clock``."""
    return t.grad_fn is not None and int(t.grad_fn._sequence_nr()) >= clock


def in_computation() -> bool:
    """Return whether this thread runs a forward of a module or Function, or a backward pass."""
    apply = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
    return in_backward() or in_module() or any(frame.f_code is apply for frame in callers())


def in_module() -> bool:
    """Return whether this thread runs a module's forward, or compiled code."""
    return any(
        "_call_impl" in frame.f_code.co_name or _is_compiled(frame)  # or its name by dynamo
        for frame in callers()
    )


def modules_around(module: torch.nn.Module) -> list[torch.nn.Module] | None:
    """Return the modules that run in this thread around the call of ``module``, which starts now.

    Returns ``None`` if they are unknown, because engine or compiled code is among the callers.
    """
    frames = callers()
    calls = [n for n, f in enumerate(frames) if f.f_code is torch.nn.Module._call_impl.__code__]
    if not calls or frames[calls[0]].f_locals["self"] is not module:
        return None
    around = frames[calls[0] + 1 :]
    if any(_is_compiled(frame) for frame in around) or is_engine(around):
        return None
    return [frames[n].f_locals["self"] for n in calls[1:]]


def running_modules() -> list[torch.nn.Module]:
    """Return the modules whose forward this thread runs, innermost first."""
    code = torch.nn.Module._call_impl.__code__
    return [frame.f_locals["self"] for frame in callers() if frame.f_code is code]


def _is_compiled(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("torch._dynamo")


def in_tracing() -> bool:
    """Return whether ``torch.compile`` makes a graph in this thread."""
    return torch._guards.TracingContext.try_get() is not None  # type: ignore[attr-defined]


def in_compiled_code() -> bool:
    """Return whether compiled code is among this thread's callers.

    Looks for frames that only compiled code has: functions excluded from compilation, such as the
    engine's hooks, are called by dynamo as well.
    """
    names = (frame.f_code.co_name for frame in callers())
    return any(n == "compile_wrapper" or n.startswith("torch_dynamo_resume") for n in names)


def has_memory(t: torch.Tensor) -> bool:
    """Return whether a tensor is a view of plain memory: not sparse, nested, a zero tensor, or one
    that ``torch.vmap`` or ``torch.func`` computes with."""
    if torch._C._functorch.is_functorch_wrapped_tensor(t):
        return False
    return t.layout is torch.strided and not t.is_nested and not t._is_zerotensor()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the current backward pass has ended, unless it raises."""
    Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def storage_over(memory: torch.Tensor, *, keep: bool = False) -> torch.UntypedStorage:
    """Return a new storage object over the bytes of ``memory``, which must outlive it.

    ``keep``: hold ``memory`` for as long as any tensor uses the storage; torch keeps the Python
    object of a storage for that long.
    """
    made: Any = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), memory.device, memory.numel() * memory.element_size()
    )
    assert isinstance(made, torch.UntypedStorage)
    if keep:
        made._memory = memory  # type: ignore[attr-defined]
    return made


def storage_key(tensor: torch.Tensor) -> int:
    """Return the identity of the storage that ``tensor`` points into."""
    return identity(tensor.untyped_storage())


def identity(storage: torch.UntypedStorage) -> int:
    """Return a number that no other live storage has."""
    return int(storage._cdata)


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the same memory whose values torch negates when it reads them."""
    return torch._neg_view(tensor)


def version_of(tensor: torch.Tensor) -> int:
    """Return how often the tensor's memory was written in place."""
    return 0 if tensor.is_inference() else int(tensor._version)


_read_version = torch.Tensor._version.__get__  # type: ignore[attr-defined]


def versions_of(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return ``version_of`` for each tensor, faster."""
    try:
        return tuple(map(_read_version, tensors))
    except RuntimeError:  # one is an inference tensor
        return tuple(map(version_of, tensors))


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all bytes of a storage as a flat uint8 tensor."""
    made = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return made.set_(storage)  # type: ignore[call-overload,no-any-return]


def counted_by(t: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the version counter of ``t``: its base, or itself if it is no view."""
    return t._base if t._is_view() and t._base is not None else t  # type: ignore[no-untyped-call]


def version_counter(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor without memory that shares the version counter of ``t``."""
    counter = t.detach()
    counter.data = _no_elements(t.dtype, t.device)
    return counter


@functools.cache
def _no_elements(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def post_accumulate_hooks(p: torch.Tensor) -> int:
    """Return the number of post-accumulate hooks of a parameter."""
    with without_overrides():
        return len(p._post_accumulate_grad_hooks or ())


# Returns a context that disables ``__torch_function__`` of tensor subclasses.
without_overrides: Callable[[], AbstractContextManager[object]] = (
    torch._C.DisableTorchFunctionSubclass
)


def grad_of(p: torch.Tensor) -> torch.Tensor | None:
    """Return ``p.grad`` without a call of the parameter's class, which would cost more."""
    with without_overrides():
        found: torch.Tensor | None = _get_grad(p)
        return found


_get_grad, _set_grad = torch.Tensor.grad.__get__, torch.Tensor.grad.__set__  # type: ignore[union-attr]


def set_grad(p: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Set ``p.grad`` without a call of the parameter's class."""
    with without_overrides():
        _set_grad(p, grad)


def drop_grads(params: Iterable[torch.Tensor]) -> None:
    """Set ``p.grad`` to ``None``, as ``Optimizer.zero_grad`` does."""
    with without_overrides():
        for p in params:
            if _get_grad(p) is not None:
                _set_grad(p, None)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no memory of its own, like a shard, or wraps other tensors."""
    return bool(is_traceable_wrapper_subclass(tensor))


def is_alone(tensor: torch.Tensor, others: int = 0) -> bool:
    """Return whether at most ``others`` further tensors use the same memory."""
    users = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]
    return int(users) <= 2 + others  # the tensor, and the storage object made here


class Watched:
    """A tensor that other tensors share memory with, and its contents when last accepted.

    Contents are compared bit by bit: tensors made by ``.data``, below autograd, or by other
    libraries do not share a version counter.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.accept()

    def _bytes(self) -> torch.Tensor:
        storage = self.tensor.untyped_storage()
        if storage.nbytes() > self.tensor.nbytes:  # it is a view of a part
            return self.tensor.reshape(-1).view(torch.uint8)
        return bytes_of(storage)

    def accept(self) -> None:
        """Take the current contents as known."""
        self._known = without_grad(lambda: self._bytes().clone())()

    @property
    def changed(self) -> bool:
        return not torch.equal(self._bytes(), self._known)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of the same layout hold the same bits.

    NaN is equal to the same NaN, and 0.0 is not equal to -0.0.
    """
    return torch.equal(bytes_of(one.untyped_storage()), bytes_of(other.untyped_storage()))


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are the same elements of the same memory."""
    return (
        storage_key(one) == storage_key(other)
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.storage_offset() == other.storage_offset()
    )


def operation_name(func: Any) -> str:
    """Return the name of a dispatched operation, such as ``aten::add_``."""
    return str(func._schema.name)


def mutated_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that a dispatched operation writes to."""
    named = func._schema.arguments
    pairs = [
        *zip(named, args, strict=False),
        *((s, kwargs[s.name]) for s in named if s.name in kwargs),
    ]
    return [a for s, a in pairs if s.alias_info is not None and s.alias_info.is_write]


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether several elements share a place in memory."""
    spans = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() > max(spans + 1, 0) or torch._debug_has_internal_overlap(tensor) == 1


def is_lazy(tensor: torch.Tensor) -> bool:
    """Return whether a parameter or buffer gets its shape in the first forward."""
    return bool(torch.nn.parameter.is_lazy(tensor))


def become(p: torch.nn.Parameter, data: torch.Tensor) -> None:
    """Give a parameter other data, also from or to ``meta``; it stays the same object."""
    if p.is_meta == data.is_meta:
        p.data = data
    else:
        torch.utils.swap_tensors(p, torch.nn.Parameter(data, requires_grad=p.requires_grad))


class StorageWatch:
    """A weak reference to a storage, which tells whether it is still in use."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference = StorageWeakRef(storage)

    @property
    def expired(self) -> bool:
        return bool(self._reference.expired())


def as_plain(t: torch.Tensor) -> torch.Tensor:
    """Return the tensor without its subclass."""
    return t if type(t) is torch.Tensor else t.as_subclass(torch.Tensor)


def joins_uneven(ddp: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Return whether its ``join`` is in use, so that ranks may take different numbers of steps."""
    return bool(ddp._join_config.enable)


def outdate(params: Iterable[torch.Tensor]) -> None:
    """Make graphs that saved these parameters themselves raise in backward."""
    with without_overrides():
        torch.autograd.graph.increment_version(list(params))


def make_wrapper(
    cls: type[torch.Tensor], like: torch.Tensor, dtype: torch.dtype,
    shape: Sequence[int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return a tensor of a wrapper subclass, without memory.

    Args:
        like: a tensor on the same device, with the same shape unless there is a ``shape``.
    """
    return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
        cls, like.shape if shape is None else shape, dtype=dtype, device=like.device,
        requires_grad=False,
    )  # fmt: skip


def without_saved_tensor_hooks(function: Callable[[], T]) -> T:
    """Return what ``function`` returns; no hook sees what autograd saves meanwhile."""
    push_saved_tensor_hooks(torch.Tensor.detach, _itself)
    try:
        return function()
    finally:
        pop_saved_tensor_hooks()


def _itself(t: torch.Tensor) -> torch.Tensor:
    return t


def property_name(func: Any) -> str:
    """Return the name of the attribute that a ``__get__`` given to ``__torch_function__`` reads."""
    return getattr(getattr(func, "__self__", None), "__name__", "")


def profiler_active() -> bool:
    """Return whether a torch profiler, or one that emits NVTX ranges, runs now."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def without_grad(function: F) -> F:
    """Wrap ``function`` to run outside of inference mode, without recording a graph.

    Torch's own context managers are Python code: a signal handler that raises inside ``__enter__``
    or ``__exit__`` leaves the user's thread without gradients for good. Here a single call into C
    undoes everything, and no handler runs between it and the ``finally``. The destructor of the
    guard cannot do this: a traceback may keep the guard, which would then undo later changes.
    """

    @functools.wraps(function)
    def quietly(*args: Any, **more: Any) -> Any:
        if not (torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
            return function(*args, **more)
        guard: Any = nullcontext()
        try:
            guard = torch._C._InferenceMode(False)  # restores the grad mode too
            guard.__enter__()
            torch._C._set_grad_enabled(False)
            return function(*args, **more)
        finally:
            guard.__exit__(None, None, None)

    return quietly  # type: ignore[return-value]
