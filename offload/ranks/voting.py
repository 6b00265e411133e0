"""How ranks agree on a commit: each comes here when its record is durable, and all must come."""

from __future__ import annotations

import logging
import threading
import time

import torch
import torch.distributed as dist

from ..errors import OffloadError

log = logging.getLogger("overspill")

PATIENCE_S = 600.0  # for a rank that is slower
CLOSING_S = 30.0  # once this one ends
FAILING_S = 1.0  # once this one ends because of an error, which nobody would see meanwhile
_LOOK_S = 0.0005


class Votes:
    """One engine's, on a group that only the thread that commits uses.

    A rank that ends does not wait for long: others may wait for it where no engine knows of it.
    Nothing is lost by that: where all records are durable, ``resume`` finds the commit, sealed or
    not, and where one is missing the commit before is whole.

    Attributes:
        abandoned: a commit was not waited for to the end, as this rank has ended.
        broken: some commit was not agreed on, and the group may have something left of it.
    """

    def __init__(self, ranks: dist.ProcessGroup) -> None:
        self._ranks, self._size = ranks, dist.get_world_size(ranks)
        self._until_s: float | None = None
        self._lock = threading.Lock()
        self.abandoned = self.broken = False

    def ends(self, *, failing: bool = False) -> None:
        """This rank ends; ``failing``: with an error."""
        until_s = time.monotonic() + (FAILING_S if failing else CLOSING_S)
        with self._lock:
            self._until_s = until_s if self._until_s is None else min(self._until_s, until_s)

    def agreed(self, number: int, step: int) -> None:
        """Returns when every rank has come to the same commit; on the thread that commits.

        Raises:
            OffloadError: one has another, or did not come.
        """
        mine = torch.tensor([number, step])
        found = [torch.empty_like(mine) for _ in range(self._size)]
        began_s = time.monotonic()
        try:
            work = dist.all_gather(found, mine, group=self._ranks, async_op=True)
            while not work.is_completed():
                now_s = time.monotonic()
                until_s = self._until_s or began_s + PATIENCE_S
                if now_s > until_s:
                    raise OffloadError("a rank did not come")
                time.sleep(min(_LOOK_S * 2 ** int(now_s - began_s), 0.05))
            work.wait()
        except (RuntimeError, OffloadError) as error:
            self.abandoned, self.broken = self._until_s is not None, True
            raise OffloadError(
                f"the commit of step {step} was not agreed on by all ranks ({error}); where all of "
                "them have it, resume finds it, else the one before"
            ) from error
        others = {tuple(each.tolist()) for each in found}
        if len(others) > 1:
            raise OffloadError(
                f"ranks commit different steps: {sorted(step for _, step in others)}; each must "
                "take the same steps"
            )
