"""Formats of frozen weights: one arithmetic, whoever does it, and that of bitsandbytes."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from overspill.io_engine import allocate_host
from overspill.optim import cuda_kernels, kernels, packed, packed_device
from overspill.optim.packed_layout import BLOCK, FORMATS, SCALES, Format, Parts, windows
from tests.crossed import crossed

HERE = Path(__file__).parent
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(300, 200), (64, 64), (7, 129), (3, 65, 100), (1, 5), (2, 40_000)]
CASES = list(itertools.product(FORMATS, DTYPES, SHAPES))


def memory(nbytes: int) -> torch.Tensor:
    return torch.from_numpy(allocate_host(nbytes).array).fill_(0xA5)


def weight_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """With zeroes, a block and a row of them, equal sizes, and sizes of very different orders."""
    draw = torch.Generator().manual_seed(len(shape) * 1000 + shape[-1])
    weight = torch.randn(shape, generator=draw) * 0.02
    flat = weight.view(-1)
    flat[: flat.numel() // 5] *= 1e-4
    flat[: min(64, flat.numel() // 2)] = 0.0
    weight.view(-1, shape[-1])[-1] = 0.0
    return weight.to(dtype)


@contextmanager
def by(who: str) -> Iterator[None]:
    """An instruction set, or plain torch."""
    native = kernels.NATIVE
    try:
        if who == "torch":
            kernels.NATIVE = None
        elif native is not None:
            native.set_isa(who)
        yield
    finally:
        kernels.NATIVE = native
        if native is not None:
            native.set_isa(native.isas()[0])


WHO = ["torch", *(kernels.NATIVE.isas() if kernels.NATIVE is not None else ())]


def pack(form: Format, weight: torch.Tensor, who: str = WHO[-1]) -> tuple[Parts, torch.Tensor]:
    parts = Parts(form, tuple(weight.shape))
    page = memory(parts.nbytes)
    with by(who):
        packed.pack(parts, weight, page)
    return parts, page


def unpack(parts: Parts, page: torch.Tensor, dtype: torch.dtype, who: str) -> torch.Tensor:
    weight = torch.full((parts.numel,), float("nan"), dtype=dtype)
    with by(who):
        packed.unpack(parts, page, weight)
    return weight


@pytest.mark.parametrize(("form", "dtype", "shape"), CASES, ids=str)
def test_all_pack_and_unpack_alike(
    form: Format, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    weight = weight_of(shape, dtype)
    parts, page = pack(form, weight, "torch")
    expected = unpack(parts, page, dtype, "torch")
    assert torch.isfinite(expected).all()
    for who in WHO:
        assert torch.equal(pack(form, weight, who)[1], page), who
        for out in DTYPES:
            found = unpack(parts, page, out, who)
            assert torch.equal(found, unpack(parts, page, out, "torch")), (who, out)
    # Of a largest size, int8 is half a step away at most, and nf4 half the widest gap.
    exact = unpack(parts, page, torch.float32, WHO[-1]).view(shape)
    most, error = weight.abs().max(), (exact - weight.float()).abs().max()
    assert error <= most * (1 / 254 if form == "int8" else 0.16) * 1.01 + 1e-6


def part(page: torch.Tensor, at: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    return page[at : at + count * dtype.itemsize].view(dtype).clone()


@pytest.mark.parametrize(("dtype", "shape"), list(itertools.product(DTYPES, SHAPES)), ids=str)
def test_nf4_is_that_of_bitsandbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Unpacked bit for bit, with the values that its scales have here; packed, nearly all alike."""
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = weight_of(shape, dtype)
    parts, page = pack("nf4", weight)
    mine = unpack(parts, page, dtype, WHO[-1])
    codes, state = functional.quantize_4bit(
        weight, blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
    )
    theirs = functional.dequantize_4bit(codes, state).view(-1)
    scale = weight.abs().max().float()
    assert (theirs.float() - mine.float()).abs().max() <= 0.02 * scale
    assert (theirs - mine).abs().mean() <= 1e-4 * scale
    state.absmax = part(page, parts.scale_codes, torch.uint8, parts.blocks)
    state.state2.absmax = part(page, parts.scales, torch.float32, -(-parts.blocks // SCALES))
    assert (state.state2.code - packed._scale_codes()).abs().max() <= 1e-7
    state.state2.code = packed._scale_codes()
    state.offset = part(page, parts.offset, torch.float32, 1)[0]
    own = part(page, 0, torch.uint8, -(-parts.numel // 2)).view(-1, 1)
    assert torch.equal(functional.dequantize_4bit(own, state).view(-1), mine)


@pytest.mark.parametrize(("dtype", "shape"), list(itertools.product(DTYPES, SHAPES)), ids=str)
def test_int8_is_that_of_bitsandbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    parts, page = pack("int8", weight_of(shape, dtype))
    codes = part(page, 0, torch.int8, parts.numel).view(-1, shape[-1])
    scales = part(page, parts.scales, torch.float32, parts.rows)
    theirs = functional.int8_vectorwise_dequant(codes, scales).to(dtype).view(-1)
    assert torch.equal(unpack(parts, page, dtype, WHO[-1]), theirs)


@pytest.mark.parametrize("most", [1, 16_384, 70_000])
@pytest.mark.parametrize(("form", "shape"), list(itertools.product(FORMATS, SHAPES)), ids=str)
def test_windows_have_what_the_whole_has(form: Format, shape: tuple[int, ...], most: int) -> None:
    parts, page = pack(form, weight_of(shape, torch.bfloat16))
    whole = unpack(parts, page, torch.bfloat16, WHO[-1])
    end = 0
    for window in windows(parts, most):
        assert window.start == end
        end = window.stop
        own = memory(window.parts.nbytes)
        for low, high, to in window.moves:
            own[to : to + high - low] = page[low:high]
        found = unpack(window.parts, own, torch.bfloat16, WHO[-1])
        assert torch.equal(found, whole[window.start : window.stop])
    assert end == parts.numel


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("bad", [float("inf"), float("nan"), -float("inf")])
def test_what_is_not_finite_is_refused(bad: float, form: Format, who: str) -> None:
    for at in (0, 63, 8191):
        weight = torch.ones(64, 128)
        weight.view(-1)[at] = bad
        with pytest.raises(ValueError, match="not finite"):
            pack(form, weight, who)


def test_sizes_are_those_that_are_told() -> None:
    numel = 4096 * 4096
    assert Parts("nf4", (4096, 4096)).nbytes * 8 / numel == pytest.approx(4.127, abs=1e-3)
    assert Parts("int8", (4096, 4096)).nbytes * 8 / numel == pytest.approx(8.008, abs=1e-3)
    parts = Parts("nf4", (0, 64))
    packed.pack(parts, torch.zeros(0, 64), memory(parts.nbytes))
    packed.unpack(parts, memory(parts.nbytes), torch.zeros(0))


def test_what_does_not_fit_is_refused() -> None:
    parts, page = pack("nf4", torch.ones(64, 64))
    for weight, given in (
        (torch.zeros(4095), page),
        (torch.zeros(64, 64), page),
        (torch.zeros(4096), page[:-1]),
        (torch.zeros(4096, dtype=torch.float64), page),
    ):
        with pytest.raises(ValueError):
            packed.unpack(parts, given, weight)
    with pytest.raises(ValueError, match="not 'fp4'"):
        Parts("fp4", (64, 64))  # type: ignore[arg-type]


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
    source = str(HERE / "cuda_unpack_on_host.cpp")
    subprocess.run(["g++", *flags, *where, source, "-o", str(library)], check=True)
    host = ctypes.CDLL(str(library))

    def launched(
        source: str, kernel: str, blocks: int, arguments: tuple[Any, ...], like: torch.Tensor
    ) -> None:
        assert source == "unpack.cu"
        *words, kind = arguments
        given = (ctypes.c_uint64 * len(words))(*(int(word) for word in words))
        getattr(host, f"run_{kernel}")(blocks, cuda_kernels.THREADS, given, ctypes.c_int(int(kind)))

    return launched


@pytest.mark.parametrize(("form", "dtype", "shape"), crossed(FORMATS, DTYPES, SHAPES[:5]))
def test_the_gpus_kernels_unpack_alike(
    form: Format, dtype: torch.dtype, shape: tuple[int, ...], launch: Launch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    parts, page = pack(form, weight_of(shape, dtype))
    expected = unpack(parts, page, dtype, "torch")
    monkeypatch.setattr(kernels, "NATIVE", None)
    monkeypatch.setattr(packed_device, "serves", lambda tensor: True)
    monkeypatch.setattr(cuda_kernels, "launch", launch)
    weight = torch.full((parts.numel,), float("nan"), dtype=dtype)
    packed.unpack(parts, page, weight)
    assert torch.equal(weight, expected)


def test_nvcc_compiles(tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    source = HERE.parents[1] / "csrc" / "cuda" / "unpack.cu"
    flags = ["-std=c++17", "-arch=sm_80", "-fmad=false", "-ptx", "-Werror=all-warnings"]
    subprocess.run(["nvcc", *flags, str(source), "-o", str(tmp_path / "out.ptx")], check=True)
