"""Functions of logits, computed for some tokens at a time; see Note [Logits in chunks]."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional

from ..errors import ModelError
from ..params.param_handle import PlaceholderParam, known
from ..private import torch_private

# Note [Logits in chunks]
# The logits of T tokens over a vocabulary of V take T x V elements, and a loss in fp32 needs
# several tensors of that size.  A ``Head`` returns ``DeferredLogits`` instead: a tensor without
# values that knows the hidden states.  Functions that treat each token on its own, such as a cross
# entropy or the log-probability of one token, then run chunk by chunk, and no chunk is kept.
# Anything else gets ordinary logits, computed at once and with their graph.
#
# A sum over tokens is differentiated chunk by chunk in forward already, since its own gradient is
# only a factor; so the product with the head's weight runs once.  A function with a result per
# token computes its logits again in backward.  So do sums in fp16, whose gradients may be too small
# for fp16 before a loss scale is applied.
#
# The head's module does not run for a chunk: its weight is read as by any code outside of it, and
# its unit stays onloaded until the last chunk.
#
# The size of a chunk depends on shapes alone: results are the same under other budgets.

CHUNK_BYTES = 256 << 20  # of a chunk's logits in fp32
LEAST_TOKENS = 128  # of a chunk; the product with the weight is slow for fewer
SLICE_BYTES = 32 << 20  # of the part of the weight's gradient, in fp32, that is added at once

T = TypeVar("T")
Step = Callable[[torch.Tensor], torch.Tensor]  # of logits (tokens, V), to the same shape
Function = Callable[..., torch.Tensor]  # of logits (tokens, V) and rows, to (tokens, ...)


def chunk_tokens(vocabulary: int) -> int:
    """Return the number of tokens whose logits are computed at once."""
    return max(LEAST_TOKENS, CHUNK_BYTES // (4 * vocabulary))


@dataclass(frozen=True)
class Source:
    """What logits are computed from.

    Attributes:
        head: the linear layer.
        hidden: its input ``(..., H)``.
        steps: applied to its output one after the other.
        dtype: of the logits after the steps.
        autocast: the dtype of autocast when the head was called, or ``None``.
        version: returns a number that changes with the weights of the head.
        versions: those of the weights and of ``hidden`` when the head was called.
        trains: whether gradients reach the head.
    """

    head: nn.Linear
    hidden: torch.Tensor
    steps: tuple[Step, ...]
    dtype: torch.dtype
    autocast: torch.dtype | None
    version: Callable[[], int]
    versions: tuple[int, int]
    trains: bool = True

    @property
    def trained(self) -> list[torch.Tensor]:
        """The parameters of the head that get gradients."""
        found = (self.head.weight, self.head.bias) if self.trains else ()
        return [p for p in found if p is not None and p.requires_grad]

    def call(self, run: Callable[[], T]) -> T:
        """Return what ``run`` computes with the weights of the head."""
        self.require_unchanged()
        return _reading(self.head.weight, run)

    def require_unchanged(self) -> None:
        """Raise ``ModelError`` if the weights or the hidden states have changed."""
        if self.versions != (self.version(), torch_private.version_of(self.hidden)):
            raise ModelError(
                "loss='chunked' has not computed these logits yet, and the weights of the head or "
                "its input have changed meanwhile; use logits before step(), or leave loss out"
            )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output of the head, before the steps."""
        return self._casting(lambda: functional.linear(hidden, self.head.weight, self.head.bias))

    def after_steps(self, logits: torch.Tensor, last: Callable[[torch.Tensor], T]) -> T:
        """Return what ``last`` makes of the logits after all steps."""

        def run() -> T:
            made = logits
            for step in self.steps:
                made = step(made)
            return last(made)

        return self._casting(run)

    def _casting(self, run: Callable[[], T]) -> T:
        kind = self.hidden.device.type
        if autocast_dtype(kind) == self.autocast:
            return run()
        with torch.autocast(kind, self.autocast, enabled=self.autocast is not None):
            return run()


def _reading(weight: torch.Tensor, run: Callable[[], T]) -> T:
    """Return what ``run`` computes with a weight, which may be offloaded.

    The weight of a head that is tied to an embedding belongs to the embedding's unit.
    """
    if isinstance(weight, PlaceholderParam):
        mine = known(weight)
        found = mine.access.compute({mine.index}, run)
        if found is not NotImplemented:
            return found  # type: ignore[no-any-return]
    return run()


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype of the current autocast, or ``None``."""
    on = torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if on else None


def ordinary(source: Source) -> torch.Tensor:
    """Return ordinary logits, with their graph."""
    return source.call(lambda: source.after_steps(source.logits(source.hidden), lambda made: made))


def per_token(source: Source, function: Function, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``function(logits, *rows)`` of all tokens, shape ``(tokens, ...)``.

    Args:
        rows: tensors with a row for each token; they get no gradient.
    """
    work = _Work(source, function, tuple(row.clone() for row in rows))
    found: torch.Tensor = source.call(lambda: _PerToken.apply(work, source.hidden, *source.trained))
    return found


def total(
    source: Source, function: Function, rows: Sequence[torch.Tensor], count: torch.Tensor | None
) -> torch.Tensor:
    """Return the sum over all tokens of ``function(logits, *rows)``, divided by ``count``.

    Args:
        function: returns one number per token.
        rows: see ``per_token``.
    """
    if torch.float16 in (source.autocast, source.hidden.dtype):
        values = per_token(source, function, rows)
        summed = values.sum(dtype=torch.promote_types(values.dtype, torch.float32))
        return (summed if count is None else summed / count).to(values.dtype)
    work = _Work(source, function, tuple(row.clone() for row in rows))
    found: torch.Tensor = source.call(
        lambda: _Total.apply(work, count, source.hidden, *source.trained)
    )
    return found


def joined(source: Source, made: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return ``made()`` as logits of a graph, whose gradient comes from code that the deferred
    logits do not see, such as a ``torch.autograd.Function``."""
    work = _Work(source, lambda logits: logits, ())
    found: torch.Tensor = _Joined.apply(work, made, source.hidden, *source.trained)
    return found


@dataclass(frozen=True)
class _Work:
    """A function of logits, chunk by chunk."""

    source: Source
    function: Function
    rows: tuple[torch.Tensor, ...]

    def chunks(self) -> Iterator[tuple[slice, torch.Tensor, tuple[torch.Tensor, ...]]]:
        """Yield tokens with their hidden states and rows."""
        hidden = _flat(self.source.hidden)
        size = chunk_tokens(self.source.head.out_features)
        for start in range(0, max(1, len(hidden)), size):
            part = slice(start, start + size)
            yield part, hidden[part], tuple(row[part] for row in self.rows)

    def values(self) -> list[torch.Tensor]:
        """Return the function of each chunk."""
        return [self._value(self.source.logits(hidden), rows) for _, hidden, rows in self.chunks()]

    def _value(self, logits: torch.Tensor, rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self.source.after_steps(logits, lambda made: self.function(made, *rows))

    def differentiated(
        self, hidden: torch.Tensor, rows: tuple[torch.Tensor, ...],
        gradient: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return the function of a chunk, and the gradient of the head's output.

        Args:
            gradient: returns the gradient of a value of the function.
        """

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.source.logits(hidden)
            with torch.enable_grad():
                value = self._value(logits.requires_grad_(), rows)
            (found,) = torch.autograd.grad(value, logits, gradient(value.detach()))
            return value.detach(), found

        return torch_private.without_saved_tensor_hooks(run)


def _flat(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.detach().reshape(-1, hidden.shape[-1])


class _Gradients:
    """The gradients of hidden states, weight and bias, summed over chunks."""

    def __init__(self, source: Source, needs: Sequence[bool]) -> None:
        self._source, self._head = source, source.head
        hidden = _flat(source.hidden)
        self._hidden = torch.empty_like(hidden) if needs[0] else None
        self._trained = source.trained
        one = len(hidden) <= chunk_tokens(source.head.out_features)
        self._sums: dict[int, torch.Tensor] = {}
        for p, needed in zip(self._trained, needs[1:], strict=True):
            dtype = p.dtype if one else torch.promote_types(p.dtype, torch.float32)
            if needed:
                self._sums[id(p)] = torch.zeros(p.shape, dtype=dtype, device=hidden.device)

    def add(self, part: slice, hidden: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add those of a chunk; ``gradient``: that of the head's output."""
        head, dtype = self._head, gradient.dtype
        if self._hidden is not None:
            self._hidden[part] = gradient @ head.weight.detach().to(dtype)
        weight = self._sums.get(id(head.weight))
        if weight is not None:
            hidden, few = hidden.to(dtype), max(1, SLICE_BYTES // (4 * head.in_features))
            for sums, of_few in zip(weight.split(few), gradient.split(few, 1), strict=True):
                if sums.dtype == dtype:
                    sums.addmm_(of_few.T, hidden)
                else:
                    sums += of_few.T @ hidden
        bias = None if head.bias is None else self._sums.get(id(head.bias))
        if bias is not None:
            bias += gradient.sum(0, dtype=bias.dtype)

    def found(self) -> list[torch.Tensor | None]:
        """Return the gradient of the hidden states, and those of ``Source.trained``."""
        hidden = self._hidden
        sums = [(p, self._sums.pop(id(p), None)) for p in self._trained]
        return [
            None if hidden is None else hidden.view(self._source.hidden.shape),
            *(None if each is None else each.to(p.dtype) for p, each in sums),
        ]


class _PerToken(torch.autograd.Function):
    """A function with a result per token."""

    @staticmethod
    def forward(ctx: Any, work: _Work, hidden: torch.Tensor, *_trained: torch.Tensor) -> Any:
        ctx.work = work
        return torch.cat(work.values())

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:  # type: ignore[override]
        _refuse_graph()
        return None, *_again(ctx.work, given, ctx.needs_input_grad[1:])


class _Joined(torch.autograd.Function):
    """Logits whose values are computed elsewhere."""

    @staticmethod
    def forward(
        ctx: Any, work: _Work, made: Callable[[], torch.Tensor], hidden: torch.Tensor,
        *_trained: torch.Tensor,
    ) -> Any:  # fmt: skip
        ctx.work = work
        return made()

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:  # type: ignore[override]
        _refuse_graph()
        given = given.reshape(-1, given.shape[-1])
        return None, None, *_again(ctx.work, given, ctx.needs_input_grad[2:])


def _refuse_graph() -> None:
    """Raise ``ModelError`` in a backward that is itself differentiated."""
    if torch.is_grad_enabled():
        raise ModelError(
            "loss='chunked' has no second derivatives (create_graph=True); leave loss out"
        )


def _again(work: _Work, given: torch.Tensor, needs: Sequence[bool]) -> list[torch.Tensor | None]:
    """Return the gradients, of logits that are computed again; ``given``: of the function."""

    def run() -> list[torch.Tensor | None]:
        gradients = _Gradients(work.source, needs)
        for part, hidden, rows in work.chunks():
            _, found = work.differentiated(hidden, rows, partial(_given, given[part]))
            gradients.add(part, hidden, found)
        return gradients.found()

    return work.source.call(run)


def _given(gradient: torch.Tensor, _value: torch.Tensor) -> torch.Tensor:
    return gradient


class _Total(torch.autograd.Function):
    """A sum over tokens, whose gradients are computed in forward."""

    @staticmethod
    def forward(
        ctx: Any, work: _Work, count: torch.Tensor | None, hidden: torch.Tensor,
        *_trained: torch.Tensor,
    ) -> Any:  # fmt: skip
        needs = ctx.needs_input_grad[2:]
        if any(needs):
            values, gradients = _with_gradients(work, count, needs)
            ctx.save_for_backward(*gradients)
        else:
            values = work.values()
        dtype = torch.promote_types(values[0].dtype, torch.float32)
        summed = sum((each.sum(dtype=dtype) for each in values[1:]), values[0].sum(dtype=dtype))
        return (summed if count is None else summed / count).to(values[0].dtype)

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:  # type: ignore[override]
        _refuse_graph()
        return (
            None,
            None,
            *(
                None if each is None else (each * given).to(each.dtype)
                for each in ctx.saved_tensors
            ),
        )


def _with_gradients(
    work: _Work, count: torch.Tensor | None, needs: Sequence[bool]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Return the function of each chunk, and the gradients of its sum divided by ``count``."""

    def of_sum(value: torch.Tensor) -> torch.Tensor:
        one = torch.ones_like(value)
        return one if count is None else one / count.to(value.dtype)

    gradients, values = _Gradients(work.source, needs), []
    for part, hidden, rows in work.chunks():
        value, found = work.differentiated(hidden, rows, of_sum)
        gradients.add(part, hidden, found)
        values.append(value)
    return values, gradients.found()
