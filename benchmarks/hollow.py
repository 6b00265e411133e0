"""Folders of quantised models whose files are holes: names, shapes and sizes, and no weights."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from overspill.state.weight_files import DTYPES

NAMES = {dtype: name for name, dtype in DTYPES.items()}
METHODS: dict[str, dict[str, Any]] = {
    "nf4": {"quant_method": "bitsandbytes"},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
Entry = tuple[torch.dtype, tuple[int, ...]]


def _tensors(config: LlamaConfig, method: str) -> tuple[dict[str, Entry], dict[str, bytes]]:
    """Return dtype and shape of the tensors in files, and the contents of those that have any."""
    with torch.device("meta"):
        state = LlamaForCausalLM(config).state_dict()
    found: dict[str, Entry] = {}
    contents: dict[str, bytes] = {}
    for name, value in state.items():
        shape = tuple(value.shape)
        if ".layers." not in name or len(shape) != 2:
            found[name] = torch.bfloat16, shape
        elif method == "fp8":
            found[name] = torch.float8_e4m3fn, shape
            found[f"{name}_scale_inv"] = torch.float32, (shape[0] // 128, shape[1] // 128)
        else:
            blocks = math.prod(shape) // 64
            told = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": shape}
            told |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.05}
            state_name = f"{name}.quant_state.bitsandbytes__nf4"
            contents[state_name] = json.dumps(told).encode()
            found |= {
                name: (torch.uint8, (32 * blocks, 1)),
                f"{name}.absmax": (torch.uint8, (blocks,)),
                f"{name}.quant_map": (torch.float32, (16,)),
                f"{name}.nested_absmax": (torch.float32, (-(-blocks // 256),)),
                f"{name}.nested_quant_map": (torch.float32, (256,)),
                state_name: (torch.uint8, (len(contents[state_name]),)),
            }
    return found, contents


def write(folder: Path, config: LlamaConfig, method: str) -> None:
    """Write a folder for a model of ``config`` whose file has holes for all values.

    Args:
        method: one of ``METHODS``.
    """
    found, contents = _tensors(config, method)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in found.items():
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        begin = stream.tell()
        stream.truncate(begin + at)
        for name, value in contents.items():
            stream.seek(begin + header[name]["data_offsets"][0])
            stream.write(value)
    told = {**json.loads(config.to_json_string()), "quantization_config": METHODS[method]}
    (folder / "config.json").write_text(json.dumps(told))
