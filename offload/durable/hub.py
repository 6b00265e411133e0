"""A model's tensors as Hugging Face files store them, streamed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import ExportError
from ..planning.models import by_model
from ..state.hub_names import Group, is_of_transformers, saved_names, tensors_of, to_hub
from ..state.module_states import added_tensors
from .tensors import StreamedTensor, in_memory, lazy, whole_stacks

Read = Callable[[torch.Tensor], torch.Tensor]  # reads a tensor of a model, keeping its dtype


@dataclass(frozen=True)
class ModelFiles:
    """The contents of the files of one model.

    Attributes:
        config: the text of its ``config.json``, if it has one.
        folder: its folder in the export; ``""`` for that of the export itself.
    """

    weights: Sequence[StreamedTensor]
    config: str | None = None
    folder: str = ""


def files_of(model: nn.Module, tensors: Sequence[StreamedTensor]) -> list[ModelFiles]:
    """Return the files of a model, or of each of several models, with Hub names.

    Args:
        tensors: all of a commit, with the model's names.
    """
    known = tensors_of(model)
    found = []
    for prefix, each in by_model(model).items():
        shared = {id(tensor): name for name, tensor in reversed(tensors_of(each).items())}
        mine = []
        for tensor in tensors:
            if tensor.name.startswith(prefix):
                mine.append(replace(tensor, name=tensor.name.removeprefix(prefix)))
            elif id(known.get(tensor.name)) in shared:  # it has the name from another model
                mine.append(replace(tensor, name=shared[id(known[tensor.name])]))
        weights = as_on_hub(each, mine)
        found.append(ModelFiles(weights, config_of(each), prefix.removesuffix(".")))
    return found


def as_on_hub(model: nn.Module, tensors: Sequence[StreamedTensor]) -> list[StreamedTensor]:
    """Convert tensors from a model's names and shapes to those of Hugging Face files.

    Only one group of tensors is in memory at a time.  For models that are not transformers',
    tensors only have their stacks joined.
    """
    tensors = whole_stacks(tensors)
    if not is_of_transformers(model):
        return tensors
    by_name = {each.name: each for each in tensors}
    meta = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in by_name.items()}
    found: list[StreamedTensor] = []
    for group in to_hub(model, meta):
        if group.transform is None:
            found.append(replace(by_name[group.sources[0][0]], name=group.target))
            continue
        taken: dict[str, torch.Tensor] = {}
        found += [
            lazy(name, t.dtype, t.shape, partial(_take, taken, name, group, model, by_name))
            for name, t in group.made.items()
        ]
    return found


def named_by_config(
    config: Path,
) -> Callable[[Sequence[StreamedTensor]], Sequence[StreamedTensor]]:
    """Return ``as_on_hub`` for the model that a ``config.json``, or the one in a folder, describes.

    If it is not a transformers model, the function only joins stacks.

    Raises:
        OffloadError: it is a transformers model, but transformers is not installed or lacks it.
    """
    path = config / "config.json" if config.is_dir() else config
    told = json.loads(path.read_text())
    names = told.get("architectures")
    if not names or "auto_map" in told:  # custom code has its own names
        return whole_stacks
    try:
        import transformers
    except ImportError as error:
        raise ExportError(
            f"{path} is about {names[0]}; transformers knows its names in files: install it, or "
            "leave the config out for the names in memory"
        ) from error
    kind = getattr(transformers, names[0], None)
    if kind is None:
        raise ExportError(
            f"{path}: transformers {transformers.__version__} has no {names[0]}; leave the config "
            "out for the names in memory"
        )
    with torch.device("meta"):
        model = kind(kind.config_class.from_json_file(path))
    return partial(as_on_hub, model)


def _take(
    taken: dict[str, torch.Tensor], name: str, group: Group, model: nn.Module,
    by_name: dict[str, StreamedTensor],
) -> torch.Tensor:  # fmt: skip
    if name not in taken:
        taken.update(group.convert(model, lambda source: whole(by_name[source])))
    return taken.pop(name)


def whole(tensor: StreamedTensor) -> torch.Tensor:
    """Read a whole tensor into memory."""
    data = np.empty(tensor.nbytes, np.uint8)
    at = 0
    for part in tensor.parts():
        taken = part.take()
        data[at : at + taken.size] = taken
        at += taken.size
    flat = torch.from_numpy(data)
    return flat.view(tensor.dtype).view(tensor.shape)


def config_of(model: nn.Module) -> str | None:
    """Return the text of a model's ``config.json``, if it has one."""
    to_json = getattr(getattr(model, "config", None), "to_json_string", None)
    return None if to_json is None else str(to_json())


def _copy(t: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return t.clone()


def of_model(model: nn.Module, read: Read = _copy) -> list[StreamedTensor]:
    """Return the tensors of a model's files, with the Hub's names.

    Each tensor is read only when it is written: by ``read``, by default from where it is.
    """
    return as_on_hub(model, as_in_memory(model, read))


def streamed(tree: Any, parameters: Iterable[torch.Tensor]) -> Any:
    """Replace ``parameters`` in a tree of dicts, lists and tuples by tensors read on demand."""
    managed = set(map(id, parameters))

    def walk(each: Any) -> Any:
        if id(each) in managed:
            return _streamed("a parameter", each, _copy)
        if isinstance(each, dict):
            return {key: walk(value) for key, value in each.items()}
        if type(each) in (list, tuple):
            return type(each)(map(walk, each))
        return each

    return walk(tree)


def of_state_dict(
    state: Mapping[str, Any], parameters: Iterable[torch.Tensor]
) -> list[StreamedTensor]:
    """Return the tensors of a state dict; ``parameters`` are read when they are written.

    A tensor with several names has the first.

    Raises:
        ValueError: a value is not a tensor.
    """
    first: dict[int, str] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{name!r} is no tensor, and safetensors holds nothing else")
        first.setdefault(id(value), name)
    found = streamed({name: state[name] for name in first.values()}, parameters)
    return whole_stacks(
        replace(each, name=name) if isinstance(each, StreamedTensor) else in_memory(name, each)
        for name, each in found.items()
    )


def in_full(tree: Any) -> Any:
    """Read all streamed tensors of a tree into memory."""
    if isinstance(tree, StreamedTensor):
        return whole(tree)
    if isinstance(tree, dict):
        return {key: in_full(value) for key, value in tree.items()}
    return type(tree)(map(in_full, tree)) if type(tree) in (list, tuple) else tree


def as_in_memory(model: nn.Module, read: Read = _copy) -> list[StreamedTensor]:
    """List a model's tensors, and then the tensors of extra state.

    Each tensor has one name: the one that transformers keeps, or the first.
    """
    tensors = tensors_of(model)
    names = saved_names(model) if is_of_transformers(model) else list(tensors)
    first = {id(tensors[name]): name for name in reversed(names)}
    chosen = [name for name in names if first[id(tensors[name])] == name]
    added = added_tensors(model)
    return [
        *(_streamed(name, tensors[name], read) for name in chosen),
        *(in_memory(name, value.cpu()) for name, value in added.items()),
    ]


def _streamed(name: str, t: torch.Tensor, read: Read) -> StreamedTensor:
    return lazy(name, t.dtype, tuple(t.shape), partial(read, t))
