"""Folders of small transformers models: one quantised, and one with its dequantised weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from overspill.state.quantised_files import dequantising
from overspill.state.weight_files import WeightFiles

from . import writers

LLAMA = LlamaConfig(
    hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=128, tie_word_embeddings=False,
)  # fmt: skip
EXPERTS = Qwen3MoeConfig(
    hidden_size=128, moe_intermediate_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=128, num_experts=8,
    num_experts_per_tok=2, tie_word_embeddings=False,
)  # fmt: skip
GPT_OSS = GptOssConfig(
    hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, vocab_size=128, num_local_experts=8,
    num_experts_per_tok=2, pad_token_id=None, tie_word_embeddings=False,
)  # fmt: skip
Tensors = dict[str, torch.Tensor]


class Folders(NamedTuple):
    """A quantised folder, and one with the values that its weights are dequantised to."""

    quantised: Path
    plain: Path


def made(root: Path, config: Any, how: str) -> Folders:
    """Write both folders for a new model of ``config``."""
    with torch.device("cpu"):
        return _made(root, config, how)


def _made(root: Path, config: Any, how: str) -> Folders:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    folders = Folders(root / "quantised", root / "plain")
    for each in folders:
        model.save_pretrained(each)
    tensors: Tensors = dict(all_of(folders.plain))
    quantise, described = HOW[how]
    file = "model.safetensors"
    save_file(dict(_quantised(tensors, quantise)), folders.quantised / file, {"format": "pt"})
    path = folders.quantised / "config.json"
    if described is not None:
        with_method = {**json.loads(path.read_text()), "quantization_config": described}
        path.write_text(json.dumps(with_method))
    files = dequantising(WeightFiles(folders.quantised), tensors)
    values = {name: files.read(name).to(torch.bfloat16) for name in files.names}
    save_file(values, folders.plain / file, {"format": "pt"})
    return folders


def all_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors of a folder."""
    files = WeightFiles(folder)
    for name in files.names:
        yield name, files.read(name)


def _quantised(
    tensors: Tensors, quantise: Callable[[str, torch.Tensor], Tensors]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in tensors.items():
        inner = "layers." in name and "norm" not in name and name.endswith(("weight", "_proj"))
        if inner and "router" not in name and "mlp.gate." not in name:
            yield from quantise(name, value).items()
        else:
            yield name, value


def fp8(name: str, value: torch.Tensor) -> Tensors:
    """DeepSeek's FP8 in blocks of 32 x 32."""
    rows, columns = value.shape
    blocks = value.float().view(rows // 32, 32, columns // 32, 32)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scales}


def nf4(name: str, value: torch.Tensor) -> Tensors:
    """bitsandbytes, with double quantisation."""
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(value, quant_type="nf4", compress_statistics=True)
    more = {f"{name}.{key}": each for key, each in state.as_dict(packed=True).items()}
    return {name: codes, **more}


def mxfp4(name: str, value: torch.Tensor) -> Tensors:
    """gpt-oss: experts alone, random codes with small scales."""
    if value.dim() != 3 or "bias" in name:
        return {name: value}
    experts, columns, rows = value.shape
    shape = (experts, rows, columns // 32)
    return {
        f"{name}_blocks": torch.randint(0, 256, (*shape, 16), dtype=torch.uint8),
        f"{name}_scales": torch.randint(119, 123, shape, dtype=torch.uint8),
    }


def qint8(name: str, value: torch.Tensor) -> Tensors:
    """Quanto with 8 bits, as its files are without a configuration."""
    codes, scales = writers.quanto_codes(value, torch.int8)
    return {f"{name}._data": codes, f"{name}._scale": scales}


def qint4(name: str, value: torch.Tensor) -> Tensors:
    """Quanto with 4 bits, in groups of 128."""
    found, _ = writers.quanto_bits_tensors(value, 4, 128)
    module = name.removesuffix("weight")
    return {module + key: each for key, each in (found | writers.quanto_activations(value)).items()}


HOW: dict[str, tuple[Callable[[str, torch.Tensor], Tensors], dict[str, Any] | None]] = {
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "mxfp4": (mxfp4, {"quant_method": "mxfp4"}),
    "qint8": (qint8, None),
    "qint4": (qint4, {"quant_method": "quanto", "weights": "int4"}),
}


def empty(folder: Path) -> PreTrainedModel:
    """Return a model of the folder's configuration, without memory if in ``empty_init``."""
    config = AutoConfig.from_pretrained(folder)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model
