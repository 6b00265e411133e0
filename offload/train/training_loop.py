"""The training loop: ordinary PyTorch, the same for the offloaded and the in-memory run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import GradientError
from ..facts.stats import Stats
from ..optimizer import OffloadedOptimizer
from .data import Batches
from .job_state import Progress
from .ranks import ALONE, Ranks, without_sync


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: from 1.
        loss: mean over the step's micro-batches, nats per token.
        tokens: tokens that went in.
        wall_s: from the end of the step before to its own end.
        cpu_s: of processors, all threads of the process together, in that time.
        stats: the engine's figures; ``None`` for a run without it.
    """

    step: int
    loss: float
    tokens: int
    wall_s: float
    cpu_s: float
    stats: Stats | None = field(default=None, repr=False)

    @property
    def tokens_s(self) -> float:
        """Tokens per second."""
        return self.tokens / self.wall_s if self.wall_s else 0.0


@dataclass(frozen=True)
class LoopSettings:
    """Length and portions of training.

    Attributes:
        steps: optimizer steps.
        accumulate: micro-batches per step.
        device: the device for batches.
        warmup: steps over which the learning rate rises to its value.
        scaled: scale the loss (fp16), and skip steps whose gradients overflow.
        clip: largest global gradient norm, for optimizers that do not clip themselves.
        ranks: the ranks that train together.
    """

    steps: int
    accumulate: int
    device: torch.device
    warmup: int = 0
    scaled: bool = False
    clip: float | None = None
    ranks: Ranks = ALONE


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    settings: LoopSettings,
    on_step: Callable[[StepRecord], None],
    progress: Progress | None = None,
) -> list[StepRecord]:
    """Trains, tells ``on_step`` about every step, and returns the record of all steps.

    ``progress``: where to go on; it is kept up with.

    Raises:
        OffloadError: the loss is not finite; the weights are those before that step.
    """
    records: list[StepRecord] = []
    scaler = torch.amp.GradScaler(settings.device.type, enabled=settings.scaled)
    progress = Progress({}) if progress is None else progress
    if progress.scaler:
        scaler.load_state_dict(dict(progress.scaler))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda done: min(1.0, (done + 1) / (settings.warmup + 1)),
        last_epoch=progress.step - 1,
    )
    params = [p for group in optimizer.param_groups for p in group["params"]]
    before, cpu_before = time.perf_counter(), time.process_time()
    for step in range(progress.step + 1, settings.steps + 1):
        loss, tokens = _gradients(model, optimizer, batches, settings, scaler)
        if not torch.isfinite(loss):
            raise GradientError(
                f"the loss is {loss.item()} at step {step}; lower the learning rate (lr), clip "
                "with max_grad_norm, or train in bf16 or fp32"
            )
        if settings.clip is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, settings.clip)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        progress.step, progress.position = step, batches.position
        progress.scaler = scaler.state_dict()
        optimizer.zero_grad()
        value = float(loss)
        now, cpu_now = time.perf_counter(), time.process_time()
        stats: Any = getattr(optimizer, "stats", None)
        records.append(StepRecord(step, value, tokens, now - before, cpu_now - cpu_before, stats))
        before, cpu_before = now, cpu_now
        on_step(records[-1])
    return records


def _gradients(
    model: nn.Module,
    optimizer: Any,
    batches: Batches,
    settings: LoopSettings,
    scaler: torch.amp.GradScaler,
) -> tuple[torch.Tensor, int]:
    """Runs all micro-batches forward and backward; mean loss (detached) and number of tokens."""
    total = torch.zeros((), device=settings.device)
    tokens = 0
    for number in range(1, settings.accumulate + 1):
        batch = next(batches).to(settings.device)
        tokens += batch.numel() * settings.ranks.size

        def run(batch: torch.Tensor = batch, last: bool = number == settings.accumulate) -> Any:
            with without_sync(model, last=last):
                loss = model(input_ids=batch, labels=batch).loss / settings.accumulate
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        alone = not settings.ranks.several and isinstance(optimizer, OffloadedOptimizer)
        total += optimizer.with_room(run) if alone else run()
    return settings.ranks.mean(total), tokens
