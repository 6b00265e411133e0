"""The loss of a language model without all of its logits at once."""

from __future__ import annotations

from torch import nn

from ..errors import ModelError
from ..logits.heads import DeferredHeads, heads_in


def defer_logits(model: nn.Module) -> None:
    """Make a model, or its skeleton in a plan, compute its logits in chunks if it can."""
    try:
        heads = heads_in(model)
    except ModelError:
        return
    DeferredHeads((head, lambda: 0) for head in heads)
