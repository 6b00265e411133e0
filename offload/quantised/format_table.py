"""The table of formats: recognise the quantised weights in files, and read descriptions of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch

from . import awq, bitsandbytes, compressed_tensors, fp4, gptq, modelopt, quanto, scaled
from .cast import Cast
from .format_base import Files, Format, QuantisedPage, QuantisedWeight, UnreadableFormat, require

FINDERS: Mapping[str, Callable[[Files, Mapping[str, Any]], Iterator[QuantisedWeight]]] = {
    method: module.find
    for module in (bitsandbytes, gptq, awq, scaled, compressed_tensors, fp4, modelopt, quanto)
    for method in module.METHODS
}
CLASSES: Mapping[str, type[Format]] = {
    each.kind: each
    for each in (
        Cast, bitsandbytes.FourBit, bitsandbytes.Int8, gptq.Gptq, awq.Awq, scaled.Scaled,
        compressed_tensors.Packed, fp4.Fp4, quanto.QBits,
    )
}  # fmt: skip


def find(files: Files, config: Mapping[str, Any] | None) -> dict[str, QuantisedWeight]:
    """Return the quantised weights in files, by name.

    Args:
        config: the ``quantization_config`` of the files; ``None`` if they have none, so that the
            tensors have to tell the format.

    Raises:
        UnreadableFormat: they are in a format that cannot be read, or are incomplete.
    """
    found = list(_by_tensors(files) if config is None else _by_config(files, config))
    _require_scales(files, found)
    return {each.name: each for each in found}


def _require_scales(files: Files, found: Iterable[QuantisedWeight]) -> None:
    """Raise ``UnreadableFormat`` if fp8 codes are left for which no scale was found."""
    used = {s.name for each in found for piece in each.pieces for s in piece.sources.values()}
    for name in files.names:
        if name not in used and name.endswith("weight"):
            dtypes = set(files.dtypes(name))
            require(not dtypes & scaled.FP8, name, "is fp8 and has no scale that is known")


def _by_config(files: Files, config: Mapping[str, Any]) -> Iterator[QuantisedWeight]:
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in FINDERS:
        known = ", ".join(sorted({each.replace("_", "-") for each in FINDERS}))
        raise UnreadableFormat(
            f"the weights were quantised by {method!r} (quantization_config in config.json), which "
            f"cannot be read; use a folder with bf16, fp16 or fp32 weights, or one of: {known}"
        )
    return FINDERS[method](files, config)


def _by_tensors(files: Files) -> Iterator[QuantisedWeight]:
    names = files.names
    if any(name.endswith(".qweight") for name in names):
        raise UnreadableFormat(
            "GPTQ and AWQ weights need the folder's config.json (or quantize_config.json of GPTQ), "
            "whose quantization_config says how their codes are packed"
        )
    if any(bitsandbytes.STATE in name or name.endswith(".SCB") for name in names):
        return bitsandbytes.find(files, {})
    if any(name.endswith(".weight_packed") for name in names):
        return compressed_tensors.find(files, {})
    if quanto.is_written_in(names):
        return quanto.find(files, {})
    if scaled.has_scales(files):
        return scaled.find(files, {})
    return scaled.find_casts(files)


def described(value: Mapping[str, Any]) -> Format:
    """Return the format that ``Format.describe`` described."""
    kind = CLASSES[value["kind"]]
    return kind(**{each.name: _from_json(each.type, value[each.name]) for each in fields(kind)})


def described_page(value: list[Any]) -> QuantisedPage:
    """Return the page that ``QuantisedPage.describe`` described."""
    return QuantisedPage(tuple((int(start), described(form)) for start, form in value))


def _from_json(annotation: Any, value: Any) -> Any:
    if str(annotation).startswith("torch.dtype"):
        return None if value is None else getattr(torch, value)
    return tuple(value) if isinstance(value, list) else value
