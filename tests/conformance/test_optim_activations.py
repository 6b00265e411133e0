"""Saved activations in packed blocks: the same bits from every kernel, bounded error, windows."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from overspill.io_engine import allocate_host
from overspill.optim import activation_blocks, cuda_kernels, kernels
from overspill.optim.activation_blocks import BLOCK, BLOCK_BYTES, ActivationBlocks
from overspill.schedule.layout import packed_bytes
from tests.conformance.test_optim_packed import WHO, by

HERE = Path(__file__).parent
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 3, 127, 128, 129, 1000, 16_384, 50_001]
CASES = list(itertools.product(DTYPES, SIZES))


def memory(nbytes: int) -> torch.Tensor:
    return torch.from_numpy(allocate_host(nbytes).array).fill_(0xA5)


def values_of(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Flat uint8 of values of different orders: outliers, zeros, subnormals, ties, extremes."""
    draw = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=draw)
    for block, factor in enumerate([1e-3, 100.0, 0.0, 1e-40, 1e-31, 1e30]):
        values[block * 300 : block * 300 + 200] *= factor
    values[7 * 300 : 8 * 300] = torch.arange(300)[: values[2100:2400].numel()] * 0.5 - 63.5
    values[::5000] = 3e4
    limit = torch.finfo(dtype).max
    memory_of = memory(numel * dtype.itemsize)
    memory_of.view(dtype).copy_(values.clamp(-limit, limit))
    return memory_of


def pack(blocks: ActivationBlocks, values: torch.Tensor, who: str) -> torch.Tensor:
    packed = memory(blocks.packed_bytes(values.numel()))
    with by(who):
        blocks.pack(values, packed)
    return packed


def unpack(blocks: ActivationBlocks, packed: torch.Tensor, nbytes: int, who: str) -> torch.Tensor:
    values = memory(nbytes)
    with by(who):
        blocks.unpack(packed, values)
    return values


def same(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether all bits are equal, but for those of NaN."""
    nan = a.view(dtype).isnan()
    if not torch.equal(nan, b.view(dtype).isnan()):
        return False
    return torch.equal(a.view(dtype)[~nan].view(torch.uint8), b.view(dtype)[~nan].view(torch.uint8))


@pytest.mark.parametrize(("dtype", "numel"), CASES, ids=str)
def test_all_pack_and_unpack_alike(dtype: torch.dtype, numel: int) -> None:
    blocks, values = ActivationBlocks(dtype), values_of(numel, dtype)
    packed = pack(blocks, values, "torch")
    found = unpack(blocks, packed, values.numel(), "torch")
    for who in WHO:
        assert torch.equal(pack(blocks, values, who), packed), who
        assert torch.equal(unpack(blocks, packed, values.numel(), who), found), who


@pytest.mark.parametrize(("dtype", "numel"), CASES, ids=str)
def test_an_element_changes_by_half_a_scale_at_most(dtype: torch.dtype, numel: int) -> None:
    blocks, values = ActivationBlocks(dtype), values_of(numel, dtype)
    found = unpack(blocks, pack(blocks, values, WHO[-1]), values.numel(), WHO[-1])
    before, after = values.view(dtype).double(), found.view(dtype).double()
    rounding = torch.finfo(dtype).eps
    for first in range(0, numel, BLOCK):
        block = before[first : first + BLOCK]
        most = float(block.abs().max())
        error = float((after[first : first + BLOCK] - block).abs().max())
        assert error <= most * (1 / 252 + rounding) + activation_blocks.LEAST_MAGNITUDE


@pytest.mark.parametrize(("dtype", "numel"), CASES, ids=str)
def test_every_element_keeps_its_sign(dtype: torch.dtype, numel: int) -> None:
    """So that ReLU knows again what it let pass; zeros stay zeros."""
    blocks, values = ActivationBlocks(dtype), values_of(numel, dtype)
    found = unpack(blocks, pack(blocks, values, WHO[-1]), values.numel(), WHO[-1])
    before, after = values.view(dtype), found.view(dtype)
    for first in range(0, numel, BLOCK):
        mine = slice(first, first + BLOCK)
        most = float(before[mine].abs().max())
        # A 64th of a scale must be a number of the dtype, and a block not be taken for zeros.
        if most / 126 / 64 >= torch.finfo(dtype).smallest_normal and most > 1e-29:
            assert torch.equal(before[mine].sign(), after[mine].sign())


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("inf"), float("nan"), -float("inf")])
def test_a_block_that_is_not_finite_becomes_nan(bad: float, dtype: torch.dtype, who: str) -> None:
    blocks, values = ActivationBlocks(dtype), memory(400 * dtype.itemsize)
    values.view(dtype).fill_(2.0)
    values.view(dtype)[200] = bad
    packed = pack(blocks, values, who)
    assert torch.equal(packed, pack(blocks, values, "torch"))
    found = unpack(blocks, packed, values.numel(), who)
    assert same(found, unpack(blocks, packed, values.numel(), "torch"), dtype)
    assert found.view(dtype)[128:256].isnan().all()
    assert not found.view(dtype)[:128].isnan().any()
    assert not found.view(dtype)[256:].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_windows_have_what_the_whole_has(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_blocks, "WINDOW", 4 * BLOCK)
    blocks, values = ActivationBlocks(dtype), values_of(3001, dtype)
    whole, parts = pack(blocks, values, WHO[-1]), memory(blocks.packed_bytes(values.numel()))
    end = to = 0
    for window, there in blocks.windows(values.numel()):
        assert (window.start, there.start) == (end, to)
        end, to = window.stop, there.stop
        parts[there] = pack(blocks, values[window].clone(), WHO[-1])
    assert (end, to) == (values.numel(), whole.numel())
    assert torch.equal(parts, whole)


def test_sizes_are_checked() -> None:
    blocks = ActivationBlocks(torch.bfloat16)
    assert blocks.packed_bytes(2 * 1280) == 10 * BLOCK_BYTES
    assert blocks.packed_bytes(0) == 0
    for dtype, nbytes in itertools.product(DTYPES, [0, 4, 508, 512, 516, 1 << 20, (1 << 20) + 4]):
        # What the residency machine reserves.
        assert ActivationBlocks(dtype).packed_bytes(nbytes) == packed_bytes(nbytes, dtype.itemsize)
    for values, packed in ((2560, 1319), (2558, 1320), (2560, 1321)):
        with pytest.raises(ValueError, match="packed"):
            blocks.pack(memory(values), memory(packed))
        with pytest.raises(ValueError, match="packed"):
            blocks.unpack(memory(packed), memory(values))
    blocks.pack(memory(16)[:0], memory(16)[:0])


# -- on a GPU, as the host can tell ---------------------------------------------------------------

Launch = Callable[[str, str, int, tuple[Any, ...], torch.Tensor], None]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """``cuda_kernels.launch``, by the kernels as host functions."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    library = tmp_path_factory.mktemp("cuda") / "host.so"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-w"]
    where = ["-I", str(HERE.parents[1] / "csrc" / "cuda"), "-I", str(HERE)]
    source = str(HERE / "cuda_activations_on_host.cpp")
    subprocess.run(["g++", *flags, *where, source, "-o", str(library)], check=True)
    host = ctypes.CDLL(str(library))

    def launched(
        source: str, kernel: str, blocks: int, arguments: tuple[Any, ...], like: torch.Tensor
    ) -> None:
        assert source == "activations.cu"
        *words, kind = arguments
        given = (ctypes.c_uint64 * len(words))(*(int(word) for word in words))
        getattr(host, f"run_{kernel}")(blocks, cuda_kernels.THREADS, given, ctypes.c_int(int(kind)))

    return launched


@pytest.mark.parametrize(("dtype", "numel"), list(itertools.product(DTYPES, [3, 129, 5001])))
def test_the_gpus_kernels_are_alike(
    dtype: torch.dtype, numel: int, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, values = ActivationBlocks(dtype), values_of(numel, dtype)
    if numel > 2 * BLOCK:
        values.view(dtype)[BLOCK] = float("nan")
    packed = pack(blocks, values, "torch")
    found = unpack(blocks, packed, values.numel(), "torch")
    monkeypatch.setattr(kernels, "NATIVE", None)
    monkeypatch.setattr(activation_blocks, "serves", lambda tensor: True)
    monkeypatch.setattr(cuda_kernels, "launch", launch)
    own, there = memory(packed.numel()), memory(values.numel())
    blocks.pack(values, own)
    blocks.unpack(own, there)
    assert torch.equal(own, packed)
    assert same(there, found, dtype)


def test_nvcc_compiles(tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    source = HERE.parents[1] / "csrc" / "cuda" / "activations.cu"
    flags = ["-std=c++17", "-arch=sm_80", "-fmad=false", "-ptx", "-Werror=all-warnings"]
    subprocess.run(["nvcc", *flags, str(source), "-o", str(tmp_path / "out.ptx")], check=True)
