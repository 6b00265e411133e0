"""The options: the frozen ``OffloadConfig``, and parsing of sizes."""

from __future__ import annotations

import difflib
import math
import numbers
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from .facts.rates import Rates
from .paths import as_path, as_paths

if TYPE_CHECKING:  # the command parses sizes without importing torch
    import torch

__all__ = ["OffloadConfig", "Size", "parse_size"]

MOST_THREADS = 256
MOST_MICRO_STEPS = 10_000  # each is simulated

# Options that only concern training.
_OF_TRAINING = (
    "master", "moments", "max_grad_norm", "update", "accumulate", "commit_every",
    "extra", "on_nonfinite",
)  # fmt: skip
_FACTORS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*|%)\s*")


@dataclass(frozen=True)
class Size:
    """A budget as given: ``nbytes``, a ``share`` of free memory, or neither (auto)."""

    nbytes: int | None = None
    share: float | None = None

    def resolve(self, free_bytes: int, margin_bytes: int) -> int:
        """Return the budget in bytes of ``free_bytes``; ``auto`` leaves ``margin_bytes`` unused."""
        if self.nbytes is not None:
            return self.nbytes
        if self.share is not None:
            return int(free_bytes * self.share)
        return max(0, free_bytes - margin_bytes)


def parse_size(value: int | str, name: str) -> Size:
    """Parse ``10 * 2**30``, ``"10GiB"``, ``"80%"`` or ``"auto"``.

    Raises:
        ValueError: the size is negative, not finite or unreadable, or has an unknown unit.
        TypeError: the value is neither a number nor a string.
    """
    if isinstance(value, numbers.Integral):
        value = _whole(value)
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"{name} must be bytes or a text such as '10GiB', got {value!r}")
    if isinstance(value, (int, float)):
        if not math.isfinite(value) or value < 0 or value != int(value):
            raise ValueError(f"{name} must be a whole number of bytes >= 0, got {value!r}")
        return Size(nbytes=int(value))
    if value.strip().lower() == "auto":
        return Size()
    match = _SIZE.fullmatch(value)
    if match is None:
        raise ValueError(f"{name}: cannot read {value!r} as a size; write '10GiB', '80%' or 'auto'")
    number, unit = float(match[1]), match[2].upper()
    if unit == "%":
        if not 0 < number <= 100:
            raise ValueError(f"{name}: a share must lie above 0% and up to 100%, got {value!r}")
        return Size(share=number / 100)
    if unit not in _FACTORS:
        known = ", ".join(["B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"])
        raise ValueError(f"{name}: unknown unit {match[2]!r} in {value!r}; known: {known}, %")
    if not math.isfinite(number * _FACTORS[unit]):
        raise ValueError(f"{name} must be a finite number of bytes, got {value!r}")
    return Size(nbytes=int(number * _FACTORS[unit]))


def _choice(name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def _whole(value: Any) -> Any:
    """Convert an integer, also one of NumPy's, to ``int``; leave ``True`` as it is."""
    return value if isinstance(value, bool) else int(value)


def _names(value: object, name: str) -> tuple[str, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of names, got {value!r}")
    found = tuple(value)
    for each in found:
        if not isinstance(each, str):
            raise TypeError(f"{name} must be a list of names, got {each!r} in it")
    return found


def _weights(value: object) -> Path | dict[str, Path]:
    if not isinstance(value, Mapping):
        return as_path(value, "weights").absolute()
    if not value:
        raise ValueError("weights is an empty dict; give a path for at least one model")
    return {str(n): as_path(each, f"weights[{n!r}]").absolute() for n, each in value.items()}


def _at_least(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} must be a whole number >= {low}, got {value!r}")


@dataclass(frozen=True)
class MissingWeights:
    """``weights=`` of a run that is resumed: only parameters on ``meta`` are read from the files.

    All else comes from the run's stores.
    """

    path: Path


@dataclass(frozen=True)
class OffloadConfig:
    """The options of ``wrap``, ``plan`` and ``resume``.

    Attributes:
        device: ``"cuda[:i]"`` or another torch accelerator, ``"cpu"``, ``"sim"``; ``None`` uses the
            accelerator if there is one, else the CPU.
        device_memory, host_memory: the most memory that the engine may hold: bytes, ``"10GiB"``,
            ``"80%"`` of free memory, or ``"auto"`` (free memory less a margin).  Free memory
            excludes what other open engines of this process may still take; free host memory also
            respects control groups and ``ulimit``.
        leave: memory left free for other models, out of what ``"auto"`` and shares refer to: one
            size for the device and the host alike, or a dict with ``"device"``, ``"host"`` or both.
        nvme: a directory, or a list of directories to stripe over; ``None`` for no third tier.
        nvme_memory: the most disk space for the store, as above.
        precision: dtype of the weights, ``"bf16"``, ``"fp16"``, ``"fp32"``; ``None`` keeps it.
        master: ``"split"`` (lossless, bf16 weights), ``"fp32"``, or ``"auto"``.
        moments: storage of the optimizer's moments: ``"fp32"``; ``"bf16"`` (stochastic rounding);
            ``"int8"`` (a logarithmic byte, with a scale per 256 elements).
        activations: where tensors that autograd saves wait for backward: ``"keep"`` (where they
            are), ``"host"``, ``"nvme"``, ``"recompute"`` (units keep their inputs and run again),
            ``"selective"`` (they also keep the outputs of attention, which is not run again), or
            ``"auto"`` (tensors that do not fit in the budgets are offloaded or recomputed).
        activations_format: ``"int8"`` moves the activations of units as bytes, with a scale per 128
            elements, and loses precision; ``None``: as they are.
        loss: ``"chunked"`` computes a language model's logits, and the loss or log-probabilities
            from them, for some tokens at a time; ``"auto"`` does so if the plan finds that the
            logits of ``tokens`` do not fit otherwise; ``None``: as the model's code does.
        tile: names or patterns of feed-forward layers, such as ``"layers.*.mlp"``, to compute for
            some tokens at a time, in backward again; ``"auto"``: those of transformers and
            diffusers if the plan finds that ``tokens`` do not fit otherwise; ``None``: no layer.
        frozen: storage format of untrained matrices, which are unpacked before use: ``"int8"`` (a
            scale per row), ``"nf4"`` (4 bits, as in QLoRA); not for embeddings, the head,
            convolutions and the modules in ``resident``.  ``None``: stored unpacked.
        tokens: tokens of the largest micro-batch, or 0 if unknown.  Resident weights then leave
            memory for the activations, and plans include compute.
        max_grad_norm: exact clipping by the global L2 norm, inside the engine.
        update: ``"step"``, ``"backward"``, ``"next_forward"`` or ``"auto"``.
        accumulate: micro-steps per step; required by ``update="backward"``, a hint otherwise.
        units: names of modules that form units, or patterns such as ``"layers.*.mlp"``; other
            units are discovered.
        resident: names or patterns of modules whose units never leave the device (with
            ``device="cpu"``, host memory).
        weights: safetensors file, Hugging Face folder, or folder of
            ``torch.distributed.checkpoint``, to load weights from; for several models, a dict with
            the paths of all or some, by their names.
        ignore_weights: names, or patterns such as ``"head.*"``, of tensors in these files that the
            model does not use; any other unused tensor is an error.
        init: for a meta model: called on each module of a unit to initialise its parameters.
        prefetch_depth: units fetched ahead of use, in the order of the last step; ``None`` lets the
            plan choose.  Prefetch is reduced or stopped while steps use units in different orders.
        threads: CPU threads of the optimizer update; ``None`` uses the physical cores; with a GPU,
            all but two of them, or all but a quarter if there are few.
        checksum: verify every byte that is read back from disk.
        rates: the machine's rates; ``None`` measures them once.
        durable, commit_every, extra, on_nonfinite: see docs/options.md.
        verbose: log the whole plan, not only one line.
    """

    device: str | None = None
    device_memory: int | str = "auto"
    host_memory: int | str = "auto"
    leave: int | str | Mapping[str, int | str] = 0
    nvme: tuple[Path, ...] | None = None
    nvme_memory: int | str = "auto"
    precision: Literal["bf16", "fp16", "fp32"] | None = None
    master: Literal["auto", "split", "fp32"] = "auto"
    moments: Literal["fp32", "bf16", "int8"] = "fp32"
    activations: Literal["auto", "keep", "host", "nvme", "recompute", "selective"] = "auto"
    activations_format: Literal["int8"] | None = None
    loss: Literal["auto", "chunked"] | None = None
    tile: Literal["auto"] | tuple[str, ...] | None = None
    frozen: Literal["int8", "nf4"] | None = None
    tokens: int = 0
    max_grad_norm: float | None = None
    update: Literal["auto", "step", "backward", "next_forward"] = "auto"
    accumulate: int = 1
    units: tuple[str, ...] | None = None
    resident: tuple[str, ...] | None = None
    weights: Path | Mapping[str, Path] | MissingWeights | None = None
    ignore_weights: tuple[str, ...] | None = None
    init: Callable[[torch.nn.Module], None] | None = None
    prefetch_depth: int | None = None
    threads: int | None = None
    checksum: bool = True
    rates: Rates | None = None
    durable: bool = True
    commit_every: int = 1
    extra: Callable[[], Mapping[str, Any]] | None = None
    on_nonfinite: Literal["raise", "skip", "rollback"] = "raise"
    verbose: bool = False

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> OffloadConfig:
        """Build a configuration from keywords; raise ``TypeError`` naming an unknown one."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
                raise TypeError(f"unknown option {name!r}{hint}")
        values = dict(options)
        if values.get("device") is not None:
            values["device"] = str(values["device"])  # also works for a ``torch.device``
        if values.get("nvme") is not None:
            folders = as_paths(values["nvme"], "nvme")
            values["nvme"] = tuple(folder.absolute() for folder in folders)
        for name in ("units", "resident", "ignore_weights"):
            if values.get(name) is not None:
                values[name] = _names(values[name], name)
        if values.get("tile") not in (None, "auto"):
            values["tile"] = _names(values["tile"], "tile")
        if values.get("weights") is not None:
            values["weights"] = _weights(values["weights"])
        if isinstance(values.get("leave"), Mapping):
            values["leave"] = dict(values["leave"])
        for name in ("tokens", "accumulate", "commit_every", "prefetch_depth", "threads"):
            if isinstance(values.get(name), numbers.Integral):
                values[name] = _whole(values[name])
        return cls(**values)

    def for_inference(self) -> OffloadConfig:
        """Return the options for a run without an optimizer, in which no step is committed.

        Raises:
            ValueError: an option only concerns training.
        """
        for each in fields(self):
            if each.name in _OF_TRAINING and getattr(self, each.name) != each.default:
                raise ValueError(
                    f"{each.name}={getattr(self, each.name)!r} says how to train, but without an "
                    "optimizer nothing is trained; leave it out, or give an optimizer"
                )
        auto = self.activations == "auto"
        if auto and self.activations_format is not None:
            raise ValueError(
                "activations_format: without an optimizer, activations='auto' keeps all of them "
                "where they are; pass activations='host' or 'nvme'"
            )
        return replace(self, durable=False, activations="keep" if auto else self.activations)

    def left_bytes(self, tier: str) -> int:
        """Return the bytes that ``leave`` sets aside in ``"device"`` or ``"host"`` memory."""
        given = self.leave.get(tier, 0) if isinstance(self.leave, Mapping) else self.leave
        nbytes = parse_size(given, "leave").nbytes
        if nbytes is None:
            raise ValueError(f"leave must be bytes or a size such as '4GiB', got {given!r}")
        return nbytes

    def __post_init__(self) -> None:
        for name in ("device_memory", "host_memory", "nvme_memory"):
            parse_size(getattr(self, name), name)
        self._check_leave()
        _choice("precision", self.precision, (None, "bf16", "fp16", "fp32"))
        _choice("master", self.master, ("auto", "split", "fp32"))
        _choice("moments", self.moments, ("fp32", "bf16", "int8"))
        known = ("auto", "keep", "host", "nvme", "recompute", "selective")
        _choice("activations", self.activations, known)
        _choice("activations_format", self.activations_format, (None, "int8"))
        _choice("loss", self.loss, (None, "auto", "chunked"))
        _choice("frozen", self.frozen, (None, "int8", "nf4"))
        _choice("update", self.update, ("auto", "step", "backward", "next_forward"))
        _choice("on_nonfinite", self.on_nonfinite, ("raise", "skip", "rollback"))
        for name in ("checksum", "durable", "verbose"):
            _choice(name, getattr(self, name), (True, False))
        _at_least("tokens", self.tokens, 0)
        _at_least("accumulate", self.accumulate, 1)
        if self.accumulate > MOST_MICRO_STEPS:
            raise ValueError(
                f"accumulate must be at most {MOST_MICRO_STEPS}, got {self.accumulate}"
            )
        _at_least("commit_every", self.commit_every, 1)
        if self.prefetch_depth is not None:
            _at_least("prefetch_depth", self.prefetch_depth, 0)
        if self.threads is not None:
            _at_least("threads", self.threads, 1)
            if self.threads > MOST_THREADS:
                raise ValueError(f"threads must be at most {MOST_THREADS}, got {self.threads}")
        if self.max_grad_norm is not None:
            limit = self.max_grad_norm
            if isinstance(limit, bool) or not isinstance(limit, numbers.Real):
                raise TypeError(f"max_grad_norm must be a number, got {limit!r}")
            if not 0 < float(limit) < math.inf:
                raise ValueError(f"max_grad_norm must be a positive number, got {limit!r}")
        if self.rates is not None and not isinstance(self.rates, Rates):
            raise TypeError(f"rates must be an overspill.Rates, got {type(self.rates).__name__}")
        for name in ("init", "extra"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise TypeError(f"{name} must be callable, got {getattr(self, name)!r}")
        self._refuse_contradictions()

    def _check_leave(self) -> None:
        tiers = ["host"] if self.device == "cpu" else ["device", "host"]
        if isinstance(self.leave, Mapping) and not set(tiers).issuperset(self.leave):
            known = " and ".join(map(repr, tiers))
            raise ValueError(f"leave takes the keys {known} here, got {dict(self.leave)!r}")
        self.require_use_of_leave(tiers)

    def require_use_of_leave(self, tiers: Iterable[str]) -> None:
        """Raise ``ValueError`` if the budgets of ``tiers`` do not depend on ``leave``."""
        sized = {"device": self.device_memory, "host": self.host_memory}
        asked = [tier for tier in tiers if self.left_bytes(tier)]
        fixed = [tier for tier in asked if parse_size(sized[tier], tier).nbytes is not None]
        if fixed and (isinstance(self.leave, Mapping) or fixed == asked):
            raise ValueError(
                f"leave: {fixed[0]}_memory is given in bytes, so it leaves all other memory free; "
                "lower it, or use 'auto' or a share such as '80%'"
            )

    def _refuse_contradictions(self) -> None:
        if self.update == "backward" and self.max_grad_norm is not None:
            raise ValueError(
                "update='backward' applies gradients before the global norm is known, so it "
                "cannot clip exactly; use update='next_forward' or drop max_grad_norm"
            )
        if self.device == "cpu" and self.device_memory != "auto":
            raise ValueError(
                "device_memory: device='cpu' has one memory tier; set host_memory instead"
            )
        if self.activations_format and self.activations not in ("auto", "host", "nvme"):
            raise ValueError(
                f"activations_format={self.activations_format!r}: with activations="
                f"{self.activations!r}, nothing is moved that may lose precision; pass "
                "activations='auto', 'host' or 'nvme', or leave it out"
            )
        stored = self.durable and self.nvme is not None
        if (self.commit_every != 1 or self.extra is not None) and not stored:
            raise ValueError(
                "commit_every and extra belong to a durable store; pass nvme= (a directory) and "
                "leave durable=True, or leave them out"
            )
        if self.on_nonfinite == "rollback" and not stored:
            raise ValueError(
                "on_nonfinite='rollback' goes back to the last commit; pass nvme= (a directory) "
                "and leave durable=True, or use 'skip'"
            )
        if self.on_nonfinite == "skip" and self.update == "backward":
            raise ValueError(
                "update='backward' applies gradients before all are known to be finite, so it "
                "cannot skip a step; use on_nonfinite='rollback', or another update"
            )
        if self.activations == "nvme" and self.nvme is None:
            raise ValueError("activations='nvme' needs nvme= (a directory)")
        if self.ignore_weights is not None and self.weights is None:
            raise ValueError("ignore_weights says what to ignore of weights=; give both or neither")
        if self.init is not None and self.weights is not None:
            raise ValueError("give weights= or init=, not both")

    @property
    def first_weights(self) -> Path | None:
        """The path given as ``weights``, or the first of several."""
        found = self.weight_files
        return next(iter(found.values())) if isinstance(found, Mapping) else found

    @property
    def weight_files(self) -> Path | Mapping[str, Path] | None:
        """The files given as ``weights``."""
        return self.weights.path if isinstance(self.weights, MissingWeights) else self.weights

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """The dtype that ``precision`` asks for, or ``None``."""
        import torch

        table = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
        return None if self.precision is None else table[cast(str, self.precision)]
