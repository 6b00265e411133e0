"""The composition root: builds the parts for one model, owns their lifetime, and runs the step."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from .durable.committing import Committing
from .durable.meta import random_states
from .errors import OffloadError
from .facts.trace import Trace
from .io_engine import OwnedStore
from .measure.calibration import Calibration
from .measure.steps import StepFigures
from .movement.accelerators.base import Accelerator
from .movement.direct import DirectAccess
from .movement.executor import Executor
from .movement.memory import Memory
from .movement.store import Store
from .movement.updates import Updater
from .optim import set_threads
from .planning.blueprint import Blueprint
from .planning.bounds import lane_seconds
from .planning.plan import host_grad_dtype
from .schedule.describe import item_of
from .schedule.ledger import Ledger
from .schedule.messages import Adopt, Freed
from .state.contents import Contents, Parts
from .state.weight_access import Weights
from .training.backward import Backward
from .training.callers import amid_engine
from .training.gradient_tensor import OffloadedGradient
from .training.gradients import GradientCollector
from .training.held_gradients import HeldGradients
from .training.held_slots import HeldSlots
from .training.hooks import ModuleHooks
from .training.modelled_compute import ModelledCompute
from .training.ranges import ProfilerRanges
from .training.residences import Residences
from .training.roster import Roster
from .training.saved import SavedTensors
from .training.stepping import Stepping, judges
from .training.torch_private import StorageWatch, in_backward
from .training.trainer import Trainer

log = logging.getLogger("overspill")
ATTRIBUTE = "_overspill_engine"


class Removable(Protocol):
    """Hooks that can be taken away."""

    def remove(self) -> None: ...


class Engine:
    """One wrapped model.  Never copied or pickled: the weights are not all in the model."""

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Mapping[str, Any]],
        blueprint: Blueprint,
        accelerator: Accelerator,
        calibration: Calibration | None = None,
        store: OwnedStore | None = None,
    ) -> None:
        """``store``: one of the very same layout, to go on in."""
        assert blueprint.plan.detail.layout is not None
        self.model, self.groups, self.blueprint = model, groups, blueprint
        self.config, self.parts, self.layout = (
            blueprint.config, blueprint.parts, blueprint.plan.detail.layout
        )  # fmt: skip
        self.accelerator = accelerator
        self.trace = Trace(ranges=ProfilerRanges(), instant=accelerator.instant)
        self.closed = self.materialized = self.returning = False
        self.roster = Roster(model, groups)
        self.trainer = Trainer()
        self._owner = os.getpid()
        self.state_hooks: Removable  # set by wrap, taken away by unwrap
        self.ledger = Ledger(len(self.parts.parameters), len(self.parts.units))
        self._unit_place: dict[int, tuple[int, int]] = {}
        rates, links = self.config.rates, blueprint.plan.link_bytes
        needed_s = {} if rates is None else lane_seconds(links, rates)
        self.figures = StepFigures(self.trace, needed_s, calibration)
        self.memory: Memory  # taken first
        self._found = store
        self.store: Store | None = None
        self.committing: Committing | None = None
        self.modelled: ModelledCompute | None = None
        self._build()

    # -- construction ---------------------------------------------------------------------------

    def _build(self) -> None:
        """Takes memory and disk, and starts the threads.  On an error nothing stays behind."""
        try:
            regions = self.layout.regions
            self.memory = Memory(self.blueprint.budgets, regions, self.accelerator)
            self.store = self._open_store()
            self.trace.tiers = self.memory.for_trace()
            self._start(self.store)
        except BaseException:
            self._release()
            raise

    def _open_store(self) -> Store:
        disk_bytes = self.blueprint.plan.disk_bytes
        if disk_bytes and self.config.nvme is not None:
            self.memory.reserve_disk(disk_bytes)
        return Store(
            self.config,
            self.layout,
            disk_bytes,
            self._found,
            self.memory.lease,
            self.accelerator.limits,
        )

    def _start(self, store: Store) -> None:
        config, layout, device = self.config, self.layout, self.accelerator.device
        if config.threads is not None:
            set_threads(config.threads)
        update = self.blueprint.update
        self.updater = Updater(
            layout, self.memory.arenas, self.blueprint.rules, self.ledger, config.accumulate,
            judges(config, update),
        )  # fmt: skip
        trainer, held_slots = self.trainer, HeldSlots()

        def before_asking() -> Iterator[Freed]:
            trainer.require()
            return held_slots.freed()

        store.begin(self._facts(), self.trace)
        self.executor = Executor(
            layout, self.memory.arenas, self.accelerator, store.disk, store.extents, self.trace,
            self.updater.work_on, self.updater.visit, self.ledger, before_asking,
            check=os.environ.get("OVERSPILL_VALIDATE") == "1",
            commits=store.writer,
        )  # fmt: skip
        self.direct = DirectAccess(layout, self.executor, store.io, store.extents)
        self.contents = Contents(layout, self.memory.arenas, self.direct)
        self.residences = Residences(self.parts, self.executor, self.accelerator, held_slots)
        self.backward = Backward(
            self.residences, self.trace, lambda: self.weights.settle(), self._backward_over
        )
        self.saved = SavedTensors(
            self.residences, self.ledger.versions, self._index_of, self.backward.enter
        )
        self.stepping = Stepping(
            config, update, self.groups, self.ledger, self.executor, self.updater,
            self.residences, self.saved, self.backward,
            lambda: random_states(device),
        )  # fmt: skip
        if store.writer is not None:
            self.committing = self.stepping.committing = Committing(
                self.model, self.groups, config, device, self.ledger, self.executor,
                self.stepping, self.direct, self.contents, store.writer,
            )  # fmt: skip
        for unit in self.parts.units:
            for place, (_, spec) in enumerate(unit.params):
                self._unit_place[id(self.parts.parameters[spec.index])] = (unit.index, place)

    def _facts(self) -> dict[str, Any]:
        config = self.config
        return {
            "optimizer": self.blueprint.rules[0].name,
            "precision": config.precision, "master": config.master, "moments": config.moments,
            "names": None if config.units is None else list(config.units),
        }  # fmt: skip

    def adopt(self) -> None:
        """Takes weights and state over as the last commit of the store that was opened again has
        them."""
        assert self._found is not None and self.committing is not None
        generation = self._found.last()
        for item, role in zip(self._found.layout.items, generation.roles, strict=True):
            key = item_of(item.key)
            self.executor.tell(Adopt(key, role))
            self.direct.reload(key)
        self.committing.adopt(generation.meta)

    def install(self) -> None:
        """Hooks up the model, once all homes are filled."""
        self.weights = Weights(
            self.parts, self.executor, self.residences, self.stepping, self.contents, self.ledger,
            self.editing, lambda: self.hooks.tidy(), self.trainer.require,
        )  # fmt: skip
        if self.committing is not None:
            self.committing.follow(self.weights.settle, self.weights.renew)
        self.residences.install(self.weights)
        self.stepping.hide_all()
        _live.add(self)
        me = weakref.ref(self)  # p.grad must not keep the engine: such a ring is never collected

        def alive() -> HeldGradients:
            engine = me()
            if engine is None or engine.closed:
                raise OffloadError("the engine of this gradient is closed")
            return engine.held

        self._gradients = alive
        transient = self.blueprint.update == "backward" and self.config.accumulate == 1
        self.collector = GradientCollector(
            self.parts, self.ledger, self.executor, self.accelerator, self.updater, self.backward,
            self.stepping, transient, self._make_grad,
        )  # fmt: skip
        self.stepping.collector = self.collector
        self.held = HeldGradients(
            self.config, self.parts, self.ledger, self.accelerator, self.direct, self.memory.arenas,
            self.updater, self.collector, self.stepping,
        )  # fmt: skip
        self.hooks = ModuleHooks(
            self.model, self.residences, self.saved, self.backward, self.trace,
            self.executor.raise_failure, self.trainer.require, self._before_forward, self._catch_up,
            self.stepping.hide_all,
        )  # fmt: skip
        if self.committing is not None:
            self.committing.ready()
        flops_s = self.accelerator.limits.device_flops_s
        if flops_s is not None:
            executor = self.executor
            self.modelled = ModelledCompute(
                self.model, self.parts, flops_s, lambda: executor.waited_ns
            )

    def _index_of(self, p: torch.Tensor) -> tuple[int, int] | None:
        found = self._unit_place.get(id(p))
        if found is None or not self.residences.streamed[found[0]]:
            return None
        return found

    def _catch_up(self, unit: int) -> None:
        self.trainer.claim()
        self.direct.finish()
        self.weights.settle(self.residences.groups[unit])
        if self.committing is not None and torch.is_grad_enabled() and not in_backward():
            self.committing.seal()  # where parts of the model are called, and not the whole
        self.stepping.show(unit)

    def _before_forward(self) -> None:
        """A forward of the whole model begins."""
        self.trainer.claim()
        self.direct.finish()
        if torch.is_grad_enabled():
            self.roster.check()
        self.weights.settle()
        self.residences.refuse_edits()
        if self.committing is not None:
            self.committing.require_whole()
            if torch.is_grad_enabled():
                self.committing.seal()

    # -- gradients ------------------------------------------------------------------------------

    def _make_grad(self, index: int) -> OffloadedGradient:
        p = self.parts.parameters[index]
        dtype = host_grad_dtype(p.dtype, self.config.accumulate)
        if dtype != p.dtype:
            p.grad_dtype = None  # type: ignore[assignment]
        return OffloadedGradient(p, dtype, index, self._gradients)

    def _backward_over(self) -> None:
        if self.executor.failed or self.closed:
            return
        self.stepping.hide_all()  # what a checkpoint has shown again
        self.collector.deliver_all()
        self.held.renew()
        if self.collector.appeared_any:  # else it was an autograd.grad of something else
            self.collector.appeared_any = False
            self.stepping.backward_over()
        self.trace.compute_pause()

    # -- the step -------------------------------------------------------------------------------

    def step(self) -> None:
        """Updates every parameter that has a gradient."""
        self.trainer.claim()
        self.raise_if_unusable()
        self.hooks.tidy()
        self.direct.finish()
        self.roster.check()
        self.weights.settle()
        self.weights.refuse_joined()
        if self.committing is not None:
            self.committing.require_whole()
        self.trace.compute_pause()
        self.held.settle()
        self.stepping.step()
        self.weights.settle()  # whoever has a tensor over a weight sees what it is now
        self.figures.taken(self.step_count)

    @property
    def step_count(self) -> int:
        """Steps taken."""
        return self.ledger.count

    def settle(self) -> None:
        """Waits for all updates, and until nothing moves; caches are dropped."""
        self.raise_if_unusable()
        self.hooks.tidy()
        self.weights.settle()
        self.stepping.land()
        self.direct.settle()

    @contextmanager
    def editing(self, parts: Parts) -> Iterator[Callable[[int], None]]:
        """Inside, nothing moves, and weights and state may be edited: that belongs to the state
        after the last step.  Gives what is to be called with a unit that was given values that are
        not finite."""
        self.executor.raise_failure()
        self.hooks.tidy()
        for unit in parts:
            self.stepping.refuse_edit(unit)
        self.stepping.land()
        self.direct.settle()
        if self.committing is None:
            yield lambda unit: None
        else:
            with self.committing.editing(parts) as spoil:
                yield spoil

    def spoiled(self, unit: int) -> None:
        """A unit was wrapped with values that are not finite."""
        if self.committing is not None:
            self.committing.spoil(unit)

    # -- state of the whole ---------------------------------------------------------------------

    def dematerialize(self) -> None:
        """The end of ``materialized``.  ``returning`` was set before: where an exception cuts this
        off, the next use does it again."""
        if not self.closed:
            self.residences.take_back(self.weights, self.stepping.hidden)
        self.materialized = self.returning = False

    def raise_if_unusable(self) -> None:
        """Raises after ``close``, after a failure, and inside ``materialized``."""
        if self.returning:
            self.dematerialize()
        if self.materialized:
            raise OffloadError("the model is materialized; leave the `with` block before training")
        self.executor.raise_failure()
        self.trainer.require()

    def _release(self) -> None:
        """Ends and frees all; what fails on the way keeps nothing after it from its end."""
        watches: list[StorageWatch] = []

        def hide() -> None:
            if hasattr(self, "residences"):
                watches.extend(self.residences.close())

        with ExitStack() as stack:  # from the last to the first
            if hasattr(self, "memory"):
                stack.callback(lambda: self.memory.close(watches))
            stack.callback(self.accelerator.close)
            stack.callback(hide)
            for part in (
                self.store,
                getattr(self, "executor", None),
                getattr(self, "direct", None),
            ):
                if part is not None:
                    stack.callback(part.close)
            if self.modelled is not None:
                stack.callback(self.modelled.remove)

    def close(self) -> None:
        """Ends all threads, frees all memory and disk.  A second call does nothing, nor does one in
        a forked child: all that is its parent's."""
        if self.closed or os.getpid() != self._owner:
            return
        if threading.current_thread().name.startswith("overspill") or amid_engine():
            # The collector, or a signal handler, has come by on a thread of the engine's own, or
            # where the engine holds a lock: neither can wait for itself.
            threading.Thread(target=self.close, name="closes-overspill").start()
            return
        if self.materialized and self.committing is not None:
            log.warning(
                "overspill: closed while the model is materialized; the store keeps the last commit"
            )
        if self.step_count:
            log.info(
                "overspill: step %d, the last, took %.3g s: %s",
                self.step_count, self.figures.last.step_s, self.figures.last.explain(),
            )  # fmt: skip
        self.trainer.closes()
        try:
            if self.committing is not None and not (self.executor.failed or self.materialized):
                self.weights.settle()
                self.committing.close()
        finally:
            self.closed = True
            self.collector.remove()
            self._release()

    def forked(self) -> None:
        """This is a forked child: nothing of the engine works here, its memory least of all."""
        self.residences.close()

    def discard(self) -> None:
        """As ``close``, for an engine that was never installed."""
        self.closed = True
        self._release()

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise OffloadError(
            "a wrapped model cannot be copied: its weights are not all in memory; copy "
            "model.state_dict(), or overspill.unwrap(model) first"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise OffloadError(
            "a wrapped model cannot be pickled: its weights are not all in memory; save "
            "model.state_dict() instead"
        )


def engine_of(model: nn.Module) -> Engine | None:
    """The engine of a wrapped model, else ``None``."""
    engine = model.__dict__.get(ATTRIBUTE)
    assert engine is None or isinstance(engine, Engine)
    return engine


_live: weakref.WeakSet[Engine] = weakref.WeakSet()  # installed


def _forked() -> None:
    for engine in list(_live):
        engine.forked()


os.register_at_fork(after_in_child=_forked)
