"""A base of 8 B parameters is wrapped without being read: the files here are holes."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.devices import about_cpu

SHAPE = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False,
)  # fmt: skip
NAMES = {
    torch.bfloat16: "BF16", torch.uint8: "U8", torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "nf4": {"quant_method": "bitsandbytes"},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
WRAP = """
import sys, time
import overspill, peft, torch, transformers
from overspill.cli import app  # what the first wrap imports
from benchmarks.worker import kernel_bytes, rss_bytes
folder = sys.argv[1]
with overspill.empty_init():
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
optimizer = None
if sys.argv[2] == "LoRA":
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
overspill.wrap(torch.nn.Linear(2, 2), device="cpu", host_memory="16MiB").close()
idle, written, began = rss_bytes(), kernel_bytes()[1], time.process_time()
made = overspill.wrap(
    model, optimizer, weights=folder, device="cpu", host_memory="3GiB", rates=overspill.Rates()
)
print(time.process_time() - began, rss_bytes() - idle, kernel_bytes()[1] - written)
made.close()
"""
Entry = tuple[torch.dtype, tuple[int, ...]]


def tensors(method: str) -> tuple[dict[str, Entry], dict[str, bytes]]:
    """Return dtype and shape of the tensors in files, and the contents of those that have any."""
    with torch.device("meta"):
        state = LlamaForCausalLM(SHAPE).state_dict()
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


def write(folder: Path, method: str) -> None:
    """Write a folder whose file has holes for all values."""
    found, contents = tensors(method)
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
    config = {**json.loads(SHAPE.to_json_string()), "quantization_config": METHODS[method]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.alone
@about_cpu
@pytest.mark.parametrize("what", ["generation", "LoRA"])
@pytest.mark.parametrize("method", METHODS)
def test_a_large_base_is_wrapped_at_once(method: str, what: str, tmp_path: Path) -> None:
    write(tmp_path, method)
    done = subprocess.run(
        [sys.executable, "-c", WRAP, str(tmp_path), what], capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    cpu_s, held, written = map(float, done.stdout.split())
    assert cpu_s < 4, "of a processor: headers, recognition and the plan"
    assert held < 500 << 20
    assert written < 1 << 20
