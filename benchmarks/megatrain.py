"""The benchmark's Llama under MegaTrain's engine, from a checkout that ``$OVERSPILL_MEGATRAIN``
names; nothing of it is built.  Written against commit 919520f07182 (April 2026), which needs CUDA.

Its own parts, as they are: bf16 parameters without a master, fp32 moments by DeepSpeed's CPU Adam
after backward, every layer's forward three times a step.  It shifts labels itself, and so computes
one position more than the other arms.  Its loss is rounded to bf16.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

VARIABLE = "OVERSPILL_MEGATRAIN"


def checkout() -> Path:
    """Where MegaTrain is.

    Raises:
        RuntimeError: nobody has said where, or it is not there.
    """
    named = os.environ.get(VARIABLE)
    if not named or not Path(named, "infinity").is_dir():
        raise RuntimeError(f"${VARIABLE} names no checkout of MegaTrain (a folder with infinity/)")
    return Path(named)


class _Layer(nn.Module):
    """A block as the engine calls it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, use_cache: bool = False,
        output_attentions: bool = False, position_embeddings: Any = None,
    ) -> Any:  # fmt: skip
        return self.block(hidden_states, torch.stack(position_embeddings))


class _Turns(nn.Module):
    """The rotations that our model makes itself."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        half = torch.arange(0, self.size, 2, device=x.device) / self.size
        angles = torch.outer(torch.arange(position_ids.shape[-1], device=x.device), 1e4**-half)
        turns = torch.stack((angles.cos(), angles.sin())).repeat(1, 1, 2).to(x.dtype)
        return tuple(turns)


class Shell(nn.Module):
    """Our Llama under the names that the engine looks for."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        width = model.head.in_features
        self.config = SimpleNamespace(
            model_type="llama", vocab_size=model.head.out_features, hidden_size=width,
            num_attention_heads=width // model.size,
        )  # fmt: skip
        self.model = nn.Module()
        self.model.embed_tokens, self.model.norm = model.tokens, model.norm
        self.model.layers = nn.ModuleList(_Layer(block) for block in model.blocks)
        self.model.rotary_emb = _Turns(model.size)
        self.lm_head = model.head


class _Causal:
    """A mask that is none: the blocks are causal themselves."""

    def to(self, _device: object) -> None:
        return None


class Engine:
    """Steps of the engine, with DeepSpeed's AdamW as in its examples, less their clipping."""

    def __init__(self, model: Any, *, batch: int, tokens: int, rate: float) -> None:
        """``model``: a ``benchmarks.model.Llama`` with memory on the host."""
        sys.path.insert(0, str(checkout()))
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from infinity import CPUMasterConfig, CPUMasterModel

        config = CPUMasterConfig(
            model_name="", dataset_path="-", dtype=next(model.parameters()).dtype, device=0,
            batch_size=batch, max_seq_len=tokens, attn_implementation="sdpa",
        )  # fmt: skip
        self._engine = CPUMasterModel(Shell(model), config)
        self._adamw = DeepSpeedCPUAdam(
            self._engine.get_parameters(), lr=rate, weight_decay=0.01, adamw_mode=True
        )

    def step(self, tokens: torch.Tensor) -> float:
        """``tokens``: (batch, tokens + 1), int64, on the host."""
        loss, *_ = self._engine.forward_and_backward(tokens, _Causal(), tokens)
        self._adamw.step()
        self._engine._sync_params_to_gpu()  # its examples do so: there is no public name
        self._adamw.zero_grad(set_to_none=True)
        return float(loss)

    def close(self) -> None:
        """Ends its thread."""
        self._engine.cleanup()
