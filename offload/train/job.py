"""One run of the main job: model and data found, wrapped, trained, compared, written out."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from torch import nn

from ..api import resume, wrap
from ..facts.stats import MemoryStats
from ..io_engine.atomic_files import make_folder
from ..logits.heads import defer_logits
from ..observe import pictures
from ..observe.page import RUN, write_page
from ..optimizer import OffloadedOptimizer
from ..planning.plan import Plan
from ..state.weight_files import SINGLE
from .compare import Comparison, in_memory_adamw, load_in_memory, weight_difference
from .cpu_kernels import choose_cpu_kernels
from .data import Batches, Corpus, load_corpus, load_tokenizer
from .gains import after_a_run
from .job_state import Progress, fingerprint
from .outputs import (
    draw_pictures,
    require_folder,
    require_room,
    stores_of,
    write_model,
    write_traces,
)
from .ranks import ALONE, Ranks, joined, replicated, sharded
from .report import Report, link_bytes
from .save import read_along, save_masters
from .shapes import DEFAULT_SHAPE, ModelSource, find_model, plan_model
from .training_loop import LoopSettings, StepRecord, train

LR_FROM_RANDOM, LR_FINE_TUNE = 3e-4, 2e-5


@dataclass(frozen=True)
class Job:
    """What to train, on what, how long, and under which budgets.

    Attributes:
        model: a named shape or a Hugging Face folder.
        data: text, jsonl or a folder; ``None`` for the standard library's sources.
        steps, batch, seq: optimizer steps; windows per micro-batch; tokens per window.
        accumulate: micro-batches per step.
        lr: learning rate of AdamW; ``None``: 3e-4 from random weights, 2e-5 from a folder.
        warmup: steps over which it rises from near zero; ``None``: a tenth of all steps.
        seed: of weights and of the order of data.
        out: folder for pictures, trace, weights and ``run.json``; made if it is not there.
        compare: also train the same steps in memory.
        recompute: compute activations again in backward instead of keeping them.
        resume: the directory of a store that this job was interrupted in, to go on there up to
            ``steps``; with a striped store all directories.
        offload: options of ``wrap``, without ``weights`` and ``accumulate``.
        spread: where torchrun has started several ranks: ``"fsdp"`` or ``"ddp"``.  ``batch`` is
            that of each rank.
    """

    model: str = DEFAULT_SHAPE
    data: Path | None = None
    steps: int = 100
    batch: int = 4
    seq: int = 256
    accumulate: int = 1
    lr: float | None = None
    warmup: int | None = None
    seed: int = 0
    out: Path = Path("runs/train")
    compare: bool = False
    recompute: bool = False
    resume: Sequence[Path] = ()
    offload: Mapping[str, Any] = field(default_factory=dict)
    spread: str = "fsdp"

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.seq < 2:
            raise ValueError(
                f"seq must be at least 2 (one token predicts the next), got {self.seq}"
            )
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if self.warmup is not None and self.warmup < 0:
            raise ValueError(f"warmup must not be negative, got {self.warmup}")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be a positive number, got {self.lr}")
        if self.spread not in ("fsdp", "ddp"):
            raise ValueError(f"spread must be 'fsdp' or 'ddp', got {self.spread!r}")
        if self.resume and self.compare:
            raise ValueError("compare trains from the first step on; leave it out with resume")

    def rate_for(self, source: ModelSource) -> float:
        """The learning rate: as asked for, or what suits the kind of start."""
        if self.lr is not None:
            return self.lr
        return LR_FROM_RANDOM if source.folder is None else LR_FINE_TUNE

    @property
    def warmed_up(self) -> int:
        """The steps over which the learning rate rises."""
        return self.steps // 10 if self.warmup is None else self.warmup

    def settings(self, source: ModelSource, corpus: Corpus, ranks: Ranks) -> dict[str, Any]:
        """What must be the same in a run that goes on."""
        return {
            "model": source.name, "data": fingerprint(corpus), "batch": self.batch * ranks.size,
            "seq": self.seq, "accumulate": self.accumulate, "seed": self.seed,
            "lr": self.rate_for(source), "warmup": self.warmed_up,
        }  # fmt: skip

    def loop_settings(
        self, device: torch.device, dtypes: Iterable[torch.dtype], clip: float | None = None,
        ranks: Ranks = ALONE,
    ) -> LoopSettings:  # fmt: skip
        """Settings of the loop for a model with weights of ``dtypes``."""
        scaled = torch.float16 in set(dtypes)
        return LoopSettings(
            self.steps, self.accumulate, device, self.warmed_up, scaled, clip, ranks
        )


class Watch(Protocol):
    """Receives the events of a job; the command line shows them."""

    def note(self, text: str) -> None:
        """Show a message."""

    def begin(self, title: str, steps: int) -> None:
        """Show that training starts."""

    def step(self, record: StepRecord, memory: Mapping[str, MemoryStats]) -> None:
        """Show a finished step; ``memory`` by tier, empty for a run without the engine."""

    def end(self) -> None:
        """Show that training has ended, with or without an error."""


def run(job: Job, watch: Watch) -> Report | None:
    """Do the whole job; every file is in ``job.out`` afterwards.  On the ranks that torchrun has
    started each calls it, and the first one writes.

    Returns:
        The report; ``None`` if the resumed run had done all its steps and only lacked its model,
        which was written.

    Raises:
        ValueError: model, data or an option makes no sense, or the files have no room.
        BudgetError: a budget is too small.
        OffloadError: a package is missing, or training failed.
    """
    choose_cpu_kernels()  # else the first step may differ from one in memory
    with joined(job.offload.get("device")) as ranks:
        return _run(job, watch, ranks)


def _run(job: Job, watch: Watch, ranks: Ranks) -> Report | None:
    _refuse_on_ranks(job, ranks)
    require_folder(job.out)
    source = find_model(job.model)
    if source.positions is not None and job.seq > source.positions:
        raise ValueError(f"seq {job.seq} exceeds the {source.positions} positions of {source.name}")
    tokenizer = load_tokenizer(source.folder)
    corpus = load_corpus(job.data, tokenizer, source.vocabulary)
    batches = Batches(corpus, job.batch, job.seq, job.seed, rank=ranks.rank, ranks=ranks.size)
    start = "random weights" if source.folder is None else f"weights from {source.folder}"
    progress = Progress(job.settings(source, corpus, ranks))
    if job.resume:
        start = f"the last commit in {', '.join(map(str, job.resume))}"
    on = f", {job.spread} on {ranks.size} ranks" if ranks.several else ""
    watch.note(f"model {source.name}: {start}{on}")
    watch.note(f"data {corpus.summary}")
    if ranks.first and (lacking := pictures.missing()) is not None:
        watch.note(f"no pictures will be drawn: {lacking}")
    try:
        trained = _train_offloaded(job, source, batches, tokenizer, progress, watch, ranks)
        if trained is None:
            return None
        report = _report(job, source, corpus, start, trained, ranks)
        if ranks.first:
            report.write(job.out / RUN)  # before anything that may still fail
        if job.compare:
            batches.position = 0
            comparison = _train_in_memory(job, source, batches, trained, watch)
            report = replace(report, comparison=comparison)
            report.write(job.out / RUN)
    finally:
        _initial(job).unlink(missing_ok=True)
    if ranks.first:
        write_page(job.out)
        curves = {"offloaded": [r.loss for r in report.records]}
        if report.comparison is not None:
            curves["in memory"] = [r.loss for r in report.comparison.records]
        draw_pictures(job.out, curves)
    return report


def _report(
    job: Job, source: ModelSource, corpus: Corpus, start: str, trained: _Trained, ranks: Ranks
) -> Report:
    return Report(
        model=source.name,
        start=start,
        data=corpus.summary,
        parameters=trained.parameters,
        device=trained.device,
        lr=job.rate_for(source),
        seed=job.seed,
        position=trained.position,
        plan=trained.plan,
        memory=trained.memory,
        links=link_bytes(trained.records),
        records=trained.records,
        rss_before_bytes=trained.rss_before_bytes,
        peak_rss_bytes=trained.peak_rss_bytes,
        planned_s=trained.planned_s,
        others=trained.others,
        comparison=None,
        out=job.out,
        ranks=ranks.size,
    )


@dataclass(frozen=True)
class _Trained:
    """What is left of the offloaded run once its engine is closed."""

    records: tuple[StepRecord, ...]
    plan: Plan
    memory: Mapping[str, MemoryStats]
    parameters: int
    dtypes: dict[str, torch.dtype]
    device: str
    compute: torch.device
    position: int
    rss_before_bytes: int
    peak_rss_bytes: int
    planned_s: float | None
    others: Mapping[str, Any]  # what other choices would take


def _model(job: Job, source: ModelSource, ranks: Ranks = ALONE) -> tuple[nn.Module, nn.Module]:
    """The model, and as it is trained: spread over ranks, where there are several."""
    model = source.build()
    defer_logits(model)
    if job.recompute:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    if not ranks.several:
        return model, model
    if job.offload.get("precision") is not None:
        model.to({"bf16": torch.bfloat16, "fp32": torch.float32}[job.offload["precision"]])
    device = ranks.device(job.offload.get("device"))
    if job.spread == "ddp":
        return model, replicated(model, device, source.folder)
    filled = bool(job.resume) or source.folder is not None
    return model, sharded(model, ranks, device, filled=filled)


def _refuse_on_ranks(job: Job, ranks: Ranks) -> None:
    if ranks.several and job.compare:
        raise ValueError("compare trains in the memory of one rank; run it without torchrun")
    if ranks.several and job.offload.get("precision") == "fp16":
        raise ValueError("precision fp16 needs a loss scale that all ranks share; use bf16")


def _train_offloaded(
    job: Job, source: ModelSource, batches: Batches, tokenizer: Any, progress: Progress,
    watch: Watch, ranks: Ranks,
) -> _Trained | None:  # fmt: skip
    torch.manual_seed(job.seed)
    rss_before = psutil.Process().memory_info().rss
    model, trained = _model(job, source, ranks)
    parameters = sum(p.numel() for p in model.parameters())
    require_room(job.out, model, job.offload.get("precision"), masters=job.compare)
    with _offloaded(job, source, trained, progress, ranks) as optimizer:
        stores = stores_of(optimizer, job.resume or job.offload.get("nvme") or ())
        batches.position = progress.position
        watch.note(f"plan {optimizer.plan}")
        require_room(job.out, model, None, masters=job.compare)  # beside the store, by now
        make_folder(job.out)
        if progress.step == job.steps:
            _write_model(job, source, model, tokenizer, stores, ranks)
            watch.note(
                f"the run had done all of its {job.steps} steps: wrote {job.out / SINGLE}; ask for "
                "more steps to continue training"
            )
            return None
        dtypes = {name: p.dtype for name, p in model.named_parameters()}
        if job.compare:
            save_masters(model, _initial(job))
        compute = next(model.parameters()).device
        settings = job.loop_settings(compute, dtypes.values(), ranks=ranks)
        watch.begin("offloaded", job.steps)
        try:
            if progress.step == 0:
                torch.manual_seed(job.seed + ranks.rank)  # else all is as the commit has it
            records = train(
                trained, optimizer, batches, settings,
                lambda r: watch.step(r, _memory(optimizer)), progress,
            )  # fmt: skip
        finally:
            watch.end()
        _write_model(job, source, model, tokenizer, stores, ranks)
        planned_s, others = None, dict[str, Any]()
        if ranks.first:
            planned_s, trace = write_traces(optimizer, job.out)
            if not ranks.several:
                given = {"tile": "auto", **job.offload, "accumulate": job.accumulate}
                given["nvme"] = given.get("nvme") or job.resume or None
                skeleton, tokens = plan_model(job.model), job.batch * job.seq
                others = after_a_run(skeleton, given, optimizer.plan, trace, tokens)
        return _Trained(
            records=tuple(records),
            plan=optimizer.plan,
            memory=_memory(optimizer),
            parameters=parameters,
            dtypes=dtypes,
            device=str(job.offload.get("device") or compute),
            compute=compute,
            position=batches.position,
            rss_before_bytes=rss_before,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            planned_s=planned_s,
            others=others,
        )


def _offloaded(
    job: Job, source: ModelSource, model: nn.Module, progress: Progress, ranks: Ranks
) -> OffloadedOptimizer:
    """Wrap the model, or resume it from the last commit of a store."""
    plain = torch.optim.AdamW(model.parameters(), lr=job.rate_for(source))
    options = {"tile": "auto", **job.offload, "accumulate": job.accumulate}
    if options.get("activations") in (None, "auto") and not ranks.several:
        # With this, even the first step is within the budgets.
        options.setdefault("tokens", job.batch * job.seq)
    weights = source.folder
    if ranks.several:
        options.update(precision=None, device=ranks.device(options.get("device")))
        weights = None if job.spread == "ddp" else weights  # already loaded
    if job.resume or (options.get("nvme") is not None and options.get("durable", True)):
        options["extra"] = progress.as_extra
    if not job.resume:
        return wrap(model, plain, **options, weights=weights)
    optimizer, extra = resume(model, list(job.resume), plain, **options)
    try:
        progress.take(extra)
        there = (job.out / SINGLE).exists()
        if progress.step > job.steps or (progress.step == job.steps and there):
            raise ValueError(
                f"resume: the run has done {progress.step} steps already, and steps={job.steps}; "
                "ask for more steps than it has done, or write its weights with "
                f"`overspill export {job.resume[0]} FOLDER`"
            )
    except ValueError:
        optimizer.close()
        raise
    return optimizer


def _memory(optimizer: OffloadedOptimizer) -> dict[str, MemoryStats]:
    return {tier.value: stats for tier, stats in optimizer.memory.items() if stats.budget_bytes}


def _initial(job: Job) -> Path:
    return job.out / "initial.safetensors"


def _write_model(
    job: Job, source: ModelSource, model: nn.Module, tokenizer: Any, stores: Sequence[Path],
    ranks: Ranks,
) -> None:  # fmt: skip
    if ranks.first:
        write_model(model, source, tokenizer, job.out, stores)
    else:
        read_along(model)


def _train_in_memory(
    job: Job, source: ModelSource, batches: Batches, trained: _Trained, watch: Watch
) -> Comparison:
    model, _ = _model(job, source)
    masters = load_in_memory(model, _initial(job), trained.dtypes, trained.compute)
    optimizer = in_memory_adamw(masters, job.rate_for(source))
    settings = job.loop_settings(
        trained.compute, trained.dtypes.values(), job.offload.get("max_grad_norm")
    )
    watch.begin("in memory", job.steps)
    try:
        torch.manual_seed(job.seed)
        records = train(model, optimizer, batches, settings, lambda r: watch.step(r, {}))
    finally:
        watch.end()
    losses = zip(records, trained.records, strict=True)
    return Comparison(
        tuple(records),
        max(abs(mine.loss - other.loss) for mine, other in losses),
        weight_difference(model, job.out / SINGLE),
    )
