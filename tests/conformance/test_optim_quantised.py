"""Dequantisation: native kernels, CUDA kernels on the host and plain torch give the same bits."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from overspill.optim import cuda_kernels, kernels, quantised, quantised_device
from overspill.optim.quantised import AWQ_NIBBLES, Codes, Order, Scaling, dequantise, scales_shape
from tests.conformance.test_optim_packed import WHO, by, memory

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "csrc" / "cuda"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS: list[tuple[Order, int]] = [
    ("halves", 4), ("awq", 4),
    *(("rows", bits) for bits in range(1, 9)), *(("interleaved", bits) for bits in range(1, 9)),
]  # fmt: skip
SHAPES = [(1, 1), (3, 1), (1, 530), (8, 31), (16, 64), (40, 257), (136, 100), (264, 1100)]
# Several tasks of the thread pool, of columns and of rows.
LONG_SHAPES = [(1, 150_001), (70_008, 1), (136, 1100)]


@dataclass(frozen=True)
class Case:
    """A quantised matrix, how it becomes a weight, the dtype of the weight, and its operands."""

    codes: Codes
    scaling: Scaling
    dtype: torch.dtype
    with_zeros: bool
    with_index: bool


def cases(order: Order, bits: int, shapes: list[tuple[int, int]], each: int) -> Iterator[Case]:
    """Yield ``each`` cases of a shape; options are drawn, always the same ones."""
    for rows, columns in shapes:
        draw = random.Random(f"{order} {bits} {rows} {columns}")
        if order == "awq":
            rows = -(-rows // 8) * 8
        for _ in range(each):
            spare = draw.choice([0, 0, 3]) if order in ("rows", "halves") else 0
            blocks = [(1, 32), (1, 64), (1, 5), (1, 1), (128, 128), (3, 7), (1 << 40, 1 << 40)]
            yield Case(
                Codes(order, bits, rows, columns, -(-columns * bits // 8) + spare),
                Scaling(
                    draw.choice(blocks), draw.choice([1.0, 1 / 127]), draw.choice(DTYPES),
                    draw.random() < 0.4,
                ),
                draw.choice(DTYPES), draw.random() < 0.5, draw.random() < 0.3,
            )  # fmt: skip


def operands(case: Case) -> dict[str, Any]:
    """Return the arguments of ``dequantise``, all but ``weight``."""
    draw = torch.Generator().manual_seed(case.codes.numel)
    codes = case.codes
    page = memory(codes.nbytes + 64)
    page[64:] = torch.randint(256, (codes.nbytes,), generator=draw, dtype=torch.uint8)
    table = torch.randn(1 << codes.bits, generator=draw)
    table[0], table[-1] = -0.0, float("nan") if codes.bits == 8 else 3.0
    groups = 3 if case.with_index else None
    scales = torch.randn(scales_shape(codes, case.scaling, groups), generator=draw)
    # Results that are infinite or subnormal in fp16, infinite in fp32 or bf16, zero, or NaN.
    for k, extreme in enumerate((3e5, 1e-6, 3e38, 1e-40, 0.0, float("inf"))):
        scales.view(-1)[k + 1 :: 13] = extreme
    zeros = torch.randint(0, 16, scales.shape, generator=draw).float()
    index = torch.randint(3, (codes.columns,), generator=draw, dtype=torch.int32)
    return {
        "codes": codes, "data": page[64:], "table": table, "scales": scales,
        "scaling": case.scaling, "zeros": zeros if case.with_zeros else None,
        "index": index if case.with_index else None,
    }  # fmt: skip


def dequantised(case: Case, who: str, where: str = "cpu") -> torch.Tensor:
    """Return the weight, which begins on an element that is not aligned any further."""
    buffer = torch.full((case.codes.numel + 2,), 7.0, dtype=case.dtype, device=where)
    given = {
        name: each.to(where) if isinstance(each, torch.Tensor) else each
        for name, each in operands(case).items()
    }
    with by(who):
        dequantise(**given, weight=buffer[1:-1])
    assert buffer[0] == buffer[-1] == 7.0, "something was written beside the weight"
    return buffer[1:-1].cpu()


def raw(weight: torch.Tensor) -> torch.Tensor:
    """Return the bits of each element, the same ones for every NaN."""
    integers = weight.view(torch.int32 if weight.dtype is torch.float32 else torch.int16)
    return torch.where(weight.isnan(), torch.zeros_like(integers) - 1, integers)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set how many threads run a kernel."""
    before = kernels.threads()
    kernels.set_threads(count)
    try:
        yield
    finally:
        kernels.set_threads(before)


@pytest.mark.parametrize(("order", "bits"), LAYOUTS)
def test_instruction_sets_give_the_same_bits(order: Order, bits: int) -> None:
    for case in cases(order, bits, SHAPES, 5):
        expected = raw(dequantised(case, "torch"))
        for who in WHO[1:]:
            assert torch.equal(raw(dequantised(case, who)), expected), (who, case)


@pytest.mark.parametrize(("order", "bits"), [("rows", 8), *LAYOUTS[:2], ("interleaved", 3)])
def test_threads_give_the_same_bits(order: Order, bits: int) -> None:
    for case in cases(order, bits, LONG_SHAPES, 2):
        expected = raw(dequantised(case, "torch"))
        for who in WHO[1:]:
            for count in (1, 3):
                with threads(count):
                    assert torch.equal(raw(dequantised(case, who)), expected), (who, count, case)


# -- the arithmetic itself ------------------------------------------------------------------------


def code_at(codes: Codes, data: bytes, row: int, column: int) -> int:
    """Return a code, as the documentation of ``Codes`` says."""
    if codes.order == "awq":
        at = 4 * (column * codes.rows // 8 + row // 8)
        word = int.from_bytes(data[at : at + 4], "little")
        return word >> (4 * AWQ_NIBBLES[row % 8]) & 15
    if codes.order == "interleaved":
        words = range(row, len(data) // 4, codes.rows)
        own = b"".join(data[4 * word : 4 * word + 4] for word in words)
    else:
        own = data[row * codes.row_bytes : (row + 1) * codes.row_bytes]
    if codes.order == "halves":
        return own[column // 2] >> (0 if column % 2 else 4) & 15
    return int.from_bytes(own, "little") >> (column * codes.bits) & ((1 << codes.bits) - 1)


def rounded(value: np.float32, dtype: torch.dtype) -> np.float32:
    """Round to nearest, ties to even."""
    if dtype is torch.float16:
        return np.float32(np.float16(value))
    if dtype is torch.float32 or not np.isfinite(value):
        return value
    bits = int(value.view(np.uint32))
    bits += 0x7FFF + (bits >> 16 & 1)
    return np.uint32(bits >> 16 << 16).view(np.float32)


def oracle(case: Case) -> torch.Tensor:
    """Return the weight, an element at a time."""
    given = operands(case)
    codes, scaling = case.codes, case.scaling
    data, table, scales = given["data"].numpy().tobytes(), *(
        given[name].numpy() for name in ("table", "scales")
    )  # fmt: skip
    made = np.zeros((codes.rows, codes.columns), np.float32)
    for row, column in np.ndindex(made.shape):
        group = (
            column // scaling.block[1] if given["index"] is None else int(given["index"][column])
        )
        at = row // scaling.block[0], group
        number = table[code_at(codes, data, row, column)]
        if given["zeros"] is not None:
            number = number - given["zeros"].numpy()[at]
        value = number * scales[at] * np.float32(scaling.factor)
        made[row, column] = rounded(rounded(value, scaling.through), case.dtype)
    flat = (made.T if scaling.transposed else made).reshape(-1)
    return torch.from_numpy(flat.copy()).to(case.dtype)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("order", "bits"), LAYOUTS)
def test_plain_torch_gives_the_bits_of_the_definition(order: Order, bits: int) -> None:
    for case in cases(order, bits, [(1, 1), (8, 1), (3, 41), (16, 64)], 4):
        assert torch.equal(raw(dequantised(case, "torch")), raw(oracle(case))), case


# -- borders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize(("order", "bits"), LAYOUTS[:3])
def test_empty_matrices_are_left_alone(order: Order, bits: int, who: str) -> None:
    for case in cases(order, bits, [(0, 64), (8, 0)], 2):
        assert dequantised(replace(case, with_index=False), who).numel() == 0


@pytest.mark.parametrize("who", WHO)
def test_what_does_not_fit_is_refused(who: str) -> None:
    case = Case(Codes("rows", 4, 8, 64, 32), Scaling((1, 32)), torch.bfloat16, True, True)
    given = {**operands(case), "weight": torch.full((512,), 7.0, dtype=torch.bfloat16)}
    data, scales, index = given["data"], given["scales"], given["index"]
    bad: list[dict[str, Any]] = [
        {"codes": Codes("rows", 4, 8, 64, 31), "data": data[:-8]},
        {"codes": Codes("rows", 9, 8, 64, 72)},
        {"codes": Codes("rows", 0, 8, 64, 32)},
        {"codes": Codes("halves", 3, 8, 64, 32)},
        {"codes": Codes("awq", 8, 8, 64)},
        {"codes": Codes("awq", 4, 4, 128)},
        {"codes": Codes("columns", 4, 8, 64, 32)},  # type: ignore[arg-type]
        {"codes": Codes("rows", 4, -8, -64, 32)},
        {"data": data[:-1]},
        {"data": data.view(torch.int8)},
        {"table": given["table"][:8]},
        {"table": given["table"].double()},
        {"scales": scales.t().contiguous()},
        {"scales": scales.t().contiguous().t()},
        {"scales": scales.half()},
        {"scales": scales[0, 0]},
        {"zeros": given["zeros"][:, :1]},
        {"zeros": given["zeros"].to(torch.int32)},
        {"index": index.long()},
        {"index": index[:-1]},
        {"index": index.repeat(2)[::2]},
        {"index": index + 1},
        {"index": index - 1},
        {"index": None},
        {"scaling": Scaling((0, 32))},
        {"scaling": Scaling((1, 32), through=torch.float64)},
        {"weight": torch.zeros(511, dtype=torch.bfloat16)},
        {"weight": torch.zeros(8, 64, dtype=torch.bfloat16)},
        {"weight": torch.zeros(512, dtype=torch.float64)},
        {"weight": torch.zeros(512, dtype=torch.bfloat16, device="meta")},
    ]
    index[0], index[1] = 0, 2
    with by(who):
        for other in bad:
            with pytest.raises(ValueError):
                dequantise(**{**given, **other})
        assert (given["weight"] == 7.0).all()
        dequantise(**given)


# -- on a GPU, as the host can tell ---------------------------------------------------------------

Launch = Callable[[str, str, int, list[Any], torch.Tensor], None]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """``cuda_kernels.launch``, by the kernel as a host function."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    library = tmp_path_factory.mktemp("cuda") / "host.so"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-w"]
    where = ["-I", str(SOURCES), "-I", str(HERE)]
    program = str(HERE / "cuda_dequantise_on_host.cpp")
    subprocess.run(["g++", *flags, *where, program, "-o", str(library)], check=True)
    host = ctypes.CDLL(str(library))

    def launched(
        source: str, kernel: str, blocks: int, arguments: list[Any], like: torch.Tensor
    ) -> None:
        assert (source, kernel) == ("dequantise.cu", "dequantise")
        *words, factor = arguments
        given = (ctypes.c_uint64 * len(words))(*(int(word) for word in words))
        host.run_dequantise(blocks, cuda_kernels.THREADS, given, ctypes.c_float(float(factor)))

    return launched


@pytest.mark.parametrize(("order", "bits"), LAYOUTS)
def test_the_gpus_kernel_gives_the_same_bits(
    order: Order, bits: int, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    for case in cases(order, bits, [(1, 530), (8, 31), (72, 37)], 2):
        expected = raw(dequantised(case, "torch"))
        with monkeypatch.context() as patch:
            patch.setattr(quantised_device, "serves", lambda tensor: True)
            patch.setattr(cuda_kernels, "launch", launch)
            assert torch.equal(raw(dequantised(case, "torch")), expected), case


def test_nvcc_compiles(tmp_path: Path) -> None:
    """CuPy compiles with -ftz=true whatever it is told; no instruction may heed that."""
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    flags = ["-std=c++17", "-arch=sm_80", "-fmad=false", "-ftz=true", "-Werror=all-warnings"]
    out = tmp_path / "out.ptx"
    source = str(SOURCES / "dequantise.cu")
    subprocess.run(["nvcc", *flags, "-ptx", source, "-o", str(out)], check=True)
    code = out.read_text()
    assert "mul.rn.f32" in code
    assert ".ftz" not in code


def test_orders_have_the_numbers_of_the_kernels() -> None:
    """csrc/cpu/job.h, csrc/cuda/dequantise.cu and ``quantised_device`` rely on them."""
    assert list(quantised.ORDERS.values()) == [0, 1, 2, 3]
    assert quantised.ORDERS["halves"] == quantised_device.BY_ROWS
    assert quantised_device.TILE_ROWS * quantised_device.TILE_COLUMNS == 8 * cuda_kernels.THREADS
