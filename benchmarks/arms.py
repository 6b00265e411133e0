"""The arms that train: overspill, plain torch and the peers, each in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .model import Shape, build
from .process import LIMIT_S, Process
from .runner import Sample

GIB = 1 << 30
# What a peer is called here: its engine, its environment, what is asked of the engine.
PEERS: Mapping[str, tuple[str, str | None, Mapping[str, Any]]] = {
    "deepspeed-nvme": ("deepspeed", "deepspeed", {"kind": "zero3-nvme"}),
    "deepspeed-zero3": ("deepspeed", "deepspeed", {"kind": "zero3-cpu"}),
    "deepspeed-zero2": ("deepspeed", "deepspeed", {"kind": "zero2-cpu"}),
    "superoffload": ("deepspeed", "deepspeed", {"kind": "superoffload"}),
    "zenflow": ("deepspeed", "deepspeed", {"kind": "zenflow"}),
    "torchao": ("torchao", "torchao", {}),
    "fsdp2": ("fsdp2", None, {}),
    "bitsandbytes": ("bitsandbytes", "bitsandbytes", {}),
    "megatrain": ("megatrain", "deepspeed", {}),
    "roundpipe": ("roundpipe", "roundpipe", {}),
    "transformers-offload": ("transformers", None, {"offload": True}),
}


@dataclass(frozen=True)
class Plan:
    """How much is run: ``rounds`` samples of ``steps`` steps each, after ``warmup`` steps.

    ``lead_in``: untimed steps at the start of every sample.  ``modes``: those of overspill's
    update, with the state on NVMe.  ``budget_s``: rounds that would end later are left out.
    ``limit_s``: an arm that takes longer for its start or for one sample is ended.
    """

    shape: Shape
    precision: str
    rounds: int
    steps: int
    warmup: int
    lead_in: int = 1
    host_memory: int = 1 << 30
    modes: tuple[str, ...] = ("step", "backward", "next_forward")
    budget_s: float = 360
    limit_s: float = LIMIT_S


class Worker:
    """An arm in a process of its own.

    ``options``: those of ``wrap``, or of the engine; ``peer``: in whose environment it runs.
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        device: str,
        options: Mapping[str, Any] | None,
        engine: str | None = None,
        peer: str | None = None,
        precision: str | None = None,
        place: Mapping[str, int] | None = None,
    ) -> None:
        """``place``: ``rank``, ``ranks`` and ``port``, where it is one of several processes."""
        self.name, self._plan, self._peer = name, plan, peer
        self._spec = {
            "shape": asdict(plan.shape),
            "precision": precision or plan.precision,
            "device": device,
            "engine": engine or ("torch" if options is None else "overspill"),
            "options": dict(options or {}),
            **(place or {}),
        }
        self._process: Process | None = None
        self._facts: Mapping[str, Any] | None = None

    def _ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        if self._process is None:
            raise RuntimeError(f"{self.name!r} is not started")
        return self._process.ask(order, self._plan.limit_s)

    def start(self) -> Mapping[str, Any]:
        """Builds, wraps, and trains the steps of the warm-up.  What is started is left as it is.

        Raises:
            RuntimeError: it is not installed, failed, or took too long.
        """
        if self._facts is not None:
            return self._facts
        self._process = Process("worker", peer=self._peer)
        facts = self._ask(self._spec)
        first = self._ask({"steps": 1})
        asked = {name: self._spec[name] for name in ("device", "engine", "options", "precision")}
        seconds = {"first_step_s": first["seconds"]}
        if self._plan.warmup > 1:
            warm = self._ask({"steps": self._plan.warmup - 1})
            seconds["warm_step_s"] = warm["seconds"]
        self._facts = {**facts, **asked, **seconds}
        return self._facts

    def sample(self) -> Sample:
        return self.sample_of(self._plan.shape.batch)

    def sample_of(self, batch: int) -> Sample:
        """A sample with another number of sequences a step."""
        seen = self._ask({"steps": self._plan.steps, "lead_in": self._plan.lead_in, "batch": batch})
        return Sample(seen.pop("seconds"), seen)

    def trace(self, path: Path) -> None:
        """Writes the lanes of the last steps: JSON, or a picture.  Of overspill only."""
        self._ask({"trace": str(path)})

    def about(self) -> Mapping[str, Any]:
        """``plan``, in words, and the ``rates`` that it counts on.  Of overspill only."""
        return self._ask({"about": True})

    def bound(self, compute_s: float) -> Mapping[str, Any]:
        """``plan_bound_s``: that of the plan, with so much compute.  Of overspill only."""
        return self._ask({"compute_s": compute_s})

    def kill(self, why: str) -> None:
        """Ends its process at once; whoever waits for its answer gets an error."""
        if self._process is not None:
            self._process.kill(why)

    def close(self) -> None:
        """Ends its process; it may be started again."""
        process, self._process, self._facts = self._process, None, None
        if process is not None:
            process.close()


def parameters(shape: Shape) -> int:
    """Parameters of the model, which is not built for it."""
    return sum(p.numel() for p in build(shape).parameters())


def peer(name: str, plan: Plan, store: Path, device: str) -> Worker:
    """The arm of a peer.

    Raises:
        ValueError: there is no such peer.
    """
    if name == "torch-fp32":
        return Worker(name, plan, device, None, precision="fp32")
    if name not in PEERS:
        raise ValueError(f"no peer {name!r}; there are torch-fp32, {', '.join(PEERS)}, all, none")
    engine, environment, options = PEERS[name]
    shape = plan.shape
    options = {
        **options, "batch": shape.batch, "tokens": shape.tokens, "nvme": str(store / name),
    }  # fmt: skip
    return Worker(name, plan, device, options, engine, environment)
