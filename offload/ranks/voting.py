"""Agreement of all ranks on each commit, once its record is durable on every rank."""

from __future__ import annotations

import logging
import threading
import time

import torch
import torch.distributed as dist

from ..errors import OffloadError, RankError

log = logging.getLogger("overspill")

PATIENCE_S = 600.0  # wait for a slower rank
CLOSING_S = 30.0  # once this rank closes
FAILING_S = 1.0  # once this rank closes after an error, which the wait would hide
_LOOK_S = 0.0005


class Votes:
    """The votes of one engine, on a group that only the commit thread uses.

    A rank that closes does not wait long: others may wait for it where their engine does not know.
    This loses no data. If all records are durable, ``resume`` finds the commit, sealed or not. If
    one is missing, the commit before it is complete.

    Attributes:
        abandoned: this rank has closed, and did not wait for a commit to the end.
        broken: the ranks did not agree on a commit, and messages of it may be left on the group.
    """

    def __init__(self, ranks: dist.ProcessGroup) -> None:
        self._ranks, self._size = ranks, dist.get_world_size(ranks)
        self._until_s: float | None = None
        self._lock = threading.Lock()
        self.abandoned = self.broken = False

    def ends(self, *, failing: bool = False) -> None:
        """Limit the wait for other ranks, because this rank closes.

        Args:
            failing: it closes after an error.
        """
        until_s = time.monotonic() + (FAILING_S if failing else CLOSING_S)
        with self._lock:
            self._until_s = until_s if self._until_s is None else min(self._until_s, until_s)

    def agreed(self, number: int, step: int) -> None:
        """Block the commit thread until every rank has come to the same commit.

        Raises:
            OffloadError: a rank has another commit, or did not come.
        """
        mine = torch.tensor([number, step], device="cpu")
        found = [torch.empty_like(mine) for _ in range(self._size)]
        began_s = time.monotonic()
        try:
            work = dist.all_gather(found, mine, group=self._ranks, async_op=True)
            while not work.is_completed():
                now_s = time.monotonic()
                until_s = self._until_s or began_s + PATIENCE_S
                if now_s > until_s:
                    raise RankError("a rank did not answer within the time limit")
                time.sleep(min(_LOOK_S * 2 ** int(now_s - began_s), 0.05))
            work.wait()
        except (RuntimeError, OffloadError) as error:
            self.abandoned, self.broken = self._until_s is not None, True
            raise RankError(
                f"the commit of step {step} was not agreed on by all ranks ({error}); where all of "
                "them have it, resume finds it, else the one before"
            ) from error
        others = {tuple(each.tolist()) for each in found}
        if len(others) > 1:
            raise RankError(
                f"ranks commit different steps: {sorted(step for _, step in others)}; each must "
                "take the same steps"
            )
