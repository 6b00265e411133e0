"""Readers for the paths from which weights or optimizer state are imported."""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Collection, Container, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..config import MissingWeights
from ..planning.models import named_models
from ..planning.partition import Partition
from ..planning.regions import TensorRegion
from ..planning.sections import has_sections
from ..planning.stand_ins import StandInModel, whole_model
from ..private import bitsandbytes_private, torch_private
from .adapters import base_of, names_in_base
from .hub_names import HubFiles, base_tensors_of, is_of_transformers, tensors_of
from .joined_files import FilesOfModel, JoinedFiles
from .module_states import FoundStates
from .quantised_files import dequantising
from .region_files import RegionFiles
from .section_files import SectionFiles
from .unmanaged import unmanaged_tensors
from .weight_files import DISTRIBUTED, OPTIMIZER, TensorFiles, WeightFiles, match_files

log = logging.getLogger("overspill")


def open_weights(weights: Path | Mapping[str, Path], model: nn.Module | None) -> TensorFiles:
    """Open the files that ``weights=`` names: safetensors or a ``torch.distributed.checkpoint``.

    Tensors have the names that ``model`` uses in memory or, without a model, those in the files.

    Raises:
        ValueError: the path is neither, or cannot be read, or holds quantised weights; or paths by
            name are given for a single model, or for a name that no model has.
    """
    if isinstance(weights, Path):
        return _open(weights, model)
    models = {} if model is None else named_models(model)
    if not models:
        raise ValueError(
            "weights is a dict, and there is only one model; pass one path, or pass a dict of "
            "models: wrap({name: model}, ...)"
        )
    if strange := sorted(set(weights) - set(models)):
        raise ValueError(f"weights: no model is named {strange[0]!r}; there are {list(models)}")
    return JoinedFiles(
        [FilesOfModel(f"{n}.", models[n], _open(path, models[n])) for n, path in weights.items()]
    )


def _open(path: Path, model: nn.Module | None) -> TensorFiles:
    base = None if model is None else base_of(model)
    files: TensorFiles
    if (path / DISTRIBUTED).is_file():
        from .distributed_checkpoint import DistributedFolder  # imports much of torch

        files = DistributedFolder(path)
    else:
        _refuse_quantised_layers(path, base)
        own = {} if base is None else {**base_tensors_of(base), **tensors_of(base)}
        files = dequantising(WeightFiles(path), own)
        if base is not None and is_of_transformers(base):
            files = HubFiles(base, files)
    return files if base is None or not has_sections(base) else SectionFiles(base, files)


def _refuse_quantised_layers(path: Path, model: nn.Module | None) -> None:
    if model is not None and bitsandbytes_private.layers(model):
        raise ValueError(
            f"weights: {path}: layers of the model were quantised by bitsandbytes when it was "
            "loaded, and have their weights; leave weights= out, or build the model inside "
            "overspill.empty_init()"
        )


def open_state(path: Path, model: nn.Module, groups: Sequence[dict[str, Any]]) -> Mapping[str, Any]:
    """Open an optimizer's ``state_dict`` on disk, without reading its tensors.

    The path is a torch file or an export's folder, which are memory-mapped, or a folder of
    ``torch.distributed.checkpoint``.

    Raises:
        ValueError: there is no state, or it does not fit the model.
    """
    if (path / DISTRIBUTED).is_file():
        from .distributed_checkpoint import optimizer_state

        return optimizer_state(path, model, groups)
    file = path / OPTIMIZER if path.is_dir() else path
    try:
        state: Mapping[str, Any] = torch.load(file, mmap=True, weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file} cannot be read as a torch file: {error}") from error
    if not {"state", "param_groups"} <= set(state):
        raise ValueError(f"{file} holds no optimizer's state_dict; it has {list(state)[:5]}")
    return state


class MatchedFiles(NamedTuple):
    """Files that ``weights=`` names, and the tensors in them of a model's parameters.

    Attributes:
        files: of a rank's shards, with their rows of tensors.
        names: by parameter index, the name of its tensor.
        used: the names of all tensors that are weights, also of parameters on other ranks.
        alone: whether nothing else is read from the files; see ``MissingWeights``.
    """

    files: TensorFiles
    names: Mapping[int, str]
    used: frozenset[str]
    alone: bool = False


def match_weights(
    weights: Path | Mapping[str, Path] | MissingWeights, model: nn.Module, parts: Partition
) -> MatchedFiles:
    """Open the files that ``weights=`` names, and do as ``match_files``.

    Several models have files of their own.

    Raises:
        ValueError: see ``open_weights`` and ``match_files``.
    """
    if isinstance(weights, MissingWeights):
        return _match_missing(weights.path, model, parts)
    files = open_weights(weights, whole_model(model))
    if isinstance(model, StandInModel):
        return _match_regions(files, model, parts, list(model.whole.parameters()))
    found: dict[int, str] = {}
    if isinstance(files, JoinedFiles):
        for prefix, each, own in files.parts:
            mine = match_files(own, each, parts.parameters)
            found |= {index: prefix + name for index, name in mine.items()}
    else:
        found = match_files(files, model, parts.parameters)
    return MatchedFiles(files, found, frozenset(found.values()))


def _match_missing(path: Path, model: nn.Module, parts: Partition) -> MatchedFiles:
    """Do as ``match_weights`` for parameters on ``meta`` alone: the files may lack others."""
    files = open_weights(path, whole_model(model))
    if isinstance(model, StandInModel):
        held = [(p, model.local_of.get(id(p))) for p in model.whole.parameters()]
        wanted = [p for p, local in held if local is not None and local.is_meta]
        return _match_regions(files, model, parts, wanted)._replace(alone=True)
    index_of = {id(p): index for index, p in enumerate(parts.parameters)}
    wanted = [p for p in parts.parameters if p.is_meta]
    found = match_files(files, model, wanted)
    names = {index_of[id(wanted[number])]: name for number, name in found.items()}
    return MatchedFiles(files, names, frozenset(names.values()), alone=True)


def _match_regions(
    files: TensorFiles, model: StandInModel, parts: Partition, every: Sequence[nn.Parameter]
) -> MatchedFiles:
    """Return the regions in files of a rank's shards of the parameters ``every``."""
    matched = match_files(files, model.whole, every)
    index_of = {id(p): index for index, p in enumerate(parts.parameters)}
    names: dict[int, str] = {}
    regions: dict[str, TensorRegion] = {}
    for number, p in enumerate(every):
        local = model.local_of.get(id(p))
        if local is None:
            continue
        if (name := matched.get(number)) is not None:
            names[index_of[id(local)]] = name
            regions[name] = model.regions[id(local)]
        elif local.is_meta:
            missing = next(n for n, each in model.whole.named_parameters() if each is p)
            raise ValueError(
                f"weights: {files.path} does not match the model: {missing} is missing"
            )
    return MatchedFiles(RegionFiles(files, regions), names, frozenset(matched.values()))


def other_tensors(
    matched: MatchedFiles, model: nn.Module, parts: Partition, ignored: Collection[str] = ()
) -> list[Others]:
    """Return the other tensors of a model's files, or of those of each of several models."""
    if matched.alone:
        return []
    managed = frozenset(map(id, parts.parameters))
    files, used = matched.files, matched.used
    if isinstance(model, StandInModel):
        managed = frozenset(map(id, model.whole.parameters()))
        model = model.whole
    if not isinstance(files, JoinedFiles):
        return [Others(files, model, used, managed, ignored)]
    return [
        Others(own, each, {n.removeprefix(prefix) for n in used if n.startswith(prefix)},
               managed, ignored)
        for prefix, each, own in files.parts
    ]  # fmt: skip


class Others:
    """Tensors in files besides weights: buffers, integer parameters and modules' extra state.

    They are checked when this is made, before anything is changed.
    """

    def __init__(
        self, files: TensorFiles, model: nn.Module, weights: Collection[str],
        managed: Container[int], ignored: Collection[str] = (),
    ) -> None:  # fmt: skip
        """
        Args:
            weights: names of the tensors that are read as weights.
            ignored: patterns (``fnmatch``) of tensor names that the model need not use.

        Raises:
            ValueError: a buffer has another shape; an integer parameter on meta is not in the
                files; or the files have tensors that the model does not use.
        """
        self._files, self._model = files, model
        self._tensors = unmanaged_tensors(model, managed)
        buffers = self._tensors
        shapes = {name: files.shape(name) for name in buffers}
        for name, tensor in buffers.items():
            if shapes[name] not in (None, tuple(tensor.shape)):
                raise ValueError(
                    f"weights: {files.path}: {name} has shape {shapes[name]}, expected "
                    f"{tuple(tensor.shape)}"
                )
        missing = [name for name, shape in shapes.items() if shape is None]
        for name in missing:
            if buffers[name].is_meta:
                raise ValueError(f"weights: {files.path} lacks {name}, which is on meta")
        self._missing = missing
        known = {*weights, *tensors_of(model)}
        in_base = names_in_base(model)
        known |= set(map(in_base, known))
        self._states = FoundStates(
            model, [name for name in files.names if name not in known], in_base
        )
        known |= self._states.names
        strange = [
            name for name in files.names
            if name not in known and not any(fnmatchcase(name, each) for each in ignored)
        ]  # fmt: skip
        if strange:
            raise ValueError(_unused(files.path, strange))

    def load(self) -> None:
        """Load them into the model."""
        if self._missing:
            names = self._missing
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            log.warning("overspill: %s lacks buffer %s%s", self._files.path, names[0], more)
        for name, tensor in self._tensors.items():
            if self._files.shape(name) is None:
                continue
            value = self._files.read(name)
            if isinstance(tensor, nn.Parameter) and tensor.is_meta:
                torch_private.become(tensor, value.to(tensor.dtype))
            else:
                tensor.detach().copy_(value)
        self._states.load(self._files.read)


def _unused(path: Path, names: list[str]) -> str:
    """Return the message for tensors in files that the model does not use."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    scales = any(_OF_QUANTISED.search(name) for name in names)
    why = (
        "; they look like scales, but no weight of the model is quantised with them: use a folder "
        "with bf16, fp16 or fp32 weights" if scales
        else "; check that the files are those of this model, or allow them: ignore_weights=[...] "
        "takes their names, or patterns such as 'head.*'"
    )  # fmt: skip
    listed = f"{', '.join(names[:5])}{more}{why}"
    return f"weights: {path} has tensors that the model does not use: {listed}"


# Names of scales and similar tensors in bitsandbytes, GPTQ, AWQ, compressed-tensors and FP8 files.
_OF_QUANTISED = re.compile(
    r"(^|[._])(scales?|scale_inv|weight_scale(_inv|_2)?|input_scale|qweight|qzeros|g_idx|absmax|"
    r"quant_map|quant_state\..*|nested_absmax|SCB|weight_packed|zero_point|weight_zero_point)$"
)
