"""Files that hold whole stacks of experts, read under the names of a model's sections."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

import torch
from torch import nn

from ..io_engine.file_ranges import FileState
from ..planning.sections import Section, Sections, section_name
from .adapters import names_in_base
from .weight_files import InFiles, QuantisedInFiles, TensorFiles, cut_runs, read_runs


class SectionFiles:
    """``TensorFiles`` under the names of stack sections, over ``files`` with whole stacks."""

    def __init__(self, model: nn.Module, files: TensorFiles) -> None:
        """
        Raises:
            ValueError: a stack has another shape.
        """
        self.path: Path = files.path
        self._files = files
        # stack name and section, by section name
        self._sections: dict[str, tuple[str, Section]] = {}
        in_base = names_in_base(model)
        for own, stack in model.named_modules():
            name = in_base(own)
            shape = files.shape(name) if isinstance(stack, Sections) else None
            if not isinstance(stack, Sections) or shape is None:
                continue  # the files may have sections instead
            if shape != stack.shape:
                raise ValueError(
                    f"weights: {files.path} does not match the model: {name} has shape {shape}, "
                    f"expected {stack.shape}"
                )
            for number, section in enumerate(stack):
                self._sections[section_name(name, number)] = name, section
        self._last: tuple[str, torch.Tensor] | None = None

    @property
    def names(self) -> list[str]:
        """See ``TensorFiles``."""
        split = {stack for stack, _ in self._sections.values()}
        return [*(n for n in self._files.names if n not in split), *self._sections]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See ``TensorFiles``."""
        if name not in self._sections:
            return self._files.shape(name)
        return tuple(self._sections[name][1].section.shape)

    def dtypes(self, name: str) -> Collection[torch.dtype]:
        """See ``TensorFiles``."""
        return self._files.dtypes(self._sections[name][0] if name in self._sections else name)

    def read(self, name: str) -> torch.Tensor:
        """See ``TensorFiles``."""
        if name not in self._sections:
            return self._files.read(name)
        if (found := self.find(name)) is not None:
            return read_runs(found, self.shape(name) or ())
        stack, section = self._sections[name]
        if self._last is None or self._last[0] != stack:
            self._last = None  # free it before reading another one
            self._last = stack, self._files.read(stack)
        return self._last[1][section.first : section.experts.stop].clone()

    def state(self, path: Path) -> FileState:
        """See ``TensorFiles``."""
        return self._files.state(path)

    def find(self, name: str) -> InFiles | None:
        """See ``TensorFiles``."""
        if name not in self._sections:
            return self._files.find(name)
        stack, section = self._sections[name]
        whole = self._files.find(stack)
        if whole is None:
            return None
        each = math.prod(section.section.shape[1:]) * whole.dtype.itemsize
        first, stop = section.first * each, section.experts.stop * each
        return InFiles(whole.dtype, tuple(cut_runs(whole.runs, first, stop - first)))

    def find_quantised(self, name: str) -> QuantisedInFiles | None:
        """See ``TensorFiles``; ``None`` if a piece has experts of several sections."""
        if name not in self._sections:
            return self._files.find_quantised(name)
        stack, section = self._sections[name]
        whole = self._files.find_quantised(stack)
        if whole is None:
            return None
        each = math.prod(section.section.shape[1:])
        first, stop = section.first * each, section.experts.stop * each
        pieces = []
        for piece in whole.pieces:
            end = piece.start + piece.form.numel
            if piece.start < stop and end > first:
                if piece.start < first or end > stop:
                    return None
                pieces.append(piece._replace(start=piece.start - first))
        return QuantisedInFiles(tuple(pieces))
