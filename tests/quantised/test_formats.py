"""Quantised weights are read to the bits of their own libraries, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from overspill.quantised.format_base import QuantisedPage
from overspill.quantised.format_table import described_page
from overspill.state.quantised_files import QuantisedFiles, dequantising
from overspill.state.weight_files import FileRun, WeightFiles

from . import writers
from .cases import (
    BF16,
    CHANNEL,
    E8M0,
    F32,
    FLOATS,
    FP8,
    GROUP,
    MODELOPT_FP8,
    PACKED,
    REAL4,
    TABLE,
    TENSOR,
    Writer,
    named,
)
from .writers import NAME, PLAIN, PREFIX, Weights, matrix, to_fp8

for library in ("bitsandbytes", "compressed_tensors", "transformers"):
    pytest.importorskip(library)


class Folder(NamedTuple):
    """A folder of a quantised weight, and what its library dequantises it to."""

    title: str
    files: QuantisedFiles
    weights: Weights


@pytest.fixture(scope="module", params=TABLE, ids=[title for title, _ in TABLE])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Write a folder of the table, and open it."""
    path = tmp_path_factory.mktemp("quantised")
    title, write = request.param
    weights = write(path)
    files = dequantising(WeightFiles(path), {})
    assert isinstance(files, QuantisedFiles)
    return Folder(title, files, weights)


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare bit for bit, signs of zeros too; all NaNs are equal."""
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert torch.equal(found.isnan(), wanted.isnan())
    whole = torch.int32 if found.dtype == F32 else torch.int16
    bits = [each.nan_to_num(0.0, torch.inf, -torch.inf).view(whole) for each in (found, wanted)]
    assert torch.equal(*bits), f"{int((bits[0] != bits[1]).sum())} of {found.numel()} differ"


def bytes_of(runs: Iterable[FileRun]) -> torch.Tensor:
    """Read runs of files as flat uint8."""
    parts = []
    for run in runs:
        with run.path.open("rb") as stream:
            stream.seek(run.offset)
            parts.append(stream.read(run.nbytes))
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


# -- every format, to the bit ---------------------------------------------------------------------


def test_read(folder: Folder) -> None:
    others = [PLAIN, *(name for name in folder.files.names if name.endswith(".bias"))]
    assert sorted(folder.files.names) == sorted([*folder.weights, *others])
    assert folder.files.find_quantised(PLAIN) is None
    for name, wanted in folder.weights.items():
        assert folder.files.shape(name) == tuple(wanted.shape)
        assert folder.files.find(name) is None
        assert_same_bits(folder.files.read(name), wanted)
        assert folder.files.dtypes(name) == (wanted.dtype,)


@pytest.mark.parametrize("dtype", FLOATS, ids=named)
def test_dequantise_into_a_parameter(folder: Folder, dtype: torch.dtype) -> None:
    for name, wanted in folder.weights.items():
        place = folder.files.find_quantised(name)
        assert place is not None
        weight = torch.full(wanted.shape, torch.nan, dtype=dtype)
        for start, form, runs in place.pieces:
            tensors = {
                key: bytes_of(runs[key]).view(each.dtype).view(each.shape)
                for key, each in form.tensors.items()
            }
            form.dequantise(tensors, weight.view(-1)[start : start + form.numel])
        assert_same_bits(weight, wanted.to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=named)
def test_unpack_a_page(folder: Folder, dtype: torch.dtype) -> None:
    for name, wanted in folder.weights.items():
        place = folder.files.find_quantised(name)
        assert place is not None
        page = QuantisedPage(tuple((piece.start, piece.form) for piece in place.pieces))
        memory = torch.full((page.nbytes,), 0xA5, dtype=torch.uint8)
        for number, key, offset, each in page.places():
            memory[offset : offset + each.nbytes] = bytes_of(place.pieces[number].runs[key])
        again = described_page(json.loads(json.dumps(page.describe())))
        assert again == page
        weight = torch.full(wanted.shape, torch.nan, dtype=dtype)
        again.unpack(memory, weight.view(-1))
        assert_same_bits(weight, wanted.to(dtype))


# -- what is refused ------------------------------------------------------------------------------


class Refusal(NamedTuple):
    """A folder, what is changed in it, and what the error says.

    Attributes:
        drop: tensors of the module that are left out.
        put: tensors that are replaced, as functions of the old one.
        config: values of the configuration that are replaced; ``None``: there is no config.json.
    """

    write: Writer
    says: str
    drop: tuple[str, ...] = ()
    put: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    config: Mapping[str, Any] | None = {}


def change(folder: Path, refusal: Refusal) -> None:
    """Write a folder again with the changes."""
    config_file = folder / "config.json"
    config = None
    if config_file.is_file():
        config = json.loads(config_file.read_text())["quantization_config"]
        config_file.unlink()
    config = None if refusal.config is None else {**(config or {}), **refusal.config}
    tensors = load_file(folder / "model.safetensors")
    del tensors[PLAIN]
    for name in refusal.drop:
        del tensors[f"{PREFIX}.{name}"]
    for name, changed in refusal.put.items():
        old = tensors.get(f"{PREFIX}.{name}", torch.empty(0))
        tensors[f"{PREFIX}.{name}"] = changed(old).clone()
    writers.write(folder, tensors, config or None)


def narrower(each: torch.Tensor) -> torch.Tensor:
    """Leave the last column out."""
    return each[..., :-1]


def shorter(each: torch.Tensor) -> torch.Tensor:
    """Leave the last row out."""
    return each[:-1]


def packed(*shape: int, form: str = PACKED, **arguments: Any) -> Writer:
    """Return a writer of a bf16 weight of compressed-tensors."""
    return partial(writers.compressed, weight=matrix(*shape, dtype=BF16), form=form, **arguments)


CODES, SCALES = to_fp8(matrix(64, 96), (16, 32))
GPTQ = partial(writers.gptq, weight=matrix(32, 96), bits=4)
AWQ = partial(writers.awq, weight=matrix(32, 96))
NF4 = partial(writers.four_bit, weight=matrix(16, 64), kind="nf4")
DOUBLE = partial(NF4, double=True)
INT8 = partial(writers.int8_rows, weight=matrix(8, 16, dtype=BF16))
BLOCKS = partial(writers.transformers_fp8, codes=CODES, scales=SCALES)
ROWS = partial(writers.fp8, codes=CODES, scales=torch.ones(64, 1), config=FP8, block=(1, 96))
MODELOPT = partial(ROWS, config=MODELOPT_FP8, scale_name="weight_scale")
OSS = partial(writers.gpt_oss, experts=2, rows=6, columns=64)
NVFP4 = partial(writers.modelopt_nvfp4, rows=6, columns=64)
PACK = packed(9, 96, num_bits=4, **GROUP)
ASYMMETRIC = packed(9, 96, num_bits=4, symmetric=False, **GROUP)
INT = packed(6, 64, form="int-quantized", num_bits=8, **CHANNEL)
FP4_GROUPS = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn}
CT_NVFP4 = packed(6, 64, form="nvfp4-pack-quantized", **REAL4, **FP4_GROUPS)
QUANTO = partial(writers.quanto_bytes, weight=matrix(6, 10), kind=torch.int8)
QUANTO4 = partial(writers.quanto_bits, weight=matrix(6, 256), bits=4, group=128, bias=True)
QUANTO2 = partial(writers.quanto_bits, weight=matrix(2, 20), bits=2)
DATA, FEW = "weight._data", "weight._data._data"
STATE = "weight.quant_state.bitsandbytes__nf4"
EXPERTS, RAW = "gate_up_proj", partial(writers.cast_only, codes=CODES)


def state_with(**changed: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that changes values in a ``QuantState``."""

    def change_state(packed: torch.Tensor) -> torch.Tensor:
        text = json.dumps({**json.loads(bytes(packed.tolist())), **changed})
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    return change_state


REFUSALS: dict[str, Refusal] = {
    **{
        f"method-{name}": Refusal(GPTQ, name, config={"quant_method": name})
        for name in ("hqq", "torchao", "aqlm", "vptq", "gguf")
    },
    "gptq-5-bits": Refusal(GPTQ, "5 bits", config={"bits": 5}),
    "gptq-without-bits": Refusal(GPTQ, "None bits", config={"bits": None}),
    "gptq-marlin": Refusal(GPTQ, "marlin", config={"checkpoint_format": "marlin"}),
    "gptq-is_marlin_format": Refusal(GPTQ, "format", config={"is_marlin_format": True}),
    "gptq-dynamic": Refusal(GPTQ, "dynamic", config={"dynamic": {"+:.*": {"bits": 8}}}),
    "gptq-without-config": Refusal(GPTQ, r"need the folder's config\.json", config=None),
    "gptq-scales-missing": Refusal(GPTQ, r"scales is missing", ("scales",)),
    "gptq-qzeros-missing": Refusal(GPTQ, r"qzeros is missing", ("qzeros",)),
    "gptq-scales-narrower": Refusal(GPTQ, "qweight", put={"scales": narrower}),
    "gptq-scales-1d": Refusal(GPTQ, PREFIX, put={"scales": torch.flatten}),
    "gptq-scales-of-a-group-missing": Refusal(GPTQ, "2 groups", put={"scales": shorter}),
    "gptq-qzeros-shorter": Refusal(GPTQ, "qzeros", put={"qzeros": shorter}),
    "gptq-qweight-shorter": Refusal(GPTQ, "g_idx", put={"qweight": shorter}),
    "gptq-g_idx-too-large": Refusal(GPTQ, "g_idx", put={"g_idx": lambda each: each + 1}),
    "gptq-g_idx-negative": Refusal(GPTQ, "g_idx", put={"g_idx": lambda each: each - 1}),
    "gptq-g_idx-int64": Refusal(GPTQ, "g_idx", put={"g_idx": lambda each: each.long().flip(0)}),
    "gptq-of-int16": Refusal(GPTQ, "qweight", put={"qweight": lambda each: each.short()}),
    "awq-gemv": Refusal(AWQ, "gemv", config={"version": "gemv"}),
    "awq-8-bits": Refusal(AWQ, "8", config={"bits": 8}),
    "awq-scales-missing": Refusal(AWQ, r"scales is missing", ("scales",)),
    "awq-qzeros-missing": Refusal(AWQ, r"qzeros is missing", ("qzeros",)),
    "awq-scales-narrower": Refusal(AWQ, PREFIX, put={"scales": narrower}),
    "awq-qweight-shorter": Refusal(AWQ, PREFIX, put={"qweight": shorter}),
    "awq-qzeros-shorter": Refusal(AWQ, "qzeros", put={"qzeros": shorter}),
    "bitsandbytes-truncated-state": Refusal(NF4, "quant_state", put={STATE: lambda e: e[:20]}),
    "bitsandbytes-state-without-shape": Refusal(NF4, STATE, put={STATE: state_with(shape=None)}),
    "bitsandbytes-unknown-kind": Refusal(NF4, "nf3", put={STATE: state_with(quant_type="nf3")}),
    "bitsandbytes-other-shape": Refusal(NF4, NAME, put={STATE: state_with(shape=[16, 65])}),
    "bitsandbytes-absmax-missing": Refusal(NF4, r"absmax is missing", ("weight.absmax",)),
    "bitsandbytes-absmax-shorter": Refusal(NF4, "absmax", put={"weight.absmax": shorter}),
    "bitsandbytes-codes-shorter": Refusal(NF4, NAME, put={"weight": shorter}),
    "bitsandbytes-codes-missing": Refusal(NF4, r"weight is missing", ("weight",)),
    "bitsandbytes-map-missing": Refusal(NF4, r"quant_map is missing", ("weight.quant_map",)),
    "bitsandbytes-nested-missing": Refusal(DOUBLE, "nested_absmax", ("weight.nested_absmax",)),
    "int8-weight_format-1": Refusal(
        INT8, "weight_format 1", put={"weight_format": lambda each: each + 1}
    ),
    "int8-scales-shorter": Refusal(INT8, "SCB", put={"SCB": shorter}),
    "int8-codes-missing": Refusal(INT8, r"weight is missing", ("weight",)),
    "fp8-scale-missing": Refusal(BLOCKS, "has no scale", ("weight_scale_inv",)),
    "fp8-scales-shorter": Refusal(BLOCKS, NAME, put={"weight_scale_inv": shorter}),
    "fp8-scales-1d": Refusal(BLOCKS, NAME, put={"weight_scale_inv": torch.flatten}),
    "fp8-scales-transposed": Refusal(BLOCKS, NAME, put={"weight_scale_inv": torch.t}),
    "fp8-other-block": Refusal(BLOCKS, NAME, config={"weight_block_size": [32, 32]}),
    "fp8-rows-shorter": Refusal(ROWS, NAME, put={"weight_scale_inv": shorter}),
    "gpt-oss-scales-missing": Refusal(OSS, "gate_up_proj_scales", (f"{EXPERTS}_scales",)),
    "gpt-oss-scales-narrower": Refusal(OSS, EXPERTS, put={f"{EXPERTS}_scales": narrower}),
    "gpt-oss-blocks-3d": Refusal(
        OSS, EXPERTS, put={f"{EXPERTS}_blocks": lambda each: each.flatten(2)}
    ),
    "modelopt-upper-missing": Refusal(NVFP4, "weight_scale_2", ("weight_scale_2",)),
    "modelopt-scales-shorter": Refusal(NVFP4, NAME, put={"weight_scale": shorter}),
    "compressed-marlin-24": Refusal(PACK, "marlin-24", config={"format": "marlin-24"}),
    "compressed-mxfp6": Refusal(PACK, "mxfp6", config={"format": "mxfp6-pack-quantized"}),
    "compressed-sparse-24": Refusal(
        PACK, "sparse-24", config={"sparsity_config": {"format": "sparse-24-bitmask"}}
    ),
    "compressed-sparse-bitmask": Refusal(PACK, "sparse", config={"format": "sparse-bitmask"}),
    "packed-scale-missing": Refusal(PACK, "weight_scale", ("weight_scale",)),
    "packed-scales-shorter": Refusal(PACK, PREFIX, put={"weight_scale": shorter}),
    "packed-groups-that-do-not-divide": Refusal(
        PACK, PREFIX, put={"weight_scale": lambda each: each.repeat(1, 2)[:, :5]}
    ),
    "packed-codes-shorter": Refusal(PACK, PREFIX, put={"weight_packed": shorter}),
    "packed-codes-narrower": Refusal(PACK, PREFIX, put={"weight_packed": narrower}),
    "packed-zero-points-shorter": Refusal(
        ASYMMETRIC, "zero_point", put={"weight_zero_point": shorter}
    ),
    "int-quantized-scale-missing": Refusal(INT, "weight_scale", ("weight_scale",)),
    "int-quantized-scales-shorter": Refusal(INT, NAME, put={"weight_scale": shorter}),
    "quanto-scale-missing": Refusal(QUANTO, r"_scale is missing", ("weight._scale",)),
    "quanto-scales-shorter": Refusal(QUANTO, NAME, put={"weight._scale": shorter}),
    "quanto-scales-1d": Refusal(QUANTO, NAME, put={"weight._scale": torch.flatten}),
    "quanto-scales-of-int32": Refusal(QUANTO, "int32", put={"weight._scale": torch.Tensor.int}),
    "quanto-codes-of-uint8": Refusal(QUANTO, "uint8", put={DATA: torch.Tensor.byte}),
    "quanto-4-bits-scale-missing": Refusal(QUANTO4, r"_scale is missing", ("weight._scale",)),
    "quanto-4-bits-shift-missing": Refusal(QUANTO4, r"_shift is missing", ("weight._shift",)),
    "quanto-4-bits-scales-shorter": Refusal(QUANTO4, NAME, put={"weight._scale": shorter}),
    "quanto-4-bits-shifts-of-fp16": Refusal(
        QUANTO4, "float16", put={"weight._shift": torch.Tensor.half}
    ),
    "quanto-4-bits-codes-shorter": Refusal(QUANTO4, "2 or 4 bits", put={FEW: shorter}),
    "quanto-4-bits-other-bias": Refusal(QUANTO4, "bias", put={"bias": shorter}),
    "quanto-weights-int3": Refusal(
        QUANTO, "int3", config={"quant_method": "quanto", "weights": "int3"}
    ),
    "nvfp4-scale-missing": Refusal(CT_NVFP4, "weight_scale", ("weight_scale",)),
    "nvfp4-codes-shorter": Refusal(CT_NVFP4, PREFIX, put={"weight_packed": shorter}),
}
# Files that miss something, or whose inputs are changed as well, with the reason for the refusal.
INCOMPLETE: dict[str, tuple[str, Refusal]] = {
    "nvfp4-upper-missing": (
        "the format is nvfp4, so that weight_global_scale must not be missing",
        Refusal(CT_NVFP4, "weight_global_scale", ("weight_global_scale",)),
    ),
    "packed-zero-points-missing": (
        "weights are not symmetric, so that weight_zero_point must not be missing",
        Refusal(ASYMMETRIC, "zero_point", ("weight_zero_point",)),
    ),
    "packed-other-bits": (
        "num_bits contradicts the number of words",
        Refusal(PACK, "bits", config={"config_groups": {"g": {"weights": {"num_bits": 8}}}}),
    ),
    "compressed-online-transform": (
        "inputs of the layers are rotated at run time",
        Refusal(PACK, "transform", config={"transform_config": {"config_groups": {"u": {
            "type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}}}}),
    ),
    "gptq-act-order-without-g_idx": (
        "desc_act says that inputs are not in order",
        Refusal(GPTQ, "g_idx", ("g_idx",), config={"desc_act": True}),
    ),
    "gptq-rotation": (
        "gptqmodel rotates the inputs of down_proj at run time",
        Refusal(GPTQ, "rotation", config={"rotation": "hadamard"}),
    ),
    "modelopt-pre_quant_scale": (
        "ModelOpt multiplies the inputs by pre_quant_scale (NVFP4_AWQ, INT8 SmoothQuant)",
        Refusal(NVFP4, "pre_quant_scale", put={"pre_quant_scale": lambda _: torch.ones(64)}),
    ),
    "cast-with-a-scale-of-another-name": (
        "codes are no values where there is a scale (Mistral's consolidated files)",
        Refusal(RAW, "scale", put={"qscale_weight": lambda _: torch.tensor(0.01)}),
    ),
    "gpt-oss-codes-of-int16": (
        "blocks and scales are uint8",
        Refusal(OSS, EXPERTS, put={f"{EXPERTS}_blocks": lambda each: each.short()}),
    ),
    "modelopt-scale-missing": (
        "codes without a scale are no weight",
        Refusal(MODELOPT, "scale", ("weight_scale",)),
    ),
    "packed-shape-missing": (
        "the number of columns is not known",
        Refusal(PACK, "weight_shape", ("weight_shape",)),
    ),
    "quanto-packed-for-a-kernel": (
        "AWQ's and Marlin's kernels have codes of 16 and 32 bits",
        Refusal(QUANTO4, "int32", put={FEW: torch.Tensor.int}),
    ),
    "quanto-two-rows": (
        "bytes of two rows can be of 2 bits, or of 4 bits with a row of zeros",
        Refusal(QUANTO2, "2 or 4 bits"),
    ),
    "bitsandbytes-block-0": (
        "blocks have elements",
        Refusal(NF4, STATE, put={STATE: state_with(blocksize=0)}),
    ),
}  # fmt: skip


ALL = {**REFUSALS, **{title: refusal for title, (_, refusal) in INCOMPLETE.items()}}


@pytest.mark.parametrize("refusal", [pytest.param(ALL[title], id=title) for title in ALL])
def test_refuse(refusal: Refusal, tmp_path: Path) -> None:
    refusal.write(tmp_path)
    change(tmp_path, refusal)
    with pytest.raises(ValueError, match=refusal.says):
        dequantising(WeightFiles(tmp_path), {})


def test_refuse_a_config_that_is_not_json(tmp_path: Path) -> None:
    GPTQ(tmp_path)
    (tmp_path / "config.json").write_text('{"quantization_config": {')
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        dequantising(WeightFiles(tmp_path), {})


# -- layouts that can be taken for others ---------------------------------------------------------


def per_row_of_experts(folder: Path) -> Weights:
    """Write experts with scales ``[experts, rows]``, as ModelOpt does with FP8_PC_PT."""
    codes, scales = CODES[:8].reshape(2, 4, 96), torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]])
    writers.write(folder, writers.prefixed({"weight": codes, "weight_scale": scales}), MODELOPT_FP8)
    return {NAME: codes.float() * scales.unsqueeze(-1)}


def per_column(folder: Path) -> Weights:
    """Write a scale for every column, in one dimension."""
    codes, scales = CODES[:, :32].contiguous(), torch.rand(32)
    writers.write(folder, writers.prefixed({"weight": codes, "weight_scale": scales}), FP8)
    return {NAME: codes.float() * scales}


def marked_for_comfyui(folder: Path) -> Weights:
    """Write a weight of ComfyUI with its marker, an fp8 tensor without values."""
    codes, scale = CODES[:8], torch.tensor(0.01)
    tensors = {f"{PREFIX}.weight": codes, f"{PREFIX}.scale_weight": scale}
    marker = torch.empty(0, dtype=torch.float8_e4m3fn)
    writers.write(folder, {**tensors, "scaled_fp8": marker})
    return {NAME: codes.float() * scale}


SQUARE, THIRTY = to_fp8(matrix(32, 32), (16, 16)), to_fp8(matrix(30, 64), (16, 64))
EXPERT_CODES = to_fp8(matrix(36, 64), (12, 32))
MAY_REFUSE, MUST_READ = True, False
# Title, what it may be taken for, whether it may be refused as well, and the writer.
AMBIGUOUS: list[tuple[str, str, bool, Writer]] = [
    (
        "packed-16-columns", "3 bits, which take 2 words too", MUST_READ,
        packed(9, 16, num_bits=4, **CHANNEL),
    ),
    (
        "packed-tensor-asymmetric", "one whose zero point is packed", MUST_READ,
        packed(9, 64, num_bits=4, symmetric=False, **TENSOR),
    ),
    (
        "modelopt-FP8_PB_WO", "scales [rows * columns, 1]",
        MAY_REFUSE,
        partial(
            MODELOPT, codes=SQUARE[0], scales=SQUARE[1][:, None, :, None].contiguous(),
            block=(16, 16),
        ),
    ),
    (
        "fp8-experts-with-cut-blocks", "blocks from one expert into the next", MAY_REFUSE,
        partial(
            writers.transformers_fp8, codes=EXPERT_CODES[0].reshape(3, 12, 64),
            scales=EXPERT_CODES[1].reshape(3, 1, 2), block=(16, 32),
        ),
    ),
    (
        "fp8-cut-block-without-its-size", "blocks of 15 rows",
        MAY_REFUSE,
        partial(writers.fp8, codes=THIRTY[0], scales=THIRTY[1], config=None, block=(16, 64)),
    ),
    ("fp8-scales-of-columns", "scales of two rows each", MAY_REFUSE, per_column),
    (
        "fp8-experts-rows", "scales of columns", MAY_REFUSE,
        per_row_of_experts,
    ),
    (
        "fp8-e8m0-scale-255", "infinity", MAY_REFUSE,
        partial(BLOCKS, scales=torch.full((4, 3), 255, dtype=torch.uint8).view(E8M0)),
    ),
    ("comfyui-marker", "a weight without a scale", MUST_READ, marked_for_comfyui),
    (
        "gptq-last-group-cut-without-g_idx", "groups of 48", MAY_REFUSE,
        partial(GPTQ, group=64, with_index=False),
    ),
    (
        "gptq-zero-point-of-0", "16", MUST_READ,
        partial(GPTQ, weight=matrix(32, 96).abs(), lowest_zero=0),
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    "may_refuse, write",
    [pytest.param(may, write, id=title) for title, _, may, write in AMBIGUOUS],
)
def test_do_not_misread(may_refuse: bool, write: Writer, tmp_path: Path) -> None:
    weights = write(tmp_path)
    try:
        files = dequantising(WeightFiles(tmp_path), {})
    except ValueError:
        assert may_refuse
        return
    for name, wanted in weights.items():
        assert_same_bits(files.read(name).to(wanted.dtype), wanted)
