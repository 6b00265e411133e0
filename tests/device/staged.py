"""Collectives between test devices: gloo's, over copies in host memory.

They run on the stream that calls them, as NCCL's kernels do, so that the device sees what they read
and write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, _create_work_from_future
from torch.futures import Future

NAME = "staged"


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


class Staged(dist.ProcessGroup):
    """Copies tensors of a device to host memory, and what it receives back."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = ProcessGroupGloo(store, rank, size, timeout)

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:
        return NAME

    def _with(
        self, outputs: Sequence[torch.Tensor], work: Any, host: Sequence[torch.Tensor]
    ) -> Any:
        work.wait()
        for there, here in zip(outputs, host, strict=True):
            there.copy_(here)
        return _done(list(outputs))

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        host = [t.cpu() for t in tensors]
        return self._with(tensors, self._gloo.allreduce(host, opts), host)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        host = [t.cpu() for t in tensors]
        return self._with(tensors, self._gloo.broadcast(host, opts), host)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        host = [[torch.empty_like(t, device="cpu") for t in each] for each in outputs]
        work = self._gloo.allgather(host, [t.cpu() for t in inputs])
        flat = [t for each in outputs for t in each]
        return self._with(flat, work, [t for each in host for t in each])

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any
    ) -> Any:
        host = [torch.empty_like(t, device="cpu") for t in outputs]
        work = self._gloo.scatter(host, [[t.cpu() for t in each] for each in inputs], opts)
        return self._with(outputs, work, host)

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        return self.allgather([list(output.view(self.size(), -1))], [given.reshape(-1)])

    def _reduce_scatter_base(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> Any:
        whole = given.reshape(-1).cpu()
        reduce = dist.AllreduceOptions()
        average = opts is not None and opts.reduceOp == dist.ReduceOp.AVG
        reduce.reduceOp = dist.ReduceOp.SUM if average or opts is None else opts.reduceOp
        self._gloo.allreduce([whole], reduce).wait()
        mine = whole.view(self.size(), -1)[self.rank()]
        output.copy_((mine / self.size() if average else mine).view(output.shape))
        return _done([output])

    def barrier(self, opts: Any = None) -> Any:
        self._gloo.barrier().wait()
        return _done([])

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        for pair in zip(outputs, inputs, strict=True):
            self._allgather_base(*pair)
        return _done(outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        for pair in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(*pair, opts)
        return _done(outputs)

    # The names of torch 2.13, and those before it.
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    allreduce_coalesced = allreduce


if not hasattr(dist.Backend, NAME.upper()):
    dist.Backend.register_backend(NAME, Staged, devices=["testdev", "cpu"])
