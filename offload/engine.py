"""The composition root: builds all parts of the engine of one model, and closes them together."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from .activations.activation_tuner import ActivationTuner
from .activations.saved_tensor_hooks import SavedTensors
from .activations.tiles import TiledLayers
from .closeable import Closeable
from .config import OffloadConfig
from .durable.commits import Commits
from .durable.meta import random_states
from .errors import clean_up
from .facts.stats import MemoryStats, Stats
from .facts.tier import Tier
from .facts.trace import Trace
from .grads.backward_update_policy import BackwardUpdatePolicy, Declared
from .grads.gradient_tensor import GradientDoor, gradients_by
from .grads.gradients import GradientCollector
from .grads.held_gradients import HeldGradients
from .grads.update_waiter import UpdateWaiter
from .logits.heads import DeferredHeads
from .loop import Loop
from .measure.calibration import Calibration
from .measure.steps import StepFigures
from .model_marks import ENGINE, MADE, ModelMarks, hold
from .params.backward import Backward
from .params.conversions import Conversions, in_engine
from .params.expert_routing import Choices
from .params.onloaded_units import OnloadedUnits
from .params.pickling import Pickling
from .params.resident_param_guard import ResidentParamGuard
from .planning.bounds import move_seconds
from .planning.budgets import Untaken
from .planning.models import entries
from .planning.plan import Plan
from .planning.stand_ins import hooked_model
from .private import buffers_private, torch_private
from .private.handles import Removable
from .schedule.units import ParamSpec
from .state.averages import AroundExchange, Averaged, Averages
from .state.coupled_steps import CoupledSteps
from .state.edits import Edits
from .state.engine_resources import EngineResources
from .state.importing import Others, open_weights
from .state.materializing import Materialized, Materializes, Materializing
from .state.model_state import StateHooks
from .state.param_access import ParamAccess
from .state.torch_state import Groups, Make, OptimizerState
from .state.unmanaged import current_names, unmanaged_tensors
from .state.weight_files import match_files
from .step.external_forward import ExternalForwardAdapter
from .step.forward_stack import ForwardStack
from .step.forwards import Forwards
from .step.hooks import ModuleHooks
from .step.modelled_compute import ModelledCompute
from .step.repeats import Repeats
from .step.stepping import Stepping

log = logging.getLogger("overspill")
T = TypeVar("T")


class Engine(Closeable):
    """The engine of one wrapped model; each part gets those that it uses when it is made."""

    def __init__(
        self, model: nn.Module, groups: Sequence[dict[str, Any]], resources: EngineResources,
        calibration: Calibration | None, hooks: list[Removable],
    ) -> None:  # fmt: skip
        """Build all parts; every installed hook is added to ``hooks`` at once."""
        runtime, contents, trainer = resources.runtime, resources.contents, resources.trainer
        config, blueprint, parts = runtime.config, runtime.blueprint, runtime.parts
        executor, updater, ledger = runtime.executor, runtime.updater, runtime.ledger
        accelerator, writer = runtime.accelerator, runtime.store.writer
        units = OnloadedUnits(runtime, resources.slot_refs, resources.stubs)
        runtime.when_still(units.close)
        backward = Backward(units, runtime.trace)
        tuner = ActivationTuner(runtime, model, backward)
        saved = SavedTensors(units, ledger.versions, backward, tuner.saved_offloader)
        stack = ForwardStack(units, saved, backward, trainer, entries(model).values())
        guard = ResidentParamGuard(units, executor, ledger)
        waiter = UpdateWaiter(config, executor, ledger)
        commits = None
        if writer is not None:
            commits = Commits(model, groups, runtime, writer, guard, waiter, contents)
        edits = Edits(executor, stack, guard, waiter, runtime.direct, commits)
        weights = ParamAccess(units, guard, contents, ledger, stack, trainer, edits)
        units.install(weights)
        guard.hide_all()
        policy = BackwardUpdatePolicy(
            config, blueprint.update, groups, ledger, updater, units, saved, guard, waiter, commits,
            weights.before_use,
        )  # fmt: skip
        weights.require_gradients_unused = policy.require_unused
        door = GradientDoor()
        collector = GradientCollector(
            ledger, updater, units, backward, policy,
            blueprint.update == "backward" and config.accumulate == 1,
            gradients_by(door, parts, config.accumulate),
        )  # fmt: skip
        while_open: list[Removable] = [collector]
        hooks.append(collector)
        held = HeldGradients(
            config, parts, ledger, accelerator, runtime.direct, runtime.memory.arenas, updater,
            collector, policy,
        )  # fmt: skip
        door.open(held)
        stepping = Stepping(
            blueprint, groups, ledger, updater, units, backward, guard, waiter, policy, collector,
            commits, weights.renew, lambda: random_states(accelerator.device),
            CoupledSteps(runtime, groups, contents, held).compute,
        )  # fmt: skip
        materializing = Materializing(runtime, units, guard, weights)
        averages = Averages(runtime, contents, weights, units, guard, edits)
        loop = Loop(
            model, groups, runtime, trainer, stack, units, guard, waiter, weights, materializing,
            averages, policy, collector, held, stepping, commits, tuner,
            Repeats(stack, backward, collector, ledger, tuner, accelerator),
        )  # fmt: skip
        backward.when_begun(loop.backward_begins)
        backward.when_over(loop.backward_over)
        backward.when_left(collector.left)
        seen = ModuleHooks(model, units, backward, stack, runtime.trace, loop, tuner)
        hooks += [seen, Choices(hooked_model(model), units)]
        self.external_forward = ExternalForwardAdapter(
            ledger, seen, loop, units, collector, weights, while_open
        )
        if (flops_s := accelerator.limits.device_flops_s) is not None:
            while_open.append(ModelledCompute(model, parts, flops_s, executor.compute))
            hooks.append(while_open[-1])
        hooks.append(StateHooks(hooked_model(model), runtime, weights, guard, trainer, commits))
        hooks.append(DeferredHeads.of_engine(blueprint.heads, parts, ledger.versions))
        named, versions = config.tile != "auto", ledger.versions
        hooks.append(TiledLayers.of_engine(blueprint.tiled, parts, versions, named=named))
        needed_s = move_seconds(runtime.blueprint.plan.link_bytes, runtime.config.rates)
        self._figures = StepFigures(runtime.trace, needed_s, calibration)
        self.state = loop.watch(OptimizerState(
            model, groups, runtime, contents, weights, guard, edits, averages, loop.quiesce
        ))  # fmt: skip
        self.model, self.runtime, self._loop, self._weights = model, runtime, loop, weights
        self._contents, self._onloaded_units, self.materializing = contents, units, materializing
        # `hooks` report a closed engine until `let_go`; `while_open` works only with an open one.
        self._while_open, self._hooks, self._door = while_open, hooks, door
        self.lives()  # last: from here on there are resources to close

    @classmethod
    def open(
        cls,
        model: nn.Module,
        groups: Sequence[dict[str, Any]],
        resources: EngineResources,
        calibration: Calibration | None = None,
    ) -> Engine:
        """Install hooks on a model whose weights and state are in ``resources``, which the caller
        closes after an error; no hooks are left then."""
        hooks: list[Removable] = []
        try:
            engine = cls(model, groups, resources, calibration, hooks)
            runtime = resources.runtime
            hooks.append(Pickling(model))
            hooks.append(Conversions(model, in_engine, lambda: runtime.closed))
            if not groups:
                inside = partial(getattr, engine._loop, "entries_inside")
                hooks.append(Forwards(model, runtime.executor.protocol, engine.forwarded, inside))
            engine.may_close()
            marks = ModelMarks(model, lambda: engine.ordinary)
            hooks.append(marks)
            marks.put(engine)
        except BaseException:
            for each in hooks:
                each.remove()
            raise
        return engine

    @property
    def ordinary(self) -> bool:
        """Whether parameters are ordinary ones, as in ``materialized``."""
        return self.materializing.active

    def model_holds(self, made: object) -> None:
        """Store what ``wrap`` returns, so that it can be found from the model."""
        hold(self.model, made)

    @property
    def made(self) -> Any:
        """What ``wrap`` returned for the model: an optimizer, or an ``OffloadedInference``."""
        return self.model.__dict__.get(MADE)

    @property
    def folders(self) -> tuple[Path, ...]:
        """The directories given as ``nvme``."""
        return self.config.nvme or ()

    @property
    def store_directories(self) -> tuple[Path, ...]:
        """The directories that no other store may be in while this engine is open."""
        io = self.runtime.store.io
        return () if io is None else io.owned_directories

    def untaken(self) -> Untaken:
        """Return what the engine may still allocate on this machine within its budgets."""
        return self.runtime.untaken()

    def let_go(self) -> None:
        """Remove hooks and attributes from the model."""
        for each in self._hooks:
            each.remove()

    @property
    def plan(self) -> Plan:
        """The plan that the run follows, with ``pageable_bytes`` as measured."""
        plan, pageable = self.runtime.blueprint.plan, self.runtime.memory.pageable_bytes
        if not pageable:
            return plan
        return replace(plan, detail=replace(plan.detail, pageable_bytes=pageable))

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self.runtime.accelerator.device

    @property
    def config(self) -> OffloadConfig:
        """The options that were given."""
        return self.runtime.config

    @property
    def stats(self) -> Stats:
        """Figures of the last step."""
        return self._figures.last

    @property
    def memory(self) -> Mapping[Tier, MemoryStats]:
        """Budget, held and peak bytes of every tier."""
        return self.runtime.memory.stats()

    @property
    def trace(self) -> Trace:
        """The recorded steps."""
        return self.runtime.trace

    # -- training -------------------------------------------------------------------------------

    def step(self, groups: Container[int] | None = None) -> None:
        """Update every parameter that has a gradient.

        Args:
            groups: the param groups of the optimizers that take a step; ``None``: all.
        """
        self._loop.step(groups)
        self._figures.taken(self.step_count)

    def check_before_use(self, check: weakref.WeakMethod[Callable[[], None]]) -> None:
        """Call ``check`` before each forward, and before weights, gradients or state are used."""
        self._loop.check_before_use(check)

    def forwarded(self, count: int, tokens: int) -> None:
        """Record, for inference, that forward number ``count`` with this many tokens has ended."""
        self._figures.taken(count, tokens)

    @property
    def step_count(self) -> int:
        """The number of steps taken."""
        return self.runtime.ledger.count

    def require_gradients_unused(self) -> None:
        """Raise if gradients cannot be dropped, because a step that has begun has applied them."""
        if not self.finished:
            self._weights.require_gradients_unused()

    def gradients_dropped(self) -> None:
        """Restart the micro-steps of this step, since ``zero_grad`` has dropped all gradients."""
        if not self.finished:
            self._loop.gradients_dropped()

    @property
    def returns(self) -> int:
        """How often the state was set back to that of a commit."""
        return self.runtime.ledger.returns

    def most_steps(self, params: Collection[torch.Tensor]) -> int:
        """Return the largest number of steps that one of some parameters has taken."""
        mine = set(map(id, params))
        pairs = zip(self.parameters, self.runtime.ledger.steps, strict=True)
        return max((steps for p, steps in pairs if id(p) in mine), default=0)

    def declared(self, final: bool) -> Declared:
        """Declare every backward in this block to be (or not to be) the last one of the step."""
        return self._loop.declared(final)

    def commit(self, what: str = "commit") -> None:
        """Commit; see ``OffloadedOptimizer.commit``.  ``what`` names the user's call in errors."""
        self._loop.commit(what)

    def rollback(self) -> Any:
        """Return to the last commit; see ``OffloadedOptimizer.rollback``."""
        return self._loop.rollback()

    def restart(self) -> Any:
        """Restore random generators from the last commit, and return its ``extra``."""
        return self._loop.restart()

    def make_room(self) -> bool:
        """See ``EngineHandle.make_room``."""
        return self._loop.make_room()

    def sleep(self, *, host: bool) -> None:
        """See ``EngineHandle.sleep``."""
        self._loop.sleep(host=host)

    def wake(self) -> None:
        """See ``EngineHandle.wake``."""
        self._loop.wake()

    def quiesce(self) -> None:
        """Wait for all updates and transfers, and drop caches."""
        self._loop.require_usable()
        self._loop.write_copies()
        self._loop.quiesce()

    def load_state(self, state_dict: Mapping[str, Any]) -> None:
        """Load optimizer state; see ``OffloadedOptimizer.load_state_dict``."""
        self._loop.require_usable()
        self.state.from_torch(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """Return optimizer state; see ``OffloadedOptimizer.state_dict``."""
        return self.state.to_torch()

    def call_optimizer(self, method: str, groups: Groups) -> None:
        """Call ``train`` or ``eval`` of the user's optimizer that has these param groups."""
        self.quiesce()
        self.state.call(method, groups)

    def streamed_state(self, make: Make) -> dict[str, Any]:
        """Return ``state_dict`` with what ``make`` returns for each tensor; see ``streamed``."""
        return self.state.streamed(make)

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The managed parameters, in the order of their indices."""
        return self.runtime.parts.parameters

    def has(self, module: nn.Module) -> bool:
        """Return whether the engine's model is or contains ``module``."""
        return any(each is module for each in self.model.modules())

    @property
    def trained(self) -> list[ParamSpec]:
        """The trained parameters, in the order in which ``masters`` yields them."""
        chunks = (chunk for unit in self.runtime.parts.units for chunk in unit.chunks)
        return [spec for chunk in chunks if chunk.group is not None for spec in chunk.params]

    def read(self, index: int) -> torch.Tensor:
        """Return a copy of a parameter's current weight."""
        return self._weights.read(index)

    def named_weights(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``overspill.named_weights``; ``model``: the engine's, or a part of it."""
        try:
            yield from self._by_name(model, self._weights.read)
        finally:
            self._contents.drop_cached_unit()

    def _by_name(
        self, model: nn.Module, read: Callable[[int], torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters that a model has now, by name.

        Those of the engine come first, unit by unit, as ``read`` returns them by index.
        """
        parts = self.runtime.parts
        names = current_names(model, parts.names, parts.parameters)
        for unit in parts.units:
            for _, spec in unit.params:
                if (name := names.get(id(parts.parameters[spec.index]))) is not None:
                    yield name, read(spec.index)
        managed = frozenset(map(id, parts.parameters))
        others = unmanaged_tensors(model, managed)
        for name, value in others.items():
            if isinstance(value, nn.Parameter):
                yield name, value.detach().clone()

    def load_weights(self, path: Path, *, hub: bool = True, part: nn.Module | None = None) -> None:
        """Load all weights and persistent buffers from safetensors files.

        Args:
            hub: whether the files use the Hub's tensor names, where the model has others.
            part: the module of the model that the files are for; default: the model.

        Raises:
            ValueError: a parameter is missing from the files, or has another shape; nothing was
                changed. Or a file turns out to be damaged while it is read; then some weights were
                changed.
        """
        model = self.model if part is None else part
        files = open_weights(path, model if hub else None)
        names = match_files(files, model, self.parameters)
        others = Others(files, model, set(names.values()), set(map(id, self.parameters)))
        self._loop.require_usable()
        self._weights.load_all({index: partial(files.read, n) for index, n in names.items()})
        others.load()

    def masters(self) -> Iterator[tuple[ParamSpec, torch.Tensor]]:
        """Yield the exact fp32 value of every trained parameter, unit by unit."""
        self.quiesce()
        for unit in self.runtime.parts.units:
            yield from self._contents.masters(unit.index)

    def materialized(
        self, model: nn.Module, given: T, *, writeback: bool, by: Materializes | None = None
    ) -> Materialized[T]:
        """See ``overspill.materialized``.  ``by``: what begins and ends the block, if not this."""
        return Materialized(
            by or self.materializing, self._loop.require_usable, model, given, writeback=writeback
        )

    def averaged(self, model: nn.Module, around: AroundExchange | None = None) -> Averaged:
        """See ``OffloadedOptimizer.averaged`` and ``Averaged``."""
        return Averaged(self.state.averages, self._loop.require_usable, model, around)

    def require_average(self) -> None:
        """Raise ``OffloadError`` unless averages are kept."""
        self.state.averages.require_kept()

    def average(self, index: int) -> torch.Tensor:
        """Return the fp32 average of a parameter, or its weight if it has no average."""
        self.require_average()
        self.quiesce()
        average = self.state.averages.read(index)
        return self._weights.read(index) if average is None else average

    def named_averages(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``OffloadedOptimizer.named_averages``."""
        yield from self._by_name(self.model, self.average)

    def give_back(self) -> None:
        """Return all parameters to ordinary ones with their weights; must be followed by close."""
        self.quiesce()  # also ends a `materialized` block that an exception interrupted
        units = range(len(self.runtime.parts.units))
        values = self._weights.read_all(units)
        for p in self.parameters:
            torch_private.set_grad(p, None)
        self._onloaded_units.give_away(values, units)
        buffers_private.give_back(self.model)
        self.let_go()

    def leave(self) -> None:
        """Remove hooks that an interrupted forward has left on the calling thread."""
        self._loop.leave()

    def finish(self) -> None:
        """Commit the last step if possible, end all threads, and free memory and disk space."""
        if self.step_count:
            log.info(
                "overspill: step %d, the last, took %.3g s: %s",
                self.step_count, self.stats.step_s, self.stats.explain(),
            )  # fmt: skip
        raised: BaseException | None = None
        try:
            self._loop.end(self.state)
        except BaseException as error:
            raised = error
            raise
        finally:
            clean_up(self._close_parts, "the end of the engine's threads", raised)
            del raised

    def _close_parts(self) -> None:
        self._door.close()
        for each in self._while_open:
            each.remove()
        self.runtime.close()

    @property
    def finished(self) -> bool:
        """Whether the engine is closed."""
        return self.runtime.closed

    def forked(self) -> None:
        """Invalidate the engine in a forked child, where its memory and threads are unusable."""
        self._onloaded_units.close()


def engine_of(model: nn.Module) -> Engine | None:
    """Return the engine of a wrapped model, or ``None``."""
    engine = model.__dict__.get(ENGINE)
    assert engine is None or isinstance(engine, Engine)
    return engine
