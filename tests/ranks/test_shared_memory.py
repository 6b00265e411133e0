"""Frozen weights that ranks of one machine have in common: in host memory, and read, once."""

from __future__ import annotations

import gc
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import overspill
from overspill.io_engine.file_ranges import FileRanges, RangeReader
from overspill.movement.pools import HeldMemory
from overspill.planning import budgets
from overspill.ranks.fsdp_private import sharded_modules
from overspill.ranks.shards import Shards, gathered_bytes
from overspill.ranks.world import World
from overspill.state.contents import Contents
from tests.unit.test_shared_memory import mapped_bytes

from .spawned import RATES, VOCABULARY, Block, folder_of, spawn, step, whole

SIZES = {"replicate": 2, "shard": 2}
STEPS = 3
LATE_S = 0.2
WIDTH = 64
DEVICE, HOST = "100KiB", "64MiB"  # a part of the frozen shards stays on the device


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def model_of(*, empty: bool = False) -> Net:
    """Only the norms are trained."""
    with overspill.empty_init() if empty else nullcontext():
        model = net()
    for name, p in model.named_parameters():
        p.requires_grad = "norm" in name
    mesh = init_device_mesh("cpu", tuple(SIZES.values()), mesh_dim_names=tuple(SIZES))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def wrapped(model: nn.Module, **options: Any) -> Any:
    given = {"device": "sim", "device_memory": DEVICE, "host_memory": HOST, "rates": RATES}
    if "nvme" in options:
        options["nvme"] = folder_of(options["nvme"])
    return overspill.wrap(model, adamw(model), **{**given, **options})


def train(model: nn.Module, optimizer: Any, rank: int, first: int = 0) -> list[float]:
    return [step(model, optimizer, number, rank) for number in range(first, first + STEPS)]


def layout_of(optimizer: Any) -> Any:
    return optimizer.plan.detail.layout


@contextmanager
def counted() -> Iterator[Counter[int]]:
    """How often ranges are read from files, by their number."""
    found, read = Counter[int](), RangeReader.read

    def counting(self: RangeReader, ranges: FileRanges, *args: Any, **options: Any) -> Any:
        found[ranges.number] += 1
        return read(self, ranges, *args, **options)

    with mock.patch.object(RangeReader, "read", counting):
        yield found


@contextmanager
def packed_late(late: bool) -> Iterator[None]:
    """If ``late``, a rank overwrites shared bytes when others have finished loading."""
    pack = Contents._pack

    def waiting(self: Contents, *args: Any) -> None:
        time.sleep(LATE_S)
        pack(self, *args)

    with mock.patch.object(Contents, "_pack", waiting) if late else nullcontext():
        yield


def kept_bytes() -> int:
    """Shared memory that is still mapped after an engine has ended."""
    gc.collect()
    HeldMemory.sweep()  # as the next engine does
    return mapped_bytes("Rss")


def gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def cases(folder: Path) -> dict[str, dict[str, Any]]:
    base = folder / "base"
    return {
        "int8 of files": {"weights": base, "frozen": "int8"},
        "int8 stored": {"frozen": "int8", "nvme": folder / "int8"},
        "files beside a store": {"weights": base, "nvme": folder / "files"},
    }  # fmt: skip


def held_once(rank: int, folder: Path) -> dict[str, list[float]]:
    """The bits are those of ranks with copies of their own; return the losses of later steps."""
    later: dict[str, list[float]] = {}
    plain = model_of()
    expected = train(plain, adamw(plain), rank)
    for name, case in cases(folder).items():
        alone = model_of(empty="weights" in case)
        with mock.patch.object(World, "shared_memory", return_value=None):
            own = {**case, "nvme": folder_of(folder / f"own {name}")} if "nvme" in case else case
            torch.manual_seed(1)
            with wrapped(alone, **own) as optimizer:
                assert not layout_of(optimizer).shared_places
                losses, weights = train(alone, optimizer, rank), whole(alone)
                copies = optimizer.memory["host"].held_bytes
                later[name] = train(alone, optimizer, rank, STEPS)
        assert losses == pytest.approx(expected, rel=1e-6 if "int8" not in name else 0.05), name

        model = model_of(empty="weights" in case)
        torch.manual_seed(1)
        with counted() as reads, packed_late(rank >= 2), wrapped(model, **case) as optimizer:
            dist.barrier()
            layout = layout_of(optimizer)
            shared = layout.regions.host_shared
            assert len(layout.shared_places) >= 2 and shared, name
            assert mapped_bytes("Rss") == shared and mapped_bytes("Pss") == shared // 2, name
            if "int8" in name:  # else the reads through a cache need less memory, too
                assert optimizer.memory["host"].held_bytes <= copies - shared // 2 + 65536, name
            in_place = {u: reads[u] for u in layout.shared_places if u in layout.in_place}
            assert bool(in_place) == ("weights" in case), name
            assert set(in_place.values()) <= {int(rank < SIZES["shard"])}, (name, in_place)
            reads.clear()
            assert train(model, optimizer, rank) == losses, name
            assert not any(reads[unit] for unit in layout.shared_places), name
            assert all(torch.equal(value, weights[n]) for n, value in whole(model).items()), name
            if name == "files beside a store":
                digests = optimizer._engine.runtime.store.digests()
                assert digests.keys() >= in_place.keys()
                assert digests == gathered(digests)[(rank + 2) % dist.get_world_size()]
            dist.barrier()
        del model, optimizer
        assert not kept_bytes(), name
    return later


def goes_on(rank: int, folder: Path, later: dict[str, list[float]]) -> None:
    """A rank that has not read the files itself knows them by the checksums of the one that has."""
    if rank == 0:
        shutil.copytree(folder / "base", folder / "moved")  # with other times of change
        os.utime(folder / "moved" / "model.safetensors", (1, 1))
    dist.barrier()
    runs = ("int8 stored", "int8", {}), ("files beside a store", "files", {"weights": "moved"})
    for name, run, given in runs:
        model = model_of(empty=True)
        optimizer, _ = overspill.resume(
            model, folder / run, adamw(model), device="sim", device_memory=DEVICE,
            host_memory=HOST, rates=RATES, **{k: folder / v for k, v in given.items()},
        )  # fmt: skip
        with optimizer:
            assert layout_of(optimizer).shared_places
            assert train(model, optimizer, rank, STEPS) == later[name], name
            optimizer.rollback()
            assert math.isfinite(sum(train(model, optimizer, rank)))


def other_plans(rank: int, folder: Path) -> None:
    """Ranks whose devices have other memory free plan for the smallest, and share as much."""
    for sizes in (110, 110, 102, 110), (210, 210, 120, 120), (120, 1000, 130, 110):
        model = model_of(empty=True)
        free = gathered_bytes(Shards(model, sharded_modules(model), ranks=2)) + (sizes[rank] << 10)
        with (
            mock.patch.object(budgets, "SIM_DEVICE_BYTES", free),
            wrapped(model, weights=folder / "base", device_memory="100%") as optimizer,
        ):
            places = gathered(layout_of(optimizer).shared_places)
            assert places[rank] == places[(rank + 2) % 4] and places[rank], sizes
            for name, value in net().named_parameters():
                assert torch.equal(whole(model)[name], value), (sizes, name)
            losses = train(model, optimizer, rank)
            assert all(map(math.isfinite, losses))
    if rank == 0:
        (folder / "halves").mkdir()
        save_file(net().bfloat16().state_dict(), folder / "halves" / "model.safetensors")
    dist.barrier()
    model = model_of(empty=True)  # two ranks cannot read in place
    with wrapped(model, weights=folder / ("base" if rank < 2 else "halves")) as optimizer:
        assert not layout_of(optimizer).shared_places
        for name, value in net().named_parameters():
            torch.testing.assert_close(whole(model)[name], value, rtol=0.01, atol=0.01)


def read_bytes() -> int:
    """What this process has read from disks so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def read_from_disk_once(file: Path, optimizer: Any, steps: Callable[[], object]) -> None:
    """All ranks together read less than twice a file from disk, and more of it from its cache."""
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    dist.barrier()
    before, logical = read_bytes(), optimizer.stats.read.bytes
    steps()
    moved = gathered((read_bytes() - before, optimizer.stats.read.bytes - logical))
    from_disk, asked = (sum(each) for each in zip(*moved, strict=True))
    assert from_disk <= 1.5 * file.stat().st_size <= asked, (from_disk, asked)


def streamed(rank: int, folder: Path) -> None:
    """What host memory has no room for is read by each rank in each pass, but from disk once."""
    model = model_of(empty=True)
    with wrapped(model, weights=folder / "base", host_memory="32.5MiB") as optimizer:
        assert len(layout_of(optimizer).in_place) >= 3 and not layout_of(optimizer).shared_places
        file = folder / "base" / "model.safetensors"
        read_from_disk_once(file, optimizer, lambda: train(model, optimizer, rank))


def fails_together(rank: int) -> None:
    """A rank that cannot load its weights leaves no memory behind, on any rank."""
    model = model_of()
    fails = mock.patch.object(Contents, "load_page", side_effect=KeyError("drawn"))
    errors = KeyError, overspill.OffloadError
    with fails if rank == 1 else nullcontext(), pytest.raises(errors) as kept:
        wrapped(model, frozen="int8")
    files = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    assert not kept_bytes() and not any("memfd:overspill" in each for each in files), kept
    with wrapped(model, frozen="int8") as optimizer:
        assert layout_of(optimizer).shared_places
        train(model, optimizer, rank)


def all_of_it(rank: int, size: int, folder: Path) -> None:
    goes_on(rank, folder, held_once(rank, folder))
    streamed(rank, folder)
    other_plans(rank, folder)
    fails_together(rank)


def test_replicas_on_one_machine(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    save_file(net().state_dict(), tmp_path / "base" / "model.safetensors")
    spawn(4, all_of_it, tmp_path)
