"""The training thread's side of commits: cuts, their facts, and rollback.

See Note [Facts of a commit].
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..errors import StoreError
from ..grads.update_waiter import UpdateWaiter
from ..io_engine.pins import Identity
from ..movement.commit_writer import CommitWriter
from ..movement.runtime import Runtime
from ..params.resident_param_guard import ResidentParamGuard
from ..planning.stand_ins import hooked_model
from ..private import torch_private
from ..schedule.describe import item_of
from ..schedule.ledger import Ledger, Prepared
from ..schedule.messages import Adopt, FiniteCheck, Key, Kind, Until
from ..state.contents import STATE, Contents, EditedParts
from ..state.edits import spoil
from ..state.module_states import ModuleStates, states_of
from ..state.unmanaged import UnmanagedState, renamed_parameters, unmanaged_tensors
from .meta import (
    as_before,
    check_readable,
    decode_facts,
    encode_facts,
    is_readable,
    kept_groups,
    member_names,
    random_states,
    regions_of,
    restore_random_states,
)

# Note [Facts of a commit]
# A commit holds weights and optimizer state, and *facts* that only the training thread knows: step
# counts, hyper-parameters, buffers, the modules' extra state, random generator states and the
# user's ``extra``.  The step itself makes the *cut*: the machine collects a consistent state over
# all tiers.  A cut can become durable only once it is *sealed*, that is, once its facts are known.
#
# Facts are not gathered in ``step()``, because the loop may still change them: a scheduler steps,
# or a callback edits weights.  They are gathered in ``seal`` at the next forward that trains, in
# ``commit()`` or in ``close()``.  After that point the loop may be ahead of the weights.  Random
# generator states are an exception: they are taken at the end of ``step()`` (or in ``commit()``),
# so what the loop draws for the next batch is drawn again after a resume.
#
# An edit after ``step()`` belongs to the state after that step.  So ``begin_edit`` withdraws the
# cut, or waits for it if it is sealed.  ``_half`` has what an edit has begun to change; while it is
# not empty nothing is committed, and after an exception it stays until the edit is repeated or
# rolled back.

log = logging.getLogger("overspill")
_UNREADABLE = ValueError(
    "it contains objects that cannot be loaded safely (weights_only); use numbers, strings, "
    "tensors, and lists, tuples and dicts of them"
)


class Commits:
    """The commits of one engine, for calls from the training thread.

    See Note [Facts of a commit].
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Mapping[str, Any]],
        runtime: Runtime,
        writer: CommitWriter,
        resident_guard: ResidentParamGuard,
        update_waiter: UpdateWaiter,
        contents: Contents,
    ) -> None:
        self._model, self._groups, self._config = model, groups, runtime.config
        self._device, self._ledger = runtime.accelerator.device, runtime.ledger
        self._executor, self._direct = runtime.executor, runtime.direct
        self._writer, self._protocol = writer, runtime.executor.protocol
        self._resident_guard, self._update_waiter, self._contents = (
            resident_guard,
            update_waiter,
            contents,
        )
        self._units, self._digests = runtime.parts.units, runtime.store.digests
        self._members, self._regions = member_names(model, groups), regions_of(model)
        self._parameters = runtime.parts.parameters
        self._managed = frozenset(map(id, self._parameters))
        self._names = runtime.parts.names
        self._known = frozenset(unmanaged_tensors(model, self._managed))
        self._left_out: set[str] = set()  # extra states that cannot be committed
        self._facts: bytes | None = None  # facts of the present state, once known
        self._asked = False  # whether `commit()` gathered them and no step followed
        self._moved = False  # whether a step was taken since wrap or resume
        self._pin: Identity | None = None  # the reader that delayed the last step's commit
        # By unit: what an edit has begun and not finished to change (parameters, STATE).
        self._half: dict[int, set[int]] = {}
        # The state before the first step is committed too.
        self._random: Mapping[str, Any] = random_states(self._device)
        self._ledger.when_taken(self._stepped)

    # -- steps ----------------------------------------------------------------------------------

    def restart(self) -> Any:
        """Restore random generators from the last commit, and return its ``extra``."""
        assert self._writer.last is not None
        facts = decode_facts(self._writer.last)
        self._random = facts["rng"]
        restore_random_states(facts["rng"], self._device)
        return facts["extra"]

    def wanted(self, count: int) -> bool:
        """Return whether step ``count`` is to be committed."""
        return count % self._config.commit_every == 0 and not self._put_off(count)

    def _put_off(self, count: int) -> bool:
        """Return whether a reader's pin delays this commit; log when that begins and ends."""
        before, self._pin = self._pin, self._writer.pin
        if self._pin is None:
            if before is not None:
                log.info("overspill: commits resume at step %d", count)
            return False
        if before is None:
            log.warning(
                "overspill: the last commit is being read (overspill export or inspect); steps "
                "from %d on are not committed until the reader has ended", count,
            )  # fmt: skip
        # Between two readers there is a commit, even if the second comes at once.
        return before is None or before == self._pin

    def _stepped(self, step: Prepared) -> None:
        """Record that a step was taken; called on the machine's thread."""
        self._random, self._facts, self._moved = step.random, None, True

    def seal(self) -> None:
        """Gather the facts of the state after the last step, and seal its cut if it is not sealed.

        Called before anything that leaves this state behind.
        """
        before = self._facts
        if before is None or self._asked:  # a scheduler may have stepped since commit()
            self._facts = self._gather()
        late = self._asked and (self._writer.agrees or self._facts != before)
        self._asked = False
        if self._protocol.open or late:
            self._tell_facts(kept=self._ledger.count > 0)

    def _tell_facts(self, *, kept: bool, always: bool = True) -> None:
        """Seal the present state with its facts.

        Args:
            kept: protects the commit from being replaced by a new store.
            always: commits even if nothing is newer than the last commit.
        """
        assert self._facts is not None
        number = self._writer.seal(self._ledger.count, self._facts, kept)
        self._protocol.seal(number, always=always)

    def _gather(self) -> bytes:
        extra = None if self._config.extra is None else self._config.extra()
        kept = unmanaged_tensors(self._model, self._managed)
        facts = {
            "step": self._ledger.count,
            "steps": list(self._ledger.steps),
            "changing": sorted(self._ledger.changing),
            "groups": kept_groups(self._groups),
            "members": self._members,
            "regions": self._regions,
            "hooked": hooked_model(self._model) is not self._model,
            "rng": self._random,
            "buffers": {name: _copy(value) for name, value in kept.items()},
            "added": sorted(kept.keys() - self._known),
            "states": self._states(),
            "renamed": renamed_parameters(self._model, self._names, self._parameters),
            "digests": self._digests(),
            "extra": extra,
        }
        check_readable({"groups": facts["groups"], "extra": extra})
        return encode_facts(facts)

    def _states(self) -> dict[str, dict[str, Any]]:
        """Return the modules' extra state, without entries that cannot be read back."""
        found: dict[str, dict[str, Any]] = {}
        for path, entries in states_of(self._model, self._leave_out).items():
            for own, value in entries.items():
                kept = _copy(value) if isinstance(value, torch.Tensor) else value
                if is_readable(kept):
                    found.setdefault(path, {})[own] = kept
                else:
                    self._leave_out(f"{path}.{own}" if path else own, _UNREADABLE)
        return found

    def _leave_out(self, name: str, why: Exception) -> None:
        if name not in self._left_out:
            self._left_out.add(name)
            log.warning(
                "overspill: commits do not include extra state %s: %s", name or "(model)", why
            )

    # -- for the user ---------------------------------------------------------------------------

    def commit(self) -> None:
        """Make the present state durable, regardless of ``commit_every``; return when it is.

        Raises:
            OffloadError: a backward has already updated a part of the model, weights are not
                finite, or an edit of them was interrupted.
        """
        self._update_waiter.wait_for_updates()
        if (reason := self._unfit()) is not None:
            raise StoreError(reason)
        self._random = random_states(self._device)
        self._facts, self._asked = self._gather(), True
        self._tell_facts(kept=True)
        self._wait_for_commit()

    def _wait_for_commit(self) -> None:
        self._protocol.wait(Until.DURABLE)
        self._executor.health.require_commits()

    def _unfit(self) -> str | None:
        """Return why the present state must not be committed; all updates have finished."""
        if self._ledger.early:
            return (
                "update='backward' has updated a part of the model; commit between step() and the "
                "next backward()"
            )
        if self._half:
            return _HALF
        if self._ledger.spoiled:
            names = ", ".join(map(self._resident_guard.name_of, sorted(self._ledger.spoiled)))
            return f"values are not finite in {names}; rollback(), or load weights and state"
        return None

    def close(self) -> None:
        """Commit the last step; if its state must not be committed, keep the last commit."""
        if self._writer.last is None and self._ledger.count == 0:
            return  # nothing was trained
        self._writer.ends()
        self._protocol.finish_updates()
        if (reason := self._unfit()) is not None:
            log.warning("overspill: closed; the store keeps the last commit: %s", reason)
            return
        if not self._protocol.open:
            self._wait_for_commit()
        if self._facts is None or self._asked:  # a scheduler may have stepped since
            self._facts = self._gather()
        # Not all ranks have edits, so when ranks must agree there is always one more commit.
        late = self._writer.agrees or (
            (self._moved or self._asked) and self._facts != self._writer.last
        )
        # A step without gradients changes only facts.
        self._tell_facts(kept=True, always=self._protocol.open or late)
        self._wait_for_commit()

    # -- edits ----------------------------------------------------------------------------------

    def require_whole(self) -> None:
        """Raise after an edit or a rollback that was interrupted.

        Raises:
            OffloadError: it was; the state is partly old and partly new.
        """
        if self._half:
            raise StoreError(_HALF)

    def begin_edit(self, parts: EditedParts) -> None:
        """Block commits until all of ``parts`` was edited (``end_edit``)."""
        for unit, some in parts.items():
            self._half.setdefault(unit, set()).update(some)

    def is_open(self, parts: EditedParts) -> bool:
        """Return whether an edit of any of ``parts`` was begun and has not ended."""
        return any(self._half.get(unit, set()).intersection(some) for unit, some in parts.items())

    def end_edit(self, parts: EditedParts) -> None:
        """End the edit of ``parts``; other parts of the same units stay blocked."""
        for unit, some in parts.items():
            left = self._half.get(unit, set()).difference(some)
            if left:
                self._half[unit] = left
            else:
                self._half.pop(unit, None)

    @contextmanager
    def editing(self, parts: EditedParts) -> Iterator[Callable[[int], None]]:
        """Stop transfers and commits for the duration of the block, which edits ``parts``.

        The edit belongs to the state after the last step.  The block receives a function to be
        called with each unit that was given non-finite values.  If it raises, commits stay blocked.
        """
        torn = set(self._half)  # values of an interrupted edit are unchecked
        self.begin_edit(parts)
        self._protocol.begin_edit()
        self._facts = None
        given: set[int] = set()
        yield given.add
        doubtful = (self._ledger.spoiled | torn) & parts.keys() - given
        sound = {unit for unit in doubtful if self._contents.is_finite(unit)}
        for unit in sorted(doubtful | given):  # last: transfers resume after this
            if unit in sound:
                self._executor.engine_port.tell(FiniteCheck(unit, finite=True))
            else:
                spoil(self._executor, self._units[unit])
        if sound:
            self._executor.engine_port.catch_up()
        self.end_edit(parts)

    def rollback(self, give_up: Callable[[], None]) -> Any:
        """Return to the last commit, and return its ``extra``.

        Args:
            give_up: ends a step that has begun, and drops all gradients.
        """
        first = self._writer.last is None
        if first and self._protocol.open and self._unfit() is None:
            self.seal()
        if (first or self._protocol.cut) and not self._protocol.open:
            self._wait_for_commit()  # a commit may be in progress, even the first
        if self._writer.last is None:
            raise StoreError(
                "there is no commit to go back to: none was made before values that are not finite "
                "came in, or an edit was interrupted; load weights and state again"
            )
        Unmanaged(self._model, decode_facts(self._writer.last))  # raises if it does not fit
        self.begin_edit({unit: {STATE} for unit in range(len(self._ledger.versions))})
        give_up()
        self._facts, self._asked = None, False
        self._direct.finish()
        self._protocol.roll_back(self._read_again)
        self._executor.health.require_commits()
        self._half.clear()
        facts = decode_facts(self._writer.last)
        log.warning("overspill: went back to the commit of step %d", facts["step"])
        return facts["extra"]

    def _read_again(self, items: Iterable[Key]) -> int:
        """Restore everything from the last commit, and return the number of its facts.

        The commit may have completed after the rollback began.
        """
        assert self._writer.last is not None
        for item in items:
            self._direct.reload(item)
            if item.kind is Kind.WEIGHTS:
                self._resident_guard.changed(item.number, range(len(self._ledger.steps)))
        facts = decode_facts(self._writer.last)
        self._restore(facts)
        return self._writer.seal(facts["step"], self._writer.last, kept=facts["step"] > 0)

    def _restore(self, facts: Mapping[str, Any]) -> None:
        _restore(self._model, self._groups, self._ledger, facts)


def adopt(
    model: nn.Module, groups: Sequence[Mapping[str, Any]], runtime: Runtime,
    contents: Contents,
) -> None:  # fmt: skip
    """Restore weights and state from the last commit of a store that was opened again."""
    found, writer = runtime.found, runtime.store.writer
    assert found is not None and writer is not None
    generation = found.last()
    for item, role in zip(found.layout.items, generation.roles, strict=True):
        key = item_of(item.key)
        runtime.executor.engine_port.tell(Adopt(key, role))
        runtime.direct.reload(key)
    facts = decode_facts(generation.meta)
    runtime.store.expect(facts.get("digests", {}))
    for unit in sorted(runtime.layout.in_place):
        contents.show_in_place(unit)
    runtime.executor.protocol.open, writer.last = False, generation.meta
    _restore(model, groups, runtime.ledger, facts)


def _restore(
    model: nn.Module, groups: Sequence[Mapping[str, Any]], ledger: Ledger, facts: Mapping[str, Any]
) -> None:
    ledger.restore(facts["step"], facts["steps"])
    ledger.changing.update(facts.get("changing", ()))
    restore_groups(groups, facts["groups"])
    Unmanaged(model, facts).restore()


class Unmanaged:
    """A commit's values of everything in a model that the engine does not manage.

    They are checked when this is made, so nothing has been changed if they do not fit.
    """

    def __init__(self, model: nn.Module, facts: Mapping[str, Any]) -> None:
        """
        Raises:
            OffloadError: the model lacks a tensor or a module.
        """
        self._tensors = UnmanagedState(model, facts["buffers"], facts.get("added", ()))
        self._states = ModuleStates(model, facts.get("states", {}))

    def restore(self) -> None:
        """Load the values into the model."""
        self._tensors.restore()
        self._states.restore()


def _copy(value: torch.Tensor) -> torch.Tensor:
    return torch_private.as_plain(value.detach().cpu().clone())


_HALF = "an edit of weights or state was interrupted; make it again, or call rollback()"


def restore_groups(
    groups: Sequence[Mapping[str, Any]], stored: Sequence[Mapping[str, Any]]
) -> None:
    """Restore hyper-parameters; tensors are changed in place, because schedulers refer to them."""
    for group, kept in zip(groups, stored, strict=True):
        for name, value in kept.items():
            present = group.get(name)
            if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
                present.copy_(value)
            else:
                group[name] = as_before(value, present)  # type: ignore[index]
