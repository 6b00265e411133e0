"""Memory that the engine frees until its next use: ``sleep`` and ``wake``.

See Note [Sleep].
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from ..errors import LifecycleError, OffloadError
from ..facts.tier import Tier
from ..io_engine import IoEngine
from ..schedule.arena import Place
from ..schedule.units import PAGE
from .accelerators.base import Accelerator
from .arena_copies import PIECE_BYTES, ArenaCopies, ArenaPiece
from .executor import Executor
from .memory import Memory
from .uninterruptible_thread import UninterruptibleThread

# Note [Sleep]
# ``sleep`` frees the device arena, and with ``host=True`` the pages of host memory.  All updates
# and transfers have ended before, so the arenas contain only items with a fixed place, and
# gradients that wait for a step.  Their bytes are copied as they are: those of the device to host
# memory if its budget has room, else to disk; those of host memory to disk.  The residency machine
# is not involved: offsets in the arenas stay valid.
#
# Host memory keeps its addresses (``Lease.discard``).  The device arena may get
# another address, so everything that points into it (``MemoryUser``) is detached before, and
# attached again.
#
# The files of copies have no name, so that they vanish with the process.
#
# Meanwhile weights can be read: ``Arenas.bytes_of`` returns temporary copies.  Code that writes or
# computes calls ``wake`` first, through ``DirectAccess.finish``, ``OnloadedUnits`` or
# ``ParamAccess``.  Before that, the executor starts commits and moves of saved tensors only, and
# fails for anything else, so that a missing call is noticed.

_WAKE_ORDER = (Tier.HOST, Tier.DEVICE)  # in the order in which memory is taken back


class MemoryUser(Protocol):
    """A part of the engine that points into the arenas.

    All methods may be called again after an exception.
    """

    def detach_memory(self) -> Sequence[str] | None:
        """Drop pointers into the arenas; return the units whose memory user code points into."""
        ...

    def memory_freed(self) -> None:
        """Adjust to memory that was freed, after ``detach_memory``."""
        ...

    def attach_memory(self) -> None:
        """Undo ``detach_memory``; the arenas may be at other addresses."""
        ...


class Sleeping:
    """Frees the memory of one engine, and allocates it again.  See Note [Sleep]."""

    def __init__(
        self, memory: Memory, executor: Executor, accelerator: Accelerator, io: IoEngine | None,
        folders: Sequence[Path], *, checksum: bool,
    ) -> None:  # fmt: skip
        """
        Args:
            io: the engine that has registered the host arena.
            folders: directories for copies on disk; empty: there are none.
        """
        self._memory, self._executor, self._accelerator = memory, executor, accelerator
        self._registered, self._arenas = io, memory.arenas
        self._thread = UninterruptibleThread("overspill-sleep")
        self._copies = ArenaCopies(
            memory, accelerator, executor.compute, folders, checksum=checksum
        )
        self._freed: set[Tier] = set()  # tiers whose memory is freed
        self._users: list[weakref.ref[MemoryUser]] = []
        self._detached = False  # whether ``attach_memory`` of the users is due

    def add_user(self, user: MemoryUser) -> None:
        """Call ``user`` before memory is freed, and when it was allocated again."""
        # Weak, as the executor's thread refers to this object, and users to the model.
        self._users.append(weakref.ref(user))

    @property
    def asleep(self) -> bool:
        """Whether memory is freed."""
        return bool(self._freed)

    # -- sleep ----------------------------------------------------------------------------------

    def sleep(self, *, host: bool) -> None:
        """Free device memory, and with ``host`` host memory as well; nothing may move.

        Raises:
            BudgetError, IoError: there is no room for the copies; nothing changes.
            OffloadError: user code still points into the memory, or there is no disk for copies.
        """
        self._thread.finish()
        wanted = _WAKE_ORDER if host else (Tier.DEVICE,)
        tiers = [tier for tier in wanted if tier not in self._freed and self._memory.has(tier)]
        deeper = host and self._copies.in_memory
        if host and (tiers or deeper):
            self._copies.require_disk()
        if not (tiers or deeper):
            return
        self._detach()
        try:
            self._thread.run(lambda: self._free_memory(tiers, host=host))
        finally:
            if self.asleep:
                for user in self._living():
                    user.memory_freed()
            else:
                self._attach()

    def _detach(self) -> None:
        self._detached = True
        names: set[str] = set()
        for collect in (True, False):
            names = {name for user in self._living() for name in user.detach_memory() or ()}
            if names and collect:
                gc.collect()  # a graph in a reference cycle
        if not names:
            return
        if not self.asleep:
            self._attach()
        raise LifecycleError(
            f"sleep: tensors still refer to the weights of {', '.join(sorted(names))}, such as a "
            "graph that a loss or an output keeps, or p.detach() from a forward; delete them (del "
            "loss, output) before sleep()"
        )

    def _attach(self) -> None:
        for user in self._living():
            user.attach_memory()
        self._detached = False

    def _living(self) -> Iterator[MemoryUser]:
        return (user for each in self._users if (user := each()) is not None)

    def _free_memory(self, tiers: Sequence[Tier], *, host: bool) -> None:
        self._accelerator.synchronize()
        self._copies.add(list(map(self._arena_piece, self._occupied(tiers))), to_disk=host)
        self._arenas.read_freed = self._read_copy
        for tier in tiers:
            self._freed.add(tier)
            if tier is Tier.HOST and self._registered is not None and self._memory.lease:
                self._registered.unregister(self._memory.lease)
            self._memory.free_tier(tier)

    def _owner(self, tier: Tier) -> Tier:
        """Return the tier whose memory the arena called ``tier`` is in: without a device, host."""
        return tier if self._accelerator.has_device_memory else Tier.HOST

    def _arena_piece(self, place: Place) -> ArenaPiece:
        arena = self._arenas.device if place.tier is Tier.DEVICE else self._arenas.host
        assert arena is not None
        on_device = place.tier is Tier.DEVICE and self._accelerator.has_device_memory
        return ArenaPiece(place, arena.narrow(0, place.offset, place.nbytes), on_device)

    def _occupied(self, tiers: Iterable[Tier]) -> Iterator[Place]:
        """Yield everything in the arenas of these tiers that has contents, in pieces."""
        occupied = self._executor.occupied()
        annex = self._arenas.annex
        if Tier.HOST in tiers and annex is not None and any(map(annex.has, occupied)):
            raise LifecycleError(
                "sleep(host=True): activations of a forward that was not followed by backward are "
                "in host memory; call backward(), or delete its loss and output, before sleep()"
            )
        for tier, arena in ((Tier.HOST, self._arenas.host), (Tier.DEVICE, self._arenas.device)):
            if arena is None or self._owner(tier) not in tiers:
                continue
            fixed = self._executor.layout.regions.fixed_bytes(tier)
            spans = [(0, fixed), *((p.offset, p.nbytes) for p in occupied if p.tier is tier)]
            for start, end in _joined(spans):
                for at in range(start, end, PIECE_BYTES):
                    yield Place(tier, at, min(PIECE_BYTES, end - at))

    # -- wake -----------------------------------------------------------------------------------

    def wake(self) -> None:
        """Allocate the memory again, with its contents.  Does nothing if it is not freed.

        Raises:
            OffloadError: there is not enough memory; nothing is lost, and a later call may succeed.
            IoError, CorruptionError: a copy on disk cannot be read.
        """
        if not (self._freed or self._detached):
            return
        self._thread.finish()
        if self._freed:
            self._thread.run(self._restore_memory)
            self._accelerator.synchronize()
        self._attach()

    def _restore_memory(self) -> None:
        for tier in (each for each in _WAKE_ORDER if each in self._freed):
            try:
                self._memory.reallocate_tier(tier)
            except (OffloadError, RuntimeError) as error:
                raise LifecycleError(
                    f"the engine cannot wake: its {tier.value} memory cannot be allocated again "
                    f"({error}); free what uses it now, such as an inference engine or another "
                    "model, and use the model again: nothing is lost"
                ) from error
            try:
                mine = [place for place in self._copies.places if self._owner(place.tier) is tier]
                self._copies.restore(list(map(self._arena_piece, mine)))
            except BaseException:
                self._memory.free_tier(tier)
                raise
            if tier is Tier.HOST and self._registered is not None and self._memory.lease:
                self._registered.register_again(self._memory.lease)
            self._freed.discard(tier)
        self._accelerator.synchronize()
        self._arenas.read_freed = None
        self._copies.close()

    # -- asleep ---------------------------------------------------------------------------------

    def _read_copy(self, place: Place) -> torch.Tensor | None:
        """Return a copy of the bytes of a place whose memory is freed; see ``Arenas``."""
        if self._owner(place.tier) not in self._freed:
            return None
        return self._thread.run(lambda: self._copies.read(place))

    def close(self) -> None:
        """End the thread, and drop the copies."""
        self._thread.close()
        self._copies.close()


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return spans ``(offset, bytes)`` as sorted, disjoint ``(start, end)``, from whole pages."""
    found: list[tuple[int, int]] = []
    for offset, nbytes in sorted(span for span in spans if span[1]):
        start, stop = offset // PAGE * PAGE, offset + nbytes
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found
