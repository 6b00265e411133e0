"""Whole, ordinary parameters on every rank, for code that reads or edits weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn

from ..errors import RankError, WeightError
from ..private.module_private import own_parameters, put_parameter
from ..state.materializing import Materializing
from .bridge import digest
from .world import World

log = logging.getLogger("overspill")


class WholeWeights(Protocol):
    """Reads and writes the weights of a model that is spread over ranks, by parameter."""

    def current_names(self) -> Mapping[int, str]:
        """Make all parameters of the model's modules current, in the form that users hold them.

        Returns:
            Their names, by id.
        """
        ...

    def read_whole(self, name: str) -> torch.Tensor:
        """Return a copy of a whole weight; every rank must call it."""
        ...

    def write_wholes(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write this rank's part of each whole weight that differs."""
        ...


class SpreadMaterializing:
    """Implements ``overspill.materialized`` for parts of a model that is spread over ranks.

    Each module of the part gets ordinary parameters, with whole weights, in place of its own. A
    block is a ``Materialized``. Every rank must begin and end it.
    """

    def __init__(self, of_engine: Materializing, weights: WholeWeights, world: World) -> None:
        """
        Args:
            of_engine: refuses all other uses of the engine meanwhile.
        """
        self._of_engine, self._weights, self._world = of_engine, weights, world
        self._block: object | None = None  # the block that has begun and has not ended
        # The parameters that were replaced: their module and name in it, and both parameters.
        self._replaced: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        self._names: dict[int, str] = {}  # by id of a replacement, the name in the model
        self._shapes: dict[str, tuple[int, ...]] = {}  # by that name
        self._others: list[str] = []  # those for which a module had another parameter at the end

    def begin(self, block: object, model: nn.Module) -> None:
        """Give a module whole parameters, for a ``block``.

        Raises:
            OffloadError: another rank was given another module.
        """
        made = self._world.all_or_none(lambda: self._wholes(model))
        try:
            self._block = block
            self._of_engine.begin(block, nn.Module())  # none of the engine's own parameters
            self._names = {id(new): name for name, _, new in made}
            self._shapes = {name: tuple(new.shape) for name, _, new in made}
            by_id = {id(old): new for _, old, new in made}
            for module in model.modules():
                for name, p in list(own_parameters(module).items()):
                    if (new := by_id.get(id(p))) is not None and p is not None:
                        self._replaced.append((module, name, p, new))
                        put_parameter(module, name, new)
        except BaseException:
            self._restore()
            raise

    def _wholes(self, model: nn.Module) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
        """Return the name of each parameter of a module, itself, and a whole one."""
        of_model = self._weights.current_names()
        params = {of_model[id(p)]: p for p in model.parameters() if id(p) in of_model}
        for rank, theirs in enumerate(self._world.gathered(list(params))):
            if theirs != list(params):
                raise RankError(
                    f"materialized: rank {rank} was given another module than rank "
                    f"{self._world.rank}; give the same one on every rank"
                )
        made = [
            (name, p, nn.Parameter(self._weights.read_whole(name), p.requires_grad))
            for name, p in params.items()
        ]
        self._world.gathered(None)  # no rank has failed to read
        return made

    def end(self) -> Mapping[str, torch.Tensor]:
        """End the block, after an error too, and return what the parameters held, by name."""
        self._others = [
            self._names[id(new)] for module, name, _, new in self._replaced
            if own_parameters(module).get(name) is not new
        ]  # fmt: skip
        found = {self._names[id(new)]: new.data for _, _, _, new in self._replaced}
        self._restore()
        return found

    def _restore(self) -> None:
        while self._replaced:
            module, name, old, _ = self._replaced[-1]
            put_parameter(module, name, old)
            self._replaced.pop()
        if self._of_engine.active:
            self._of_engine.end()
        self._block, self._names = None, {}

    def abandon(self, block: object) -> bool:
        """End an interrupted ``block``; return whether edits are dropped."""
        dropped = self._block is block
        if dropped:
            log.warning("overspill: materialized was interrupted at its end; edits are dropped")
            self._restore()
        return dropped

    def write_back(self, found: Mapping[str, torch.Tensor]) -> None:
        """Write the weights that were edited, the same on all ranks.

        Raises:
            OffloadError: ranks have different values, a parameter was replaced by another, or has
                another shape. Nothing is written.
        """
        self._world.all_or_none(lambda: self._write_alike(found))

    def _write_alike(self, found: Mapping[str, torch.Tensor]) -> None:
        for name in self._others:
            raise WeightError(
                f"parameter {name!r} was replaced while the model was materialized; copy the new "
                "values into it (p.data.copy_(new))"
            )
        for name, value in found.items():
            if tuple(value.shape) != self._shapes[name]:
                raise WeightError(
                    f"the data of {name!r} has shape {tuple(value.shape)} at the end of "
                    f"materialized, and needs {self._shapes[name]}; nothing was written"
                )
        marks = {
            name: (tuple(value.shape), str(value.dtype), digest(value.contiguous()))
            for name, value in found.items()
        }
        for rank, theirs in enumerate(self._world.gathered(marks)):
            for name, mark in marks.items():
                if theirs[name] != mark:
                    raise RankError(
                        f"materialized: rank {rank} has left other values in {name!r} than rank "
                        f"{self._world.rank}, and nothing was written; edit weights in the same "
                        "way on every rank"
                    )
        with torch.no_grad():
            self._weights.write_wholes(found)
        self._world.gathered(None)
