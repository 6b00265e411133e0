"""The ranks that train a model together: their communication, and their shares of a machine."""

from __future__ import annotations

import hashlib
import math
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..config import OffloadConfig, parse_size
from ..errors import RankError, format_budget
from ..facts.rates import Rates
from ..io_engine.shared_memory import SharedMemory
from ..open_engines import untaken
from ..optim.cores import allowed_cpus, quota_cpus
from ..planning.budgets import (
    DISK_MARGIN,
    HOST_MARGIN,
    Untaken,
    free_disk_bytes,
    free_host_bytes,
)
from ..planning.plan import Plan
from .stores import holds_store, in_the_way, rank_folder, runs_in
from .voting import Votes

PATIENCE = timedelta(minutes=10)  # wait for a rank that does not answer
WORD_S = 5.0  # interval between messages of a rank that others wait for
Given = TypeVar("Given")

# Note [Errors on one rank]
# ~~~~~~~~~~~~~~~~~~~~~~~~~
# Ranks that build an engine together exchange messages with ``gathered``, a collective. If one rank
# raises, the others would wait for it in their next ``gathered`` until the group times out.
#
# ``all_or_none`` prevents that. A rank whose work raises takes part in one more ``gathered``, with
# a ``_Failed`` as its message, and then raises its own error. On the other ranks that call of
# ``gathered`` raises ``OtherRankError``. Two conditions must hold:
#
# - The work ends with a ``gathered`` on every rank. A rank that returned earlier could not receive
#   an error of another rank.
# - The error did not interrupt a ``gathered``. If it did (``_lost``), the other ranks are in that
#   call, or have ended, and another message would not reach them.


class OtherRankError(RankError):
    """Another rank could not do its part of what all ranks do together."""


@dataclass(frozen=True)
class _Failed:
    """The last message of a rank that has an error; see Note [Errors on one rank]."""

    why: str


class _Pair:
    """The process groups of one engine: two for messages, and one for weights if needed.

    Later engines use the same groups, because torch never forgets the names of groups that it has
    created.
    """

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members, self.of = members, dist.group.WORLD
        self.words, self.votes = self._new(), self._new()
        self.taken = False
        self._weights: dist.ProcessGroup | None = None

    def weights(self) -> dist.ProcessGroup:
        """Return the group for weights, on any device."""
        if self._weights is None:
            self._weights = self._new(None)
        return self._weights

    def _new(self, backend: str | None = "gloo") -> dist.ProcessGroup:
        made: dist.ProcessGroup | None = dist.new_group(
            list(self.members), timeout=PATIENCE, backend=backend, use_local_synchronization=True
        )
        assert made is not None
        return made

    @classmethod
    def free(cls, members: tuple[int, ...]) -> _Pair:
        """Return groups that no engine uses, the same on all ranks; create them if needed."""
        known = [p for p in _PAIRS if p.of is dist.group.WORLD and p.members == members]
        usable: list[Any] = []
        if known:  # after an error, a group may be unusable on some ranks
            usable = [None] * len(members)
            dist.all_gather_object(usable, [not p.taken for p in known], group=known[0].words)
        free = [pair for number, pair in enumerate(known) if all(each[number] for each in usable)]
        pair = free[0] if free else cls(members)
        if not free:
            _PAIRS.append(pair)
        pair.taken = True
        return pair


_PAIRS: list[_Pair] = []  # in order of creation, which is the same on all ranks


class World:
    """All ranks of a model: ``size`` of them, of which ``local_size`` are on this machine.

    The engine's own messages use groups in host memory that nothing else uses.

    Attributes:
        group: the group for messages of the training thread.
        votes: the votes of the commit thread, on a group of its own.
        cpu_share: this rank's share of the time of the processors that it may use.
    """

    def __init__(self, ranks: Iterable[int], *, weights: bool = False) -> None:
        """
        Args:
            ranks: global ranks.
            weights: the ranks will exchange weights.
        """
        members = tuple(sorted(ranks))
        self._pair = _Pair.free(members)
        if weights:
            self._pair.weights()
        self.group, self.votes = self._pair.words, Votes(self._pair.votes)
        self._lost = False  # whether a ``gathered`` was begun and did not end
        self.rank, self.size = members.index(dist.get_rank()), len(members)
        self._machine = f"{socket.gethostname()}:{_boot()}"
        everyone = self.gathered((self._machine, allowed_cpus()))
        here = [i for i, (name, _) in enumerate(everyone) if name == self._machine]
        self.cpu_share = share_of_cpus([everyone[i][1] for i in here], everyone[self.rank][1])
        self.local_rank, self.local_size = here.index(self.rank), len(here)
        self._first_here = here[0]

    def weights(self) -> dist.ProcessGroup:
        """Return the group of a thread that exchanges weights."""
        return self._pair.weights()

    def gathered(self, mine: Given) -> list[Given]:
        """Exchange values, and return those of all ranks, by rank.

        Raises:
            OtherRankError: a rank has an error instead; see Note [Errors on one rank].
        """
        found: list[Any] = [None] * self.size
        self._lost = True
        dist.all_gather_object(found, mine, group=self.group)
        self._lost = False
        for rank, word in enumerate(found):
            if isinstance(word, _Failed):
                raise OtherRankError(f"rank {rank} could not: {word.why}")
        return found

    def all_or_none(self, work: Callable[[], Given]) -> Given:
        """Run ``work`` so that an error on one rank becomes an error on all.

        ``work`` must end with a ``gathered``. See Note [Errors on one rank].

        Returns:
            The result of ``work``.
        """
        try:
            return work()
        except OtherRankError:
            raise
        except BaseException as error:
            if not self._lost:  # else the others are in that call, or have ended
                with suppress(OtherRankError, RuntimeError):
                    self.gathered(_Failed(f"{type(error).__name__}: {error}"))
            raise

    def require_alike(self, given: Mapping[str, Any]) -> None:
        """Require that all ranks give the same values.

        Raises:
            ValueError: the values differ.
        """
        everyone = self.gathered(dict(given))
        for name in given:
            values = [each.get(name) for each in everyone]
            for rank, value in enumerate(values):
                if value != values[0]:
                    raise ValueError(
                        f"{name} is {values[0]!r} on rank 0 and {value!r} on rank {rank}; every "
                        "rank is to pass the same"
                    )

    def shared_memory(self, key: Any) -> SharedMemory | None:
        """Return memory that this rank shares with all ranks of its machine that give an equal key.

        Returns ``None`` if no other rank does, or if these ranks cannot open each other's files.
        """
        digest = hashlib.sha256(repr(key).encode()).hexdigest()  # keys may be long
        keys = self.gathered((self._machine, digest))
        alike = [rank for rank, each in enumerate(keys) if each == keys[self.rank]]
        if all(keys.count(each) == 1 for each in keys):
            return None
        made: SharedMemory | None = None
        with suppress(OSError):
            made = SharedMemory.create(alike) if self.rank == alike[0] else None
        address = self.gathered(None if made is None else made.address)[alike[0]]
        with suppress(OSError):
            if made is None and address is not None:
                made = SharedMemory.open(address, alike)
        has = self.gathered(made is not None)
        return made if len(alike) > 1 and all(has[rank] for rank in alike) else None

    def of_first_here(self, make: Callable[[], Given]) -> Given:
        """Return what the first rank of each machine makes; to be used inside ``all_or_none``."""
        made = make() if self.local_rank == 0 else None
        return self.gathered(made)[self._first_here]  # type: ignore[return-value]

    def of_first(self, make: Callable[[], Given]) -> Given:
        """Return what the first rank makes, however long it takes, while the others wait.

        The first rank sends messages meanwhile, so that the wait does not time out.

        Raises:
            Exception: what ``make`` raised on the first rank; on the others ``OtherRankError``.
        """
        done: list[Given] = []
        raised: list[Exception] = []

        def work() -> None:
            try:
                done.append(make())
            except Exception as error:
                raised.append(error)

        worker = threading.Thread(target=work, name="overspill-first")
        if self.rank == 0:
            worker.start()

        def wait() -> Given:
            while True:
                if self.rank == 0:
                    worker.join(timeout=WORD_S)
                if raised:
                    raise raised[0]
                if told := self.gathered(done)[0]:
                    return told[0]

        return self.all_or_none(wait)

    def norm(self, squares: float) -> float:
        """Return the global L2 norm, the same on all ranks, from every rank's sum of squares."""
        mine = torch.tensor([squares], dtype=torch.float64, device="cpu")
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self.group)
        values = [float(each) for each in found]
        finite = all(math.isfinite(each) for each in values)
        return math.sqrt(math.fsum(values)) if finite else math.nan

    def together(self, what: str) -> None:
        """Block until every rank has come here.

        Raises:
            OffloadError: a rank did not come within ``PATIENCE``.
        """
        try:
            dist.monitored_barrier(self.group, timeout=PATIENCE)
        except RuntimeError as error:
            raise RankError(
                f"{what} must be called on every rank, and one did not call it: {error}"
            ) from None

    def close(self, *, broken: bool = False) -> None:
        """Release the groups for the next engine, unless messages may be left on them."""
        self._pair.taken = broken or self.votes.broken or self._lost

    # -- shares ---------------------------------------------------------------------------------

    def refuse_runs(self, folders: Collection[Path], sizes: Collection[int] | None = None) -> None:
        """Refuse folders that already hold a run.

        Args:
            sizes: refuse only runs of these numbers of ranks.

        Raises:
            IoError: some rank sees such a run.
        """
        there = runs_in(folders)
        if any(map(holds_store, folders)):
            there.add(1)
        seen = [(size, str(next(iter(folders)))) for size in there]
        for size, folder in sorted(each for mine in self.gathered(seen) for each in mine):
            if sizes is None or size in sizes:
                raise in_the_way(Path(folder), size)

    def share(self, config: OffloadConfig, gathered_bytes: int = 0) -> OffloadConfig:
        """Return the options of one rank: its part of the machine, and directories of its own.

        Host memory and disk space are divided, and so are threads unless their number is given. The
        directories are created.

        Args:
            gathered_bytes: device memory that ``"auto"`` and shares leave to FSDP2.
        """
        host = parse_size(config.host_memory, "host_memory")

        def of_machine() -> tuple[int, int | None]:
            # Assume that the engines of the other local ranks are as large as this rank's.
            promised = Untaken.together([untaken()] * self.local_size)
            free = max(0, free_host_bytes() - promised.host - config.left_bytes("host"))
            memory = host.resolve(free, int(free * HOST_MARGIN))
            if config.nvme is None:
                return memory, None
            disk = free_disk_bytes(config.nvme, promised)
            asked = parse_size(config.nvme_memory, "nvme_memory")
            return memory, asked.resolve(disk, int(disk * DISK_MARGIN))

        memory, disk = self.of_first_here(of_machine)
        changed: dict[str, Any] = {"host_memory": memory // self.local_size}
        size = parse_size(config.device_memory, "device_memory")
        device = config.device or ("cuda" if torch.accelerator.is_available() else "cpu")
        changed["leave"] = 0  # what is left of host memory is taken off already
        if device != "cpu" and size.nbytes is None:
            changed["leave"] = {"device": config.left_bytes("device") + gathered_bytes}
        if disk is not None:
            changed["nvme_memory"] = disk // self.local_size
            changed["nvme"] = tuple(map(self._own_folder, config.nvme or ()))
        if config.threads is None:
            count = min(int(len(allowed_cpus()) * self.cpu_share), quota_cpus() // self.local_size)
            changed["threads"] = max(1, count)
        return replace(config, **changed)

    def _own_folder(self, folder: Path) -> Path:
        mine = folder / rank_folder(self.rank, self.size)
        mine.mkdir(exist_ok=True)
        return mine

    def rates(self, whole: Rates, *, on_cpu: bool) -> Rates:
        """See ``rates_of_rank``."""
        return rates_of_rank(whole, self.local_size, self.cpu_share, on_cpu=on_cpu)


def rates_of_rank(whole: Rates, ranks: int, cpu_share: float, *, on_cpu: bool) -> Rates:
    """Return the rates of one of a machine's ranks while all of them work.

    Args:
        cpu_share: a rank's share of the time of the processors.
        on_cpu: forward and backward run on them, too.
    """
    disks = "disk_read_bytes_s", "disk_write_bytes_s", "disk_both_bytes_s", "dram_bytes_s"
    processors = ["update_params_s", "update_beside_params_s", "host_flops_s"]
    processors += ["device_flops_s"] * on_cpu
    shares = dict.fromkeys(disks, 1 / ranks) | dict.fromkeys(processors, cpu_share)
    found = {name: getattr(whole, name) for name in shares}
    return replace(whole, **{k: v * shares[k] for k, v in found.items() if v is not None})


def fitting_machine(plan: Plan, ranks: int, needs: Sequence[Mapping[str, str]] = ()) -> Plan:
    """Return the plan of a rank, with the budgets that would fit all ranks, as users give them.

    Args:
        ranks: those of its machine, among which host memory and disk space are divided.
        needs: what would fit each rank; default: the plan's rank has the most rows.
    """
    if not plan.detail.fitting:
        return plan
    every, fitting = (*needs, plan.detail.fitting), dict[str, str]()
    for option in dict.fromkeys(option for each in every for option in each):
        most = max(
            parse_size(each[option], option).nbytes or 0
            for each in every if option in each
        )  # fmt: skip
        fitting[option] = format_budget(most * (1 if option == "device_memory" else ranks))
    return replace(plan, detail=replace(plan.detail, fitting=fitting, ranks=ranks))


def share_of_cpus(ranks: Sequence[Collection[int]], mine: Collection[int]) -> float:
    """Return the share of one of a machine's ranks in the processors that it may use.

    It is 1 if every rank is bound to its own ones, and ``1 / len(ranks)`` if none is bound.

    Args:
        ranks: the processors of each rank.
        mine: those of this rank.
    """
    return sum(1 / sum(cpu in cpus for cpus in ranks) for cpu in mine) / len(mine)


def _boot() -> str:
    """Return an ID of the machine's boot, which tells apart machines with one host name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
