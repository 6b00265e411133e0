"""Conversion between tensors in memory and their names and shapes in Hugging Face files.

transformers describes the difference by conversions (renamed, stacked, split, transposed tensors),
which ``from_pretrained`` and ``save_pretrained`` apply to a whole model at once.  Here they are
applied to one group of tensors at a time: the smallest set that belongs together, such as the
experts of a layer.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..io_engine.file_ranges import FileState
from ..planning.sections import joined
from ..private import module_private
from .adapters import names_in_base
from .quantised_files import QuantisedFiles
from .weight_files import FileRun, InFiles, QuantisedInFiles, QuantisedRuns, WeightFiles

Read = Callable[[str], torch.Tensor]
_QUANTISED = "quantization_config"


@dataclass
class Group:
    """Tensors that are converted together.  ``made`` has the results on ``meta``."""

    transform: Any
    target: str
    sources: list[tuple[str, str]] = field(default_factory=list)  # each with its pattern
    renamings: list[Any] = field(default_factory=list)  # renamings of the results
    made: dict[str, torch.Tensor] = field(default_factory=dict)

    def convert(self, model: nn.Module, read: Read) -> dict[str, torch.Tensor]:
        """Return the converted tensors; ``read`` returns a source tensor by name."""
        if self.transform is None:
            return {self.target: read(self.sources[0][0])}
        from transformers.core_model_loading import apply_renamings

        transform = copy.deepcopy(self.transform)
        for name, pattern in self.sources:
            transform.add_tensor(self.target, name, pattern, read(name))
        made = transform.convert(self.target, model=model, config=getattr(model, "config", None))
        return {
            apply_renamings(name, self.renamings): t[0] if isinstance(t, list) else t
            for name, t in made.items()
        }


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether a model is a transformers model, without importing transformers."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def forget_quantisation(model: nn.Module) -> Callable[[], None]:
    """Remove ``quantization_config`` from the configurations of models that are not quantised.

    A model that is built from the configuration of a quantised folder has ordinary weights, and
    what is saved of it has, too.  transformers does the same when it dequantises.

    Returns:
        A function that undoes it.
    """
    removed: list[tuple[Any, Any]] = []
    quantised = [each for each in model.modules() if hasattr(each, "hf_quantizer")]
    inside = {id(module) for each in quantised for module in each.modules()}
    for module in model.modules() if "transformers" in sys.modules else ():
        config = vars(module).get("config")
        found = getattr(config, _QUANTISED, None)
        if found and is_of_transformers(module) and id(module) not in inside:
            removed.append((config, found))
            delattr(config, _QUANTISED)

    def undo() -> None:
        for config, found in removed:
            setattr(config, _QUANTISED, found)

    return undo


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's parameters and persistent buffers by state-dict name; read nothing."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        own = {**module_private.own_parameters(module), **module_private.persistent_buffers(module)}
        found |= {dot + name: t for name, t in own.items() if t is not None}
    return found


def base_tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the same on ``meta``, with the base's names from before adapters, and whole stacks."""
    in_base = names_in_base(model)
    found = {in_base(name): on_meta(tensor) for name, tensor in tensors_of(model).items()}
    return joined(found, lambda _, parts: torch.cat(list(parts)))


def saved_names(model: Any) -> list[str]:
    """Return the names in ``tensors_of`` that transformers saves.

    Tied tensors have one name, and tensors that the model's class excludes have none.
    """
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    left_out = getattr(model, "_keys_to_ignore_on_save", None) or ()
    found = {n: on_meta(t) for n, t in tensors_of(model).items() if n not in left_out}
    return list(remove_tied_weights_from_state_dict(found, model))


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor of the same shape and dtype."""
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")


def to_hub(model: Any, tensors: Mapping[str, torch.Tensor]) -> list[Group]:
    """Return the groups that convert a model's tensors (on ``meta``) to the Hub's."""
    renamings, converters = _split(_saved_as(model))
    groups: dict[str, Group] = {}
    for name in _natural(tensors):
        target, transform, pattern = _match(name, converters)
        if transform is None:
            target = _rename(name, renamings)
        group = groups.setdefault(target, Group(transform, target))
        group.sources.append((name, pattern or name))
        if transform is not None:
            group.renamings = renamings
    return _made(model, groups.values(), tensors)


def from_hub(model: Any, tensors: Mapping[str, torch.Tensor]) -> list[Group]:
    """Return the groups that convert the Hub's tensors (on ``meta``) to a model's.

    Tensors that the model lacks are left out.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import rename_source_key

    renamings, converters = _split(get_model_conversion_mapping(model))
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    mine, prefix = base_tensors_of(model), getattr(model, "base_model_prefix", None)
    groups: dict[str, Group] = {}
    for name in _natural(tensors):
        target, pattern = rename_source_key(name, renamings, converters, prefix, mine)
        if target not in mine and name in mine:
            target, pattern = rename_source_key(name, [], [], prefix, mine)
        if target in mine:
            transform = None if pattern is None else by_pattern[pattern]
            group = groups.setdefault(target, Group(transform, target))
            group.sources.append((name, pattern or name))
    return _made(model, groups.values(), tensors)


def _saved_as(model: Any) -> list[Any]:
    """Return the conversions from memory to files.

    They are the reverse of the conversions that loaded the model, or else of its class's.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    used: list[Any] | None = getattr(model, "_weight_conversions", None)
    if used is None:
        # A model that was not loaded does not say whether its files would have the prefix.
        every = get_model_conversion_mapping(model, add_legacy=False)
        used = [each for each in every if not isinstance(each, PrefixChange)]
    return [each.reverse_transform() for each in reversed(used)]


def _split(transforms: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Split conversions into renamings and others."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    every = list(transforms)
    return (
        [each for each in every if isinstance(each, WeightRenaming)],
        [each for each in every if isinstance(each, WeightConverter)],
    )


def _match(name: str, converters: list[Any]) -> tuple[str, Any, str | None]:
    """Return the new name by the first converter that matches, that converter, and its pattern."""
    for each in converters:
        target, pattern = each.rename_source_key(name)
        if pattern is not None:
            return target, each, pattern
    return name, None, None


def _rename(name: str, renamings: list[Any]) -> str:
    for each in renamings:
        name, _ = each.rename_source_key(name)
    return name


def _natural(names: Iterable[str]) -> list[str]:
    """Sort names with numbers in numeric order: the tenth expert comes after the ninth."""
    from transformers.core_model_loading import dot_natural_key

    return sorted(names, key=dot_natural_key)


def _made(
    model: nn.Module, groups: Iterable[Group], tensors: Mapping[str, torch.Tensor]
) -> list[Group]:
    found = list(groups)
    for group in found:
        group.made = group.convert(model, tensors.__getitem__)
    return found


class HubFiles:
    """``TensorFiles`` that have the Hub's names, read under the names in a model."""

    def __init__(self, model: nn.Module, files: WeightFiles | QuantisedFiles) -> None:
        """
        Raises:
            ValueError: tensors that are converted together are incomplete or do not fit together.
        """
        self.path: Path = files.path
        self._model, self._files = model, files
        shapes = {name: files.shape(name) or () for name in files.names}
        meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        try:
            groups = from_hub(model, meta)
        except Exception as error:
            raise ValueError(
                f"weights: {files.path} does not match the model: transformers cannot convert it: "
                f"{error}"
            ) from error
        self._made = {name: t for group in groups for name, t in group.made.items()}
        self._group = {name: group for group in groups for name in group.made}
        used = {source for group in groups for source, _ in group.sources}
        left_out = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        self._others = [
            n for n in files.names if n not in used and not any(re.search(k, n) for k in left_out)
        ]
        self._last: tuple[Group, dict[str, torch.Tensor]] | None = None
        self._traced: tuple[Group | None, dict[str, InFiles]] = None, {}
        self._pieces: tuple[Group | None, dict[str, QuantisedInFiles]] = None, {}

    @property
    def names(self) -> list[str]:
        """See ``TensorFiles``; tensors unknown to the model keep their names in the files."""
        return [*self._made, *self._others]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See ``TensorFiles``."""
        made = self._made.get(name)
        return None if made is None else tuple(made.shape)

    def dtypes(self, name: str) -> Collection[torch.dtype]:
        """See ``TensorFiles``."""
        sources = self._group[name].sources
        return {dtype for source, _ in sources for dtype in self._files.dtypes(source)}

    def read(self, name: str) -> torch.Tensor:
        """See ``TensorFiles``."""
        group = self._group[name]
        if self._last is None or self._last[0] is not group or name not in self._last[1]:
            self._last = group, group.convert(self._model, self._files.read)
        return self._last[1].pop(name)

    def state(self, path: Path) -> FileState:
        """See ``TensorFiles``."""
        return self._files.state(path)

    def find(self, name: str) -> InFiles | None:
        """See ``TensorFiles``."""
        group = self._group[name]
        if group.transform is None:
            return self._files.find(group.sources[0][0])
        if group is not self._traced[0]:
            self._traced = group, _trace(group, self._model, self._files)
        return self._traced[1].get(name)

    def find_quantised(self, name: str) -> QuantisedInFiles | None:
        """See ``TensorFiles``."""
        group = self._group[name]
        if group.transform is None:
            return self._files.find_quantised(group.sources[0][0])
        if group is not self._pieces[0]:
            self._pieces = group, _trace_quantised(group, self._model, self._files)
        return self._pieces[1].get(name)


class _Rows(NamedTuple):
    """The rows of a group's sources, numbered, and those that each result is made of.

    Attributes:
        firsts: by source, the number of its first row.
        width: elements of a row.
        made: by result, the numbers of its rows.
    """

    firsts: Mapping[str, int]
    width: int
    made: Mapping[str, torch.Tensor]


def _rows(group: Group, model: nn.Module, files: WeightFiles | QuantisedFiles) -> _Rows | None:
    """Return the rows that a group's results are made of; ``None`` if it does more than move them.

    The conversion runs on tensors in which each row is a single number, the row's own.
    """
    firsts, widths, numbers = dict[str, int](), set[int](), dict[str, torch.Tensor]()
    count = 0
    for name, _ in group.sources:
        shape = files.shape(name) or ()
        if len(shape) < 2 or not math.prod(shape):
            return None
        firsts[name] = count
        rows = math.prod(shape[:-1])
        widths.add(shape[-1])
        numbers[name] = torch.arange(count, count + rows, device="cpu").reshape(*shape[:-1], 1)
        count += rows
    try:
        made = group.convert(model, numbers.__getitem__)
    except Exception:  # it needs the contents of rows
        return None
    for name, numbered in made.items():
        if numbered.shape != (*group.made[name].shape[:-1], 1) or numbered.dtype != torch.int64:
            return None
    if len(widths) != 1:
        return None
    return _Rows(firsts, widths.pop(), {name: t.flatten() for name, t in made.items()})


def _trace(
    group: Group, model: nn.Module, files: WeightFiles | QuantisedFiles
) -> dict[str, InFiles]:
    """Return the locations of a group's results, if they are made of whole rows of its sources."""
    found = [files.find(name) for name, _ in group.sources]
    rows = None if None in found else _rows(group, model, files)
    dtypes = {each.dtype for each in found if each is not None}
    if rows is None or len(dtypes) != 1:
        return {}
    dtype = dtypes.pop()
    firsts = rows.firsts.values()
    runs = [(each.runs[0], n) for each, n in zip(found, firsts, strict=True) if each is not None]
    row_bytes = rows.width * dtype.itemsize
    return {n: InFiles(dtype, _runs(made, runs, row_bytes)) for n, made in rows.made.items()}


def _trace_quantised(
    group: Group, model: nn.Module, files: WeightFiles | QuantisedFiles
) -> dict[str, QuantisedInFiles]:
    """Return the pieces of a group's results, if they are made of whole quantised weights."""
    found = {name: files.find_quantised(name) for name, _ in group.sources}
    rows = None if None in found.values() else _rows(group, model, files)
    if rows is None:
        return {}
    source_of = {first: name for name, first in rows.firsts.items()}
    results: dict[str, QuantisedInFiles] = {}
    for result, numbers in rows.made.items():
        pieces, at = list[QuantisedRuns](), 0
        while at < numbers.numel():
            first = int(numbers[at])
            source = found.get(source_of.get(first, ""))
            if source is None:
                return {}
            count = math.prod((files.shape(source_of[first]) or ())[:-1])
            expected = torch.arange(first, first + count, device="cpu")
            if not torch.equal(numbers[at : at + count], expected):
                return {}
            start = at * rows.width
            pieces += [each._replace(start=start + each.start) for each in source.pieces]
            at += count
        results[result] = QuantisedInFiles(tuple(pieces))
    return results


def _runs(
    rows: torch.Tensor, runs: list[tuple[FileRun, int]], row_bytes: int
) -> tuple[FileRun, ...]:
    """Return rows, given by number, as runs of files; ``runs`` has the first number of each."""
    starts = [0, *(torch.nonzero(rows.diff() != 1).flatten() + 1).tolist(), rows.numel()]
    firsts, found = [first for _, first in runs], list[FileRun]()
    for start, stop in itertools.pairwise(starts):
        at, end = int(rows[start]), int(rows[start]) + stop - start
        while at < end:
            number = bisect_right(firsts, at) - 1
            run, first = runs[number]
            count = min(end, first + run.nbytes // row_bytes) - at
            found.append(
                FileRun(run.path, run.offset + (at - first) * row_bytes, count * row_bytes)
            )
            at += count
    return tuple(found)
