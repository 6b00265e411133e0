"""What the user holds: ``wrap``, ``plan``, ``unwrap`` and the optimizer that they get back."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .committing import Committing
from .config import OffloadConfig, Tier
from .decide import calibrated, decide, foretell
from .durable.export import export_store
from .engine import ATTRIBUTE, Engine, engine_of
from .errors import BudgetError, OffloadError
from .loading import WeightFiles, default_init, initialise, match_files, values_of_unit
from .model_state import StateHooks, read_weight
from .observe.export import save_trace
from .observe.machine import Machine
from .observe.rates import Rates
from .observe.stats import MemoryStats, Stats
from .runtime import torch_private
from .runtime.accelerator import make_accelerator
from .schedule.plan import Plan

log = logging.getLogger("overspill")
# -- planning ------------------------------------------------------------------------------------


def plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    tokens: int = 0,
    machine: Machine | None = None,
    measure: bool = False,
    example: Callable[[], torch.Tensor] | None = None,
    **options: Any,
) -> Plan:
    """What ``wrap`` with the same options would hold and move.  Allocates nothing.

    Lack of room is not an error: ``plan.fits`` and ``plan.shortfalls`` tell.

    Args:
        tokens: of one micro-step.  They let compute count; without them, time is that of moves and
            updates alone.
        machine: plan for that one; with sizes in it, its memory and disks count, not those here.
        example: runs one micro-batch forward and returns its loss, as in
            ``lambda: model(**batch).loss``.  It and its backward run a few times, in memory, and
            what each unit computes and keeps counts instead of what its FLOPs suggest; a model on
            ``meta`` tells its activations only.  Gradients that were there stay.
        measure: measure this machine anew instead of using the rates kept from before.
        options: see ``OffloadConfig``.

    Raises:
        TypeError: an unknown option, or an optimizer that is not supported.
        ValueError: an option's value makes no sense.
    """
    return foretell(
        model, optimizer, options, tokens=tokens, machine=machine, measure=measure, example=example
    )


# -- wrapping -----------------------------------------------------------------------------------


def raise_shortfall(plan: Plan) -> None:
    """Raises ``BudgetError`` for a plan that does not fit."""
    if plan.fits:
        return
    first = plan.shortfalls[0]
    raise BudgetError(
        first.what, first.tier.value, first.need_bytes, first.have_bytes, first.have_bytes,
        first.remedy,
    )  # fmt: skip


def _fill(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine) -> None:
    """Moves weights and state to their homes, one unit at a time, and frees the originals."""
    parts, config, rule = engine.parts, engine.config, engine.blueprint.rule
    files = None if config.weights is None else WeightFiles(config.weights)
    names = {} if files is None else match_files(files, model, parts)
    init = config.init or default_init(model)
    device = engine.accelerator.device
    for index, p in enumerate(parts.parameters):
        engine.updater.steps[index] = rule.steps_taken(optimizer.state.get(p, {}))
    for unit in parts.units:
        specs = {spec.index: spec for _, spec in unit.params}
        made: Mapping[int, torch.Tensor] = {}
        if files is None and any(parts.parameters[i].is_meta for i in specs):
            made = initialise(parts.found[unit.index], specs, parts, init)

        def weight_of(index: int, made: Mapping[int, torch.Tensor] = made) -> torch.Tensor:
            if files is not None:
                return files.load(names[index])
            return made.get(index, parts.parameters[index].data)

        values = values_of_unit(parts, unit.index, optimizer, rule, weight_of)
        engine.contents.fill(unit.index, values, first=True)
        for chunk, spec in unit.params:
            stub = torch.full((), float("nan"), dtype=chunk.dtype, device=device)
            torch_private.become(parts.parameters[spec.index], stub.expand(spec.shape))
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.device != device:
                setattr(module, name, buffer.to(device))


def wrap(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> OffloadedOptimizer:
    """Offloads a model and its optimizer; the training loop stays as it is.

    Changes ``model`` in place (hooks; no module is replaced) and returns an optimizer over the
    same param groups.  Options: see ``OffloadConfig``.

    Example::

        optimizer = overspill.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-5),
                                   device_memory="10GiB", host_memory="24GiB", nvme="/scratch")

    Raises:
        BudgetError: a budget is too small; nothing was allocated.
        TypeError: an unknown option, or an optimizer that is not supported.
        ValueError: an option's value makes no sense, or weights do not match the model.
        OffloadError: the model is wrapped already, or cannot be.
    """
    config = OffloadConfig.from_options(options)
    accelerator = make_accelerator(config.device, config.rates)
    try:
        config, calibration = calibrated(model, optimizer, config, accelerator)
        blueprint = decide(model, optimizer, config, accelerator)
        raise_shortfall(blueprint.plan)
        if config.weights is not None:
            match_files(WeightFiles(config.weights), model, blueprint.parts)
        engine = Engine(model, optimizer.param_groups, blueprint, accelerator, calibration)
    except BaseException:
        accelerator.close()
        raise
    try:
        _fill(model, optimizer, engine)
        return install(model, optimizer, engine)
    except BaseException:
        engine.discard()
        raise


def install(
    model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine
) -> OffloadedOptimizer:
    """Hooks up a model whose weights and state are in their homes, and hands out the optimizer."""
    engine.install()
    engine.state_hooks = StateHooks(engine)
    log.info("overspill: %s", engine.blueprint.plan)
    if engine.config.verbose:
        for name, home in engine.blueprint.plan.placement.items():
            grads = "on arrival" if home.grads is None else home.grads.value
            state = ", ".join(dict.fromkeys(tier.value for tier in home.state)) or "none"
            log.info(
                "overspill: unit %s: weights %s%s, gradients %s, state %s",
                name, home.weights.value, " (resident)" if home.resident else "", grads, state,
            )  # fmt: skip
    optimizer.state.clear()
    # Found on the instance, these refuse copies and pickles of the model before they begin.
    model.__dict__.update(
        {
            ATTRIBUTE: engine,
            "__deepcopy__": engine.__deepcopy__,
            "__reduce_ex__": engine.__reduce_ex__,
        }
    )
    torch_private.count_step(optimizer)
    return OffloadedOptimizer(engine, optimizer)


class OffloadedOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` whose parameters and state live on several tiers.

    ``param_groups`` are the very objects of the wrapped optimizer, read at every step, so
    schedulers work unchanged.  A context manager; ``close`` also runs at interpreter exit.
    """

    def __init__(self, engine: Engine, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, dict(inner.defaults))
        self.param_groups = inner.param_groups
        self._engine = engine
        self._finalizer = weakref.finalize(self, Engine.close, engine)

    # -- training -------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates all parameters that have a gradient; returns the closure's result, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._engine.step()
        return loss

    @property
    def step_count(self) -> int:
        """Steps taken since ``wrap``."""
        return self._engine.step_count

    # -- commits --------------------------------------------------------------------------------

    def commit(self) -> None:
        """Makes the present state durable now; returns when it is.

        Raises:
            OffloadError: there is no durable store, or the step is not whole.
            IoError: the disk refused; the commit before it is whole.
        """
        self._committing("commit").commit()

    def rollback(self) -> Any:
        """Goes back to the last commit: weights, state, step counts and hyper-parameters.

        Gradients are dropped.  Random generators stay as they are.

        Returns:
            What ``extra`` gave when that commit was sealed.
        """
        return self._committing("rollback").rollback()

    def _committing(self, what: str) -> Committing:
        self._engine.raise_if_unusable()
        if self._engine.committing is None:
            raise OffloadError(
                f"{what}() needs a durable store; pass nvme= (a directory) to wrap, and leave "
                "durable=True"
            )
        return self._engine.committing

    # -- observing ------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan that this run follows."""
        return self._engine.blueprint.plan

    @property
    def stats(self) -> Stats:
        """Figures of the last step."""
        return self._engine.stats

    @property
    def memory(self) -> Mapping[Tier, MemoryStats]:
        """Budget, held and peak bytes of every tier."""
        return self._engine.memory()

    def trace(self, path: str | Path) -> None:
        """Writes the recorded steps: Chrome trace JSON, or a picture of the lanes for ``.png``."""
        save_trace(self._engine.trace, Path(path))

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The state in torch's own format: fp32 moments, one entry per trained parameter.

        Before the first step there is none, so the dict is small.  Needs memory for all moments.
        """
        engine = self._engine
        order = {id(p): i for i, p in enumerate(p for g in self.param_groups for p in g["params"])}
        state: dict[int, dict[str, Any]] = {}
        if any(engine.updater.steps):
            engine.settle()
            for unit in engine.parts.units:
                for spec, values in engine.contents.state(unit.index):
                    step = engine.updater.steps[spec.index]
                    if step:
                        number = order[id(engine.parts.parameters[spec.index])]
                        state[number] = {"step": torch.tensor(float(step)), **values}
        start, groups = 0, []
        for group in self.param_groups:
            kept = {k: v for k, v in group.items() if k != "params"}
            kept["params"] = list(range(start, start + len(group["params"])))
            start += len(group["params"])
            groups.append(kept)
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Takes over state in torch's own format (from ``state_dict`` here or of torch's own).

        Parameters are matched by ``param_names`` where groups have them (an export's have), else
        by their place.

        Raises:
            ValueError: other groups or names, or tensors of other shapes; nothing was changed.
        """
        engine = self._engine
        engine.raise_if_unusable()
        groups = state_dict["param_groups"]
        mine = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in groups] != mine:
            raise ValueError(
                f"the state has param groups of {[len(g['params']) for g in groups]} parameters, "
                f"expected {mine}"
            )
        by_id = {
            id(p): state_dict["state"][number]
            for group, loaded in zip(self.param_groups, groups, strict=True)
            for p, number in zip(group["params"], self._numbers(group, loaded), strict=True)
            if number in state_dict["state"]
        }
        self._check_shapes(by_id)
        engine.settle_to_edit()
        for unit in engine.parts.units:
            if unit.trainable:
                engine.contents.fill(unit.index, self._values(by_id, unit.index), first=False)
        for index, p in enumerate(engine.parts.parameters):
            engine.updater.steps[index] = engine.blueprint.rule.steps_taken(by_id.get(id(p), {}))
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update({k: v for k, v in loaded.items() if k not in ("params", "param_names")})

    def _numbers(self, group: Mapping[str, Any], loaded: Mapping[str, Any]) -> list[int]:
        """The numbers that the loaded state has for a group's parameters, in the group's order."""
        numbers: list[int] = list(loaded["params"])
        if "param_names" not in loaded:
            return numbers
        number_of = dict(zip(loaded["param_names"], numbers, strict=True))
        names: dict[int, list[str]] = {id(p): [] for p in group["params"]}
        for name, p in self._engine.model.named_parameters(remove_duplicate=False):
            names.get(id(p), []).append(name)
        for name, p in zip(group.get("param_names", ()), group["params"], strict=False):
            names[id(p)].append(name)
        found = []
        for p in group["params"]:
            match = next((name for name in names[id(p)] if name in number_of), None)
            if match is None:
                raise ValueError(
                    f"the state's param_names lack {names[id(p)][0]!r} in this group, which has "
                    f"{sorted(number_of)[:3]} and others; build the optimizer with the same "
                    "groups, or remove param_names to match by place"
                )
            found.append(number_of.pop(match))
        return found

    def _check_shapes(self, by_id: Mapping[int, Mapping[str, Any]]) -> None:
        known = {"step", "master", *self._engine.blueprint.rule.moments}
        for p in self._engine.parts.parameters:
            for name, value in by_id.get(id(p), {}).items():
                if name not in known:
                    raise ValueError(
                        f"the state has {name!r}; this optimizer's has {sorted(known)}"
                    )
                if isinstance(value, torch.Tensor) and value.dim() and value.shape != p.shape:
                    raise ValueError(
                        f"state {name!r} has shape {tuple(value.shape)}, expected {tuple(p.shape)}"
                    )

    def _values(
        self, by_id: Mapping[int, Mapping[str, Any]], unit: int
    ) -> Callable[[Any], Mapping[str, torch.Tensor] | None]:
        engine = self._engine
        rule = engine.blueprint.rule
        group_of = {spec.index: chunk.group for chunk, spec in engine.parts.units[unit].params}

        def values(spec: Any) -> Mapping[str, torch.Tensor] | None:
            given = by_id.get(id(engine.parts.parameters[spec.index]), {})
            group = group_of[spec.index]
            if group is None:
                return None
            starts = rule.initial(self.param_groups[group])
            master = {} if given.get("master") is None else {"weight": given["master"]}
            return master | {
                name: torch.full(spec.shape, starts.get(name, 0.0))
                if given.get(name) is None
                else given[name]
                for name in rule.moments
            }

        return values

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once wrapped: the plan is made for the groups that were there."""
        if "_engine" in self.__dict__:
            raise OffloadError("add_param_group after wrap is not supported; unwrap and wrap again")
        super().add_param_group(param_group)

    def save(self, path: str | Path) -> None:
        """Commits, and exports the commit to the new folder ``path``: weights as Hugging Face
        safetensors, ``config.json`` if the model has one, and ``optimizer.pt``.

        Example::

            model = LlamaForCausalLM.from_pretrained(path)
            optimizer.load_state_dict(torch.load(f"{path}/optimizer.pt", mmap=True))

        Raises:
            OffloadError: ``path`` is there already, its disk has no room, or there is no durable
                store; nothing was written.
        """
        engine = self._engine
        self._committing("save").commit()
        to_json = getattr(getattr(engine.model, "config", None), "to_json_string", None)
        text = None if to_json is None else str(to_json())
        assert engine.config.nvme is not None
        export_store(engine.config.nvme, Path(path), config=text)

    # -- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends all threads and frees all memory; the model cannot run any more (see ``unwrap``)."""
        self._finalizer()

    def __enter__(self) -> OffloadedOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def accumulate(optimizer: torch.optim.Optimizer, *, final: bool) -> Iterator[None]:
    """Says whether the ``backward()`` inside is the last one of its step.

    For ``update="backward"`` with uneven micro-steps; the other modes need no word, and take it.

    Example::

        for number, batch in enumerate(micro_batches):
            with overspill.accumulate(optimizer, final=number == len(micro_batches) - 1):
                model(batch).loss.backward()
        optimizer.step()

    Raises:
        TypeError: ``optimizer`` does not come from ``wrap``.
        OffloadError: ``final=False``, but the run keeps no gradients between micro-steps.
    """
    if not isinstance(optimizer, OffloadedOptimizer):
        raise TypeError(f"accumulate needs a wrapped optimizer, got {type(optimizer).__name__}")
    with optimizer._engine.stepping.declared(final):
        yield


def unwrap(model: nn.Module) -> nn.Module:
    """Gives back an ordinary model with its trained weights; ends the engine.

    Needs memory for the whole model on its device.  Gradients are dropped.

    Raises:
        OffloadError: the model is not wrapped, or its engine was closed.
    """
    engine = engine_of(model)
    if engine is None:
        raise OffloadError("the model is not wrapped by overspill")
    engine.settle()
    values = [read_weight(engine, index) for index in range(len(engine.parts.parameters))]
    for p, value in zip(engine.parts.parameters, values, strict=True):
        p.grad = None
        p.data = value
    engine.hooks.remove()
    engine.state_hooks.remove()
    engine.close()
    for name in (ATTRIBUTE, "__deepcopy__", "__reduce_ex__"):
        del model.__dict__[name]
    return model


__all__ = ["OffloadedOptimizer", "Rates", "accumulate", "engine_of", "plan", "unwrap", "wrap"]
