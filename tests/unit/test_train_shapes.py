"""Named shapes and model folders, built without memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from overspill.train.shapes import BYTES, DEFAULT_SHAPE, SHAPES, find_model  # noqa: E402

MILLIONS = {
    "gpt2-25m": (20, 40),
    "gpt2-124m": (124, 125),
    "gpt2-1.5b": (1557, 1558),
    "llama-1b": (1235, 1236),
    "llama-8b": (8030, 8031),
    "llama-70b": (70550, 70560),
}


@pytest.mark.parametrize("name", MILLIONS)
def test_sizes_are_those_of_the_name(name: str) -> None:
    model = find_model(name).build()
    low, high = MILLIONS[name]
    assert low <= sum(p.numel() for p in model.parameters()) / 1e6 < high
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    assert model.training


def test_the_default_reads_bytes_and_has_no_dropout() -> None:
    source = find_model(DEFAULT_SHAPE)
    assert source.vocabulary == BYTES and source.folder is None
    assert not any(m.p for m in source.build().modules() if isinstance(m, torch.nn.Dropout))


def test_unknown_names_get_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'llama-8b'"):
        find_model("lama-8b")
    with pytest.raises(ValueError, match="shapes: gpt2-1m"):
        find_model("zzz")
    with pytest.raises(ValueError, match=r"no config\.json"):
        find_model(str(tmp_path))


def test_a_broken_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        find_model(str(tmp_path))


def test_a_folder_with_a_config(tmp_path: Path) -> None:
    find_model("gpt2-1m").config.save_pretrained(tmp_path)
    source = find_model(str(tmp_path))
    assert source.folder == tmp_path
    assert source.positions == SHAPES["gpt2-1m"].positions
    assert isinstance(source.build(), transformers.GPT2LMHeadModel)
