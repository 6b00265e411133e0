"""Functions of logits, computed for some tokens at a time; see Note [Logits in chunks]."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
# several tensors of that size.  A head returns ``DeferredLogits`` instead: a tensor without values
# that knows the hidden states.  Functions that treat each token on its own, such as a cross
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
# Autocast, which may differ between the head and what follows, is that of each call.
#
# The size of a chunk depends on shapes alone: results are the same under other budgets.

CHUNK_BYTES = 256 << 20  # of a chunk's logits in fp32
LEAST_TOKENS = 128  # of a chunk; the product with the weight is slow for fewer
SLICE_BYTES = 32 << 20  # of the part of the weight's gradient, in fp32, that is added at once

T = TypeVar("T")
Rows = tuple[torch.Tensor, ...]  # with a row for each token
Step = Callable[[torch.Tensor], torch.Tensor]  # of logits (tokens, V), to the same shape
Function = Callable[..., torch.Tensor]  # of logits (tokens, V) and rows, to (tokens, ...)
# Of a head's weights: the engine that updates them, their version there, and torch's own version,
# ``None`` while they are offloaded.
Version = tuple[object, int, int | None]


def chunk_tokens(vocabulary: int) -> int:
    """Return the number of tokens whose logits are computed at once."""
    return max(LEAST_TOKENS, CHUNK_BYTES // (4 * vocabulary))


@dataclass(frozen=True)
class Projection:
    """A head as it was called, and the steps that follow.

    Attributes:
        head: the linear layer.
        steps: applied to its output one after the other.
        dtype: of the logits after the steps.
        autocast: the dtype of autocast when the head was called, or ``None``.
        version: returns the version of the weights.
        called: their version when the head was called.
        trains: whether gradients reach the head.
    """

    head: nn.Linear
    steps: tuple[Step, ...]
    dtype: torch.dtype
    autocast: torch.dtype | None
    version: Callable[[], Version]
    called: Version
    trains: bool

    @property
    def trained(self) -> list[torch.Tensor]:
        """The parameters of the head that get gradients."""
        found = (self.head.weight, self.head.bias) if self.trains else ()
        return [p for p in found if p is not None and p.requires_grad]

    def require_unchanged(self) -> None:
        """Raise ``ModelError`` if the weights have changed since the head was called."""
        engine, count, own = self.version()
        own_then = self.called[2]
        known = None not in (own, own_then)
        if (engine, count) != self.called[:2] or (known and own != own_then):
            raise ModelError(_CHANGED)

    def call(self, run: Callable[[], T]) -> T:
        """Return what ``run`` computes with the weights of the head, which may be offloaded."""
        self.require_unchanged()
        weight = self.head.weight
        if isinstance(weight, PlaceholderParam):  # tied ones belong to the embedding's unit
            mine = known(weight)
            found = mine.access.compute({mine.index}, run)
            if found is not NotImplemented:
                return found  # type: ignore[no-any-return]
        return run()

    def linear(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output of the head, before the steps."""
        head = self.head
        return under_autocast(
            hidden.device.type, self.autocast,
            lambda: functional.linear(hidden, head.weight, head.bias),
        )  # fmt: skip

    def after_steps(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits after all steps."""
        for step in self.steps:
            logits = step(logits)
        return logits


@dataclass(frozen=True)
class Source:
    """What logits are computed from.

    Attributes:
        hidden: the input ``(..., H)`` of the head.
        hidden_version: its version when the head was called.
    """

    projection: Projection
    hidden: torch.Tensor
    hidden_version: int

    def require_unchanged(self) -> None:
        """Raise ``ModelError`` if the weights or the hidden states have changed."""
        self.projection.require_unchanged()
        if self.hidden_version != torch_private.version_of(self.hidden):
            raise ModelError(_CHANGED)


def without_gradients(source: Source) -> Source:
    """Return the same source, for logits whose gradient is not wanted."""
    projection = replace(source.projection, trains=False)
    return replace(source, projection=projection, hidden=source.hidden.detach())


_CHANGED = (
    "loss='chunked' has not computed these logits yet, and the weights of the head or its input "
    "have changed meanwhile; use logits before step(), or leave loss out"
)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype of the current autocast, or ``None``."""
    on = torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if on else None


def under_autocast(device_type: str, dtype: torch.dtype | None, run: Callable[[], T]) -> T:
    """Return what ``run`` computes under autocast to ``dtype``; ``None``: without autocast."""
    if autocast_dtype(device_type) == dtype:
        return run()
    with torch.autocast(device_type, dtype, enabled=dtype is not None):
        return run()


def ordinary(source: Source) -> torch.Tensor:
    """Return ordinary logits, with their graph."""
    source.require_unchanged()
    projection = source.projection
    return projection.call(lambda: projection.after_steps(projection.linear(source.hidden)))


def per_token(source: Source, function: Function, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``function(logits, *rows)`` of all tokens, shape ``(tokens, ...)``.

    Args:
        rows: tensors with a row for each token; they get no gradient.
    """
    source.require_unchanged()
    work, copies = _Work(source.projection, function), [row.clone() for row in rows]
    trained = source.projection.trained
    found: torch.Tensor = source.projection.call(
        lambda: _PerToken.apply(work, copies, source.hidden, *trained)
    )
    return found


def total(
    source: Source, function: Function, rows: Sequence[torch.Tensor], count: torch.Tensor | None
) -> torch.Tensor:
    """Return the sum over all tokens of ``function(logits, *rows)``, divided by ``count``.

    Args:
        function: returns one number per token.
        rows: see ``per_token``.
    """
    projection = source.projection
    if torch.float16 in (projection.autocast, projection.dtype, source.hidden.dtype):
        values = per_token(source, function, rows)
        summed = values.sum(dtype=torch.promote_types(values.dtype, torch.float32))
        return (summed if count is None else summed / count).to(values.dtype)
    source.require_unchanged()
    work, given = _Work(projection, function), (tuple(rows), count)
    # Backward begins with these gradients, so there is no time to offload them.
    found: torch.Tensor = projection.call(lambda: torch_private.without_saved_tensor_hooks(
        lambda: _Total.apply(work, given, source.hidden, *projection.trained)
    ))  # fmt: skip
    return found


def joined(source: Source, made: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return ``made()`` as logits of a graph, whose gradient comes from code that the deferred
    logits do not see, such as a ``torch.autograd.Function``."""
    work = _Work(source.projection, lambda logits: logits)
    found: torch.Tensor = _Joined.apply(work, made, source.hidden, *source.projection.trained)
    return found


@dataclass(frozen=True)
class _Work:
    """A function of logits, chunk by chunk."""

    projection: Projection
    function: Function

    def chunks(
        self, hidden: torch.Tensor, rows: Sequence[torch.Tensor]
    ) -> Iterator[tuple[slice, torch.Tensor, Rows]]:
        """Yield tokens with their hidden states and rows."""
        flat = _flat(hidden)
        size = chunk_tokens(self.projection.head.out_features)
        for start in range(0, max(1, len(flat)), size):
            part = slice(start, start + size)
            yield part, flat[part], tuple(row[part] for row in rows)

    def values(self, hidden: torch.Tensor, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the function of each chunk."""
        return [
            self._value(self.projection.linear(few), of_few)
            for _, few, of_few in self.chunks(hidden, rows)
        ]

    def _value(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        return self.function(self.projection.after_steps(logits), *rows)

    def differentiated(
        self, hidden: torch.Tensor, rows: Rows, gradient: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the function of a chunk, and the gradient of the head's output.

        Args:
            gradient: returns the gradient of a value of the function.
        """

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.projection.linear(hidden)
            with torch.enable_grad():
                value = self._value(logits.requires_grad_(), rows)
            (found,) = torch.autograd.grad(value, logits, gradient(value.detach()))
            return value.detach(), found

        return torch_private.without_saved_tensor_hooks(run)

    def gradients(
        self, hidden: torch.Tensor, rows: Sequence[torch.Tensor], needs: Sequence[bool],
        gradient: Callable[[slice, torch.Tensor], torch.Tensor],
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:  # fmt: skip
        """Return the function of each chunk, and the gradients of hidden states and parameters.

        Args:
            needs: whether hidden states and each of ``Projection.trained`` need a gradient.
            gradient: returns the gradient of the function, given tokens and their values.
        """
        sums, values = _Gradients(self.projection, hidden, needs), []
        for part, few, of_few in self.chunks(hidden, rows):
            value, found = self.differentiated(few, of_few, partial(gradient, part))
            under_autocast(hidden.device.type, None, partial(sums.add, part, few, found))
            values.append(value)
        return values, sums.found()


def _flat(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.detach().reshape(-1, hidden.shape[-1])


class _Gradients:
    """The gradients of hidden states, weight and bias, summed over chunks."""

    def __init__(self, projection: Projection, hidden: torch.Tensor, needs: Sequence[bool]) -> None:
        self._head, self._shape = projection.head, hidden.shape
        self._hidden = torch.empty_like(_flat(hidden)) if needs[0] else None
        self._trained = projection.trained
        one = len(_flat(hidden)) <= chunk_tokens(self._head.out_features)
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
        """Return the gradient of the hidden states, and those of ``Projection.trained``."""
        sums = [(p, self._sums.pop(id(p), None)) for p in self._trained]
        return [
            None if self._hidden is None else self._hidden.view(self._shape),
            *(None if each is None else each.to(p.dtype) for p, each in sums),
        ]


class _PerToken(torch.autograd.Function):
    """A function with a result per token; backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any, work: _Work, rows: list[torch.Tensor], hidden: torch.Tensor,
        *_trained: torch.Tensor,
    ) -> Any:  # fmt: skip
        ctx.work = work
        ctx.save_for_backward(hidden, *rows)
        return torch.cat(work.values(hidden, rows))

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:  # type: ignore[override]
        return None, None, *_again(ctx, given)


class _Joined(torch.autograd.Function):
    """Logits whose values are computed elsewhere."""

    @staticmethod
    def forward(
        ctx: Any, work: _Work, made: Callable[[], torch.Tensor], hidden: torch.Tensor,
        *_trained: torch.Tensor,
    ) -> Any:  # fmt: skip
        ctx.work = work
        ctx.save_for_backward(hidden)
        return made()

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:  # type: ignore[override]
        return None, None, *_again(ctx, given.reshape(-1, given.shape[-1]))


def _again(ctx: Any, given: torch.Tensor) -> list[torch.Tensor | None]:
    """Return the gradients, of logits that are computed again; ``given``: of the function."""
    _refuse_graph()
    work, (hidden, *rows) = ctx.work, ctx.saved_tensors
    needs = ctx.needs_input_grad[2:]
    return work.projection.call(  # type: ignore[no-any-return]
        lambda: work.gradients(hidden, rows, needs, lambda part, _value: given[part])[1]
    )


def _refuse_graph() -> None:
    """Raise ``ModelError`` in a backward that is itself differentiated."""
    if torch.is_grad_enabled():
        raise ModelError(
            "loss='chunked' has no second derivatives (create_graph=True); leave loss out"
        )


class _Total(torch.autograd.Function):
    """A sum over tokens, whose gradients are computed in forward."""

    @staticmethod
    def forward(
        ctx: Any, work: _Work, given: tuple[Rows, torch.Tensor | None], hidden: torch.Tensor,
        *_trained: torch.Tensor,
    ) -> Any:  # fmt: skip
        rows, count = given

        def of_sum(_part: slice, value: torch.Tensor) -> torch.Tensor:
            one = torch.ones_like(value)
            return one if count is None else one / count.to(value.dtype)

        if any(ctx.needs_input_grad):
            values, gradients = work.gradients(hidden, rows, ctx.needs_input_grad[2:], of_sum)
            ctx.save_for_backward(*gradients)
        else:
            values = work.values(hidden, rows)
        dtype = torch.promote_types(values[0].dtype, torch.float32)
        summed = sum((each.sum(dtype=dtype) for each in values[1:]), values[0].sum(dtype=dtype))
        return (summed if count is None else summed / count).to(values[0].dtype)

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:  # type: ignore[override]
        _refuse_graph()
        gradients = [
            None if each is None else (each * given).to(each.dtype) for each in ctx.saved_tensors
        ]
        return None, None, *gradients
