"""Linear heads of language models, which defer their logits; see Note [Logits in chunks]."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from ..planning.models import by_model
from ..planning.partition import Partition
from ..private import torch_private
from ..private.module_private import own_parameters
from .deferred import DeferredLogits
from .rows import Projection, Source, Version, autocast_dtype, chunk_tokens

# The heads that defer their logits, with what returns the version of their weights.
_HEADS = weakref.WeakKeyDictionary[nn.Module, Callable[[], int]]()


def head_of(model: nn.Module) -> nn.Linear:
    """Return the layer that computes the logits of a language model.

    Raises:
        ModelError: there is none, or it is no plain linear layer.
    """
    asked: Any = getattr(model, "get_output_embeddings", None)
    found: Any = asked() if callable(asked) else None
    if found is None:
        found = _largest_head(model)
    saved = getattr(found, "modules_to_save", None)  # of peft: a trained copy of the head
    if isinstance(saved, nn.ModuleDict) and (active := getattr(found, "active_adapters", None)):
        found = saved[active[0]]
    if found is None:
        raise ModelError(
            f"loss='chunked' needs a language model, and {type(model).__name__} has no linear "
            "layer from its hidden states to its vocabulary; leave loss out"
        )
    plain = isinstance(found, nn.Linear) and type(found).forward is nn.Linear.forward
    own = vars(found).get("forward") if plain else None
    plain = plain and (own is None or _is_ours(own))  # also in a copy of a wrapped model
    if not plain or "weight" not in own_parameters(found) or not found.weight.is_floating_point():
        raise ModelError(
            "loss='chunked' needs a plain nn.Linear with nn.Linear's own forward as the head, not "
            f"this {type(found).__name__}; leave loss out, or leave adapters away from the head"
        )
    assert isinstance(found, nn.Linear)
    return found


def _largest_head(model: nn.Module) -> nn.Linear | None:
    """Return the linear layer to the vocabulary of an embedding with as many features."""
    tables = {(m.embedding_dim, m.num_embeddings)
              for m in model.modules() if isinstance(m, nn.Embedding)}  # fmt: skip
    heads = [
        m for m in model.modules()
        if isinstance(m, nn.Linear) and (m.in_features, m.out_features) in tables
    ]  # fmt: skip
    return heads[-1] if heads else None


def heads_in(model: nn.Module) -> tuple[nn.Linear, ...]:
    """Return the heads of one or several models whose logits can be deferred."""
    found = dict.fromkeys(map(_head_if_any, by_model(model).values()))
    return tuple(head for head in found if head is not None)


def _head_if_any(model: nn.Module) -> nn.Linear | None:
    try:
        return head_of(model)
    except ModelError:
        return None


def require_heads(model: nn.Module) -> tuple[nn.Linear, ...]:
    """Return the same; raise ``ModelError`` if there are none."""
    return heads_in(model) or tuple(map(head_of, by_model(model).values()))


def are_deferred(heads: Iterable[nn.Linear], tokens: int) -> bool:
    """Return whether heads defer the logits of a number of tokens, if they defer any."""
    return all(tokens > chunk_tokens(head.out_features) for head in heads)


def deferred_heads(model: nn.Module) -> tuple[nn.Linear, ...]:
    """Return the heads in a model that defer their logits now."""
    return tuple(m for m in model.modules() if isinstance(m, nn.Linear) and m in _HEADS)


def defer_logits(model: nn.Module) -> None:
    """Defer the logits of a model, or of its skeleton in a plan, if it can, until it is freed."""
    DeferredHeads((head, lambda: 0) for head in heads_in(model))


def _is_ours(forward: Any) -> bool:
    return isinstance(forward, partial) and forward.func is _forward


class DeferredHeads:
    """Heads whose logits are deferred until ``remove``."""

    def __init__(self, heads: Iterable[tuple[nn.Linear, Callable[[], int]]]) -> None:
        """
        Args:
            heads: each with a function that returns the version of its weights.
        """
        self._before: list[tuple[nn.Linear, Any]] = []
        for head, version in heads:
            self._before.append((head, head.__dict__.get("forward")))
            _HEADS[head] = version
            head.__dict__["forward"] = partial(_forward, head)

    @staticmethod
    def of_engine(
        heads: Iterable[nn.Linear], parts: Partition, versions: Sequence[int]
    ) -> DeferredHeads:
        """Defer the logits of heads of an engine; ``versions``: by unit, those of its weights."""
        units = {id(p): unit for p, unit in zip(parts.parameters, parts.unit_of, strict=True)}
        return DeferredHeads(
            (head, partial(versions.__getitem__, units[id(head.weight)])) for head in heads
        )

    def remove(self) -> None:
        """Let the heads compute their logits at once again."""
        while self._before:
            head, before = self._before.pop()
            _HEADS.pop(head, None)
            if not _is_ours(head.__dict__.get("forward")):
                continue  # it was replaced since
            if before is None:
                head.__dict__.pop("forward", None)
            else:
                head.__dict__["forward"] = before


def _forward(self: nn.Linear, input: Any) -> Any:
    """Run a head, and defer its logits if they are many."""
    version = _HEADS.get(self)  # a copy of the head is not in it
    if version is None or torch.compiler.is_compiling() or not _is_long(self, input):
        return nn.Linear.forward(self, input)
    autocast = autocast_dtype(input.device.type)
    projection = Projection(
        self, (), self.weight.dtype if autocast is None else autocast, autocast,
        partial(_version_of, self), _version_of(self),
        trains=any(p is not None and p.requires_grad for p in (self.weight, self.bias)),
    )  # fmt: skip
    return DeferredLogits.make(Source(projection, input, torch_private.version_of(input)))


def _version_of(head: nn.Linear) -> Version:
    count, weight = _HEADS.get(head), head.weight
    own = torch_private.version_of(weight) if type(weight) is nn.Parameter else None
    return count, 0 if count is None else count(), own


def _is_long(head: nn.Linear, hidden: Any) -> bool:
    """Return whether the logits of hidden states take more than a chunk."""
    if type(hidden) is not torch.Tensor or not torch_private.has_memory(hidden):
        return False
    if hidden.dim() < 2 or hidden.shape[-1] != head.in_features or hidden.is_inference():
        return False
    return hidden.numel() // head.in_features > chunk_tokens(head.out_features)
