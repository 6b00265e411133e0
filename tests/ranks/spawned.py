"""Functions that run on several ranks at once, each a process of its own, over loopback."""

from __future__ import annotations

import io
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import overspill
from tests.forked import CONTEXT

PATIENCE_S = 60
ANSWER_S = 240  # for all that ranks have to do
RATES = overspill.Rates(
    disk_read_bytes_s=1e9, disk_write_bytes_s=1e9, update_params_s=1e8, h2d_bytes_s=1e10,
    d2h_bytes_s=1e10, dram_bytes_s=1e10,
)  # fmt: skip
VOCABULARY, WIDTH = 50, 32


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Its vocabulary does not divide by most numbers of ranks; ``last`` has few rows."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.last = nn.Linear(VOCABULARY, 3)
        self.shift = nn.Parameter(torch.zeros(WIDTH))  # the model's own
        self.register_buffer("runs", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.runs += 1
        x = self.embed(tokens) + self.shift
        for layer in self.layers:
            x = layer(x)
        x = self.head(x)
        return x * (1 + self.last(x).mean())


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def sharded(dtype: torch.dtype = torch.float32) -> Net:
    model = net(dtype)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def loss_of(model: nn.Module, number: int, rank: int) -> torch.Tensor:
    """Of the batch of that number; every rank has another."""
    torch_rng = torch.Generator().manual_seed(1000 * number + rank)
    tokens = torch.randint(0, VOCABULARY, (4, 9), generator=torch_rng)
    logits = model(tokens[:, :-1]).flatten(0, 1).float()
    return functional.cross_entropy(logits, tokens[:, 1:].flatten())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int) -> float:
    """One step with the batch of that number; its loss."""
    loss = loss_of(model, number, rank)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """All weights; every rank calls it."""
    return {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()}  # type: ignore[attr-defined]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


class Started:
    """``work(rank, size, *args)`` on several ranks, under way."""

    def __init__(
        self, size: int, work: Callable[..., Any], *args: Any, backend: str = "gloo"
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._ranks: list[Any] = []
        for rank in range(size):
            here, there = CONTEXT.Pipe()
            met = f"{self._folder.name}/met"
            each = CONTEXT.Process(target=_run, args=(there, rank, size, met, work, args, backend))
            each.start()
            there.close()
            self._pipes.append(here)
            self._ranks.append(each)

    def wait_for(self, folder: Path) -> None:
        """Returns when every rank has a store below ``folder`` that it has taken."""
        until = time.monotonic() + PATIENCE_S
        while not all(each.is_alive() and self._has_begun(each.pid) for each in self._ranks):
            assert time.monotonic() < until and all(each.is_alive() for each in self._ranks)
            time.sleep(0.05)

    @staticmethod
    def _has_begun(pid: int) -> bool:
        try:
            links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        except FileNotFoundError:  # one was closed meanwhile
            return False
        return any(os.path.basename(link) == "overspill.store" for link in links)

    def kill(self, rank: int) -> None:
        self._ranks[rank].kill()

    def answers(self) -> list[tuple[bool, Any]]:
        """Of each rank: whether it went well, and what it gave."""
        found: list[tuple[bool, Any]] = []
        for pipe, each in zip(self._pipes, self._ranks, strict=True):
            try:
                found.append(pipe.recv() if pipe.poll(ANSWER_S) else (False, f"{each.name} hung"))
            except EOFError:
                found.append((False, f"{each.name} died"))
        return found

    def end(self) -> None:
        """Returns when no rank is left.

        Raises:
            AssertionError: one did not end by itself.
        """
        hung = []
        for each in self._ranks:
            each.join(PATIENCE_S)
            if each.is_alive():
                hung.append(each.name)
                each.kill()
                each.join()
        self._folder.cleanup()
        assert not hung, f"{hung} did not end"


def spawn(size: int, work: Callable[..., Any], *args: Any, backend: str = "gloo") -> list[Any]:
    """What ``work(rank, size, *args)`` gives on each rank; ``backend``: of torch.distributed.

    Raises:
        AssertionError: it raised on one of them, or took too long.
    """
    ranks = Started(size, work, *args, backend=backend)
    try:
        answers = ranks.answers()
    finally:
        ranks.end()
    failed = [value for ok, value in answers if not ok]
    assert not failed, "\n".join(sorted(failed, key=lambda text: "peer" in text))
    return [torch.load(io.BytesIO(value), weights_only=False) for _, value in answers]


def _run(
    pipe: Connection, rank: int, size: int, met: str, work: Callable[..., Any], args: Any,
    backend: str,
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            backend, init_method=f"file://{met}", rank=rank, world_size=size,
            timeout=timedelta(seconds=PATIENCE_S),
        )  # fmt: skip
        target = io.BytesIO()  # tensors as they are, not shared with a process that ends
        torch.save(work(rank, size, *args), target)
        pipe.send((True, target.getvalue()))
    except BaseException:
        pipe.send((False, f"rank {rank}: {traceback.format_exc()}"))
        raise SystemExit(1) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def folder_of(path: Path | str) -> Path:
    Path(path).mkdir(exist_ok=True)
    return Path(path)
