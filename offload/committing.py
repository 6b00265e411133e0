"""The training thread's side of commits: when a step is cut, what is known of it, and the way back.

A cut is sealed when its facts are known: at the next forward that trains, at ``commit()`` or at
``close()``, so that what the loop does after ``step()`` (a scheduler's step) is inside.  The states
of random generators are those at the end of ``step()``: what the loop draws for the next batch is
drawn again after a resume.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .config import OffloadConfig
from .errors import OffloadError
from .runtime.commits import CommitWriter
from .runtime.direct import DirectAccess
from .runtime.executor import Executor
from .runtime.facts import (
    check_extra,
    decode_facts,
    encode_facts,
    kept_buffers,
    kept_groups,
    member_names,
    random_states,
    restore_buffers,
    restore_random_states,
)
from .runtime.updates import Updater
from .schedule.messages import Cut, Durable, Kind, Seal
from .stepping import Stepping

log = logging.getLogger("overspill")


class Committing:
    """Owned by the engine; all methods are for the training thread."""

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Mapping[str, Any]],
        config: OffloadConfig,
        device: torch.device,
        executor: Executor,
        updater: Updater,
        stepping: Stepping,
        direct: DirectAccess,
        writer: CommitWriter,
    ) -> None:
        self._model, self._groups, self._config, self._device = model, groups, config, device
        self._executor, self._updater, self._stepping = executor, updater, stepping
        self._direct, self._writer = direct, writer
        self._members = member_names(model, groups)
        self._open = True  # there is a cut, or the very first is to be made, without its facts
        self._cut = False  # the machine has, or will have, a cut of the last step
        self._checked = False
        self._random: dict[str, Any] = {}

    # -- steps ----------------------------------------------------------------------------------

    def ready(self) -> None:
        """The model is wrapped: the state before the first step is to be committed too."""
        self._random = random_states(self._device)

    def adopt(self, data: bytes) -> None:
        """All is as a commit has it."""
        self._open, self._writer.last = False, data
        facts = decode_facts(data)
        self._restore(facts)
        restore_buffers(self._model, facts["buffers"])

    def restart(self) -> Any:
        """Training goes on from the last commit: sets random generators, returns ``extra``."""
        assert self._writer.last is not None
        facts = decode_facts(self._writer.last)
        self._random = facts["rng"]
        restore_random_states(facts["rng"], self._device)
        return facts["extra"]

    def wanted(self, count: int) -> bool:
        """Whether step ``count`` is to be committed."""
        return count % self._config.commit_every == 0

    def stepped(self) -> None:
        """A step was taken."""
        self._random = random_states(self._device)
        self._open = self._cut = self.wanted(self._stepping.count)

    def seal(self) -> None:
        """The last step's cut, if it has one without facts, gets those that hold now."""
        if self._open:
            number = self._facts()
            self._open = False
            self._executor.tell(Seal(number) if self._cut else Cut(number))

    def _facts(self) -> int:
        extra = None if self._config.extra is None else self._config.extra()
        if extra is not None and not self._checked:
            check_extra(extra)
            self._checked = True
        facts = {
            "step": self._stepping.count,
            "steps": list(self._updater.steps),
            "groups": kept_groups(self._groups),
            "members": self._members,
            "rng": self._random,
            "buffers": kept_buffers(self._model),
            "extra": extra,
        }
        return self._writer.seal(self._stepping.count, encode_facts(facts))

    # -- for the user ---------------------------------------------------------------------------

    def commit(self, *, closing: bool = False) -> None:
        """Makes the present state durable, whatever ``commit_every`` says; returns when it is.

        Raises:
            OffloadError: a backward has already updated a part of the model.
        """
        if self._stepping.partial:
            raise OffloadError(
                "update='backward' has updated a part of the model; commit between step() and the "
                "next backward()"
            )
        self._stepping.land()
        if closing and not self._open and not self._newer():
            return
        if not closing:
            self._random = random_states(self._device)
        if self._open:
            self.seal()
        else:
            self._executor.tell(Cut(self._facts()))
        self._executor.request(Durable)

    def _newer(self) -> bool:
        """Whether anything has changed since the last commit, or one is under way."""
        with self._executor.lock:
            return self._executor.machine.commits.newer()

    def close(self) -> None:
        """The last step is committed, unless it is not whole."""
        if self._writer.last is None and self._stepping.count == 0:
            return  # nothing was trained
        if self._stepping.partial:
            log.warning("overspill: closed within a step; the store keeps the last commit")
        elif self._updater.nonfinite:
            log.warning("overspill: values are not finite; the store keeps the last commit")
        else:
            self.commit(closing=True)

    def finish(self) -> None:
        """Waits for a commit that is under way: what it holds is about to be edited."""
        if self._cut:
            self.seal()
        self._executor.request(Durable)

    def rollback(self) -> Any:
        """Goes back to the last commit, and returns its ``extra``.  Gradients are dropped."""
        if self._writer.last is None or (self._cut and not self._open):
            self.finish_any()
        self._stepping.give_up()
        self._open = self._cut = False
        self._direct.settle()
        with self._executor.lock:
            stale = self._executor.machine.rollback()
        for item in stale:
            self._direct.reload(item)
            if item.kind is Kind.WEIGHTS:
                self._stepping.changed(item.number)
        assert self._writer.last is not None
        facts = decode_facts(self._writer.last)
        self._restore(facts)
        number = self._writer.seal(facts["step"], self._writer.last)
        self._executor.tell(Cut(number))
        self._executor.request(Durable)
        log.warning("overspill: went back to the commit of step %d", facts["step"])
        return facts["extra"]

    def finish_any(self) -> None:
        """As ``finish``, and the first commit of all too."""
        if self._writer.last is None:
            self.seal()
        self._executor.request(Durable)

    def _restore(self, facts: Mapping[str, Any]) -> None:
        self._updater.steps[:] = facts["steps"]
        self._stepping.count = facts["step"]
        restore_groups(self._groups, facts["groups"])


def restore_groups(
    groups: Sequence[Mapping[str, Any]], stored: Sequence[Mapping[str, Any]]
) -> None:
    """Puts hyper-parameters back; one that is a tensor keeps its place, as schedulers expect."""
    for group, kept in zip(groups, stored, strict=True):
        for name, value in kept.items():
            present = group.get(name)
            if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
                present.copy_(value)
            else:
                group[name] = value  # type: ignore[index]
