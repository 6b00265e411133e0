"""Host memory that several processes of a machine map, such as ranks that read the same weights."""

from __future__ import annotations

import fcntl
import hashlib
import os
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from .buffers import Lease
from .errors import HostMemoryError

# Note [Shared host memory]
# ~~~~~~~~~~~~~~~~~~~~~~~~~
# Ranks that replicate each other (HSDP) have the same frozen weights.  If they run on one machine,
# the fixed host copies of these weights are at the start of each rank's arena, and that part of
# every arena is a mapping of one file in memory.  The planner counts a rank's share of it.  The
# ranks compare their plans, and share nothing if they differ in these places (``Sharding.agree``).
#
# Nothing synchronises the ranks while they train, so the shared bytes must not change then.  Only
# units that nothing may edit are shared: packed ones, and units that are read from files in place.
# While ranks load, the bytes may change, since no rank reads any before all have loaded
# (``Sharding.made_by``).  One rank reads units from files; every rank packs, to the same bytes.


class SharedAddress(NamedTuple):
    """Where another process finds a ``SharedMemory``."""

    process: int
    descriptor: int
    inode: int


class SharedMemory:
    """A file in memory without a name, which the system frees with the last process that has it.

    See Note [Shared host memory].

    Attributes:
        members: the ranks that map it; the first of them creates it.
        first: whether this is the first of them.
    """

    def __init__(self, descriptor: int, members: Sequence[int], *, first: bool) -> None:
        self.members, self.first, self._descriptor = tuple(members), first, descriptor
        self.close = weakref.finalize(self, os.close, descriptor)  # mappings stay

    @classmethod
    def create(cls, members: Sequence[int]) -> SharedMemory:
        """Create empty memory.

        Raises:
            OSError: the system has no such files, or no descriptor is free.
        """
        return cls(os.memfd_create("overspill", os.MFD_CLOEXEC), members, first=True)

    @property
    def address(self) -> SharedAddress:
        """The address for ``open`` in other processes, until ``close``."""
        inode = os.fstat(self._descriptor).st_ino
        return SharedAddress(os.getpid(), self._descriptor, inode)

    @classmethod
    def open(cls, address: SharedAddress, members: Sequence[int]) -> SharedMemory:
        """Open what another process has created.

        Raises:
            OSError: the process is not there, or may not be looked into.
        """
        path = f"/proc/{address.process}/fd/{address.descriptor}"
        found = cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), members, first=False)
        if found.address.inode != address.inode:  # another process, if PID namespaces differ
            found.close()
            raise FileNotFoundError(path)
        return found

    def map_over(self, lease: Lease, nbytes: int, contents: str) -> None:
        """Map the file in place of the first ``nbytes`` of ``lease``, which hold nothing yet.

        Args:
            nbytes: a multiple of the system's page size.
            contents: what lies where, the same text in all processes.

        Raises:
            OffloadError: other processes have other contents, or the system refuses the mapping.
        """
        digest = hashlib.sha256(contents.encode()).digest()
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            if not os.fstat(self._descriptor).st_size:
                os.pwrite(self._descriptor, digest, nbytes)  # behind what is mapped
            elif os.pread(self._descriptor, len(digest) + 1, nbytes) != digest:
                raise HostMemoryError(
                    "ranks with the same frozen weights have placed them differently in host memory"
                )
        except OSError as error:
            raise HostMemoryError(f"shared host memory: {error.strerror}") from error
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        lease.map_file(self._descriptor, nbytes)
