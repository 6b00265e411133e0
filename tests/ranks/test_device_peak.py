"""Memory that FSDP2 takes beside the engine's: at most what plans leave to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import overspill
from overspill.ranks.shards import gathered_bytes

from .spawned import RATES, adamw, spawn

LAYERS, WIDTH, ROWS = 8, 256, 2


class Storages(TorchDispatchMode):
    """The most bytes at a time in storages that operations have made, but for an engine's."""

    def __init__(self, arenas: Any) -> None:
        super().__init__()
        self._arenas, self._live, self.peak_bytes = arenas, dict[int, StorageWeakRef](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for t in tree_leaves(found):
            if type(t) in (torch.Tensor, nn.Parameter) and not t.is_meta:
                storage = t.untyped_storage()
                if not self._arenas.contain(storage.data_ptr()):
                    self._live.setdefault(storage._cdata, StorageWeakRef(storage))
        self._count()
        return found

    def _count(self) -> None:
        total = 0
        for key, reference in list(self._live.items()):
            storage: Any = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)  # type: ignore[attr-defined]
            if storage is None:
                del self._live[key]
            else:
                total += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, total)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
          for _ in range(LAYERS))
    )  # fmt: skip


def peaks(rank: int, size: int) -> None:
    for options in ({"update": "next_forward"}, {"update": "backward"}, {"activations": "host"}):
        model = layers()
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        each = sum(p.numel() * 4 for p in model[0].parameters())
        budget = 3 * each // size  # of the shards of eight layers
        with overspill.wrap(
            model, adamw(model), device="sim", rates=RATES, host_memory="1GiB",
            device_memory=budget, **options,
        ) as optimizer:  # fmt: skip
            for _ in range(2):
                arenas = optimizer._engine.runtime.executor.arenas
                with Storages(arenas) as storages:
                    model(torch.ones(ROWS, WIDTH)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert optimizer.memory["device"].peak_bytes <= budget
            shards = optimizer._holder.shards  # type: ignore[attr-defined]
            most = gathered_bytes(shards)
            assert most == 5 * each, "three layers' weights, and two layers' gradients"
            kept = LAYERS * ROWS * 11 * WIDTH * 4  # what autograd keeps, at most
            assert 3 * each <= storages.peak_bytes <= most + kept, options


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_what_fsdp2_gathers_is_left_to_it(size: int) -> None:
    spawn(size, peaks)
