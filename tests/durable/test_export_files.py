"""The files of an export: whole or not there, bounded in memory, every bit of them checked."""

from __future__ import annotations

import ctypes
import errno
import random
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from overspill.durable.export import OPTIMIZER, write_export
from overspill.durable.hub import ModelFiles
from overspill.durable.sums import SUMS, verify_export
from overspill.durable.tensors import AHEAD_PARTS, Part, StreamedTensor, in_memory, lazy, stream
from overspill.errors import IoError, OffloadError
from overspill.io_engine import store_file
from overspill.io_engine.native import crc32
from overspill.optim.formats import join_halves, split_master
from overspill.state.weight_files import WeightFiles
from tests.devices import about_files

pytestmark = about_files


PART = 4 << 20


def large(name: str, nbytes: int) -> StreamedTensor:
    """A tensor of bf16 that exists in parts only."""

    def parts() -> Iterator[Part]:
        for _ in range(nbytes // PART):
            yield Part(PART, lambda: np.full(PART, 7, np.uint8))

    return StreamedTensor(name, torch.bfloat16, (nbytes // 2,), parts)


def export_small(out: Path) -> tuple[list[torch.Tensor], dict[str, Any]]:
    values = [torch.randn(30, 20), torch.randn(7).bfloat16(), torch.arange(5)]
    tensors = [in_memory(f"w{i}", value) for i, value in enumerate(values)]
    moment = torch.randn(30, 20)
    state = {0: {"step": torch.tensor(3.0), "exp_avg": moment}}
    groups = [{"lr": torch.tensor(0.5), "betas": (0.9, 0.99), "params": [0]}]
    streamed = {0: {"step": torch.tensor(3.0), "exp_avg": in_memory("m", moment)}}
    write_export(out, [ModelFiles(tensors, "{}")], {"state": streamed, "param_groups": groups}, 3,
                 shard_bytes=2000)  # fmt: skip
    return values, {"state": state, "param_groups": groups}


def test_shards_and_torch_file_load(tmp_path: Path) -> None:
    """Sharded weights read back by name; the optimizer's file by ``torch.load``, mapped too."""
    values, tree = export_small(tmp_path / "out")
    files = WeightFiles(tmp_path / "out")
    for number, value in enumerate(values):
        assert torch.equal(files.read(f"w{number}"), value)
    assert len(list((tmp_path / "out").glob("model-*-of-00002.safetensors"))) == 2
    for mapped in (False, True):
        found = torch.load(tmp_path / "out" / OPTIMIZER, weights_only=True, mmap=mapped)
        torch.testing.assert_close(found, tree, rtol=0, atol=0)
    assert verify_export(tmp_path / "out", lambda nbytes: None) == []


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_that_cannot_allocate_ahead(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unable:
        def fallocate(self, *_: int) -> int:
            ctypes.set_errno(code)
            return -1

    monkeypatch.setattr(store_file, "_libc", Unable())
    values, _ = export_small(tmp_path / "out")
    assert verify_export(tmp_path / "out", lambda nbytes: None) == []
    assert torch.equal(WeightFiles(tmp_path / "out").read("w0"), values[0])


def test_a_full_disk_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def fallocate(self, *_: int) -> int:
            ctypes.set_errno(errno.ENOSPC)
            return -1

    monkeypatch.setattr(store_file, "_libc", Full())
    with pytest.raises(IoError, match=r"out/config.json: cannot write: No space.*are needed, and"):
        export_small(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_memory_is_bounded(tmp_path: Path) -> None:
    """192 MiB of weights and moments go out with less than 40 MiB of memory."""
    weights = [large(f"w{i}", 48 << 20) for i in range(2)]
    state = {i: {"exp_avg": large("m", 48 << 20)} for i in range(2)}
    tracemalloc.start()
    try:
        files = write_export(
            tmp_path / "out", [ModelFiles(weights)], {"state": state, "param_groups": []}, 1
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(files.values()) > 192 << 20
    assert peak < 40 << 20


def test_few_parts_are_begun_ahead_however_small() -> None:
    """Each may hold a whole block of a store until it is taken.  Empty ones are made in their turn,
    since values may come from one iterator."""
    begun = taken = most = 0

    def small(number: int) -> StreamedTensor:
        def parts() -> Iterator[Part]:
            nonlocal begun, most
            begun += 1
            most = max(most, begun - taken)
            yield Part(4, lambda: np.zeros(4, np.uint8))

        return StreamedTensor(f"t{number}", torch.float32, (1,), parts)

    for _ in stream([small(number) for number in range(200)]):
        taken += 1
    assert taken == 200 and most <= AHEAD_PARTS + 1
    values = iter([torch.ones(3), torch.ones(0), torch.ones(2)])
    made = [lazy("v", torch.float32, (n,), lambda: next(values)) for n in (3, 0, 2)]
    assert [data.size for data in stream(made)] == [12, 0, 8]


@pytest.mark.parametrize("broken", ["weights", "optimizer", "check"])
def test_an_interrupted_export_leaves_nothing(tmp_path: Path, broken: str) -> None:
    """Whatever fails, at whatever file, nothing stands under the name that was asked for."""

    def parts() -> Iterator[Part]:
        yield Part(4, lambda: np.zeros(4, np.uint8))
        raise KeyboardInterrupt

    def check() -> None:
        if broken == "check":
            raise KeyboardInterrupt

    bad = StreamedTensor("bad", torch.float32, (2,), parts)
    good = in_memory("good", torch.ones(2))
    state = {0: {"exp_avg": bad if broken == "optimizer" else good}}
    weights = [bad if broken == "weights" else good]
    tree = {"state": state, "param_groups": []}
    with pytest.raises(KeyboardInterrupt):
        write_export(tmp_path / "out", [ModelFiles(weights)], tree, 1, check=check)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(OffloadError, match="is there already"):
        write_export(tmp_path / "out", [ModelFiles([])], None, 1)
    assert (tmp_path / "out" / "mine").read_text() == "precious"


def test_every_flipped_bit_is_told(tmp_path: Path) -> None:
    """400 single bits, spread over all files of an export, its list of checksums among them."""
    out, generator = tmp_path / "out", random.Random(0)
    export_small(out)
    paths = sorted(out.iterdir())
    assert SUMS in {path.name for path in paths}
    for number in range(400):
        path = paths[number % len(paths)]
        data = path.read_bytes()
        bit = generator.randrange(8 * len(data))
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert verify_export(out, lambda nbytes: None), f"{path.name}, bit {bit}"
        path.write_bytes(data)
    assert verify_export(out, lambda nbytes: None) == []


def test_files_that_are_cut_or_gone_are_told(tmp_path: Path) -> None:
    export_small(tmp_path / "out")
    path = tmp_path / "out" / OPTIMIZER
    path.write_bytes(path.read_bytes()[:-1])
    assert "is damaged" in verify_export(tmp_path / "out", lambda nbytes: None)[0]
    path.unlink()
    assert "No such file" in verify_export(tmp_path / "out", lambda nbytes: None)[0]


def test_checksums_go_on_from_those_before() -> None:
    data = np.frombuffer(random.Random(0).randbytes(100_003), np.uint8)
    first = crc32(data[:777])
    assert crc32(data[777:], first) == zlib.crc32(data.tobytes())


def test_halves_are_joined_as_masters_are() -> None:
    value = torch.randn(4096) * torch.tensor([1.0, 1e-30, 1e30, 65504.0]).repeat(1024)
    upper, lower = split_master(value)
    raw = [half.view(torch.uint16).numpy() for half in (upper, lower)]
    assert torch.from_numpy(join_halves(*raw)).view(torch.int32).equal(value.view(torch.int32))
