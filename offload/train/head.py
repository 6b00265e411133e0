"""The loss of a language model without its logits: head and loss in chunks, by torch's own op."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..plans import LOSS_IN_CHUNKS

# Families whose logits are the head's product with the last hidden state, and nothing else.
PLAIN_HEADS = ("gpt2", "llama", "mistral", "qwen2", "qwen3")


def has_chunked_loss() -> bool:
    """Whether this torch has the op: from 2.13 on."""
    return hasattr(functional, "linear_cross_entropy")


def chunk_loss(model: nn.Module) -> None:
    """Has a causal language model of transformers compute its loss in chunks, where that is known
    to be the same: logits never exist as a whole.

    Calls without labels, or with anything but ids and labels, run as they did, and so do those with
    fewer tokens than the model is wide, where chunks do not pay.  Where the op is missing, nothing
    changes.
    """
    head = mark_chunked(model) if hasattr(model, "config") else None
    if head is None:
        return
    plain = model.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        ids, labels = kwargs.get("input_ids"), kwargs.get("labels")
        if args or labels is None or set(kwargs) != {"input_ids", "labels"}:
            return plain(*args, **kwargs)
        if ids is None or ids.numel() < head.in_features:
            return plain(**kwargs)
        hidden = self.base_model(input_ids=ids).last_hidden_state
        return _type_of_output()(loss=_loss(hidden, head.weight, labels))

    model.__dict__["forward"] = MethodType(forward, model)


def mark_chunked(model: nn.Module) -> nn.Linear | None:
    """Says of a model that ``chunk_loss`` changes, or of its skeleton in a plan, that its loss is
    computed in chunks; its head.  ``None``: not of this one."""
    head = _plain_head(model) if has_chunked_loss() else None
    if type(head) is not nn.Linear or head.bias is not None:
        return None
    if head.out_features <= head.in_features:
        return None
    model.__dict__[LOSS_IN_CHUNKS] = head.in_features
    return head


def _plain_head(model: Any) -> nn.Module | None:
    """What gives out the logits of a model of transformers, or of a skeleton, which has no
    configuration and stands for one whose head is plain."""
    if not hasattr(model, "config"):
        return getattr(model, "lm_head", None)
    if getattr(model.config, "model_type", None) not in PLAIN_HEADS:
        return None
    head: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    return head


def _loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean negative logarithm of the probability of each next token, in nats."""
    options = nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
    loss: torch.Tensor = functional.linear_cross_entropy(  # type: ignore[attr-defined]
        hidden[:, :-1].flatten(0, 1), weight, labels[:, 1:].flatten(), options=options
    )
    return loss


def _type_of_output() -> Any:
    """What models of transformers return with a loss."""
    from transformers.modeling_outputs import CausalLMOutput

    return CausalLMOutput
