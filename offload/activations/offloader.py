"""Offloading of storages that autograd saves, until backward unpacks them.

See Note [Offloading of saved tensors].
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import BudgetError, format_bytes
from ..movement.accelerators.base import Accelerator, Event
from ..movement.executor import Executor
from ..movement.saved_storages import OffloadedStorage, SavedStore
from ..optim.activation_blocks import ActivationBlocks
from ..params.backward import Backward
from ..planning.save_timing import UnitForward
from ..private import torch_private
from ..schedule.activations import LEAST_BYTES, room_beside
from ..schedule.messages import SavedBytes
from .local_parts import local_part
from .precision import Precision
from .untracked_activations import UntrackedActivations, UntrackedForward, UntrackedStep

log = logging.getLogger("overspill")

# Note [Offloading of saved tensors]
# Whole storages move, so that memory that several saved tensors share moves once. A graph holds a
# ``SavedHandle`` for each saved tensor, with shape and strides. All handles over one storage hold
# its ``SharedStorage``. When the last handle is freed, whether a backward has run or not,
# ``SharedStorage.end`` drops the storage from the residency machine. The end is a weak reference
# with a callback in C, because Python code there could lose a signal.
#
# A storage can leave only if autograd has saved at least ``1 / LEAST_SHARE`` of its bytes:
# otherwise other code probably keeps it, and offloading it would free nothing. Small storages,
# parameters, buffers and memory of the engine stay.
#
# Saves are reported to the residency machine in chunks, at the end of a unit, and when the stream
# changes, each time with one event for all of them. Above the room that is left for activations,
# the forward waits for offloads. If no tier has room, storages stay and a warning says so, unless
# the policy names a tier: then it is an error.
#
# A storage is packed as a known one only if its version is unchanged. Once it was reported, it may
# have been copied already, so its version counter must be the same object as well: views made by
# ``unsafe_chunk`` count their versions separately. ``unpack`` compares versions as torch does.


LEAST_SHARE = 4  # a storage stays if autograd saved a smaller part of it
TELL_SHARE = 16  # part of the room, after which saves are reported within a unit
NOWHERE = -1  # the unit of what is saved outside of all units
MORE_OVER = 1.1  # warn again only if the excess over the budget has grown by this factor
MOST_FORWARDS = 10_000  # units remembered; more without a backward is not a step


class SharedStorage:
    """A storage that autograd saved, shared by all handles over it."""

    __slots__ = (
        "__weakref__", "blocks", "counted_by", "covered", "end", "reported", "saved", "unit",
        "version",
    )  # fmt: skip

    def __init__(
        self, store: SavedStore, saved: OffloadedStorage, t: torch.Tensor,
        blocks: ActivationBlocks | None,
    ) -> None:  # fmt: skip
        self.unit, self.saved, self.blocks = NOWHERE - 1, saved, blocks
        self.covered = 0  # total bytes of the tensors saved over it
        self.reported = False  # whether ``blocks`` is fixed
        self.version = torch_private.version_of(t)
        self.counted_by = weakref.ref(torch_private.counted_by(t))
        watch = torch_private.StorageWatch(t.untyped_storage())  # its end runs Python code
        self.end = store.watch(self, saved.number, watch)

    def has(self, t: torch.Tensor, blocks: ActivationBlocks | None) -> bool:
        """Return whether the kept bytes are, or will be, the contents of ``t`` now.

        Once the storage was reported, its bytes may have been copied. Then the version counter must
        be the same one too. ``blocks``: how ``t`` may be packed.
        """
        if self.expired or self.version != torch_private.version_of(t):
            return False
        if self.reported and self.blocks not in (None, blocks):
            return False
        return not self.end.told or self.counted_by() is torch_private.counted_by(t)

    @property
    def leaves(self) -> bool:
        """Whether so much of it was saved that other code is unlikely to keep it for long."""
        return self.covered * LEAST_SHARE >= self.saved.nbytes

    @property
    def expired(self) -> bool:
        """Whether the storage itself is no longer referenced."""
        watch = self.end.beside
        assert isinstance(watch, torch_private.StorageWatch)
        return watch.expired


def _living(
    known: dict[int, weakref.ref[SharedStorage]],
) -> dict[int, weakref.ref[SharedStorage]]:
    return {key: each for key, each in known.items() if each() is not None}


class SavedHandle:
    """One saved tensor: its place in its storage, and the version that it must still have."""

    __slots__ = ("counter", "dtype", "offset", "shape", "shared", "stride", "version")

    def __init__(self, shared: SharedStorage, t: torch.Tensor, counter: torch.Tensor) -> None:
        self.shared, self.counter, self.version = shared, counter, torch_private.version_of(t)
        self.dtype, self.offset = t.dtype, t.storage_offset()
        self.shape, self.stride = t.shape, t.stride()


class SavedTensorOffloader:
    """The pack and unpack functions of one engine, for saved tensors that are not weights."""

    def __init__(
        self, executor: Executor, accelerator: Accelerator, stays: Iterable[torch.Tensor]
    ) -> None:
        """Set up; ``stays``: tensors whose storages are never offloaded."""
        self._executor, self._accelerator, self._store = executor, accelerator, executor.saved
        self._device, self._policy = accelerator.device, executor.layout.saved.policy
        self.room_bytes = executor.layout.saved.compute  # that may stay with compute
        # While they live: their keys may be reused later.
        self._stays: dict[int, torch_private.StorageWatch] = {}
        self.never_offload(stays)
        self._arenas = executor.arenas
        packs = executor.layout.saved.itemsize > 0
        self.precision = Precision(self._make_exact) if packs else None
        self._known: dict[int, weakref.ref[SharedStorage]] = {}  # by storage
        self._numbers = itertools.count()
        self._untold: list[weakref.ref[SharedStorage]] = []
        self._untold_bytes = self._bytes = self._largest = 0
        self._unit_bytes = [0] * len(executor.layout.units)
        self._lock = threading.Lock()
        self._stream: object = None
        self._unit = NOWHERE
        self._forwards: deque[UnitForward] = deque(maxlen=MOST_FORWARDS)
        self._begins = False  # the last one still waits for what it needs
        # Bytes saved when no tier had room for more.
        self._refused_bytes = 0
        self._told_refusal = False
        # The excess over the room that was last reported.
        self._told_over_bytes = 0
        self._chunk = max(LEAST_BYTES, self.room_bytes // TELL_SHARE)
        # Memory that came back and that compute has not passed yet: by event, and since the last
        # one.
        self._behind: deque[tuple[Event, int]] = deque()
        self._since_bytes = 0
        self.resting = UntrackedActivations()

    def never_offload(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave the storages of these tensors where they are."""
        for t in tensors:
            if (local := local_part(t)) is not None:
                t = local[0]
            if torch_private.has_memory(t):
                watch = torch_private.StorageWatch(t.untyped_storage())
                self._stays[torch_private.storage_key(t)] = watch

    def rest_for(self, t: torch.Tensor) -> UntrackedStep | None:
        """Return what to hold with ``t`` if it stays without being tracked, else ``None``."""
        if self.precision is not None and self.precision.saves(t):
            self._look()
        if self.resting.rest is None:
            return None
        return self._take_untracked(t.nbytes)

    def _take_untracked(self, nbytes: int) -> UntrackedStep | None:
        rest = self.resting.take(nbytes)
        if rest is None and not self._executor.health.ended:
            aside = self.resting.aside_bytes
            self._store.turn(torch_private.in_backward(), self._room_bytes, aside)
        return rest

    def begin_forward(
        self, args: Iterable[Any], kwargs: Mapping[str, Any]
    ) -> UntrackedForward | None:
        """Begin a forward of the whole model; see ``UntrackedActivations.begin``."""
        return None if self.precision is not None else self.resting.begin(args, kwargs)

    def end_forward(self, forward: UntrackedForward) -> None:
        """Count what a forward of the whole model has saved without hooks."""
        if nbytes := self.resting.end(forward):
            self._take_untracked(nbytes)

    @property
    def _room_bytes(self) -> int:
        """The room for tracked activations."""
        return self.room_bytes - self.resting.aside_bytes

    # -- out ------------------------------------------------------------------------------------

    def pack(self, t: torch.Tensor, *, exact: bool = False) -> SavedHandle | None:
        """Return what autograd keeps instead of ``t``; ``None``: ``t`` stays as it is.

        Args:
            exact: it is not packed in another format.
        """
        self.resting.passed_bytes += t.nbytes
        storage = self._storage_of(t)
        if storage is None:
            return None
        precision = self.precision
        blocks = None if precision is None or exact else precision.blocks_for(t, storage.nbytes())
        shared = self._share(t, storage, blocks)
        handle = SavedHandle(shared, t, torch_private.version_counter(t))
        if precision is None:
            self._look()
        elif blocks is not None:  # otherwise, look when the next operator saves
            precision.packs(handle, t)
        return handle

    def _share(
        self, t: torch.Tensor, storage: torch.UntypedStorage, blocks: ActivationBlocks | None
    ) -> SharedStorage:
        """Return the storage that the handles over it share, with one for ``t``."""
        key = torch_private.identity(storage)
        with self._lock:
            known = self._known.get(key)
            shared = None if known is None else known()
            if shared is None or not shared.has(t, blocks):
                flat = torch_private.bytes_of(storage)
                saved = OffloadedStorage(next(self._numbers), flat)
                shared = SharedStorage(self._store, saved, t, blocks)
                self._known[key] = weakref.ref(shared)
            elif not shared.reported and shared.blocks != blocks:
                shared.blocks = None  # some of it must be exact
            left = shared.leaves
            shared.covered += t.nbytes
            if shared.leaves and not left:
                shared.end.counted = shared.saved.nbytes
                self._count(shared.saved.nbytes)
            # A storage that is saved again is needed sooner in backward.
            if shared.leaves and shared.unit != self._unit:
                shared.unit = self._unit
                self._untold.append(weakref.ref(shared))
        return shared

    def _make_exact(self, handle: SavedHandle, t: torch.Tensor) -> None:
        handle.shared = self._share(t, t.untyped_storage(), None)

    def _count(self, nbytes: int) -> None:
        """Count a storage that may leave from now on."""
        self._bytes += nbytes
        self._largest = max(self._largest, nbytes)
        self._untold_bytes += nbytes
        if not torch_private.in_backward():
            self._unit_bytes[self._unit] += nbytes  # outside of units: the last entry
            if self._forwards and len(self._forwards[-1].saves) < MOST_FORWARDS:
                self._forwards[-1].saves.append((time.perf_counter_ns(), nbytes))

    def _storage_of(self, t: torch.Tensor) -> torch.UntypedStorage | None:
        """Return the storage of a tensor if it may be offloaded."""
        if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.device != self._device:
            return None
        if t.is_conj() or t.is_neg() or t.is_quantized or t.is_inference():
            return None
        storage = t.untyped_storage()
        if storage.nbytes() < LEAST_BYTES:
            return None
        stays = self._stays.get(torch_private.identity(storage))
        if stays is not None and not stays.expired:
            return None
        return None if self._arenas.contain(storage.data_ptr()) else storage

    def enter(self, unit: int) -> None:
        """Record that ``unit`` runs from now on, or none, and report what the last one saved."""
        if self.precision is not None:
            self.precision.computes(unit=unit != NOWHERE)
        if self.resting.rest is not None:
            self._unit = unit
        elif unit != self._unit:
            self._ran(unit)
            self._settle()
            if unit == NOWHERE:  # backward needs what the last one saved at once
                self.tell()
            elif self._bytes:  # else nothing could leave
                self._tell(self._take() if self._untold else [], unit)

    def computes(self) -> None:
        """Record that the unit has waited for all that it needs, so its compute begins."""
        if self._begins and self._forwards:  # only once if a unit runs several times in a row
            last = self._forwards[-1]
            self._forwards[-1] = last._replace(began_ns=time.perf_counter_ns())
        self._begins = False

    def computed(self) -> None:
        """Record that the forward of a unit has ended."""
        if self.precision is not None:
            self.precision.computes(unit=False)

    def _ran(self, unit: int) -> None:
        self._unit = unit
        self._begins = torch.is_grad_enabled()  # else it saves nothing, and takes another time
        if self._begins:
            self._forwards.append(UnitForward(unit, time.perf_counter_ns(), []))

    def _look(self) -> None:
        """Report saves if they are many, and wait for offloads if they exceed the room."""
        stream = self._accelerator.stream()
        if stream != self._stream:
            self._stream = stream
            self.tell()
        self._settle()
        here = self._bytes - self._store.away_bytes
        room = room_beside(self._room_bytes, self._largest)
        if here > room and self._bytes > self._refused_bytes + self._chunk:
            self._wait()
        elif self._untold_bytes > self._chunk:
            self.tell()

    def _settle(self) -> None:
        """Stop counting storages whose last handle was freed."""
        while self._store.ended:
            with self._lock:
                try:
                    self._bytes -= self._store.ended.popleft()
                except IndexError:
                    return
        self._refused_bytes = min(self._refused_bytes, self._bytes)

    def _take(self) -> list[SharedStorage]:
        """Return what was not reported yet; holding it defers its end until it is reported."""
        with self._lock:
            untold, self._untold, self._untold_bytes = self._untold, [], 0
        return [shared for each in untold if (shared := each()) is not None]

    def _announced(self, untold: list[SharedStorage]) -> tuple[SavedBytes, ...]:
        event = self._accelerator.record()
        for shared in untold:
            if not shared.end.told:
                shared.saved.event = event
                with self._lock:
                    shared.reported, shared.saved.blocks = True, shared.blocks
        return tuple(
            SavedBytes(
                shared.saved.number, shared.saved.nbytes, shared.unit,
                0 if (blocks := shared.saved.blocks) is None else blocks.dtype.itemsize,
            )
            for shared in untold
        )  # fmt: skip

    def tell(self) -> None:
        """Report what was saved since the last report to the machine."""
        if self._untold and (untold := self._take()):
            self._tell(untold)

    def _tell(self, untold: list[SharedStorage], unit: int | None = None) -> None:
        new = [shared.saved for shared in untold if not shared.end.told]
        items = self._announced(untold) if untold else ()
        self._store.save(items, new, unit=unit)

    def _wait(self) -> None:
        untold = self._take()
        new = [shared.saved for shared in untold if not shared.end.told]
        items = self._announced(untold)
        try:
            self._store.save(items, new, wait=True)
        except BudgetError as error:
            self._settle()
            if self._policy in ("host", "nvme"):
                raise
            if not self._told_refusal:
                self._told_refusal = True
                log.warning(
                    "overspill: activations fit in no tier and stay where they are, over the "
                    "budget (%s saved so far): %s", format_bytes(self._bytes), error,
                )  # fmt: skip
            self._refused_bytes = self._bytes

    def _tell_over(self) -> None:
        """Warn if a step kept more activations at compute than its budget, with the step's peak.

        Warn once, and again only if the excess has grown.
        """
        most, room = self._store.most_here_bytes, self.room_bytes
        self._store.most_here_bytes = 0
        # Saves are reported in chunks, so an excess of one chunk is normal.
        if most - room > max(self._chunk, MORE_OVER * self._told_over_bytes):
            self._told_over_bytes = most - room
            tier = "device" if self._executor.layout.has_device else "host"
            log.warning(
                "overspill: a step kept up to %s of activations in %s memory at once, %s more than "
                "the %s that the budget leaves for them; the largest one is %s. Use fewer tokens, "
                "pass loss='chunked', or raise %s_memory", format_bytes(most), tier,
                format_bytes(most - room), format_bytes(room), format_bytes(self._largest), tier,
            )  # fmt: skip

    # -- back -----------------------------------------------------------------------------------

    def turn(self, backward: bool) -> None:
        """Report what was saved, and tell the machine that a backward begins or has ended."""
        if not self._executor.health.ended:
            self.tell()
            self._ran(NOWHERE)
            beside = self.resting.backward_begins(self._bytes) if backward else 0
            if not backward:
                moves = self._policy != "auto" or self._store.away_bytes or self._refused_bytes
                self.resting.step_over(self.room_bytes, quiet=not moves)
            self._store.turn(backward, self._room_bytes, beside)
            if not backward:
                self._tell_over()
            self._behind.clear()
            self._since_bytes = 0
            if not backward:
                if self.resting.rest is None:  # else they are unchanged
                    self._unit_bytes = [0] * len(self._unit_bytes)
                self._forwards.clear()
                with self._lock:
                    self._known = _living(self._known)
                    self._bytes = self._store.counted_bytes  # interrupts may have lost some ends

    def unit_bytes(self) -> list[int]:
        """Return the bytes that each unit saved in forwards since the last backward."""
        return list(self._unit_bytes)

    def forwards(self) -> list[UnitForward]:
        """Return when units ran in forwards since the last backward, and what was saved then."""
        return list(self._forwards)

    @torch_private.without_grad
    def unpack(self, handle: SavedHandle) -> torch.Tensor:
        """Return the saved tensor, and fetch its storage if it was offloaded."""
        version = torch_private.version_of(handle.counter)
        if version != handle.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {tuple(handle.shape)} is at version {version}; expected "
                f"version {handle.version} instead"
            )
        saved = handle.shared.saved
        for memory in self._tries(saved):
            if memory is None:
                self._keep_up()
                self._store.fetch(saved.number)
                continue
            event = saved.event
            if saved.fetched and event is not None:
                self._executor.compute.wait_on((event,), "copy_in")
                self._accelerator.keep(memory)
                if not saved.taken:
                    saved.taken = True
                    self._since_bytes += saved.nbytes
            if memory.device != self._device:  # the device had no memory when it came back
                there = memory.to(self._device)
                if saved.memory is memory:
                    saved.event = self._accelerator.record()  # first: a copy out may follow
                    saved.memory = there
                memory = there
            made = torch.empty(0, dtype=handle.dtype, device=memory.device)
            return made.set_(memory.untyped_storage(), handle.offset, handle.shape, handle.stride)
        raise AssertionError("tries do not end")

    def _keep_up(self) -> None:
        """Wait for compute to pass most storages that came back, before another one comes.

        Memory that compute has yet to pass cannot be reused, and a device may be far behind.
        Storages up to the size of the largest one are not waited for.
        """
        if self._since_bytes:
            self._behind.append((self._accelerator.record(), self._since_bytes))
            self._since_bytes = 0
        behind = sum(nbytes for _, nbytes in self._behind)
        while self._behind and (behind > self._largest or self._behind[0][0].done()):
            event, nbytes = self._behind.popleft()
            event.synchronize()
            behind -= nbytes

    def _tries(self, saved: OffloadedStorage) -> Iterator[torch.Tensor | None]:
        # It may have been offloaded again between the grant and this read.
        while True:
            yield saved.memory


def make_saved_offloader(
    executor: Executor, accelerator: Accelerator, model: nn.Module, backward: Backward
) -> SavedTensorOffloader | None:
    """Return the offloader that follows a model's backwards, or ``None`` if nothing may leave."""
    if executor.layout.saved.policy == "keep":
        return None
    saved_offloader = SavedTensorOffloader(
        executor, accelerator, [*model.parameters(), *model.buffers()]
    )
    backward.when_begun(lambda: saved_offloader.turn(backward=True))
    backward.when_over(lambda: saved_offloader.turn(backward=False))
    return saved_offloader
