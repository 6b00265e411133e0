"""Public optimizers, how each is built, and what is expected of it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

NATIVE, STREAMED, RESIDENT = "native", "streamed", "resident"
USABLE = NATIVE, STREAMED, RESIDENT


@dataclass(frozen=True)
class Public:
    """An optimizer by its module and class.

    Attributes:
        expected: one of ``USABLE``, or a part of the reason why it is refused.
        options: of its constructor.
        groups: param groups of a model; the default has all parameters in one.
        matrices_only: whether it takes matrices only, so that the rest is frozen.
    """

    module: str
    name: str
    expected: str = STREAMED
    options: tuple[tuple[str, Any], ...] = ()
    groups: Callable[[nn.Module], Any] | None = None
    matrices_only: bool = False

    @property
    def key(self) -> str:
        return f"{self.module}.{self.name}"

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.matrices_only:
            for p in model.parameters():
                p.requires_grad_(p.dim() == 2)
        params = [p for p in model.parameters() if p.requires_grad]
        given = params if self.groups is None else self.groups(model)
        made: torch.optim.Optimizer = self.kind(given, **dict(self.options))
        if callable(train := getattr(made, "train", None)):
            train()
        return made

    @property
    def kind(self) -> Any:
        if self.module == "pytorch_optimizer":
            return import_module(self.module).load_optimizer(self.name)
        return getattr(import_module(self.module), self.name)


def apart(model: nn.Module, **matrices: Any) -> list[dict[str, Any]]:
    """Matrices in a group with these options, everything else in another one."""
    large = [p for p in model.parameters() if p.dim() == 2]
    small = [p for p in model.parameters() if p.dim() != 2]
    return [{"params": large, **matrices}, {"params": small}]


def _flagged(model: nn.Module, flag: str) -> list[dict[str, Any]]:
    large, small = apart(model)
    return [{**large, flag: True}, {**small, flag: False}]


FAILS = "its step fails on small parameters"
OUTSIDE = "it keeps state outside of its state and param_groups"
NO_PARAMETER = "it keeps state that belongs to no parameter"
OTHERWISE = "it changes parameters without a gradient, or keeps state elsewhere"
REFERS = "refers to parameters, a model or an optimizer"

# Of pytorch_optimizer, what is not simply streamed.  Those in ``NOT_BUILT`` cannot be built from
# the parameters of a model at all.
_EXPECTED = {
    "adagc": RESIDENT, "adai": RESIDENT, "adams": RESIDENT, "asgd": RESIDENT, "avagrad": RESIDENT,
    "dadaptadagrad": RESIDENT, "dadaptadam": RESIDENT, "dadaptadan": RESIDENT,
    "dadaptlion": RESIDENT, "dadaptsgd": RESIDENT, "prodigy": RESIDENT,
    "alice": RESIDENT, "dash": RESIDENT, "gravity": RESIDENT, "kron": RESIDENT,
    "madgrad": NO_PARAMETER, "ranger21": OTHERWISE, "stablespam": OUTSIDE, "emofact": OUTSIDE,
    "adahessian": FAILS, "alig": FAILS, "bsam": FAILS, "lbfgs": REFERS, "lorarite": FAILS,
    "sara": FAILS, "sophiah": FAILS, "spam": FAILS,
    "magma": REFERS, "adam": NATIVE, "adamw": NATIVE, "sgd": NATIVE,  # these are torch's
}  # fmt: skip
_OPTIONS: dict[str, Any] = {
    "bsam": {"num_data": 10}, "ranger21": {"num_iterations": 100},
}  # fmt: skip
_MUONS = ("adago", "adamuon", "muon", "muonclip", "normuon")
NOT_BUILT = {
    "adalomo": "a model", "adammini": "a model", "lomo": "a model", "demo": "a process group",
    "distributedmuon": "a process group",
}  # fmt: skip


def of_pytorch_optimizer() -> list[Public]:
    found = []
    for name in import_module("pytorch_optimizer").get_supported_optimizers():
        if name in NOT_BUILT:
            continue
        groups = partial(_flagged, flag="use_muon") if name in _MUONS else None
        options = tuple(_OPTIONS.get(name, {}).items())
        expected = _EXPECTED.get(name, STREAMED)
        only = name == "spectralsphere"
        found.append(Public("pytorch_optimizer", name, expected, options, groups, only))
    return found


def of_torch() -> list[Public]:
    known = {
        "Adam": NATIVE, "AdamW": NATIVE, "SGD": NATIVE, "Adagrad": NATIVE, "Muon": NATIVE,
        "LBFGS": REFERS, "SparseAdam": FAILS,
    }  # fmt: skip
    options: dict[str, Any] = {"SGD": {"momentum": 0.9}}
    return [
        Public("torch.optim", name, known.get(name, STREAMED),
               tuple(options.get(name, {}).items()), None, name == "Muon")
        for name, kind in sorted(vars(torch.optim).items())
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    ]  # fmt: skip


def low_rank(model: nn.Module) -> list[dict[str, Any]]:
    return apart(
        model, rank=4, update_proj_gap=5, scale=0.25, proj_type="std", proj="random",
        scale_type="channel",
    )  # fmt: skip


OTHERS: Sequence[Public] = (
    *(Public("schedulefree", name) for name in (
        "AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree", "AdamWScheduleFreeReference",
        "AdamWScheduleFreePaper",
    )),
    *(Public("schedulefree", f"{name}ScheduleFreeClosure", FAILS)
      for name in ("AdamW", "RAdam", "SGD")),
    Public("prodigyopt", "Prodigy", RESIDENT),
    Public("lion_pytorch", "Lion", options=(("lr", 1e-3),)),
    Public("galore_torch", "GaLoreAdamW", groups=low_rank),
    Public("galore_torch", "GaLoreAdafactor", groups=low_rank),
    Public("apollo_torch", "APOLLOAdamW", groups=low_rank),
    Public("transformers.optimization", "Adafactor"),
)  # fmt: skip


def all_of_them() -> list[Public]:
    return [*of_torch(), *of_pytorch_optimizer(), *OTHERS]


SHORT = {
    FAILS: "needs a closure, a graph or other parameters",
    OUTSIDE: "keeps state in attributes", NO_PARAMETER: "keeps state that belongs to no parameter",
    OTHERWISE: "changes parameters without a gradient, or keeps other state",
    REFERS: "holds parameters or another optimizer",
}  # fmt: skip
PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
BEGIN, END = "<!-- tried: made from tests/optimizers/table.py -->\n", "<!-- end -->"


def listing() -> str:
    """The page's tables: what can be used, and what is refused and why."""
    usable: dict[str, list[str]] = {}
    resident: list[str] = []
    refused: dict[str, list[str]] = {}
    for each in all_of_them():
        package = each.module.partition(".")[0] if each.module != "torch.optim" else each.module
        if each.expected in USABLE:
            usable.setdefault(package, []).append(each.name)
            resident += [f"{package}.{each.name}"] if each.expected == RESIDENT else []
        else:
            refused.setdefault(SHORT[each.expected], []).append(f"{package}.{each.name}")
    for name, needs in NOT_BUILT.items():
        refused.setdefault(f"takes {needs}, not parameters", []).append(f"pytorch_optimizer.{name}")
    lines = ["", "Can be used:", ""]
    for package, names in usable.items():
        names.sort()
        parts = [names[at : at + 40] for at in range(0, len(names), 40)]
        for number, part in enumerate(parts):
            more = f", {number + 1} of {len(parts)}" if len(parts) > 1 else ""
            lines += [f"- **{package}** ({len(names)}{more}): {', '.join(part)}"]
    lines += ["", f"Of these, resident: {', '.join(resident)}."]
    lines += ["", "Refused:", ""]
    lines += [f"- {why}: {', '.join(names)}" for why, names in refused.items()]
    wrapped = (
        textwrap.fill(
            line, 120, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
        )
        for line in lines
    )
    return "\n".join(wrapped) + "\n\n"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    PAGE.write_text(before + listing() + after, encoding="utf-8")
