"""Write one small folder per quantised format, as its own library does.

Every function writes ``model.safetensors`` and ``config.json`` and returns the weights that the
format's library dequantises the files to, by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

Weights = dict[str, torch.Tensor]
PLAIN = "model.norm.weight"  # a tensor of every folder that is not quantised
PREFIX = "model.layers.0.proj"
NAME = f"{PREFIX}.weight"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the outputs in a word; autoawq's order_map


def matrix(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return random values in the range of a model's weights."""
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=draw) * 0.05).to(dtype)


def write(folder: Path, tensors: Mapping[str, torch.Tensor], config: Any = None) -> Path:
    """Write a folder; ``config``: its quantization_config, or ``None`` for no config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {PLAIN: torch.ones(8, dtype=torch.bfloat16)}
    values = {name: each.contiguous() for name, each in {**tensors, **plain}.items()}
    save_file(values, folder / "model.safetensors")
    if config is not None:
        text = json.dumps({"model_type": "llama", "quantization_config": config})
        (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


def prefixed(tensors: Mapping[str, torch.Tensor]) -> Weights:
    """Return the tensors of one module under their names in the files."""
    return {f"{PREFIX}.{name}": each for name, each in tensors.items()}


# -- bitsandbytes ---------------------------------------------------------------------------------

BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def four_bit_tensors(
    weight: torch.Tensor, kind: str, block: int = 64, *, double: bool = False,
    storage: torch.dtype = torch.uint8,
) -> tuple[Weights, torch.Tensor]:  # fmt: skip
    """Quantise with bitsandbytes; return the tensors of the files and the dequantised weight."""
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(
        weight,
        blocksize=block,
        compress_statistics=double,
        quant_type=kind,
        quant_storage=storage,
    )
    tensors = {f"weight.{key}": each for key, each in state.as_dict(packed=True).items()}
    return prefixed({"weight": codes, **tensors}), four_bit_weight(codes, state)


def four_bit_weight(codes: torch.Tensor, state: Any) -> torch.Tensor:
    """Dequantise with bitsandbytes.

    Blocks are of the flat weight.  The AVX-512 kernel of bitsandbytes 0.50.2 confuses them where
    rows are no multiple of a block, so that its generic implementation is used there.  A zero of
    fp4 is positive in ``quant_map``, and negative in some kernels.
    """
    from bitsandbytes import functional
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute as generic

    scales = state.absmax
    if state.nested:
        scales = functional.dequantize_blockwise(scales, state.state2) + state.offset
    flat = codes.reshape(-1).view(torch.uint8)
    # It would be compiled, which takes longer than all of the tests.
    with torch.compiler.set_stance("force_eager"):
        if state.shape[-1] % state.blocksize == 0:
            return functional.dequantize_4bit(codes, state) + 0.0
        return generic(flat, scales, state.code, state.blocksize, state.shape, state.dtype) + 0.0


def four_bit(
    folder: Path, weight: torch.Tensor, kind: str, block: int = 64, **kwargs: Any
) -> Weights:
    """Write a weight of ``Linear4bit``; see ``four_bit_tensors``."""
    tensors, dequantised = four_bit_tensors(weight, kind, block, **kwargs)
    write(folder, tensors, BITSANDBYTES)
    return {NAME: dequantised}


def four_bit_module(folder: Path, weight: torch.Tensor, *, config: bool = True) -> Weights:
    """Write the ``state_dict`` of a ``Linear4bit``."""
    import bitsandbytes

    rows, columns = weight.shape
    linear = bitsandbytes.nn.Linear4bit(columns, rows, bias=False, quant_type="nf4")
    linear.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
    linear.to("cpu")
    write(folder, prefixed(linear.state_dict()), BITSANDBYTES if config else None)
    quantised = linear.weight
    return {NAME: four_bit_weight(quantised.data, quantised.quant_state)}


def int8_rows(folder: Path, weight: torch.Tensor, *, weight_format: int | None = 0) -> Weights:
    """Write a weight of ``Linear8bitLt``."""
    from bitsandbytes import functional

    codes, scales, _ = functional.int8_vectorwise_quant(weight)
    tensors = {"weight": codes, "SCB": scales}
    if weight_format is not None:
        tensors["weight_format"] = torch.tensor(weight_format, dtype=torch.uint8)
    write(folder, prefixed(tensors), {"quant_method": "bitsandbytes", "load_in_8bit": True})
    return {NAME: functional.int8_vectorwise_dequant(codes, scales)}


# -- GPTQ and AWQ ---------------------------------------------------------------------------------


def pack_bits(codes: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Pack along the first dimension into 32-bit words, the lowest bits of a word first."""
    every = np.unpackbits(codes.astype(np.uint8)[None], axis=0, bitorder="little", count=bits)
    stream = every.transpose(1, 0, *range(2, every.ndim)).reshape(-1, *codes.shape[1:])
    stream = np.pad(stream, [(0, -len(stream) % 32)] + [(0, 0)] * (stream.ndim - 1))
    packed = np.packbits(stream, axis=0, bitorder="little")  # 4 bytes a word
    words = packed.reshape(-1, 4, *codes.shape[1:]).astype(np.uint32)
    shifts = np.arange(4, dtype=np.uint32).reshape(1, 4, *[1] * (codes.ndim - 1)) * 8
    return (words << shifts).sum(axis=1, dtype=np.uint32).view(np.int32)


def integer_groups(
    weight: torch.Tensor, bits: int, groups_of: np.ndarray[Any, Any], lowest_zero: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Round a weight to integers.

    Returns:
        Codes ``[inputs, outputs]``; zero points and fp32 scales ``[groups, outputs]``.
    """
    values, most = weight.float().numpy().T, (1 << bits) - 1
    groups = int(groups_of.max()) + 1
    low = np.stack([values[groups_of == g].min(0) for g in range(groups)]).clip(max=0)
    high = np.stack([values[groups_of == g].max(0) for g in range(groups)]).clip(min=0)
    scales = (high - low) / most
    zeros = np.rint(-low / scales).clip(lowest_zero, most).astype(np.int64)
    codes = np.rint(values / scales[groups_of]) + zeros[groups_of]
    return codes.clip(0, most).astype(np.int64), zeros, scales


def integers_times_scales(
    codes: np.ndarray[Any, Any], zeros: np.ndarray[Any, Any], scales: torch.Tensor,
    groups_of: np.ndarray[Any, Any],
) -> torch.Tensor:  # fmt: skip
    """Return ``(code - zero) * scale`` as ``[outputs, inputs]``, computed in the scales' dtype."""
    differences = torch.from_numpy(codes - zeros[groups_of]).to(scales.dtype)
    return (differences * scales[torch.from_numpy(groups_of)]).t().contiguous()


def gptq(
    folder: Path, weight: torch.Tensor, bits: int, group: int = 32, *, act_order: bool = False,
    version: str | None = "gptq", with_index: bool = True, dtype: torch.dtype = torch.float16,
    lowest_zero: int = 1,
) -> Weights:  # fmt: skip
    """Write a weight of GPTQ, and dequantise it by the definition of the format.

    For all bits and both versions, the result is the same as that of ``QuantLinear`` of auto_gptq
    0.7.1 (``qlinear_cuda.py``) and of ``dequantize_weight`` of gptqmodel 7.7.0 (``torch.py``).
    Their results differ for a zero point of 0 in the first version, which is avoided here.

    Args:
        version: ``checkpoint_format``; all but ``"gptq_v2"`` store zero points less one.
        lowest_zero: bound of the zero points; in the first version, gptqmodel stores 0 as -1.
    """
    columns, shift = weight.shape[1], 0 if version == "gptq_v2" else 1
    groups_of = np.arange(columns) // group
    if act_order:
        groups_of = groups_of[np.random.default_rng(bits).permutation(columns)]
    codes, zeros, scales = integer_groups(weight, bits, groups_of, lowest_zero)
    rounded = torch.from_numpy(scales).to(dtype)
    tensors = {
        "qweight": torch.from_numpy(pack_bits(codes, bits)),
        "qzeros": torch.from_numpy(pack_bits((zeros - shift).T % (1 << bits), bits).T.copy()),
        "scales": rounded,
    }
    if with_index:
        tensors["g_idx"] = torch.from_numpy(groups_of.astype(np.int32))
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order}
    if version is not None:
        config["checkpoint_format"] = version
    write(folder, prefixed(tensors), config)
    return {NAME: integers_times_scales(codes, zeros, rounded, groups_of)}


def awq(
    folder: Path, weight: torch.Tensor, group: int = 32, dtype: torch.dtype = torch.float16
) -> Weights:
    """Write a weight of AWQ (gemm), and dequantise it by the definition of the format.

    The result is the same as that of ``dequantize_gemm`` of autoawq 0.2.9 (``packing_utils.py``).
    """
    columns = weight.shape[1]
    groups_of = np.arange(columns) // group
    codes, zeros, scales = integer_groups(weight, 4, groups_of, 0)
    rounded = torch.from_numpy(scales).to(dtype)
    tensors = {
        "qweight": torch.from_numpy(pack_awq(codes)),
        "qzeros": torch.from_numpy(pack_awq(zeros)),
        "scales": rounded,
    }
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    write(folder, prefixed(tensors), config)
    return {NAME: integers_times_scales(codes, zeros, rounded, groups_of)}


def pack_awq(codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Pack eight 4-bit codes along the last dimension into a word, in ``AWQ_ORDER``."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), dtype=np.uint32)
    for place, output in enumerate(AWQ_ORDER):
        words |= codes[:, output::8].astype(np.uint32) << np.uint32(4 * place)
    return words.view(np.int32)


# -- 8 bits with scales ---------------------------------------------------------------------------


def blockwise(scales: torch.Tensor, block: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """Return scales ``[blocks, blocks]`` as fp32 of a matrix's shape; the last blocks are cut."""
    full = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return full[: shape[0], : shape[1]]


def to_fp8(
    weight: torch.Tensor, block: Sequence[int], dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp8 codes of a matrix and fp32 scales ``[blocks, blocks]``."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % block[1], 0, -rows % block[0]))
    cut = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    scales = cut.abs().amax((1, 3)).clamp(min=1e-12) / torch.finfo(dtype).max
    return (weight / blockwise(scales, block, weight.shape)).to(dtype), scales


def fp8(
    folder: Path, codes: torch.Tensor, scales: torch.Tensor, config: Any,
    *, block: Sequence[int], scale_name: str = "weight_scale_inv", **others: torch.Tensor,
) -> Weights:  # fmt: skip
    """Write a weight of fp8 with a grid of scales, and dequantise it in plain torch.

    Args:
        scales: written as they are; any shape that has ``rows x columns`` of blocks.
        others: further tensors of the module.
    """
    write(folder, prefixed({"weight": codes, scale_name: scales, **others}), config)
    rows, columns = codes.shape
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    return {NAME: codes.float() * blockwise(scales.float().reshape(grid), block, codes.shape)}


def transformers_fp8(
    folder: Path, codes: torch.Tensor, scales: torch.Tensor, block: Sequence[int] | None = None
) -> Weights:
    """Write an FP8 weight of DeepSeek's layout, dequantised to fp32 by transformers itself.

    Args:
        block: ``weight_block_size``; by default the scales tell.
    """
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    whole = (codes.shape[-2] // scales.shape[-2], codes.shape[-1] // scales.shape[-1])
    config = {"quant_method": "fp8", "weight_block_size": block or whole}
    write(folder, prefixed({"weight": codes, "weight_scale_inv": scales}), config)
    convert = Fp8Dequantize(None)
    return {NAME: convert._dequantize_one(codes, scales, output_dtype=torch.float32)}


def cast_only(folder: Path, codes: torch.Tensor) -> Weights:
    """Write fp8 values without a scale, as image models have them."""
    write(folder, {NAME: codes})
    return {NAME: codes.float()}


# -- FP4 ------------------------------------------------------------------------------------------


def gpt_oss(folder: Path, experts: int, rows: int, columns: int) -> Weights:
    """Write a stack of MXFP4 experts with every code and scale, dequantised by transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    draw = torch.Generator().manual_seed(rows)
    size = (experts, rows, columns // 32)
    blocks = torch.randint(256, (*size, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(110, 135, size, generator=draw, dtype=torch.uint8)
    scales.view(-1)[:4] = torch.tensor([0, 1, 254, 253], dtype=torch.uint8)
    name = f"{PREFIX}.gate_up_proj"
    write(folder, {f"{name}_blocks": blocks, f"{name}_scales": scales}, {"quant_method": "mxfp4"})
    return {name: convert_moe_packed_tensors(blocks, scales)}


def nvfp4_numbers(packed: torch.Tensor) -> torch.Tensor:
    """Return the numbers of E2M1 codes, two a byte, computed from sign, exponent and mantissa."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()
    sign, exponent, mantissa = 1 - 2.0 * (codes >> 3), (codes >> 1) & 3, (codes & 1) / 2
    return sign * torch.where(exponent == 0, mantissa, (1 + mantissa) * 2.0 ** (exponent - 1))


def modelopt_nvfp4(folder: Path, rows: int, columns: int) -> Weights:
    """Write an NVFP4 weight of ModelOpt with every code, dequantised in plain torch to bf16."""
    draw = torch.Generator().manual_seed(rows)
    packed = torch.randint(256, (rows, columns // 2), generator=draw, dtype=torch.uint8)
    scales = (torch.rand(rows, columns // 16, generator=draw) * 448).to(torch.float8_e4m3fn)
    upper = torch.tensor(0.0123)
    tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": upper}
    tensors["input_scale"] = torch.tensor(0.5)
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    write(folder, prefixed(tensors), config)
    each = (scales.float() * upper).repeat_interleave(16, 1)
    return {NAME: (nvfp4_numbers(packed) * each).to(torch.bfloat16)}


# -- Quanto ---------------------------------------------------------------------------------------


def quanto_bytes(
    folder: Path, weight: torch.Tensor, kind: torch.dtype, *, axis: int = 0, config: Any = None
) -> Weights:
    """Write a weight of qint8 or qfloat8, and dequantise it by the definition of the format.

    The result is the same as that of ``WeightQBytesTensor`` of optimum-quanto 0.2.7.

    Args:
        axis: the dimension with a scale for each index; -1: the last one.
    """
    codes, scales = quanto_codes(weight, kind, axis)
    tensors = {"weight._data": codes, "weight._scale": scales, **quanto_activations(weight)}
    write(folder, prefixed(tensors), config)
    return {NAME: scales * codes.to(weight.dtype)}


def quanto_codes(
    weight: torch.Tensor, kind: torch.dtype, axis: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 8-bit codes and scales; a dimension of one index has a scale without dimensions."""
    others = [d for d in range(weight.dim()) if d != axis % weight.dim()]
    most = weight.abs().amax(others, keepdim=True) if weight.shape[axis] > 1 else weight.abs().max()
    limits = torch.finfo(kind) if kind.is_floating_point else torch.iinfo(kind)
    scales = most / limits.max
    values = weight / scales
    rounded = values if kind.is_floating_point else values.round()
    return rounded.clamp(limits.min, limits.max).to(kind), scales


def quanto_activations(weight: torch.Tensor) -> Weights:
    """Return the scales of a module's activations, which are 1 unless it was calibrated."""
    return {f"{name}_scale": torch.ones((), dtype=weight.dtype) for name in ("input", "output")}


def quanto_bits(
    folder: Path, weight: torch.Tensor, bits: int, *, group: int | None = None, bias: bool = False,
    zero_points: bool = False, config: Any = None,
) -> Weights:  # fmt: skip
    """Write a weight of qint4 or qint2, and dequantise it by the definition of the format.

    The result is the same as that of ``WeightQBitsTensor`` of optimum-quanto 0.2.7.

    Args:
        group: elements that share a scale; ``None``: a row.
        bias: whether the module has a bias, whose shape tells that of a weight in groups.
        zero_points: whether shifts are integers.
    """
    tensors, dequantised = quanto_bits_tensors(weight, bits, group, zero_points)
    if bias:
        tensors["bias"] = torch.zeros(weight.shape[0], dtype=weight.dtype)
    write(folder, prefixed({**tensors, **quanto_activations(weight)}), config)
    return {NAME: dequantised}


def quanto_bits_tensors(
    weight: torch.Tensor, bits: int, group: int | None, zero_points: bool = False
) -> tuple[Weights, torch.Tensor]:
    """Return the tensors of a weight of few bits, and the weight dequantised from them."""
    values, most = weight if group is None else weight.reshape(-1, group), (1 << bits) - 1
    across = list(range(1, values.dim())) if len(values) > 1 else [0]
    low, high = values.amin(across, keepdim=True), values.amax(across, keepdim=True)
    scales, shifts = (high - low) / most, -low
    if zero_points:
        shifts = (shifts / scales).round().clamp(0, most).to(torch.uint8)
        codes = (values / scales).round() + shifts
    else:
        codes = ((values + shifts) / scales).nan_to_num(0.0).round()
    codes = codes.clamp(0, most).to(torch.uint8)
    tensors = {"_data._data": quanto_pack(codes, bits), "_scale": scales, "_shift": shifts}
    if zero_points:
        made = scales * (codes.to(torch.int8) - shifts.to(torch.int8))
    else:
        made = scales * codes - shifts
    stored = {f"weight.{name}": each for name, each in tensors.items()}
    return stored, made.reshape(weight.shape)


def quanto_pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack along the first dimension: a byte has codes of rows that are far apart."""
    planes = 8 // bits
    high = -(-len(codes) // planes)
    padded = np.zeros((planes * high, *codes.shape[1:]), dtype=np.uint8)
    padded[: len(codes)] = codes.numpy()
    shifts = bits * np.arange(planes).reshape(planes, *[1] * codes.dim())
    spread = padded.reshape(planes, high, *codes.shape[1:]) << shifts
    return torch.from_numpy(spread.sum(axis=0).astype(np.uint8))


# -- compressed-tensors ---------------------------------------------------------------------------


def compressed(
    folder: Path, weight: torch.Tensor, form: str, *, scales_as: torch.dtype | None = None,
    edges: bool = False, **args: Any,
) -> Weights:  # fmt: skip
    """Write a weight by the compressor of compressed-tensors, and decompress it by the same.

    Args:
        form: name of the compressor.
        scales_as: dtype of the scales in the files; by default that of the weight.
        edges: whether to replace uint8 scales by the extreme exponents.
        args: of ``QuantizationArgs``.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
    from compressed_tensors.quantization import QuantizationScheme as Scheme

    scheme = Scheme(targets=["Linear"], weights=QuantizationArgs(**args), format=form)
    compressor = BaseCompressor.get_value_from_registry(form)
    state = {"weight": weight, **quantisation_parameters(weight, scheme.weights)}
    if scales_as is not None:
        state["weight_scale"] = state["weight_scale"].to(scales_as)
    stored = compressor.compress(state, scheme)
    if edges:
        exponents = torch.tensor([0, 1, 254, 255], dtype=torch.uint8)
        stored["weight_scale"] = stored["weight_scale"].clone()
        stored["weight_scale"].view(-1)[:4] = exponents
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=form).to_dict()
    write(folder, prefixed(stored), {**config, "quantization_status": "compressed"})
    return {NAME: compressor.decompress(stored, scheme)["weight"]}


def quantisation_parameters(weight: torch.Tensor, args: Any) -> Weights:
    """Return the scales and zero points that compressed-tensors computes from least and most."""
    from compressed_tensors.quantization.utils import calculate_qparams

    strategy, rows = str(args.strategy), weight.shape[0]
    if strategy == "tensor":
        cut, dims = weight, (0, 1)
    elif strategy == "channel":
        cut, dims = weight.unsqueeze(1), (2,)
    elif strategy == "block":
        high, wide = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % wide, 0, -rows % high))
        cut, dims = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high)), (1, 3)
    else:
        cut, dims = weight.unflatten(1, (-1, args.group_size)), (2,)
    upper = None
    if strategy == "tensor_group":  # NVFP4: all scales together fill the range of fp8
        upper = (448 * 6 / weight.abs().max().float()).reshape(1)
    scales, zeros = calculate_qparams(cut.amin(dims), cut.amax(dims), args, global_scale=upper)
    made = {"weight_scale": scales.to(weight.dtype), "weight_zero_point": zeros}
    return made if upper is None else {**made, "weight_global_scale": upper}
