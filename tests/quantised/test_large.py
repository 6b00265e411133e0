"""A base of 8 B parameters is wrapped without being read: the files here are holes."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from transformers import LlamaConfig

from benchmarks.hollow import METHODS, write
from overspill.state.weight_files import WeightFiles
from tests.devices import about_cpu

SHAPE = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False,
)  # fmt: skip
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


@pytest.mark.alone
@about_cpu
@pytest.mark.parametrize("what", ["generation", "LoRA"])
@pytest.mark.parametrize("method", METHODS)
def test_a_large_base_is_wrapped_at_once(method: str, what: str, tmp_path: Path) -> None:
    write(tmp_path, SHAPE, method)
    done = subprocess.run(
        [sys.executable, "-c", WRAP, str(tmp_path), what], capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    cpu_s, held, written = map(float, done.stdout.split())
    assert cpu_s < 4, "of a processor: headers, recognition and the plan"
    assert held < 500 << 20
    assert written < 1 << 20


def test_a_file_larger_than_memory_is_read(tmp_path: Path) -> None:
    """torch's reader of safetensors maps the whole file as writable, for which there is no room."""
    path = tmp_path / "model.safetensors"
    size = 4 * psutil.virtual_memory().total
    header = {
        "large": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
        "small": {"dtype": "F32", "shape": [2, 2], "data_offsets": [size, size + 16]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    values = torch.arange(4, dtype=torch.float32, device="cpu").view(2, 2)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.seek(8 + len(text) + size)
        stream.write(values.numpy().tobytes())
    files = WeightFiles(tmp_path)
    assert files.shape("large") == (size,)
    assert torch.equal(files.read("small"), values)


def test_tensors_without_elements_and_strange_dtypes(tmp_path: Path) -> None:
    import safetensors.torch

    path = tmp_path / "model.safetensors"
    values = {
        "empty": torch.empty(0, 8), "nothing": torch.empty(0, dtype=torch.bfloat16),
        "scalar": torch.tensor(2.0), "flags": torch.tensor([True, False]),
        "fnuz": torch.arange(4.0).to(torch.float8_e4m3fnuz),
    }  # fmt: skip
    safetensors.torch.save_file({n: v.cpu() for n, v in values.items()}, path)
    files = WeightFiles(tmp_path)
    for name, value in values.items():
        found = files.read(name)
        assert found.dtype == value.dtype and found.shape == value.shape, name
        assert torch.equal(found.float(), value.cpu().float()), name
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"BF16"', b'"F4"  '))
    files = WeightFiles(tmp_path)
    assert not files.dtypes("nothing")
    with pytest.raises(ValueError, match="cannot be read"):
        files.read("nothing")


@pytest.mark.parametrize("how", ["smaller", "renamed", "noise"])
def test_a_file_that_is_replaced_is_noticed(how: str, tmp_path: Path) -> None:
    import safetensors.torch

    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"w": torch.zeros(1000, device="cpu")}, path)
    files = WeightFiles(tmp_path)
    if how == "noise":
        path.write_bytes(b"\xff" * 100)
    else:
        name, size = ("w", 10) if how == "smaller" else ("v", 1000)
        safetensors.torch.save_file({name: torch.zeros(size, device="cpu")}, path)
    for use in (files.read, files.find, files.run):
        with pytest.raises(ValueError, match="has changed since it was opened"):
            use("w")
