"""Models of the common families as bare module trees: names and shapes for a plan, nothing to run.

Importing transformers takes longer than planning; for a plan, names and shapes are enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..optim.joint import JointOptimizer
from ..state.adapters import ADDED

LLAMA_LIKE = ("llama", "mistral", "qwen2")


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))


def _table(rows: int, width: int) -> nn.Embedding:
    """Without its own way to fill it, which imports torch's compiler: half a second."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


class Conv1D(nn.Module):
    """A product with a weight, as GPT-2 keeps it (inputs first)."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width_in, width_out))
        self.bias = nn.Parameter(torch.empty(width_out))


class FeedForward(nn.Module):
    """A layer that a plan can divide into tiles."""


class _LlamaLayer(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        heads = config["num_attention_heads"]
        size = config.get("head_dim") or width // heads
        kv = (config.get("num_key_value_heads") or heads) * size
        qkv_bias = config["model_type"] == "qwen2" or bool(config.get("attention_bias"))
        out_bias = bool(config.get("attention_bias")) and config["model_type"] != "qwen2"
        mlp_bias = bool(config.get("mlp_bias"))
        self.self_attn = nn.Module()
        self.self_attn.q_proj = nn.Linear(width, heads * size, bias=qkv_bias)
        self.self_attn.k_proj = nn.Linear(width, kv, bias=qkv_bias)
        self.self_attn.v_proj = nn.Linear(width, kv, bias=qkv_bias)
        self.self_attn.o_proj = nn.Linear(heads * size, width, bias=out_bias)
        self.mlp = FeedForward()
        self.mlp.gate_proj = nn.Linear(width, inner, bias=mlp_bias)
        self.mlp.up_proj = nn.Linear(width, inner, bias=mlp_bias)
        self.mlp.down_proj = nn.Linear(inner, width, bias=mlp_bias)
        self.input_layernorm, self.post_attention_layernorm = _Norm(width), _Norm(width)


def _llama(config: Mapping[str, Any]) -> nn.Module:
    model, width, vocabulary = nn.Module(), config["hidden_size"], config["vocab_size"]
    model.model = nn.Module()
    model.model.embed_tokens = _table(vocabulary, width)
    layers = range(config["num_hidden_layers"])
    model.model.layers = nn.ModuleList(_LlamaLayer(config) for _ in layers)
    model.model.norm = _Norm(width)
    model.lm_head = nn.Linear(width, vocabulary, bias=False)
    if config.get("tie_word_embeddings", False):
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


class NewGELUActivation(nn.Module):
    """GPT-2's, by whose name a plan knows how much it keeps."""


class _Gpt2Layer(nn.Module):
    def __init__(self, width: int, inner: int, activation: str) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = nn.Module(), FeedForward()
        self.attn.c_attn, self.attn.c_proj = Conv1D(width, 3 * width), Conv1D(width, width)
        self.mlp.c_fc, self.mlp.c_proj = Conv1D(width, inner), Conv1D(inner, width)
        if activation == "gelu_new":
            self.mlp.act = NewGELUActivation()


def _gpt2(config: Mapping[str, Any]) -> nn.Module:
    model, width, vocabulary = nn.Module(), config["n_embd"], config["vocab_size"]
    inner = config.get("n_inner") or 4 * width
    model.transformer = nn.Module()
    model.transformer.wte = _table(vocabulary, width)
    model.transformer.wpe = _table(config["n_positions"], width)
    layers = range(config["n_layer"])
    activation = config.get("activation_function", "gelu_new")
    model.transformer.h = nn.ModuleList(_Gpt2Layer(width, inner, activation) for _ in layers)
    model.transformer.ln_f = nn.LayerNorm(width)
    model.lm_head = nn.Linear(width, vocabulary, bias=False)
    if config.get("tie_word_embeddings", True):
        model.lm_head.weight = model.transformer.wte.weight
    return model


def add_lora(model: nn.Module, rank: int) -> None:
    """Freezes a model's weights, and puts LoRA beside the matrices of its layers.

    Raises:
        ValueError: ``rank`` is less than 1, or there are no such matrices.
    """
    if rank < 1:
        raise ValueError(f"the rank of LoRA must be at least 1, got {rank}")
    model.requires_grad_(False)
    head = model.get_submodule("lm_head") if hasattr(model, "lm_head") else None
    matrices = [m for m in model.modules() if isinstance(m, (nn.Linear, Conv1D)) and m is not head]
    if not matrices:
        raise ValueError("LoRA: the model has no matrices that a plan knows as such")
    added: list[nn.Parameter] = []
    most = min(max(m.weight.shape) for m in matrices)
    if rank > most:
        raise ValueError(f"the rank of LoRA must be at most {most}, a matrix's size, got {rank}")
    for m in matrices:
        rows, columns = m.weight.shape
        inputs, outputs = (columns, rows) if isinstance(m, nn.Linear) else (rows, columns)
        made = {"device": m.weight.device, "dtype": m.weight.dtype}
        first = nn.Linear(inputs, rank, bias=False, **made)
        second = nn.Linear(rank, outputs, bias=False, **made)
        m.lora_A, m.lora_B = first, second
        added += [*first.parameters(), *second.parameters()]
    model.__dict__[ADDED] = added


def skeleton_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """torch's AdamW of what is trained, as far as a plan looks at it: its constructor too imports
    the compiler."""
    optimizer = torch.optim.AdamW.__new__(torch.optim.AdamW)
    optimizer.defaults = {
        "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False,
        "maximize": False, "capturable": False, "differentiable": False, "foreach": None,
        "fused": None,
    }  # fmt: skip
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer.param_groups = [{"params": trained, **optimizer.defaults}]
    return optimizer


def skeleton_optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """What trains a model, as far as a plan looks at it.

    Args:
        name: ``"adamw"``, or ``"muon"`` for Muon on the matrices of the layers, and AdamW on the
            rest.

    Raises:
        ValueError: another name, no matrices to train, or torch has no Muon.
    """
    if name == "adamw":
        return skeleton_adamw(model)
    if name != "muon":
        raise ValueError(f"optimizer {name!r} is unknown; use adamw or muon")
    if not hasattr(torch.optim, "Muon"):
        raise ValueError("torch.optim.Muon needs torch 2.9 or later")
    apart = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    named = getattr(model, "get_output_embeddings", None)  # of transformers
    head = named() if named is not None else getattr(model, "lm_head", None)
    if head is not None:
        apart |= set(head.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() == 2 and p not in apart]
    if not matrices:
        raise ValueError(f"there are no matrices to train with {name}")
    own = set(matrices)
    others = [p for p in trained if p not in own]
    rest = [torch.optim.AdamW(others)] if others else []
    return JointOptimizer([torch.optim.Muon(matrices), *rest])


def skeleton(config: Mapping[str, Any]) -> nn.Module | None:
    """The module tree of a Hugging Face configuration; ``None`` for a family not known here.

    Raises:
        ValueError: the configuration lacks a size.
    """
    family = config.get("model_type")
    build = _gpt2 if family == "gpt2" else _llama if family in LLAMA_LIKE else None
    if build is None:
        return None
    try:
        with torch.device("meta"):
            model = build(config)
    except KeyError as error:
        raise ValueError(f"model: the configuration of this {family} lacks {error}") from error
    name = config.get("torch_dtype") or config.get("dtype")
    dtype = getattr(torch, str(name), None)
    return model.to(dtype) if isinstance(dtype, torch.dtype) else model
