"""Access to the current full weights from outside of training, one parameter at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ..errors import BackwardUpdateError, BudgetError, WeightError
from ..params.before_use import UseCallbacks
from ..params.onloaded_units import OnloadedUnits
from ..params.param_handle import PlaceholderParam
from ..params.resident_param_guard import ResidentParamGuard
from ..private import torch_private
from ..private.reentrancy import callers
from ..private.trainer import Trainer
from ..schedule.ledger import Ledger
from ..schedule.units import ParamSpec
from ..step.forward_stack import ForwardStack
from .contents import Contents, Values, values_by_spec
from .edits import Edits
from .exact_masters import replacing
from .in_place import is_from_files
from .lent_copies import LentCopies, LentCopy, Loan, changed_otherwise

T = TypeVar("T")
Reads = Mapping[int, Callable[[], torch.Tensor]]  # by parameter


class ParamAccess:
    """Reads and writes weights for code outside of the engine; see ``WeightAccess``.

    A tensor over a parameter follows its weight, and changes to it reach the weight, as in plain
    PyTorch.  See Note [Tensors over parameters].

    Attributes:
        before_use: called before weights are read or changed.
    """

    def __init__(
        self, onloaded_units: OnloadedUnits, resident_guard: ResidentParamGuard, contents: Contents,
        ledger: Ledger, forward_stack: ForwardStack, trainer: Trainer, edits: Edits,
    ) -> None:  # fmt: skip
        self.before_use = UseCallbacks()
        self._parts, self._executor = onloaded_units.parts, onloaded_units.executor
        self._onloaded_units, self._resident_guard = onloaded_units, resident_guard
        self._contents, self._ledger = contents, ledger
        self._forward_stack, self._trainer, self._edits = forward_stack, trainer, edits
        self._loans: dict[int, Loan] = {}
        self._in_dicts: LentCopies[int] = LentCopies()  # see Note [Copies in state dicts]
        self._outside: list[Callable[[], None]] = []
        # Called before ``p.grad`` is set; raises for gradients that update='backward' has applied.
        self.require_gradients_unused: Callable[[], None] = lambda: None

    def name(self, index: int) -> str:
        """Return the parameter's name in the model."""
        return self._parts.shown_names[index]

    def tidy(self) -> None:
        """Close what an exception has left open, so that no placeholder is read as a weight."""
        self.before_use()
        self._forward_stack.tidy()

    # -- reading --------------------------------------------------------------------------------

    def read(self, index: int) -> torch.Tensor:
        """Return a copy of a parameter's current weight, on its device and with its strides."""
        self._begin(self._parts.unit_of[index])
        return self._read(index)

    def read_all(self, units: Container[int]) -> dict[int, torch.Tensor]:
        """Return copies of all current weights of these units, by parameter index."""
        chosen = [index for index, unit in enumerate(self._parts.unit_of) if unit in units]
        values = {index: self.read(index) for index in chosen}
        self._onloaded_units.let_go()
        return values

    def _begin(self, unit: int) -> None:
        self._executor.health.check()
        self._trainer.require()
        self.before_use()
        # excluding the current call
        if not any(frame.f_code in _AMID_READING for frame in callers()[2:]):
            self._forward_stack.tidy(reading=True)  # not in a signal handler during a read
        self.reconcile(compare={unit})

    def _read(self, index: int) -> torch.Tensor:
        self._executor.health.check()  # after a failed update memory may hold two steps
        self._trainer.require()
        return self._copy(index)

    @torch_private.without_grad
    def _copy(self, index: int) -> torch.Tensor:
        unit = self._parts.unit_of[index]
        if self._contents.asleep:
            there = self._onloaded_units.accelerator.device
            return self._contents.read_param_asleep(unit, index).to(there)
        hidden = self._begin_reading(unit)
        try:
            return self._onloaded_units.weight(index).clone()
        finally:
            self._resident_guard.end_reading(unit, hidden)

    def lent(self) -> bool:
        """Return whether users may have copies of weights, whose changes count."""
        return bool(self._loans or self._in_dicts)

    def together(self, indices: Collection[int]) -> bool:
        """Return whether all parameters belong to the same unit."""
        return len({self._parts.unit_of[index] for index in indices}) == 1

    def compute(self, indices: Collection[int], run: Callable[[], T]) -> T:
        """See ``WeightAccess.compute``."""
        if self._contents.asleep or not self._forward_stack.may_run():
            return NotImplemented  # type: ignore[no-any-return]
        unit = self._parts.unit_of[next(iter(indices))]
        self._begin(unit)
        hidden = self._begin_reading(unit, computing=True)
        try:
            return self._forward_stack.run(unit, run)
        finally:
            self._resident_guard.end_reading(unit, hidden)

    def address(self, index: int) -> int:
        """See ``WeightAccess.address``."""
        unit = self._parts.unit_of[index]
        self._begin(unit)
        hidden = self._begin_reading(unit, computing=True)
        try:
            return self._onloaded_units.weight(index).data_ptr()
        finally:
            self._resident_guard.end_reading(unit, hidden)

    def _begin_reading(self, unit: int, *, computing: bool = False) -> list[int]:
        self._contents.wake()
        for again in (True, False):
            try:
                if computing and torch_private.in_backward():
                    # Backward goes on with this unit, as with units that it saved.
                    self._resident_guard.show(unit)
                    self._forward_stack.backward_reads(unit)
                return self._resident_guard.begin_reading(unit)
            except BudgetError:
                if not (again and self._forward_stack.put_away()):
                    raise
        raise AssertionError("the second try returns or raises")

    def borrow(self, index: int) -> torch.Tensor:
        """Return a copy as ``read`` does, or a tensor over the lent copy if there is one."""
        self._begin(self._parts.unit_of[index])
        loan = self._loans.get(index)
        return self._read(index) if loan is None else loan.copy.detach()

    def lend(self, index: int, copy: torch.Tensor) -> None:
        """Track ``copy``, which was borrowed: a tensor over it exists and may be written to."""
        if index not in self._loans:
            watched = torch_private.Watched(copy.detach())
            self._loans[index] = Loan(watched, self._now(index))

    def copied(self, index: int, found: torch.Tensor) -> torch.Tensor:
        """Return the copy that goes into a state dict, given what torch has put there (``found``).

        Writes to it do not reach the weight directly: see ``lend_in_dict``.
        """
        if isinstance(found, PlaceholderParam):
            return self.read(index)
        self.reconcile()
        loan = self._loans.get(index)
        if (
            loan is not None
            and torch_private.is_alone(loan.copy, 1)
            and torch_private.storage_key(loan.copy) == torch_private.storage_key(found)
        ):
            del self._loans[index]  # made for this dict, and not referenced elsewhere
            return found
        return found.detach().clone()

    def _now(self, index: int) -> tuple[int, int]:
        """Return the version of a weight, which differs once the weight has changed."""
        return self._ledger.updates[self._parts.unit_of[index]], self._ledger.edits[index]

    def write_copies(self, units: Container[int] | None = None) -> None:
        """Call ``reconcile`` and compare the bits of copies, because the model, or units, run."""
        compared = range(len(self._parts.units)) if units is None else units
        self.reconcile(units, compare=compared)
        self._in_dicts.stop_comparing(lambda index: self._parts.unit_of[index] in compared)

    def reconcile(
        self, units: Container[int] | None = None, *, compare: Container[int] = ()
    ) -> None:
        """Write changes of lent copies to their weights, and refresh copies of changed weights.

        Copies without other references are dropped.  See Note [Tensors over parameters].

        Args:
            units: limits this to their parameters.
            compare: units whose copies in state dicts are compared by their bits.

        Raises:
            OffloadError: a copy was changed after an update had changed the weights.
        """
        self.write_changed()
        if self._in_dicts:
            self._write_dicts(compare)
        if not self._loans:
            return
        asked = {index: loan for index, loan in self._loans.items()
                 if units is None or self._parts.unit_of[index] in units}  # fmt: skip
        edited = {index: loan for index, loan in asked.items() if loan.watched.changed}
        late = [index for index, loan in edited.items() if loan.version != self._now(index)
                or self._parts.unit_of[index] in self._ledger.early]  # fmt: skip
        if late:
            self.renew()
            raise BackwardUpdateError(
                f"a tensor over the weights of {', '.join(map(self.name, late))} was changed in "
                "place after update='backward' had changed the weights, and the change is lost; "
                "change weights between step() and the next backward()"
            )
        if edited:
            self._write({index: loan.copy for index, loan in edited.items()})
        if units is None:
            self._forget()
        for index in asked.keys() & self._loans.keys():
            loan = self._loans[index]
            if loan.version != self._now(index):
                self._renew(index, loan)

    def write_changed(self) -> None:
        """Write the changes that modules have made in place to their own weights.

        See Note [Changes in forward] in ``params/edit_watch.py``.  The graph of that forward
        stays valid, as with ``.data`` in plain PyTorch.
        """
        changed = self._onloaded_units.changed()
        if late := [i for i in changed if self._parts.unit_of[i] in self._ledger.early]:
            self._onloaded_units.forget_changed(late)
            raise BackwardUpdateError(
                f"{', '.join(map(self.name, late))}: the module changed this weight in place "
                "during backward, after update='backward' had updated it; the change is lost. Use "
                "update='next_forward'"
            )
        fixed = self._executor.layout.unchangeable
        if kept := {i: changed[i].weight for i in changed if self._parts.unit_of[i] in fixed}:
            self._refuse_changes(kept)
            changed = {i: change for i, change in changed.items() if i not in kept}
        if changed:
            values = {index: change.weight for index, change in changed.items()}
            self._write(values, before={i: change.before for i, change in changed.items()})
            self._onloaded_units.forget_changed(changed)

    def _refuse_changes(self, values: Mapping[int, torch.Tensor]) -> None:
        """Restore weights that cannot be changed, and raise if a module had changed them; if the
        copy that compute uses is the only one, the change stays, as in PyTorch."""
        self._onloaded_units.let_go()
        self._edits.restore({self._parts.unit_of[index] for index in values})
        # Only now: a failed restore must not lose the change.
        self._onloaded_units.forget_changed(values)
        for index, value in values.items():
            self.require_same(index, value, " by its module's forward")

    def lend_in_dict(self, index: int, copy: torch.Tensor, state: dict[str, Any]) -> None:
        """Track a copy in a state dict, so that in-place changes to it are written back."""
        lent = self._in_dicts.add(index, copy, self._now(index))
        self._in_dicts.add_all(state, [lent])

    def _write_dicts(self, compare: Container[int]) -> None:
        changed = self._in_dicts.changed(lambda index: self._parts.unit_of[index] in compare)
        late = [copy for copy in changed if copy.version != self._now(copy.key)]
        for copy in late:
            copy.accept(copy.version)
        if late:
            raise WeightError(
                f"{self.name(late[0].key)!r} was changed in place in a state dict from before the "
                "last update of the weights, and the change is lost; take model.state_dict() again "
                "after a step, and change that, or the parameter itself"
            )
        self._refuse_two(changed)
        for unit in sorted({self._parts.unit_of[copy.key] for copy in changed}):
            # An interrupt leaves units that are not written yet to the next call.
            mine = [copy for copy in changed if self._parts.unit_of[copy.key] == unit]
            self._write({copy.key: copy.tensor for copy in mine if copy.tensor is not None})
            for copy in mine:
                copy.accept(self._now(copy.key))

    def _refuse_two(self, changed: Sequence[LentCopy[int]]) -> None:
        """Raise if a weight was changed in two copies, and forget these changes.

        Raises:
            OffloadError: two copies were changed to different values.
        """
        kept = {index: loan.copy for index, loan in self._loans.items() if loan.watched.changed}
        twice = {copy.key for copy in changed_otherwise(changed, kept)}
        for copy in changed:
            if copy.key in twice:
                copy.accept(self._now(copy.key))
        for index in twice & self._loans.keys():
            self._renew(index, self._loans[index])
        if twice:
            raise WeightError(
                f"{self.name(min(twice))!r} was changed in place in two copies, of state dicts or "
                "of tensors over the parameter, which are the same tensor in PyTorch; both changes "
                "are lost. Change one of them, and then read the parameter again"
            )

    def look_outside(self, look: Callable[[], None]) -> None:
        """Register ``look``, which writes weight changes that the engine cannot detect itself."""
        self._outside.append(look)

    def take_edits(self) -> None:
        """Call every function registered with ``look_outside``; must not run during a forward."""
        for look in self._outside:
            look()

    def refuse_joined(self) -> None:
        """Raise ``OffloadError`` if trained parameters share memory, as after ``a.data = b.data``.

        The engine would update each by itself; in plain PyTorch each update changes both.
        """
        seen: dict[int, list[int]] = {}
        for index, loan in self._loans.items():
            if self._parts.groups[index] is not None:
                seen.setdefault(torch_private.storage_key(loan.copy), []).append(index)
        for indices in seen.values():
            ends = 0
            for start, end, index in sorted((*self._span(i), i) for i in indices):
                if start < ends:
                    raise WeightError(
                        f"{self.name(index)} lies over the same memory as another trained "
                        "parameter (p.data = ...); tie parameters before wrap, or assign a copy"
                    )
                ends = end

    def _span(self, index: int) -> tuple[int, int]:
        copy = self._loans[index].copy
        first = int(copy.storage_offset()) * copy.element_size()
        return first, first + copy.nbytes

    def renew(self) -> None:
        """Refresh all lent copies from the weights, and discard changes made to them."""
        self._onloaded_units.forget_changed(self._onloaded_units.changed())
        self._forget()
        for index, loan in list(self._loans.items()):
            self._renew(index, loan)

    def _forget(self) -> None:
        """Drop copies that only loans refer to.  If two parameters share one copy, keep it."""
        keys = {i: torch_private.storage_key(loan.copy) for i, loan in self._loans.items()}
        lent = Counter(keys.values())
        starts = Counter((keys[i], loan.copy.data_ptr()) for i, loan in self._loans.items())
        over = [i for i, loan in self._loans.items()
                if torch_private.is_alone(loan.copy, lent[keys[i]] - 1)
                and starts[keys[i], loan.copy.data_ptr()] == 1]  # fmt: skip
        for index in over:
            del self._loans[index]

    def _renew(self, index: int, loan: Loan) -> None:
        overwrite(loan.copy, self._read(index))
        self._same(index, loan)

    def _same(self, index: int, loan: Loan) -> None:
        loan.watched.accept()
        loan.version = self._now(index)

    # -- writing --------------------------------------------------------------------------------

    def write(self, index: int, value: torch.Tensor) -> None:
        """Replace one parameter's weight and its master."""
        self.write_all({index: value})

    def write_all(self, values: Mapping[int, torch.Tensor]) -> None:
        """Write weights, and their exact masters, by parameter index.

        Raises:
            OffloadError: a unit among them runs, or this step's backward has updated it already.
        """
        self.reconcile(compare={self._parts.unit_of[index] for index in values})
        others = {i: value for i, value in values.items() if not self._is_lent(i, value)}
        if others:  # ``reconcile`` has written the lent ones
            self._write(others)

    def load_all(self, values: Reads, *, lost: Container[int] = ()) -> None:
        """Write weights unit by unit, reading each by a call.  ``lost``: see ``replacing``.

        Raises:
            OffloadError: the model runs, or this step's backward has updated a unit already.
        """
        self.reconcile(compare={self._parts.unit_of[index] for index in values})
        fixed, parts = self._executor.layout.unchangeable, dict[int, list[int]]()
        for index in sorted(values, key=self._parts.unit_of.__getitem__):
            if (unit := self._parts.unit_of[index]) in fixed:
                self.require_same(index, values[index]().detach())
            else:
                parts.setdefault(unit, []).append(index)
        self.require_writable(parts)

        def value_of(spec: ParamSpec) -> Values | None:
            read = values.get(spec.index)
            return read and replacing(read().detach(), lost=spec.index in lost)

        self._fill(parts, value_of)
        self.renew()

    def replace(self, index: int, value: torch.Tensor) -> None:
        """Implement ``p.data = value``: later writes to ``value`` are writes to the weight.

        Tensors over the previous data keep their values and are no longer connected to the weight.
        """
        self._begin(self._parts.unit_of[index])
        self._in_dicts.drop_over(value)  # it is the weight from now on
        loan = self._loans.pop(index, None)
        try:
            self._write({index: value})
        except BaseException:
            if loan is not None:
                self._loans[index] = loan
            raise
        self.lend(index, value)

    def require_writable(self, units: Iterable[int]) -> None:
        """Raise ``OffloadError`` if a unit runs, or this step's backward has updated it already."""
        self.before_use()
        self._forward_stack.tidy()
        for unit in units:
            if self._onloaded_units.uses[unit]:
                name = self._parts.units[unit].name
                raise WeightError(
                    f"weights of unit {name!r} cannot be changed while its forward or backward "
                    "runs, as in a hook; change them between backward() and step(), or let the "
                    "wrapped optimizer update them in backward (update='backward')"
                )
            self._resident_guard.refuse_edit(unit)

    def require_same(self, index: int, value: torch.Tensor, by: str = "") -> None:
        """Raise ``OffloadError`` if a weight that cannot be changed would get another value.

        ``by`` names what would change it, for the message.
        """
        if self._parts.unit_of[index] not in self._executor.layout.unchangeable:
            return
        weight = self._copy(index)
        if not torch.equal(value.to(weight.device, weight.dtype), weight):
            unit = self._parts.units[self._parts.unit_of[index]]
            own = unit.packed and not is_from_files(unit)
            why = "kept in the format of frozen=" if own else "read in place from files of weights="
            raise WeightError(
                f"{self.name(index)} is not trained, and is {why}, so it cannot be changed{by}; "
                "leave that option out and load the model before wrap, or overspill.unwrap(model) "
                "first; merge adapters inside overspill.materialized(model)"
            )

    def _is_lent(self, index: int, value: torch.Tensor) -> bool:
        loan = self._loans.get(index)
        return loan is not None and torch_private.same_memory(loan.copy, value)

    def _write(
        self, values: Mapping[int, torch.Tensor],
        before: Mapping[int, torch.Tensor | None] | None = None,
    ) -> None:  # fmt: skip
        """Write weights; ``before`` has old values of weights that modules changed in place."""
        self._executor.health.check()
        fixed = self._executor.layout.unchangeable
        for index in values:
            self.require_same(index, values[index].detach())
        values = {i: v for i, v in values.items() if self._parts.unit_of[i] not in fixed}
        parts: dict[int, list[int]] = {}
        for index in sorted(values, key=self._parts.unit_of.__getitem__):
            parts.setdefault(self._parts.unit_of[index], []).append(index)
        units = list(parts)
        self.require_writable(units)
        # Values that are themselves lazy are read now, before all transfers stop.
        given = {index: value.detach() for index, value in values.items()}
        before, end_graphs = before or {}, before is None
        unknown = {index for index, was in before.items() if was is None}
        self._fill(parts, values_by_spec(given, before), end_graphs=end_graphs, unknown=unknown)
        for index, loan in self._loans.items():
            if self._parts.unit_of[index] not in units:
                continue
            if index in given and not torch_private.same_memory(loan.copy, given[index]):
                overwrite(loan.copy, given[index])
            self._same(index, loan)

    @torch_private.without_grad
    def _fill(
        self, parts: Mapping[int, list[int]], value_of: Callable[[ParamSpec], Values | None],
        *, end_graphs: bool = True, unknown: Container[int] = (),
    ) -> None:  # fmt: skip
        with self._edits.of(parts) as spoil:
            for unit, indices in parts.items():
                if not self._contents.load(unit, value_of, first=False, unknown=unknown):
                    spoil(unit)
                if end_graphs:
                    self._resident_guard.changed(unit, indices)


_AMID_READING = tuple(
    f.__code__ for f in (ParamAccess._read, ParamAccess.compute, ParamAccess.address)
)
overwrite = torch_private.without_grad(torch.Tensor.copy_)
