"""The optimizer's state in torch's own format: read from the engine and loaded into it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import OptimizerStateError
from ..movement.runtime import Runtime
from ..optim.averaged import AVERAGE, check_kept
from ..optim.streamed import RECORD, StreamedRule
from ..params.resident_param_guard import ResidentParamGuard
from ..schedule.units import ParamSpec
from .averages import Averages, first_averages
from .contents import STATE, Contents
from .edits import Edits
from .lent_copies import LentCopies
from .param_access import ParamAccess, overwrite
from .state_matching import NAMES, Given, check_values, matched
from .streamed_state import StreamedState, master_key, own_state

Groups = Sequence[dict[str, Any]]
Make = Callable[[str, tuple[int, ...], Callable[[], torch.Tensor]], Any]


class OptimizerState:
    """The optimizer state of all parameters, read on demand and replaceable."""

    def __init__(
        self,
        model: nn.Module,
        groups: Groups,
        runtime: Runtime,
        contents: Contents,
        weights: ParamAccess,
        resident_guard: ResidentParamGuard,
        edits: Edits,
        averages: Averages,
        quiesce: Callable[[], None],
    ) -> None:
        """
        Args:
            quiesce: waits for all updates and transfers.
        """
        self._model, self._groups, self._contents = model, groups, contents
        self._parts, self._steps = runtime.parts, runtime.ledger.steps
        self._blueprint = runtime.blueprint
        self._streamed = StreamedState(runtime.blueprint, contents)
        self._weights, self._resident_guard, self._edits = weights, resident_guard, edits
        self.averages, self._quiesce = averages, quiesce
        self._ledger = runtime.ledger
        self._edited = Counter[tuple[int, str]]()  # edits of each tensor of state
        self._loaded = 0  # how often all state was loaded
        self._held: LentCopies[tuple[int, str]] = LentCopies()
        self._in_dicts: LentCopies[tuple[int, str]] = LentCopies()
        self._index = {id(p): i for i, p in enumerate(self._parts.parameters)}

    # -- one parameter --------------------------------------------------------------------------

    def has(self, p: object) -> bool:
        """Return whether a parameter has taken a step."""
        index = self._index.get(id(p))
        return index is not None and self._steps[index] > 0

    def those_that_have(self) -> list[torch.Tensor]:
        """Return the parameters that have taken a step."""
        return [p for p in self._parts.parameters if self.has(p)]

    def index_of(self, p: object) -> int:
        """Return the index of a trained parameter.

        Raises:
            KeyError: the engine does not train such a parameter.
        """
        index = self._index.get(id(p))
        if index is None or self._blueprint.rule_of(index) is None:
            raise KeyError(p)
        return index

    def _read(self, index: int) -> dict[str, Any]:
        self._quiesce()
        found = dict(self._contents.stored(*self._chunk_of(index))[index])
        found.pop("master", None)
        if RECORD in found:
            return self._streamed.read(index, found[RECORD])
        return {"step": _count(self._steps[index]), **found}

    # -- copies that users have -----------------------------------------------------------------

    def lend(self, index: int) -> dict[str, Any]:
        """Return copies of a parameter's state; the previous ones if still referenced.

        See Note [Copies in state dicts].
        """
        self.write_back({index})
        held = {
            copy.key: copy.tensor for copy in self._held
            if copy.version == self._version(*copy.key)
        }  # fmt: skip
        found = self._read(index)
        own = {id(value): name for name, value in found.items()}
        for name, value in self._streamed.tracked(index, found).items():
            tensor = held.get((index, name)) if id(value) in own else None
            if tensor is None:
                version = self._version(index, name)
                self._held.add((index, name), value, version, by_bits=True)
            else:
                found[own[id(value)]] = tensor
        self._streamed.lend(index, found, self._version(index, RECORD))
        return found

    def adopt(self, index: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the contents of ``state[p]`` after ``values`` were written to it.

        As in PyTorch, these are the given tensors themselves if they are fp32, else copies.
        """
        if self._streamed.has(index):
            return self.lend(index)
        for name, value in values.items():
            self._held.drop((index, name))
            if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
                version = self._version(index, name)
                self._held.add((index, name), value, version, by_bits=True)
        return self.lend(index)

    def _version(self, index: int, name: str) -> tuple[int, ...]:
        """Return a value that differs once the engine's own tensor of state has changed.

        Edits of a weight change its master, and no other state.
        """
        unit, ledger = self._parts.unit_of[index], self._ledger
        edits = self._edited[index, name] + self._edited[index, RECORD]
        edits += ledger.edits[index] if name == "master" else 0
        return ledger.updates[unit], ledger.returns, self._loaded, edits

    def write_copies(self) -> None:
        """Call ``write_back`` and compare the bits of all copies, because the model runs next."""
        self.write_back(range(len(self._steps)))
        self._in_dicts.stop_comparing()

    def write_back(self, compare: Container[int] = ()) -> None:
        """Write state that was changed in place in copies.

        Args:
            compare: parameters whose copies in state dicts are compared by their bits.

        Raises:
            OffloadError: a copy was changed after a step, or an edit, had changed the state itself.
        """
        for index, state in self._streamed.changed_trees(self._version):
            self.write({index: state}, whole=True)
        if not (self._held or self._in_dicts):
            return
        changed = [*self._in_dicts.changed(lambda key: key[0] in compare), *self._held.changed()]
        late = [copy for copy in changed if copy.version != self._version(*copy.key)]
        if late:
            for copy in late:
                copy.accept(self._version(*copy.key))
            index, name = late[0].key
            raise OptimizerStateError(
                f"{name!r} of the state of {self._parts.names[index]!r} was changed in place in a "
                "copy from before the last step, and the change is lost; take optimizer.state[p] "
                "or optimizer.state_dict() again after a step, and change that"
            )
        for unit in sorted({self._parts.unit_of[copy.key[0]] for copy in changed}):
            # An interrupt leaves units that are not written yet to the next call.
            mine = [copy for copy in changed if self._parts.unit_of[copy.key[0]] == unit]
            values: dict[int, dict[str, Any]] = {}
            for copy in mine:
                values.setdefault(copy.key[0], {})[copy.key[1]] = copy.tensor
            self.write({i: v for i, v in values.items() if not self._streamed.has(i)})
            self._edit({i: v for i, v in values.items() if self._streamed.has(i)})
            for copy in mine:
                copy.accept(self._version(*copy.key))

    def forget_changes(self) -> None:
        """Discard changes in copies, because the state is about to be restored from a commit."""
        self._in_dicts.forget()
        for copy in self._held.changed():
            copy.accept(None)

    def renew(self) -> None:
        """Update copies that users kept over a step, because in PyTorch they are the state."""
        for copy in self._held:
            if copy.alone or copy.tensor is None:
                continue
            index, name = copy.key
            if copy.version != (version := self._version(index, name)):
                now = self._streamed.tracked(index, self._read(index)).get(name)
                if now is None or now.shape != copy.tensor.shape:
                    continue  # a streamed optimizer has replaced it, as in PyTorch
                overwrite(copy.tensor, now)
                copy.accept(version)

    def write(self, values: Mapping[int, Mapping[str, Any]], *, whole: bool = False) -> None:
        """Set values of the state of parameters, by index and name; other values stay.

        Args:
            whole: requires all values of these parameters.

        Raises:
            ValueError: a name is unknown, or a shape differs; nothing changed.
        """
        made: dict[int, Mapping[str, Any]] = {}
        for index, given in values.items():
            if self._streamed.has(index):
                made[index] = self._streamed.as_record(
                    index, given if whole else {**self._read(index), **given}
                )
                self._edited[index, RECORD] += 1
            else:
                rule, p = self._blueprint.rule_of(index), self._parts.parameters[index]
                assert rule is not None
                check_values(self._parts.names[index], rule.moments, p.shape, given, whole=whole)
                made[index] = given
        self._edit(made)

    def reset(self, indices: Iterable[int]) -> None:
        """Reset parameters to empty state, as before their first step."""
        given: dict[int, Mapping[str, Any]] = {}
        for index in indices:
            rule, group = self._blueprint.rule_of(index), self._parts.groups[index]
            assert rule is not None and group is not None
            if self._streamed.has(index):
                given[index] = self._streamed.as_record(index, {})
                self._edited[index, RECORD] += 1
                continue
            starts, shape = rule.initial(self._groups[group]), self._parts.parameters[index].shape
            moments = {
                name: torch.full(shape, starts.get(name, 0.0), dtype=torch.float32, device="cpu")
                for name in rule.moments
            }
            given[index] = {"step": 0, **moments}
        self._edit(given)

    def _edit(self, values: Mapping[int, Mapping[str, Any]]) -> None:
        if values:
            self._weights.take_edits()  # writing a unit's state renews its weights on the device
        parts: dict[int, set[int]] = {}
        for index, given in values.items():
            edited = parts.setdefault(self._parts.unit_of[index], {STATE})
            if "master" in given:
                edited.add(index)

        def value_of(spec: ParamSpec) -> Mapping[str, torch.Tensor] | None:
            if (given := values.get(spec.index)) is None:
                return None
            if self._streamed.has(spec.index) and RECORD not in given:
                return {RECORD: self._streamed.with_tensors(spec.index, given)}
            return {
                "weight" if name == "master" else name: torch.as_tensor(value).detach()
                for name, value in given.items()
                if name != "step"
            }

        with self._edits.of(parts) as spoil:
            self.averages.forget()
            for unit, edited in parts.items():
                if not self._contents.load(unit, value_of, first=False):
                    spoil(unit)
                if len(edited) > 1:
                    self._resident_guard.changed(unit, edited)
            for index, given in values.items():
                self._edited.update((index, name) for name in given if name != RECORD)
                if "step" in given:
                    self._steps[index] = int(torch.as_tensor(given["step"]).item())

    def _chunk_of(self, index: int) -> tuple[int, int]:
        """Return a parameter's unit, and the number of its chunk there."""
        unit = self._parts.unit_of[index]
        for number, chunk in enumerate(self._parts.units[unit].chunks):
            if any(spec.index == index for spec in chunk.params):
                return unit, number
        raise AssertionError("every parameter is in a chunk of its unit")

    def call(self, method: str, groups: Groups) -> None:
        """Call ``train`` or ``eval`` of a streamed optimizer, which may change weights and state.

        Schedule-free optimizers move the weights between where gradients are taken and the average
        that is evaluated.

        Args:
            groups: the optimizer's; others may be of another optimizer.
        """
        self._weights.reconcile()
        self.write_back(range(len(self._steps)))
        own = [n for n, group in enumerate(self._groups) if any(group is each for each in groups)]
        rules = [(n, self._blueprint.rules[n]) for n in own]
        after = {n: r.group_after(method, self._groups[n])
                 for n, r in rules if isinstance(r, StreamedRule)}  # fmt: skip
        parts: dict[int, set[int]] = {}
        for index in (i for i, group in enumerate(self._parts.groups) if group in after):
            parts.setdefault(self._parts.unit_of[index], {STATE}).add(index)
        with self._edits.of(parts) as spoil:
            for unit, indices in parts.items():
                called = self._streamed.called(method, self._groups, unit, indices)
                if not self._contents.load(unit, called, first=False):
                    spoil(unit)
                self._resident_guard.changed(unit, indices)
            self._loaded += 1
            for number, values in after.items():
                self._groups[number].update(values)
        self._weights.renew()
        self.renew()

    # -- all ------------------------------------------------------------------------------------

    def to_torch(self) -> dict[str, Any]:
        """Return the state in the format of ``torch.optim.Optimizer.state_dict``.

        Parameters that have taken a step have fp32 moments, and the exact ``master`` if their
        weight has one; those of streamed optimizers their own state, and ``overspill.master``.
        ``"param_names"`` has the parameter names of each group, so that the state can be loaded
        after the model has changed.
        """
        self.write_back(range(len(self._steps)))
        made = self.streamed(lambda name, shape, read: read())
        numbered = [p for group in self._groups for p in group["params"]]
        for number, values in made["state"].items():
            index = self._index[id(numbered[number])]
            made["state"][number] = found = OrderedDict(values)
            lent = [
                self._in_dicts.add((index, name), value, self._version(index, name))
                for name, value in self._streamed.tracked(index, found).items()
            ]
            self._in_dicts.add_all(found, lent)
        made[NAMES] = self._names()
        return made

    def _names(self) -> list[list[str]]:
        """Return the names of all parameters, by group."""
        name_of = {id(p): name for name, p in self._model.named_parameters()}
        for p, name in zip(self._parts.parameters, self._parts.names, strict=True):
            name_of[id(p)] = name
        return [[name_of.get(id(p), "") for p in group["params"]] for group in self._groups]

    def streamed(self, make: Make) -> dict[str, Any]:
        """Build the result of ``to_torch`` with values that ``make`` returns instead of tensors.

        ``make`` receives a tensor's name and shape, and a function that reads it in fp32.  That
        function works until training goes on, and is fastest if called in the order of the calls of
        ``make``.
        """
        last: dict[tuple[int, int], dict[int, dict[str, torch.Tensor]]] = {}

        def read(index: int, name: str) -> torch.Tensor:
            chunk = self._chunk_of(index)
            if chunk not in last:
                last.clear()
                self._quiesce()  # weights may have been read in between, which uses memory
                last[chunk] = self._contents.stored(*chunk)
            return last[chunk][index][name]

        state: dict[int, dict[str, Any]] = {}
        start, kept = 0, []
        for group, rule in zip(self._groups, self._blueprint.rules, strict=True):
            for number, p in enumerate(group["params"], start):
                index = self._index.get(id(p))
                if index is None or not self._steps[index]:
                    continue
                names = {name: name for name in rule.moments}
                if self._contents.has_master(*self._chunk_of(index)):
                    names[master_key(rule)] = "master"
                count = {"step": _count(self._steps[index])}
                own = self._read(index) if isinstance(rule, StreamedRule) else count
                state[number] = own | {
                    key: make(f"{number}.{name}", tuple(p.shape), partial(read, index, name))
                    for key, name in names.items()
                }
            kept.append({**group, "params": list(range(start, start + len(group["params"])))})
            start += len(group["params"])
        return {"state": state, "param_groups": kept}

    def from_torch(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of ``to_torch`` or of torch's own ``state_dict``.

        Raises:
            ValueError: groups, names or tensor shapes differ; nothing was changed.
        """
        groups = self._groups
        given, loaded_groups = matched(self._model, groups, self._names(), state_dict)
        self._check_shapes(given)
        for rule, group, loaded in zip(self._blueprint.rules, groups, loaded_groups, strict=True):
            check_kept(rule, {**group, **loaded})
            rule.scalars({**group, **loaded}, 1)
        self._weights.take_edits()
        self._weights.reconcile()
        self._fill(given, loaded_groups)
        self.renew()

    def _given(self, given: Given, index: int) -> Mapping[str, Any]:
        return given.get(id(self._parts.parameters[index]), {})

    def _fill(self, given: Given, loaded_groups: Groups) -> None:
        trained = [unit for unit in self._parts.units if unit.trainable]
        parts = {
            unit.index: {
                STATE,
                *(
                    p.index
                    for _, p in unit.params
                    if master_key(self._blueprint.rule_of(p.index)) in self._given(given, p.index)
                ),
            }
            for unit in trained
        }
        with self._edits.of(parts) as spoil:
            self.averages.forget()
            self._in_dicts.forget()
            self._loaded += 1
            for unit in trained:
                averages = first_averages(
                    self._blueprint, self._contents, unit, partial(self._given, given)
                )
                values = self._values(given, averages)
                if not self._contents.load(unit.index, values, first=False):
                    spoil(unit.index)
                if len(parts[unit.index]) > 1:
                    self._resident_guard.changed(unit.index, parts[unit.index])
            for index in range(len(self._parts.parameters)):
                own = self._blueprint.rule_of(index)
                taken = 0 if own is None else own.steps_taken(self._given(given, index))
                self._steps[index] = taken
            for group, loaded in zip(self._groups, loaded_groups, strict=True):
                others = {k: v for k, v in loaded.items() if k not in ("params", "param_names")}
                group.update(others)

    def _check_shapes(self, all_given: Given) -> None:
        for index, p in enumerate(self._parts.parameters):
            rule, given = self._blueprint.rule_of(index), all_given.get(id(p), {})
            if rule is None:  # not trained, so it has no state
                continue
            if isinstance(rule, StreamedRule):
                self._streamed.as_record(index, own_state(given, rule))
                continue
            known = {"step", "master", *rule.moments}
            for name in given:
                if name not in known:
                    raise ValueError(
                        f"the state has {name!r}; this optimizer's has {sorted(known)}"
                    )
                like = getattr(given, "like", None)  # values on disk are not read for this check
                value = given[name] if like is None else like(name)
                if isinstance(value, torch.Tensor) and value.dim() and value.shape != p.shape:
                    raise ValueError(
                        f"state {name!r} has shape {tuple(value.shape)}, expected {tuple(p.shape)}"
                    )

    def _values(
        self, all_given: Given, averages: Mapping[int, torch.Tensor]
    ) -> Callable[[ParamSpec], Mapping[str, torch.Tensor] | None]:
        """Return the function that gives ``Contents.load`` the values of each parameter.

        They are the loaded values, else an average's first value, else those the rule starts with.
        """

        def values(spec: ParamSpec) -> Mapping[str, torch.Tensor] | None:
            given = self._given(all_given, spec.index)
            group, rule = self._parts.groups[spec.index], self._blueprint.rule_of(spec.index)
            if group is None or rule is None:
                return None
            starts = rule.initial(self._groups[group])
            exact = given.get(master_key(rule))
            master = {} if exact is None else {"weight": exact}
            if isinstance(rule, StreamedRule):
                return master | {
                    RECORD: self._streamed.as_record(spec.index, own_state(given, rule))[RECORD]
                }

            def first(name: str) -> torch.Tensor:
                if name == AVERAGE and spec.index in averages:
                    weight: torch.Tensor = master.get("weight", averages[spec.index])
                    return weight
                start = starts.get(name, 0.0)
                return torch.full(spec.shape, start, dtype=torch.float32, device="cpu")

            return master | {
                name: first(name) if given.get(name) is None else given[name]
                for name in rule.moments
            }

        return values


def _count(steps: int) -> torch.Tensor:
    return torch.tensor(float(steps), dtype=torch.float32, device="cpu")
