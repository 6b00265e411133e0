"""The table of quantised formats: a title and a function that writes a folder, for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import writers
from .writers import Weights, matrix, to_fp8

Writer = Callable[[Path], Weights]
Case = tuple[str, Writer]
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
FLOATS = (F32, BF16, F16)
FP8 = {"quant_method": "fp8"}
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
MODELOPT_FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}
CHANNEL, TENSOR = {"strategy": "channel"}, {"strategy": "tensor"}
GROUP = {"strategy": "group", "group_size": 32}
REAL8, REAL4 = {"type": "float", "num_bits": 8}, {"type": "float", "num_bits": 4}
PACKED = "pack-quantized"


def named(each: torch.dtype) -> str:
    """Return the name of a dtype without its module."""
    return str(each).removeprefix("torch.")


def case(title: str, write: Callable[..., Weights], **arguments: Any) -> Case:
    """Return a row of the table."""
    return title, partial(write, **arguments)


def bitsandbytes_cases() -> Iterator[Case]:
    write = writers.four_bit
    for kind in ("nf4", "fp4"):
        for double in (False, True):
            for block in (64, 128):
                for dtype in FLOATS:
                    title = f"{kind}-{'double-' * double}{block}-{named(dtype)}"
                    weight = matrix(12, 128, dtype=dtype, seed=block)
                    yield case(title, write, weight=weight, kind=kind, block=block, double=double)
    for shape in ((7, 9), (1, 33), (5, 201), (64, 64), (24, 40), (200, 1), (2, 3, 5)):
        for kind in ("nf4", "fp4"):
            for double in (False, True):
                title = f"{kind}-{'double-' * double}{'x'.join(map(str, shape))}"
                yield case(title, write, weight=matrix(*shape), kind=kind, double=double)
    many = matrix(130, 128, dtype=BF16)  # 260 blocks: two blocks of nested scales
    yield case("nf4-double-260-blocks", write, weight=many, kind="nf4", double=True)
    for storage in FLOATS:
        weight = matrix(16, 64, dtype=BF16)
        title = f"nf4-stored-as-{named(storage)}"
        yield case(title, write, weight=weight, kind="nf4", storage=storage)
    for block in (32, 256, 4096):
        weight = matrix(3, 4096 if block == 4096 else 256, dtype=F16)
        yield case(f"nf4-block-{block}", write, weight=weight, kind="nf4", block=block)
    yield case("nf4-zeros", write, weight=torch.zeros(8, 16), kind="nf4")
    for config in (True, False):
        title, weight = f"nf4-module-config-{config}", matrix(16, 64, dtype=BF16)
        yield case(title, writers.four_bit_module, weight=weight, config=config)
    for rows, columns in ((24, 40), (7, 9), (1, 33), (32, 32), (9, 1)):
        weight = matrix(rows, columns, dtype=F16)
        yield case(f"int8-{rows}x{columns}", writers.int8_rows, weight=weight)
    weight = matrix(8, 16, dtype=F16)
    yield case("int8-without-weight_format", writers.int8_rows, weight=weight, weight_format=None)


def gptq_and_awq_cases() -> Iterator[Case]:
    for bits in (2, 3, 4, 8):
        for act_order in (False, True):
            for version in ("gptq", "gptq_v2"):
                title = f"{version}-{bits}-bits-{'act' if act_order else 'in'}-order"
                weight = matrix(32, 96, seed=bits)
                yield case(
                    title, writers.gptq, weight=weight, bits=bits, version=version,
                    act_order=act_order,
                )  # fmt: skip
    more: Mapping[str, Mapping[str, Any]] = {
        "bf16": {"dtype": BF16}, "fp32": {"dtype": F32}, "8-bits-bf16": {"dtype": BF16, "bits": 8},
        "one-group": {"group": 96}, "one-group-act-order": {"group": 96, "act_order": True},
        "without-g_idx": {"with_index": False}, "without-checkpoint_format": {"version": None},
        "last-group-cut": {"group": 64},
    }  # fmt: skip
    for title, options in more.items():
        yield case(f"gptq-{title}", writers.gptq, weight=matrix(32, 96), **{"bits": 4, **options})
    for bits in (2, 4, 8):  # in every dimension a single word, and square
        few = 32 // bits
        title = f"gptq-{bits}-bits-smallest"
        yield case(title, writers.gptq, weight=matrix(few, few), bits=bits, group=few)
    for rows, columns, group in ((32, 96, 32), (8, 64, 16), (64, 64, 64), (96, 32, 8)):
        for dtype in (F16, BF16):
            title, weight = f"awq-{rows}x{columns}-{named(dtype)}", matrix(rows, columns)
            yield case(title, writers.awq, weight=weight, group=group, dtype=dtype)


def every_code(dtype: torch.dtype) -> torch.Tensor:
    """Return all 256 codes, those of NaN and infinity too, as 16 x 16."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).reshape(16, 16)


def fp8_cases() -> Iterator[Case]:
    write, draw = writers.transformers_fp8, torch.Generator().manual_seed(3)
    for title, shape, block in (
        ("blocks", (64, 96), (16, 32)), ("square", (32, 32), (16, 16)), ("rows", (6, 10), (1, 10)),
        ("tensor", (6, 10), (6, 10)), ("groups", (6, 64), (1, 32)),
    ):  # fmt: skip
        codes, scales = to_fp8(matrix(*shape), block)
        for dtype in (F32, BF16):
            name = f"transformers-{title}-{named(dtype)}-scales"
            yield case(name, write, codes=codes, scales=scales.to(dtype))
    powers = torch.randint(90, 140, (4, 3), generator=draw, dtype=torch.uint8)
    powers[0] = torch.tensor([0, 1, 254])
    codes, _ = to_fp8(matrix(64, 96), (16, 32))
    yield case("transformers-uint8-scales", write, codes=codes, scales=powers)
    yield case("transformers-e8m0-scales", write, codes=codes, scales=powers.view(E8M0))
    highest = torch.full((4, 3), 255, dtype=torch.uint8)
    yield case("transformers-uint8-scales-255", write, codes=codes, scales=highest)
    stack, scales = codes.reshape(2, 32, 96), torch.rand(2, 2, 3, generator=draw)
    yield case("transformers-stack-of-experts", write, codes=stack, scales=scales)

    codes, scales = to_fp8(matrix(576, 300, seed=4), (128, 128))
    config = {**FP8, "weight_block_size": [128, 128]}
    deepseek = {"config": config, "block": (128, 128)}
    yield case("deepseek-blocks-cut", writers.fp8, codes=codes, scales=scales, **deepseek)
    small = {"codes": codes[:64, :40].clone(), "scales": scales[:1, :1]}
    yield case("deepseek-smaller-than-a-block", writers.fp8, **small, **deepseek)
    for dtype in (E4M3, E5M2):
        per_row = {"block": (1, 16), "scale_name": "weight_scale", "config": FBGEMM}
        each = {"codes": every_code(dtype), "scales": torch.rand(16, 1, generator=draw)}
        yield case(f"every-code-of-{named(dtype)}", writers.fp8, **each, **per_row)
        yield case(f"cast-{named(dtype)}", writers.cast_only, codes=every_code(dtype))


def fp8_row_and_tensor_cases() -> Iterator[Case]:
    write, (codes, scales) = writers.fp8, to_fp8(matrix(6, 10), (1, 10))
    row = {"codes": codes, "block": (1, 10), "scale_name": "weight_scale"}
    bound = {"input_scale_ub": torch.tensor([1200.0])}
    flat = scales.flatten()
    yield case("fbgemm", write, **row, scales=scales, config=FBGEMM, **bound)
    yield case("fbgemm-1d", write, **row, scales=flat, config=FBGEMM)
    one_row = {**row, "codes": codes[:1].clone(), "scales": scales[0]}
    yield case("fbgemm-one-row", write, **one_row, config=FBGEMM)
    yield case("modelopt-fp8-rows", write, **row, scales=flat, config=MODELOPT_FP8)
    square, each = to_fp8(matrix(8, 8), (1, 8))
    row_of_8 = {**row, "codes": square, "block": (1, 8), "scales": each.flatten()}
    yield case("fbgemm-1d-square", write, **row_of_8, config=FBGEMM)
    codes, scale = to_fp8(matrix(6, 10), (6, 10))
    whole = {"codes": codes, "block": (6, 10)}
    for dims in range(3):
        tensor = {**whole, "scales": scale.reshape((1,) * dims)}
        named_scale, half = {"scale_name": "weight_scale"}, {"input_scale": torch.tensor(0.5)}
        yield case(
            f"modelopt-fp8-{dims}d", write, **tensor, **named_scale, **half, config=MODELOPT_FP8
        )
        yield case(f"fp8-tensor-{dims}d", write, **tensor, **named_scale, config=FP8)
        comfyui = {"scale_name": "scale_weight", "scale_input": torch.tensor(1.0)}
        yield case(f"comfyui-{dims}d", write, **tensor, **comfyui, config=None)


def fp4_cases() -> Iterator[Case]:
    for experts, rows, columns in ((2, 6, 64), (1, 8, 32), (3, 64, 64)):
        shape = {"experts": experts, "rows": rows, "columns": columns}
        yield case(f"gpt-oss-{experts}x{rows}x{columns}", writers.gpt_oss, **shape)
    for rows, columns in ((6, 64), (1, 16), (32, 32)):
        title = f"modelopt-nvfp4-{rows}x{columns}"
        yield case(title, writers.modelopt_nvfp4, rows=rows, columns=columns)


def quanto_cases() -> Iterator[Case]:
    write, few = writers.quanto_bytes, writers.quanto_bits
    for kind in (torch.int8, E4M3, E5M2):
        for dtype in FLOATS:
            title = f"quanto-{named(kind)}-{named(dtype)}"
            yield case(title, write, weight=matrix(7, 45, dtype=dtype), kind=kind)
        for shape in ((1, 33), (9, 1), (5, 3, 3, 2)):
            title = f"quanto-{named(kind)}-{'x'.join(map(str, shape))}"
            yield case(title, write, weight=matrix(*shape, dtype=BF16), kind=kind)
        columns = {"weight": matrix(6, 6, dtype=BF16), "axis": -1}
        yield case(f"quanto-{named(kind)}-scales-of-columns", write, kind=kind, **columns)
    for bits in (4, 2):
        for group, shape in ((128, (6, 256)), (96, (7, 96)), (64, (5, 192)), (32, (3, 160))):
            for dtype in FLOATS:
                for zero_points in (False, True):
                    end = "-zero-points" * zero_points
                    title = f"quanto-{bits}-bits-groups-of-{group}-{named(dtype)}{end}"
                    options = {"group": group, "bias": True, "zero_points": zero_points}
                    weight = matrix(*shape, dtype=dtype, seed=bits)
                    yield case(title, few, weight=weight, bits=bits, **options)
        for shape in ((5, 45), (64, 64), (9, 129), (1, 33), (5, 3, 3, 2), (11, 1)):
            title = f"quanto-{bits}-bits-{'x'.join(map(str, shape))}"
            yield case(title, few, weight=matrix(*shape, dtype=BF16), bits=bits)
        config = {"quant_method": "quanto", "weights_dtype": f"int{bits}"}
        two = {"weight": matrix(2, 20), "bits": bits, "config": config}
        yield case(f"quanto-{bits}-bits-two-rows", few, **two)
    yield case("quanto-4-bits-two-rows-by-bytes", few, weight=matrix(2, 20), bits=4)
    config = {"quant_method": "quanto", "weights": "int8"}
    yield case("quanto-config", write, weight=matrix(6, 10), kind=torch.int8, config=config)
    large = matrix(4100, 2048, dtype=BF16)  # planes of several temporaries
    yield case("quanto-4-bits-large", few, weight=large, bits=4, group=128, bias=True)


def compressed(
    title: str, form: str, *shape: int, dtype: torch.dtype = BF16, **arguments: Any
) -> Case:
    """Return a row for a weight of compressed-tensors."""
    return case(
        title, writers.compressed, weight=matrix(*shape, dtype=dtype), form=form, **arguments
    )


def packed_cases() -> Iterator[Case]:
    for bits in (2, 3, 4, 5, 8):
        for strategy in (CHANNEL, GROUP):
            for symmetric in (True, False):
                title = (
                    f"packed-{bits}-bits-{strategy['strategy']}{'-asymmetric' * (not symmetric)}"
                )
                options = {"num_bits": bits, "symmetric": symmetric, **strategy}
                yield compressed(title, PACKED, 9, 96, **options)
        yield compressed(f"packed-{bits}-bits-tensor", PACKED, 9, 96, num_bits=bits, **TENSOR)
    asymmetric = {"symmetric": False, "num_bits": 4}
    for dtype in (F16, F32):
        title = f"packed-{named(dtype)}"
        yield compressed(title, PACKED, 9, 64, dtype=dtype, **asymmetric, **GROUP)
    for rows, columns in ((5, 45), (1, 40), (40, 40), (33, 33)):
        for bits in (3, 4):
            title, options = f"packed-{bits}-bits-{rows}x{columns}", {**asymmetric, **CHANNEL}
            yield compressed(title, PACKED, rows, columns, **{**options, "num_bits": bits})


def compressed_cases() -> Iterator[Case]:
    for bits, form in ((4, "naive-quantized"), (8, "int-quantized")):
        for symmetric in (True, False):
            for strategy in (CHANNEL, GROUP, TENSOR):
                title = f"{form}-{strategy['strategy']}{'-asymmetric' * (not symmetric)}"
                options = {"num_bits": bits, "symmetric": symmetric, **strategy}
                yield compressed(title, form, 6, 64, **options)
    block = {"strategy": "block", "block_structure": [16, 24]}
    for form in ("float-quantized", "naive-quantized"):
        for strategy in (CHANNEL, GROUP, TENSOR, block):
            title = f"{form}-fp8-{strategy['strategy']}"
            yield compressed(title, form, 48, 96, **REAL8, **strategy)
    real = "float-quantized"
    yield compressed(f"{real}-fp32-scales", real, 6, 64, **REAL8, **CHANNEL, scales_as=F32)
    yield compressed(f"{real}-blocks-cut", real, 40, 60, **REAL8, **block)
    nvfp4 = {**REAL4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": E4M3}
    for rows, columns in ((6, 64), (1, 16), (32, 32)):
        yield compressed(f"nvfp4-{rows}x{columns}", "nvfp4-pack-quantized", rows, columns, **nvfp4)
    exponents = {**GROUP, "scale_dtype": torch.uint8}
    for edges in (False, True):
        end, options = "-extreme-exponents" * edges, {**exponents, "edges": edges}
        yield compressed(f"mxfp4{end}", "mxfp4-pack-quantized", 6, 64, **REAL4, **options)
        yield compressed(f"mxfp8{end}", "mxfp8-quantized", 6, 64, **REAL8, **options)


TABLE = (
    *bitsandbytes_cases(), *gptq_and_awq_cases(), *fp8_cases(), *fp8_row_and_tensor_cases(),
    *fp4_cases(), *packed_cases(), *compressed_cases(), *quanto_cases(),
)  # fmt: skip
