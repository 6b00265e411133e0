"""Memory that the engine gives back while it is not used: ``sleep``, and ``wake`` at its next use.

See Note [Sleep].
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from ..errors import OffloadError
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
# ``sleep`` frees the device arena, and with ``host=True`` the pages of host memory.  Everything has
# come to rest before, so what the arenas hold are the fixed homes, and gradients that wait for a
# step.  These bytes are copied as they are: those of the device to host memory if its budget has
# room, else to disk; those of host memory to disk.  The residency machine is not involved: offsets
# in the arenas stay valid, and no item moves while the engine sleeps.
#
# Host memory keeps its addresses (``Lease.discard``).  The device arena is allocated anew, so
# everything that points into it (``MemoryUser``) is dropped before, and made again.
#
# Files of copies have no name, so that they vanish with the process.
#
# Meanwhile weights can be read: ``Arenas.bytes_of`` returns copies of the copies.  Whatever writes
# or computes calls ``wake`` first, through ``DirectAccess.finish``, ``OnloadedUnits`` or ``Loop``.
# The executor refuses to move anything before that, so a missing call would be an error.

_ASLEEP = (Tier.HOST, Tier.DEVICE)  # in the order in which memory is taken back


class MemoryUser(Protocol):
    """A part of the engine that points into the arenas.

    All methods may be called again after an exception.
    """

    def leave_memory(self) -> Sequence[str] | None:
        """Drop pointers into the arenas; return the units, if any, to which user code points."""
        ...

    def memory_freed(self) -> None:
        """Adjust to memory that was freed, after ``leave_memory``."""
        ...

    def enter_memory(self) -> None:
        """Point into the arenas again, which may be elsewhere; the opposite of ``leave_memory``."""
        ...


class Sleeping:
    """Gives memory of one engine back, and takes it again.  See Note [Sleep]."""

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
        self._away: set[Tier] = set()  # tiers whose memory was given back
        self._users: list[weakref.ref[MemoryUser]] = []
        self._left = False  # whether ``enter_memory`` of the users is due

    def around(self, user: MemoryUser) -> None:
        """Call ``user`` before memory is freed, and when it was allocated again."""
        # Weak, as the executor's thread refers to this object, and users to the model.
        self._users.append(weakref.ref(user))

    @property
    def asleep(self) -> bool:
        """Whether memory was given back."""
        return bool(self._away)

    # -- sleep ----------------------------------------------------------------------------------

    def sleep(self, *, host: bool) -> None:
        """Give back device memory, and with ``host`` host memory as well; nothing may move.

        Raises:
            BudgetError, IoError: there is no room for the copies; nothing changes.
            OffloadError: user code still points into the memory, or there is no disk for copies.
        """
        self._thread.finish()
        wanted = _ASLEEP if host else (Tier.DEVICE,)
        tiers = [tier for tier in wanted if tier not in self._away and self._memory.has(tier)]
        deeper = host and self._copies.in_memory
        if host and (tiers or deeper):
            self._copies.require_disk()
        if not (tiers or deeper):
            return
        self._leave()
        try:
            self._thread.run(lambda: self._give_back(tiers, host=host))
        finally:
            if self.asleep:
                for user in self._living():
                    user.memory_freed()
            else:
                self._enter()

    def _leave(self) -> None:
        self._left = True
        names: set[str] = set()
        for collect in (True, False):
            names = {name for user in self._living() for name in user.leave_memory() or ()}
            if names and collect:
                gc.collect()  # a graph in a reference cycle
        if not names:
            return
        if not self.asleep:
            self._enter()
        raise OffloadError(
            f"sleep: tensors still refer to the weights of {', '.join(sorted(names))}, such as a "
            "graph that a loss or an output keeps, or p.detach() from a forward; delete them (del "
            "loss, output) before sleep()"
        )

    def _enter(self) -> None:
        for user in self._living():
            user.enter_memory()
        self._left = False

    def _living(self) -> Iterator[MemoryUser]:
        return (user for each in self._users if (user := each()) is not None)

    def _give_back(self, tiers: Sequence[Tier], *, host: bool) -> None:
        self._accelerator.synchronize()
        self._copies.add(list(map(self._piece, self._pieces(tiers))), to_disk=host)
        self._arenas.elsewhere = self._find
        for tier in tiers:
            self._away.add(tier)
            if tier is Tier.HOST and self._registered is not None and self._memory.lease:
                self._registered.forget(self._memory.lease)
            self._memory.give_back(tier)

    def _owner(self, tier: Tier) -> Tier:
        """Return the tier whose memory the arena called ``tier`` is in: without a device, host."""
        return tier if self._accelerator.has_device_memory else Tier.HOST

    def _piece(self, place: Place) -> ArenaPiece:
        arena = self._arenas.device if place.tier is Tier.DEVICE else self._arenas.host
        assert arena is not None
        on_device = place.tier is Tier.DEVICE and self._accelerator.has_device_memory
        return ArenaPiece(place, arena.narrow(0, place.offset, place.nbytes), on_device)

    def _pieces(self, tiers: Iterable[Tier]) -> Iterator[Place]:
        """Yield everything in the arenas of these tiers that has contents, in pieces."""
        occupied = self._executor.occupied()
        annex = self._arenas.annex
        if Tier.HOST in tiers and annex is not None and any(map(annex.has, occupied)):
            raise OffloadError(
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
        """Take the memory back, with its contents.  Does nothing if the engine is not asleep.

        Raises:
            OffloadError: there is not enough memory; nothing is lost, and a later call may succeed.
        """
        if not (self._away or self._left):
            return
        self._thread.finish()
        if self._away:
            self._thread.run(self._take_back)
            self._accelerator.synchronize()
        self._enter()

    def _take_back(self) -> None:
        for tier in (each for each in _ASLEEP if each in self._away):
            try:
                self._memory.take_back(tier)
            except (OffloadError, RuntimeError) as error:
                raise OffloadError(
                    f"the engine cannot wake: its {tier.value} memory cannot be allocated again "
                    f"({error}); free what uses it now, such as a rollout engine or another model, "
                    "and use the model again: nothing is lost"
                ) from error
            try:
                mine = [place for place in self._copies.places if self._owner(place.tier) is tier]
                self._copies.restore(list(map(self._piece, mine)))
            except BaseException:
                self._memory.give_back(tier)
                raise
            if tier is Tier.HOST and self._registered is not None and self._memory.lease:
                self._registered.remember(self._memory.lease)
            self._away.discard(tier)
        self._accelerator.synchronize()
        self._arenas.elsewhere = None
        self._copies.close()

    # -- asleep ---------------------------------------------------------------------------------

    def _find(self, place: Place) -> torch.Tensor | None:
        """Return a copy of the bytes of a place whose memory was given back; see ``Arenas``."""
        if self._owner(place.tier) not in self._away:
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
