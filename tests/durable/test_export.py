"""Export of a real store: the same logits, the same state, damage told; and ``save``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.durable import tensors
from overspill.durable.export import export_store
from overspill.durable.inspect import inspect_store
from overspill.errors import OffloadError
from overspill.io_engine import CorruptionError, blocks
from tests.devices import CPU, DEVICE
from tests.models import TinyLM, adamw, batch, train


def llama(**options: Any) -> tuple[Any, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=500, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM, LlamaForCausalLM(config)


def run_llama(model: Any, optimizer: Any, steps: int) -> None:
    for seed in range(steps):
        ids = batch(seed)[0]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_saved_model_has_the_same_logits(tmp_path: Path, tied: bool, moments: str) -> None:
    """Save -> ``from_pretrained`` -> same logits; the state is ``state_dict``'s."""
    kind, model = llama(tie_word_embeddings=tied)
    (tmp_path / "store").mkdir()
    given = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with overspill.wrap(
        model,
        given,
        device=CPU,
        nvme=tmp_path / "store",
        host_memory="64MiB",
        moments=moments,
        precision="bf16",
    ) as optimizer:
        run_llama(model, optimizer, 2)
        optimizer.save(tmp_path / "out")
        with torch.no_grad():
            expected = model.eval()(input_ids=batch(9)[0]).logits
        state = optimizer.state_dict()["state"]
    with torch.device("cpu"):  # else transformers asks for accelerate
        again = kind.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).to(DEVICE)
    with torch.no_grad():
        assert torch.equal(again.eval()(input_ids=batch(9)[0]).logits, expected)
    found = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True, mmap=True)
    assert found["state"].keys() == state.keys()
    for number, values in state.items():
        assert all(torch.equal(found["state"][number][k], v) for k, v in values.items())


def test_torch_goes_on_with_an_exported_state(tmp_path: Path) -> None:
    """Optimizer file -> ``torch.optim.AdamW.load_state_dict`` -> same next step."""
    torch.manual_seed(0)
    model = TinyLM()
    (tmp_path / "store").mkdir()
    with overspill.wrap(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3), device=CPU,
        nvme=tmp_path / "store", host_memory="64MiB",
    ) as optimizer:  # fmt: skip
        train(model, optimizer, 2)
        optimizer.save(tmp_path / "out")
        other = TinyLM()
        other.load_state_dict(model.state_dict())
        train(model, optimizer, 1)
        expected = model.state_dict()
    theirs = torch.optim.AdamW(other.parameters())
    theirs.load_state_dict(torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True))
    train(other, theirs, 1)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=2**-22, atol=2**-24)


def test_an_export_reads_every_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights a second time, as the upper halves of the masters; and where a block that two
    tensors share was let go, that again."""
    (tmp_path / "store").mkdir()
    model = nn.Sequential(*(nn.Linear(2048, 1536) for _ in range(4))).bfloat16()
    given = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wrapped = overspill.wrap(
        model, given, device=CPU, nvme=tmp_path / "store", host_memory="192MiB", precision="bf16"
    )
    with wrapped as optimizer:
        for layer in model:
            layer(torch.ones(1, 2048, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    read: list[int] = []
    preadv = os.preadv

    def counted(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        got = preadv(fd, buffers, offset)
        read.append(got)
        return got

    monkeypatch.setattr(blocks, "KEPT_BLOCKS", 8)
    monkeypatch.setattr(tensors, "AHEAD_BYTES", 8 << 20)
    monkeypatch.setattr(os, "preadv", counted)
    files = export_store(tmp_path / "store", tmp_path / "out").files
    assert sum(files.values()) > 150 << 20
    assert sum(read) < 1.1 * sum(files.values())


def test_damage_of_a_store_is_told_and_not_exported(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    model = TinyLM()
    with overspill.wrap(
        model, adamw(model), device=CPU, nvme=tmp_path / "store", host_memory="64MiB"
    ) as optimizer:
        train(model, optimizer, 1)
    found = inspect_store(tmp_path / "store")
    assert found.wrong == () and found.commits[-1].step == 1 and found.verified_bytes > 0
    path = tmp_path / "store" / "overspill.store"
    data = bytearray(path.read_bytes())
    for at in range(0, len(data), 4096):
        data[at] ^= 1
    path.write_bytes(data)
    assert inspect_store(tmp_path / "store").wrong
    with pytest.raises(CorruptionError, match="checksum"):
        export_store(tmp_path / "store", tmp_path / "out")
    assert [each.name for each in tmp_path.iterdir()] == ["store"]


def test_save_without_a_store_says_what_to_do() -> None:
    model = TinyLM()
    optimizer = overspill.wrap(model, adamw(model), device=CPU)
    with optimizer, pytest.raises(OffloadError, match="nvme="):
        optimizer.save("nowhere")
