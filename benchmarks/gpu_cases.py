"""What ``make gpu`` trains, the most telling first, and what each case needs of the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .arms import GIB, Plan, Worker, parameters, peer
from .model import Shape

# Widths, layers and vocabularies of TinyLlama 1.1 B, OpenLLaMA 3 B and Llama 2 7 B.
SHAPES: Mapping[str, Shape] = {
    "1 B": Shape(22, 2048, 32, 32000, 8, 2048, kv_heads=4, inner=5632, recompute=True),
    "3 B": Shape(26, 3200, 32, 32000, 8, 2048, kv_heads=32, inner=8640, recompute=True),
    "7 B": Shape(32, 4096, 32, 32000, 8, 2048, kv_heads=32, inner=11008, recompute=True),
}
TORCH, HOST, DISK, SHARDED = "torch", "host", "NVMe", "a rank of FSDP2"


@dataclass(frozen=True)
class Case:
    """An arm on a model.

    ``engine``: ``TORCH``; ``HOST`` or ``DISK`` for overspill with its state there; ``SHARDED`` for
    it over the one rank of FSDP2, the state in host memory; else a peer.
    ``update``: overspill's mode.  ``batches``: sequences a step, one after the other.
    ``activations``: of overspill; those that are kept lie beside its budget.
    ``limit_s``: it is ended after that.  ``compiled``: each block by ``torch.compile``.
    """

    model: str
    engine: str
    update: str = ""
    batches: tuple[int, ...] = (8,)
    limit_s: float = 90
    activations: str = "keep"
    compiled: bool = False

    @property
    def name(self) -> str:
        beside = ", compiled" if self.compiled else ""
        if self.engine == TORCH:
            return f"torch, all on the device{beside}"
        beside += "" if self.activations == "keep" else f", activations {self.activations}"
        return f"overspill, {self.engine}, {self.update}{beside}" if self.update else self.engine


BOTH = (8, 32)  # 16 K and 64 K tokens a step
CASES: Sequence[Case] = (
    Case("1 B", TORCH, batches=BOTH),
    Case("1 B", HOST, "next_forward", BOTH),
    Case("1 B", HOST, "backward", BOTH),
    Case("7 B", TORCH, batches=BOTH),
    Case("7 B", HOST, "next_forward", BOTH, limit_s=180),
    Case("7 B", HOST, "backward", BOTH, limit_s=180),
    Case("1 B", "roundpipe", limit_s=120),  # compiles its update first, as DeepSpeed does
    Case("1 B", "deepspeed-zero3", limit_s=150),
    Case("1 B", "deepspeed-zero2"),
    Case("1 B", "fsdp2"),
    Case("1 B", TORCH, compiled=True, limit_s=120),
    Case("1 B", HOST, "next_forward", compiled=True, limit_s=120),
    Case("1 B", HOST, "next_forward", BOTH, activations="auto"),
    Case("1 B", DISK, "next_forward"),
    Case("1 B", SHARDED, "next_forward"),  # the only one over NCCL
    Case("1 B", "deepspeed-nvme", limit_s=120),
    Case("1 B", "megatrain", limit_s=150),
    Case("1 B", "transformers-offload", batches=BOTH),  # of activations alone
    Case("1 B", "torchao"),
    Case("3 B", TORCH),
    Case("3 B", HOST, "next_forward", limit_s=120),
    Case("3 B", "roundpipe", limit_s=150),
    Case("3 B", DISK, "backward", limit_s=120),
    Case("1 B", DISK, "backward"),
    Case("1 B", HOST, "step"),
    Case("1 B", DISK, "step"),
)


@dataclass(frozen=True)
class Scale:
    """The sizes of a run: models, and the room that budgets leave beside bytes per parameter."""

    device: str
    shapes: Mapping[str, Shape]
    device_room: int
    host_room: int

    def shape(self, case: Case, batch: int | None = None) -> Shape:
        """The model of a case, with so many sequences a step."""
        return replace(self.shapes[case.model], batch=batch or case.batches[0])

    def options(self, case: Case, store: Path) -> dict[str, Any]:
        """Options of ``wrap`` for a case of overspill.

        State in host memory: weights and gradients find room on the device.  State on disk: half
        of the weights there, all of them in host memory.  Not durable: of 3 B, two copies of the
        state would not fit the disk.
        """
        count = parameters(self.shapes[case.model])
        given = {"update": case.update, "activations": case.activations}
        if case.engine == SHARDED:
            return {"update": case.update}  # FSDP2 has the weights, and autograd what it saves
        if case.engine == HOST:
            return {**given, "device_memory": 5 * count + self.device_room}
        return {
            **given,
            "device_memory": count + self.device_room,
            "host_memory": 2 * count + self.host_room,
            "nvme": str(store),
            "durable": False,
        }

    def worker(self, case: Case, plan: Plan, store: Path) -> Worker:
        """The case's arm."""
        if case.engine == TORCH and not case.compiled:
            return Worker(case.name, plan, self.device, None)
        if case.engine == TORCH:
            return Worker(case.name, plan, self.device, {}, "torch-compiled")
        if case.update:
            engine = "overspill-fsdp2" if case.engine == SHARDED else "overspill"
            engine += "-compiled" if case.compiled else ""
            return Worker(case.name, plan, self.device, self.options(case, store), engine)
        return peer(case.engine, plan, store, "cpu" if self.device == "sim" else self.device)


CUDA = Scale("cuda", SHAPES, device_room=GIB, host_room=4 * GIB)
# The same cases at sizes that say nothing.
SIM = Scale(
    "sim",
    {
        name: Shape(layers, 64, 4, 256, 8, 16, kv_heads=2, inner=160, recompute=True)
        for name, layers in (("1 B", 3), ("3 B", 4), ("7 B", 5))
    },
    device_room=4 << 20,
    host_room=16 << 20,
)


@dataclass(frozen=True)
class Needs:
    """Bytes that a case takes of the machine, from above."""

    device: int
    host: int
    disk: int


# Bytes a parameter in host memory and on disk.  DeepSpeed holds an fp32 gradient and a copy in bf16
# beside its 12 bytes of state, and swaps the gradient too; ours is the split master with its
# moments, and gradients in bf16; torchao has weights, gradients and two moments in bf16; MegaTrain
# two copies of bf16 weights, bf16 gradients and fp32 moments; RoundPipe fp32 weights, gradients and
# moments, and bf16 weights and gradients; FSDP2 what torchao has.
HOST_STATE = {
    TORCH: 0, HOST: 14, DISK: 0, SHARDED: 14, "deepspeed-zero3": 22, "deepspeed-zero2": 22,
    "deepspeed-nvme": 8, "torchao": 8, "megatrain": 14, "transformers-offload": 0,
    "roundpipe": 20, "fsdp2": 8,
}  # fmt: skip
ALL_THERE = (TORCH, "transformers-offload")  # weights, gradients and moments in bf16
DISK_STATE = {DISK: 12, "deepspeed-nvme": 16}
PROCESS_BYTES = 6 * GIB  # Python, torch, CUDA


def activation_bytes(shape: Shape) -> int:
    """Of a step with recompute: every block's input, and the larger of one block and the loss.

    The loss holds 16 bytes a logit: them in fp32, their log-softmax, and the gradients of both in
    turn.  A block: in bf16 some 16 rows of its width and 5 of its inner width for each token.
    """
    tokens = shape.tokens_per_step
    block = 2 * tokens * (16 * shape.width + 5 * shape.inner)
    return 2 * tokens * shape.width * shape.layers + max(block, 16 * tokens * shape.vocabulary)


def needs(case: Case, scale: Scale = CUDA) -> Needs:
    """What a case takes."""
    count = parameters(scale.shapes[case.model])
    given = scale.options(case, Path()) if case.update else {}
    weights = 8 if case.engine in ALL_THERE else 5
    on_device = given.get("device_memory", weights * count)
    in_host = given.get("host_memory", HOST_STATE[case.engine] * count)
    return Needs(
        on_device + activation_bytes(scale.shape(case, max(case.batches))),
        in_host + PROCESS_BYTES,
        DISK_STATE.get(case.engine, 0) * count,
    )
