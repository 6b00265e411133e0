"""A thousand single bits that turn in a store: each is said, or lies where nothing is loaded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.durable.inspect import inspect_store
from overspill.io_engine.committed import find_store
from overspill.io_engine.manifest import MANIFEST_NAME, RecordKind
from overspill.io_engine.reading import StoreReader
from overspill.io_engine.store_file import STORE_NAME
from tests.devices import CPU, normal

WIDTH = 48


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])


def options() -> dict[str, Any]:
    return {"device": CPU, "host_memory": "200KiB", "rates": overspill.Rates()}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (value,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([value ^ 1 << bit % 8]))


def contents(folder: Path) -> tuple[Any, ...]:
    """All that a resume would take over."""
    store = find_store(folder)
    last = store.last()
    with StoreReader(store, last) as reader:
        items = [reader.read(i.key, 0, i.nbytes).tobytes() for i in store.layout.items]
    return last.number, last.step, last.roles, last.meta, items


def loaded(folder: Path) -> dict[str, list[tuple[int, int]]]:
    """The ranges of bytes, by file, in which a bit that turns must be said.

    Of the store file, the extents of the last commit; of the manifest, all but its last seal.
    """
    store = find_store(folder)
    last = store.last()
    data = [
        (piece.offset, piece.offset + piece.nbytes)
        for item, role in zip(store.layout.items, last.roles, strict=True) if role >= 0
        for piece in item.extents[role].pieces
    ]  # fmt: skip
    seal = store.manifests[0].log.records[-1]
    assert seal.kind == RecordKind.SEAL
    return {STORE_NAME: data, MANIFEST_NAME: [(0, seal.offset)]}


@pytest.mark.parametrize("flips", [250, pytest.param(1000, marks=pytest.mark.soak)])
def test_single_bits(tmp_path: Path, flips: int) -> None:
    """Issue: corrupt blocks are found at load and in inspect, never silently loaded."""
    model = build()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    with overspill.wrap(model, inner, nvme=tmp_path, **options()) as optimizer:
        for number in range(3):
            model(normal(number, 4, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        wanted = weights(model)
    before, ranges, rng = contents(tmp_path), loaded(tmp_path), random.Random(0)
    said = resumed = 0
    for number in range(flips):
        name = (STORE_NAME, MANIFEST_NAME)[number % 2]
        bit = rng.randrange(8 * (tmp_path / name).stat().st_size)
        matters = any(start <= bit // 8 < end for start, end in ranges[name])
        flip(tmp_path / name, bit)
        try:
            wrong = inspect_store(tmp_path).wrong
        except overspill.IoError as error:
            wrong = (str(error),)
        where = f"bit {bit} of {name}"
        if wrong:
            said += 1
        else:
            assert contents(tmp_path) == before, where
        assert wrong or not matters, where
        if number % 40 < 2:  # resume takes longer; nothing but the same model may come of it
            pristine = {n: (tmp_path / n).read_bytes() for n in (STORE_NAME, MANIFEST_NAME)}
            resumed += resumes(tmp_path, wanted, bool(wrong))
            for each, data in pristine.items():
                (tmp_path / each).write_bytes(data)
        flip(tmp_path / name, bit)
    assert contents(tmp_path) == before
    assert 0.3 * flips < said < flips and 0 < resumed < flips // 20


def resumes(folder: Path, wanted: dict[str, torch.Tensor], wrong: bool) -> bool:
    """Whether the store can be resumed; it must not if something is wrong in it."""
    model = build()
    if wrong:
        with pytest.raises(overspill.IoError):
            overspill.resume(model, folder, **options())
        return False
    optimizer, _ = overspill.resume(model, folder, **options())
    with optimizer:
        assert optimizer.step_count == 3
        for name, value in weights(model).items():
            assert torch.equal(value, wanted[name]), name
    return True
