"""The stores of many ranks below one folder: those of one run, and what they hold together."""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..durable.export import Exported, Named, config_text, write_export
from ..durable.files import SHARD_BYTES, Note
from ..durable.hub import ModelFiles, whole
from ..durable.inspect import require_unmoved
from ..durable.source import StoreSource
from ..durable.tensors import (
    StreamedTensor,
    in_memory,
    lazy,
    one_after_the_other,
    whole_stacks,
)
from ..errors import CorruptionError, IoError
from ..io_engine.committed import FoundStore, find_store
from ..io_engine.manifest import Generation, read_manifest
from ..planning.regions import Place, TensorRegion
from ..planning.stand_ins import whole_name

Placed = tuple[StreamedTensor, Place | None]
_RANK = re.compile(r"rank-(\d{5})-of-(\d{5})")


def rank_folder(rank: int, size: int) -> str:
    """Return the name of a rank's own folder below a run's."""
    return f"rank-{rank:05d}-of-{size:05d}"


def with_ranks(folder: Path) -> list[Path]:
    """Return the folder, and those of ranks below it."""
    below = folder.iterdir() if folder.is_dir() else ()
    return [folder, *(each for each in below if _RANK.fullmatch(each.name))]


def holds_store(folder: Path) -> bool:
    """Return whether the folder has a store that must be kept."""
    found = read_manifest(folder) if folder.is_dir() else None
    return found is not None and bool(found.kept or found.damage)


def runs_in(folders: Iterable[Path]) -> set[int]:
    """Return the numbers of ranks of the runs below folders; a rank may lack its store."""
    names = [each for folder in folders if folder.is_dir() for each in folder.iterdir()]
    return {
        int(match[2]) for each in names
        if (match := _RANK.fullmatch(each.name)) and holds_store(each)
    }  # fmt: skip


def in_the_way(folder: Path, ranks: int) -> IoError:
    """Return the error for a folder that holds a run of ``ranks``, where a new run is to start."""
    who = "one rank" if ranks == 1 else f"{ranks} ranks"
    return IoError(
        f"{folder}: holds a run of {who}; continue it with overspill.resume(model, "
        f"{str(folder)!r}), remove its files if it is of no use any more, or choose another folder "
        "(nvme=)",
        path=str(folder), errno=errno.EEXIST,
    )  # fmt: skip


def names_in(store: FoundStore) -> list[str]:
    """Return the names of all parameters of one store, as the store has them."""
    units = store.layout.description["units"]
    return [p["name"] for unit in units for chunk in unit["chunks"] for p in chunk["params"]]


class RunStores:
    """The stores of all ranks of one run, and the commit that all of them have."""

    def __init__(self, stores: Sequence[FoundStore], *, ranks: bool = True) -> None:
        """
        Args:
            ranks: the stores hold shards; otherwise there is one store of a whole model.

        Raises:
            IoError: a rank's store was never committed.
            CorruptionError: a store is damaged, or they have no commit in common.
        """
        self.stores, self.ranks = list(stores), ranks
        self.generations = _in_common(self.stores)

    @property
    def step(self) -> int:
        """The step of the commit that all have."""
        return self.generations[0].step


def _in_common(stores: Sequence[FoundStore]) -> list[Generation]:
    """Return, for each store, the last commit that all have.

    A rank may have made one more, which the others did not reach. The data of the commit before it
    is then untouched.
    """
    for store in stores:
        store.last()  # raises if there is no commit
    mine = [{(g.number, g.step): g for g in store.generations[-2:]} for store in stores]
    common = set(mine[0]).intersection(*mine)
    if not common:
        last = ", ".join(
            f"{store.directories[0].name} step {store.last().step}" for store in stores
        )
        folder = stores[0].directories[0].parent
        raise CorruptionError(
            f"{folder}: the ranks' stores have no commit in common, so they are not of one run "
            f"({last})",
            path=str(folder),
        )
    return [each[max(common)] for each in mine]


def find_run(folders: Sequence[Path]) -> RunStores | None:
    """Return the newest complete set of ranks' stores below the folders of a run.

    If the folders themselves hold the store of one rank, and it is newer, that is returned.
    ``None``: there are no ranks' stores.

    Raises:
        IoError: no set is complete.
        CorruptionError: see ``RunStores``.
    """
    sizes = runs_in(folders)
    found, missing = list[RunStores](), ""
    for size in sorted(sizes):
        places = [[folder / rank_folder(rank, size) for folder in folders] for rank in range(size)]
        absent = [place for rank in places for place in rank if not place.is_dir()]
        if absent:
            missing = str(absent[0])
            continue
        try:
            found.append(RunStores([find_store(rank) for rank in places]))
        except IoError as error:
            missing = str(error)
    if found and any(map(holds_store, folders)):
        found.append(RunStores([find_store(folders)], ranks=False))
    if found:
        return max(found, key=lambda run: (run.step, run.generations[0].when_s))
    if sizes:
        raise IoError(f"no set of the ranks' stores is complete: {missing}", path=missing)
    return None


class RunSource:
    """The contents of a run's commit as whole parameters, read in parts.

    It corresponds to ``StoreSource`` of one store.
    """

    def __init__(self, run: RunStores, weights: Path | Mapping[str, Path] | None = None) -> None:
        """For ``weights`` see ``StoreSource``."""
        self.run, self.generation = run, run.generations[0]
        self._named = whole_name if run.ranks else str
        self._sources: list[StoreSource] = []
        try:
            for store, generation in zip(run.stores, run.generations, strict=True):
                self._sources.append(StoreSource(store, generation, weights))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the files."""
        for source in self._sources:
            source.close()

    def facts_of(self, rank: int) -> Mapping[str, Any]:
        """Return the facts in a rank's commit, or in the first rank's if there is no such rank."""
        return self._sources[rank if rank < len(self._sources) else 0].facts

    @cached_property
    def in_place(self) -> frozenset[str]:
        """The parameters of which all ranks read their parts from files beside the stores."""
        there, elsewhere = set[str](), set[str]()
        for source in self._sources:
            in_place = source.in_place
            there |= in_place
            elsewhere |= {each.name for each in source.parameters()} - in_place
        return frozenset(map(self._named, there - elsewhere))

    def files_in_place(self, rank: int, ranks: int) -> Path:
        """Return the path that was given as ``weights``, or where it is now.

        Each of the ``ranks`` that call this verifies a part of the weights in these files.

        Raises:
            CorruptionError: they are not what they were.
        """
        for source in self._sources:
            source.check_files(rank, ranks)
        if (root := next((each.root for each in self._sources if each.files), None)) is not None:
            return root
        paths = sorted({path for source in self._sources for path in source.files})
        return paths[0] if len(paths) == 1 else Path(os.path.commonpath(paths))

    @cached_property
    def members(self) -> list[list[str]]:
        """The parameters of every param group; rank 0 has rows of all of them."""
        return [[self._named(name) for name in group] for group in self.facts_of(0)["members"]]

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers of the first rank."""
        return {self._named(k): v for k, v in self.facts_of(0)["buffers"].items()}

    @cached_property
    def _weights(self) -> dict[str, Pieces]:
        """By parameter, its parts on each rank that has any."""
        found: dict[str, list[Placed]] = {}
        for source in self._sources:
            places = source.facts.get("regions", {})
            for tensor in source.parameters():
                placed = tensor, places.get(tensor.name)
                found.setdefault(self._named(tensor.name), []).append(placed)
        return {name: Pieces(parts) for name, parts in found.items()}

    @cached_property
    def _state(self) -> dict[str, dict[str, Any]]:
        """By parameter, its state: tensors as their parts on each rank, and its step count."""
        found: dict[str, dict[str, Any]] = {}
        for source in self._sources:
            tree, places = source.state_dict(), source.facts.get("regions", {})
            names = {
                number: name
                for group in tree["param_groups"]
                for number, name in zip(group["params"], group["param_names"], strict=True)
            }
            for number, state in tree["state"].items():
                mine = found.setdefault(self._named(names[number]), {})
                for key, value in state.items():
                    if isinstance(value, StreamedTensor):
                        placed = value, places.get(names[number])
                        mine.setdefault(key, []).append(placed)
                    else:
                        mine[key] = value
        return {
            name: {k: Pieces(v) if isinstance(v, list) else v for k, v in state.items()}
            for name, state in found.items()
        }

    def weights(self) -> list[StreamedTensor]:
        """Return every whole parameter once, then the buffers."""
        joined = [pieces.joined(name) for name, pieces in self._weights.items()]
        return joined + [in_memory(name, value) for name, value in self.buffers.items()]

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state of whole parameters, as ``StoreSource.state_dict``."""
        names = [name for group in self.members for name in group]
        number_of = {name: number for number, name in enumerate(names)}
        groups = [
            {**kept, "params": [number_of[n] for n in group], "param_names": list(group)}
            for kept, group in zip(self.facts_of(0)["groups"], self.members, strict=True)
        ]
        state = {
            number_of[name]: {
                key: value.joined(key) if isinstance(value, Pieces) else value
                for key, value in of.items()
            }
            for name, of in self._state.items()
        }
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    # -- regions --------------------------------------------------------------------------------

    def weight(self, name: str, region: TensorRegion) -> torch.Tensor:
        """Return a region of a parameter, as it is stored."""
        return self._weights[name].region(region)

    def state(self, name: str, key: str, region: TensorRegion) -> Any:
        """Return a region of one tensor of a parameter's state, in fp32, or its step."""
        value = self._state[name][key]
        return value.region(region) if isinstance(value, Pieces) else value

    def state_names(self, name: str) -> list[str]:
        """Return the names in a parameter's state; empty if it took no step."""
        return list(self._state.get(name, ()))

    # -- what it is of --------------------------------------------------------------------------

    @property
    def optimizer(self) -> str:
        """The name of the optimizer's rule."""
        return str(self.run.stores[0].layout.description["optimizer"])

    @cached_property
    def parameters(self) -> dict[str, tuple[tuple[int, ...], torch.dtype, int | None]]:
        """Shape, dtype and param group (``None``: not trained) of every whole parameter."""
        chunk_of = {
            self._named(p["name"]): chunk
            for store in self.run.stores for unit in store.layout.description["units"]
            for chunk in unit["chunks"] for p in chunk["params"]
        }  # fmt: skip
        return {
            name: (
                self._weights[name].shape,
                getattr(torch, chunk["dtype"]),
                chunk["group"],
            )
            for name, chunk in chunk_of.items()
        }


class Pieces:
    """A tensor that is stored in regions. Regions that several ranks have are equal."""

    def __init__(self, parts: Sequence[Placed]) -> None:
        """
        Args:
            parts: in the order of ranks; without places they are consecutive rows, in stores from
                before places were recorded.
        """
        each, place = parts[0]
        rows = sum(part.shape[0] for part, _ in parts) if each.shape else 0
        self.shape = (rows, *each.shape[1:])[: len(each.shape)] if place is None else place[1]
        self._dtype, self._parts, row = each.dtype, dict[TensorRegion, StreamedTensor](), 0
        for part, place in parts:
            after = (row, *(0 for _ in part.shape[1:]))[: len(part.shape)]
            first = after if place is None else place[0]
            self._parts.setdefault(TensorRegion(tuple(first), part.shape, tuple(self.shape)), part)
            row += part.shape[0] if part.shape else 0

    def region(self, wanted: TensorRegion) -> torch.Tensor:
        """Read a region.

        Raises:
            CorruptionError: a rank's part of it is missing.
        """
        found, numel = torch.empty(wanted.shape, dtype=self._dtype, device="cpu"), 0
        for region, part in self._parts.items():
            if (shared := region.shared_with(wanted)) is not None:
                mine = shared.inside(found, wanted)
                mine.copy_(shared.inside(whole(part), region))
                numel += mine.numel()
        self._require(numel, found.numel())
        return found

    def _require(self, numel: int, wanted: int) -> None:
        if numel != wanted:
            name = next(iter(self._parts.values())).name
            raise CorruptionError(
                f"parameter {name!r}: the ranks' stores hold {numel} of {wanted} elements"
            )

    def joined(self, name: str) -> StreamedTensor:
        """Return the whole tensor. Parts of it that are not whole rows are read at once."""
        self._require(sum(part.numel for part in self._parts.values()), math.prod(self.shape))
        bands: dict[TensorRegion, list[StreamedTensor]] = {}
        for region, part in sorted(self._parts.items(), key=lambda item: item[0]):
            bands.setdefault(region.rows, []).append(part)
        return one_after_the_other(
            name,
            [
                parts[0] if len(parts) == 1 else self._band(name, rows)
                for rows, parts in bands.items()
            ],
        )

    def _band(self, name: str, rows: TensorRegion) -> StreamedTensor:
        return lazy(name, self._dtype, rows.shape, lambda: self.region(rows))


def export_run(
    run: RunStores, out: Path, *, config: Path | str | None = None, optimizer: bool = True,
    shard_bytes: int = SHARD_BYTES, note: Note = lambda nbytes: None, named: Named = whole_stacks,
    weights: Path | Mapping[str, Path] | None = None,
) -> Exported:  # fmt: skip
    """Write whole parameters, assembled from the rows of all ranks, as ``export_store`` does.

    One process does it, with memory for a few parts; no rank needs to run.

    Args:
        weights: see ``export_store``.

    Raises:
        OffloadError: ``out`` exists, its disk has too little room, or training continued meanwhile.
        IoError, CorruptionError: a store cannot be read. Nothing was exported.
    """
    source = RunSource(run, weights)
    try:
        tree = source.state_dict() if optimizer else None
        text = None if config is None else config_text(config)
        files = write_export(
            out, [ModelFiles(named(source.weights()), text)], tree, run.step,
            shard_bytes=shard_bytes, note=note, check=lambda: _require_unmoved(run),
        )  # fmt: skip
    finally:
        source.close()
    return Exported(run.step, files)


def _require_unmoved(run: RunStores) -> None:
    for store, generation in zip(run.stores, run.generations, strict=True):
        now = find_store(store.directories)
        if store.last().number == generation.number:
            require_unmoved(store, generation, now)
