"""Any torch optimizer as a rule: its own ``step`` runs on one parameter at a time.

See Note [Streamed optimizers].
"""

from __future__ import annotations

import copy
import math
import random
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .formats import Field, Master, Moments, WholeField, master_fields
from .rule import Rule, StepScalars
from .single_step import Group, bare, called, name_of, options_of, refresh, same_value, stepped
from .state_record import (
    RecordFormat,
    RecordFullError,
    Slot,
    UnknownClassError,
    classes_in,
    tensors_in,
)
from .whole import exact_weight, store_exact

# Note [Streamed optimizers]
# Most optimizers update a parameter from its own weight, gradient and state alone.  Such an
# optimizer needs no rule of ours: ``stepped`` makes a copy of it with one param group of one
# parameter, and calls its ``step``.  The parameter is a view of the fp32 weight or master, and
# large state tensors are views of the parameter's record (``state_record``).  A split master, and a
# gradient that is scaled or not fp32, need a temporary copy.
#
# Hyper-parameters are as the group had them when the step began.  Some optimizers write to the
# group (a step count, the sum of past learning rates), once per step for all its parameters.
# Copies of the group would lose this, so ``advance`` runs one more step, on a parameter of its own
# of a few elements, and the engine stores what that has changed in the user's group.
#
# ``streamed_trial`` finds out whether all this gives the same results as the optimizer itself: it
# trains some small parameters with gradients of very different sizes in both ways.  Optimizers that
# couple parameters, or draw random numbers from global generators, depend on the order of updates:
# see Note [Coupled optimizers].  Optimizers with state outside of ``state`` and ``param_groups``
# are refused.

RECORD = "record"
"""The field that holds all state of one parameter, as bytes; see ``state_record``."""

_SMALL = 2**16  # elements; the state of larger parameters is found without memory, if possible


@dataclass(frozen=True)
class StreamedScalars(StepScalars):
    """One step of a param group: the gradient's factor, and the group without ``params``."""

    group: Mapping[str, Any] = field(default_factory=dict)


class StreamedRule:
    """The rule of one param group of an optimizer whose parameters are updated independently.

    Attributes:
        coupled: whether all parameters must be stepped at once; see Note [Coupled optimizers].
        own: a copy of the optimizer without parameters and state.
        named: whether the group has names of its parameters.
        first_state: what the optimizer's constructor puts into the state of a parameter.
        options: the group's hyper-parameters for trials.
        dtypes: of tensors in the state of a parameter.
        classes: of objects in it.
    """

    whole = True
    coupled = False
    moments: tuple[str, ...] = ()

    def __init__(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
        self.name = name_of(optimizer)
        self._source = weakref.ref(optimizer)
        self.own = bare(optimizer, apart=True)
        self.named = "param_names" in group
        self.first_state = _first_state(optimizer, group)
        self.options = self.group_after("train", group)
        lr = self.options.get("lr")
        if lr is not None and not bool(lr):  # a warm-up from 0: the trial would see no change
            self.options["lr"] = self.options.get("initial_lr") or 0.01
        self._formats: dict[tuple[int, ...], RecordFormat] = {}
        self.classes: dict[tuple[str, str], type] = {}
        self.dtypes: set[torch.dtype] = set()
        self._scratch: dict[torch.device, Tensor] = {}
        self.steps_to_settle, self.finds_without_memory = 2, False

    # -- state ----------------------------------------------------------------------------------

    def state_fields(
        self, weight_dtype: torch.dtype, master: Master, moments: Moments,
        shape: tuple[int, ...] = (),
    ) -> tuple[Field, ...]:  # fmt: skip
        """The master's field, and one for everything else."""
        if moments != "fp32":
            raise ValueError(
                f"moments={moments!r} is not possible with {self.name}, whose own step() keeps its "
                "state; leave moments out"
            )
        fields = master_fields(weight_dtype, master)
        return (*fields, WholeField(RECORD, torch.uint8, shape=(self.format_of(shape).nbytes,)))

    def format_of(self, shape: tuple[int, ...]) -> RecordFormat:
        """Return the format of the state of a parameter of this shape."""
        if shape not in self._formats:
            with Quiet():
                self._formats[shape] = self._found(shape)
        return self._formats[shape]

    def keep_formats(self, formats: Mapping[tuple[int, ...], RecordFormat]) -> None:
        """Use formats that were found already, by shape."""
        self._formats.update(formats)

    def _found(self, shape: tuple[int, ...]) -> RecordFormat:
        if 0 in shape:
            return RecordFormat.of({})
        if math.prod(shape) > _SMALL and self.finds_without_memory:
            try:
                return self.formats_on("meta", shape, self.steps_to_settle)[-1]
            except Exception:  # an operation is not possible without memory
                pass
        return self.formats_on("cpu", shape, self.steps_to_settle)[-1]

    def formats_on(self, device: str, shape: tuple[int, ...], steps: int) -> list[RecordFormat]:
        """Return, after each of some steps, the format with room for the state until then.

        Args:
            device: ``"cpu"`` or ``"meta"``.
        """
        found = [RecordFormat.of({})]
        for state in self.steps_on(device, shape, steps):
            self.classes |= classes_in(state)
            self.dtypes |= {t.dtype for t in tensors_in(state)}
            found.append(found[-1].with_room_for(state))
        return found[1:]

    def steps_on(
        self, device: str, shape: tuple[int, ...], steps: int,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> Iterator[dict[str, Any]]:  # fmt: skip
        """Yield the state of a parameter after each of some steps.

        Args:
            device: ``"cpu"`` or ``"meta"``.
            around: each step runs inside a new one.
        """
        param, group = nn.Parameter(drawn(shape, 0, device)), self.options
        state = copy.deepcopy(self.first_state)
        for step in range(1, steps + 1):
            param.grad = drawn(shape, step, device)
            with Answers(), around():
                group = stepped(self.own, group, param, state, apart=True)
            yield state

    def read(self, record: Tensor, shape: tuple[int, ...]) -> dict[str, Any]:
        """Return the state in a record; its larger tensors are views of the record."""
        return self.format_of(shape).read(record, None, self.classes)[0]

    def stored(self, state: dict[str, Any], shape: tuple[int, ...]) -> Tensor:
        """Return a record with this state.

        Raises:
            ValueError: it does not fit.
        """
        form = self.format_of(shape)
        record = torch.zeros(form.nbytes, dtype=torch.uint8, device="cpu")
        try:
            form.write(record, state)
        except RecordFullError as error:
            raise ValueError(
                f"the given state of a parameter of shape {shape} takes {error.need} bytes, and "
                f"that of {self.name} takes {error.have}; give the state of an optimizer of the "
                "same class with the same options"
            ) from None
        return record

    def steps_taken(self, state: Mapping[str, Any]) -> int:
        step = state.get("step")
        known = isinstance(step, (int, float)) or (isinstance(step, Tensor) and step.numel() == 1)
        return int(step) if known else int(bool(state))  # type: ignore[arg-type]

    def initial(self, group: Mapping[str, Any]) -> dict[str, float]:
        return {}

    # -- steps ----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Take over attributes that the user has set on the optimizer."""
        if (source := self._source()) is not None:
            refresh(self.own, source)

    def scalars(
        self, group: Mapping[str, Any], step: int, grad_scale: float = 1.0
    ) -> StreamedScalars:
        return StreamedScalars(step, (grad_scale,), 0, self._with_names(group))

    def _with_names(self, group: Mapping[str, Any]) -> Group:
        return {**options_of(group), **({"param_names": []} if self.named else {})}

    def advance(self, group: Mapping[str, Any], *, active: bool) -> dict[str, Any]:
        """Return what one step of the optimizer sets in its group.

        Args:
            active: whether a parameter of the group has a gradient.
        """
        param = nn.Parameter(drawn((4, 4), 0, "cpu"))
        if active:
            param.grad = drawn((4, 4), 1, "cpu")
        before, state = options_of(group), copy.deepcopy(self.first_state)
        with Quiet():
            after = stepped(self.own, self._with_names(group), param, state, apart=True)
        return {k: v for k, v in after.items() if k not in before or not same_value(before[k], v)}

    def called(
        self, method: str, group: Mapping[str, Any], weight: Tensor, record: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Call ``train`` or ``eval`` of the optimizer, which may change weights.

        Args:
            weight: the exact weight, in fp32; it may be changed.

        Returns:
            The weight and the record after it.
        """
        param, form = nn.Parameter(weight), self.format_of(tuple(weight.shape))
        state, slots = form.read(record, param, self.classes)
        with Quiet(), torch.no_grad():
            called(self.own, method, self._with_names(group), param, state)
        form.write(record, state, param, slots)
        return param.detach(), record

    def group_after(self, method: str, group: Mapping[str, Any]) -> Group:
        """Return a group's hyper-parameters after ``train`` or ``eval``."""
        with Quiet():
            none = nn.Parameter(torch.zeros(0))
            return called(self.own, method, self._with_names(group), none, {})

    def update(
        self, grad: Tensor, weight: Tensor, state: Mapping[str, Tensor], scalars: StepScalars,
        position: int = 0,
    ) -> bool:  # fmt: skip
        """Run the optimizer's step on a parameter; ``grad`` and ``weight`` have its shape."""
        assert isinstance(scalars, StreamedScalars)
        param = nn.Parameter(exact_weight(weight, state).detach())
        param.grad = self._scaled(grad, scalars.coefficients[0])
        record = state[RECORD]
        values, slots = self.format_of(tuple(weight.shape)).read(record, param, self.classes)
        stepped(self.own, scalars.group, param, values)
        self.write_record(record, values, param, slots)
        return store_exact(param.detach(), weight, state)

    def write_record(
        self, record: Tensor, values: dict[str, Any], param: nn.Parameter, slots: list[Slot]
    ) -> None:
        """Store the state of a parameter after a step.

        Args:
            slots: see ``RecordFormat.write``.

        Raises:
            RuntimeError: it does not fit.
        """
        with self._named_errors(tuple(param.shape)) as form:
            form.write(record, values, param, slots, self.classes)

    def check_record(self, values: dict[str, Any], param: nn.Parameter) -> None:
        """Raise what ``write_record`` would raise."""
        with self._named_errors(tuple(param.shape)) as form:
            form.check(values, param, self.classes)

    @contextmanager
    def _named_errors(self, shape: tuple[int, ...]) -> Iterator[RecordFormat]:
        try:
            yield self.format_of(shape)
        except UnknownClassError as error:
            raise RuntimeError(
                f"the state that {self.name} keeps of a parameter of shape {shape} now has an "
                f"object of {error}, which it had not when wrap tested it; a resumed run could not "
                "read it. If an option was changed since wrap, resume the last commit with an "
                "optimizer that has it"
            ) from None
        except RecordFullError as error:
            raise RuntimeError(
                f"the state that {self.name} keeps of a parameter of shape {shape} has grown to "
                f"{error.need} bytes; overspill found {error.have} bytes before training, and "
                "cannot move more. If an option was changed since wrap, resume the last commit "
                "with an optimizer that has it, and nvme= with another folder"
            ) from None

    def _scaled(self, grad: Tensor, scale: float) -> Tensor:
        """Return a gradient in fp32, times a factor.

        It shares the gradient's memory if nothing is to convert: an optimizer may change it in
        place, as in PyTorch.
        """
        if scale == 1.0 and grad.dtype == torch.float32:
            return grad.detach()
        kept = self._scratch.get(grad.device)
        if kept is None or kept.numel() < grad.numel():
            kept = torch.empty(grad.numel(), dtype=torch.float32, device=grad.device)
            self._scratch[grad.device] = kept
        scaled = kept[: grad.numel()].as_strided(grad.shape, grad.stride())
        return scaled.copy_(grad).mul_(scale)


def share_scratch(rules: Iterable[Rule]) -> None:
    """Let the rules of one engine, which are never used at the same time, share one copy of a
    gradient.

    It is as large as the largest gradient; see ``WholeUpdates.memory``.
    """
    scratch: dict[torch.device, Tensor] = {}
    for rule in rules:
        if isinstance(rule, StreamedRule):
            rule._scratch = scratch


def _first_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an optimizer's constructor puts into the state of a parameter, such as a seed."""
    largest = max(group["params"], key=Tensor.numel, default=None)
    state = dict(optimizer.state.get(largest, {})) if largest is not None else {}
    trained = any(t.numel() > 1 for t in tensors_in(state)) or float(state.get("step", 0)) > 0
    return {} if trained else copy.deepcopy(state)


def drawn(shape: tuple[int, ...], seed: int, device: str) -> Tensor:
    """Return numbers of a normal distribution, the same for the same seed; none on ``"meta"``."""
    if device == "meta":
        return torch.empty(shape, dtype=torch.float32, device="meta")
    draw = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu")


Generators = tuple[Any, Any, Tensor]


def generators() -> Generators:
    """Return the states of the global random generators."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def restore(states: Generators) -> None:
    """Set the global random generators."""
    python, numpys, torchs = states
    random.setstate(python)
    np.random.set_state(numpys)
    torch.set_rng_state(torchs)


class Quiet(ExitStack):
    """Ignores warnings of optimizers and the user's default device, and draws no random numbers.

    That is, the global generators are then as before.
    """

    def __enter__(self) -> Quiet:
        self.enter_context(warnings.catch_warnings())
        self.enter_context(torch.device("cpu"))
        self.callback(restore, generators())
        warnings.simplefilter("ignore")
        return self


class Answers(TorchFunctionMode):
    """Returns placeholders when code asks tensors on ``meta`` for values.

    Values rarely decide about the size of the state.  A loop may wait for one, and then raises.
    """

    def __init__(self) -> None:
        super().__init__()
        self._left = _MOST_ANSWERS

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _ASKS and isinstance(args[0], Tensor) and args[0].is_meta:
            self._left -= 1
            if self._left < 0:
                raise RuntimeError("a step asks for too many values")
            return _ASKS[func]
        return func(*args, **(kwargs or {}))


_MOST_ANSWERS = 1000  # of one step
_ASKS = {
    Tensor.item: 1.0, Tensor.__bool__: False, Tensor.__float__: 1.0, Tensor.__int__: 1,
    Tensor.__index__: 1,
}  # fmt: skip
