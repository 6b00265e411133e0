"""The optimizer that ``wrap`` returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from .durable.export import export_model, export_store
from .durable.hub import files_of
from .engine import Engine
from .engine_handle import EngineHandle
from .errors import OptimizerStateError
from .grads.backward_update_policy import Declared
from .model_marks import MADE
from .optim.averaged import DECAY, check_decay
from .optim.formats import as_weight
from .paths import as_path
from .private import optimizer_private, torch_private
from .private.reentrancy import refuse_reentry
from .state.averages import Averaged
from .state.importing import open_state
from .state.lazy_state import LazyState
from .state.torch_state import Make

Given = TypeVar("Given", bound=torch.optim.Optimizer)


class OffloadedOptimizer(EngineHandle, torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` whose parameters and state live on several tiers.

    ``param_groups`` is the same list as in the wrapped optimizer, and is read at every step, so
    schedulers work unchanged.  This is a context manager; ``close`` also runs at interpreter exit,
    and when neither the model nor the optimizer is in use any more.
    """

    def __init__(self, engine: Engine, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, dict(inner.defaults))
        self.param_groups = inner.param_groups
        self.state = LazyState(engine.state)  # type: ignore[assignment]
        for before in optimizer_private.step_hooks(inner, before=True):
            self.register_step_pre_hook(before)
        for after in optimizer_private.step_hooks(inner, before=False):
            self.register_step_post_hook(after)
        optimizer_private.move_state_hooks(inner, self)
        for method in ("train", "eval"):  # of schedule-free optimizers; trainers look for them
            if callable(getattr(inner, method, None)):
                self.__dict__[method] = partial(engine.call_optimizer, method, self.param_groups)
        self._engine = engine

    def __setattr__(self, name: str, value: Any) -> None:
        mine = self.__dict__.get(name)
        if name == "state" and "_engine" in self.__dict__ and value is not mine and not value:
            self.state.clear()  # code resets it by ``optimizer.state = defaultdict(dict)``
            return
        if name in ("state", "param_groups") and "_engine" in self.__dict__ and value is not mine:
            raise OptimizerStateError(
                f"optimizer.{name} cannot be replaced, since the engine holds it; change what is "
                "there (group['lr'] = ..., optimizer.state[p][name] = ...), assign an empty dict "
                "to optimizer.state to reset it, or use load_state_dict"
            )
        super().__setattr__(name, value)

    def __setstate__(self, state: Mapping[str, Any]) -> NoReturn:
        raise OptimizerStateError(
            "a wrapped optimizer cannot take over the state of a pickled one (__setstate__), since "
            "the engine holds it; use optimizer.load_state_dict(other.state_dict())"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise OptimizerStateError(
            "a wrapped optimizer cannot be copied or pickled, since the engine holds its state; "
            "copy or save optimizer.state_dict()"
        )

    # -- training -------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient; return the closure's result, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_step()
        return loss

    @torch_private.without_grad
    def _take_step(self) -> None:
        self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero.

        Raises:
            OffloadError: ``update="backward"`` has applied them, and no step was taken since.
        """
        self._engine.require_gradients_unused()
        if set_to_none:
            for group in self.param_groups:
                torch_private.drop_grads(group["params"])
        else:
            super().zero_grad(set_to_none=False)
        if len(self.all_optimizers) == 1:
            self._engine.gradients_dropped()

    def accumulate(self, *, final: bool) -> Declared:
        """Declare whether the ``backward()`` in this block is the last one of its step.

        Only ``update="backward"`` with uneven micro-steps needs this; other modes accept it.

        Example::

            for number, batch in enumerate(micro_batches):
                with optimizer.accumulate(final=number == len(micro_batches) - 1):
                    model(batch).loss.backward()
            optimizer.step()

        Raises:
            OffloadError: ``final=False``, but the run keeps no gradients between micro-steps.
        """
        return self._engine.declared(final)

    @property
    def all_optimizers(self) -> Sequence[OffloadedOptimizer]:
        """All optimizers of the same ``wrap``, in the order in which they were given."""
        return (self,)

    @property
    def step_count(self) -> int:
        """The number of steps taken since ``wrap``."""
        return self._engine.step_count

    # -- commits --------------------------------------------------------------------------------

    def commit(self) -> None:
        """Make the present state durable now; return when it is.

        Raises:
            OffloadError: there is no durable store, or the step is not complete.
            IoError: a write failed; the previous commit is intact.
        """
        refuse_reentry()
        self._engine.commit()

    def rollback(self) -> Any:
        """Return to the last commit: weights, state, step counts and hyper-parameters.

        Gradients are dropped.  Random generators are not changed.

        Returns:
            What ``extra`` returned when that commit was sealed.
        """
        refuse_reentry()
        return self._engine.rollback()

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the state in torch's format: fp32 moments, one entry per trained parameter.

        Parameters have no entry before their first step.  Needs memory for all moments.
        """
        return optimizer_private.state_with_hooks(self, self._state)

    def _state(self) -> dict[str, Any]:
        return self._engine.state_dict()

    def streamed_state(self, make: Make) -> dict[str, Any]:
        """Return ``state_dict()`` with what ``make`` returns for each tensor, in place of it.

        Args:
            make: called with a name, a shape, and a function that reads the tensor.
        """
        return self._engine.streamed_state(make)

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any] | str | os.PathLike[str]
    ) -> None:
        """Load state in torch's format, from ``state_dict`` of this or of a torch optimizer.

        A path names a file of such a state, an export, or a folder of
        ``torch.distributed.checkpoint``; it is read tensor by tensor.

        Parameters are matched by ``param_names`` if groups have them (those of exports do), else by
        position.

        Raises:
            ValueError: groups, names or tensor shapes differ; nothing was changed.
        """
        if not isinstance(state_dict, Mapping):
            folder = as_path(state_dict, "state_dict, which is no dict,")
            state_dict = open_state(folder, self._engine.model, self.param_groups)
        optimizer_private.load_with_hooks(self, state_dict, self._load)

    def _load(self, state: Mapping[str, Any]) -> None:
        self._engine.load_state(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ``OffloadError`` once wrapped, because the plan is made for the existing groups."""
        if "_engine" in self.__dict__:
            raise OptimizerStateError(
                "add_param_group after wrap is not supported, since the plan is made for the "
                "groups that were there; call it before wrap, or keep state = "
                "optimizer.state_dict(), call overspill.unwrap(model), wrap the model again with "
                "an optimizer that has all groups (another nvme=, if the store is durable), and "
                "call its load_state_dict(state)"
            )
        super().add_param_group(param_group)

    def save(self, path: str | Path) -> None:
        """Commit, and export the commit to the new folder ``path``.

        The folder has the weights as Hugging Face safetensors, with the Hub's names if it is a
        transformers model, ``config.json`` if the model has one, and ``optimizer.pt``.

        Example::

            model = LlamaForCausalLM.from_pretrained(path)
            optimizer.load_state_dict(torch.load(f"{path}/optimizer.pt", mmap=True))

        Raises:
            OffloadError: ``path`` exists already, its disk has too little space, or there is no
                durable store; nothing was written.
        """
        refuse_reentry()
        out = as_path(path, "path")
        model, config = self._engine.model, self._engine.config
        self._engine.commit("save")
        assert config.nvme is not None
        export_store(config.nvme, out, split=partial(files_of, model), weights=config.weight_files)

    # -- averages -------------------------------------------------------------------------------

    def averaged(self) -> Averaged:
        """Compute with the averages instead of the weights in this block.

        For evaluation, generation and ``model.state_dict()``; a forward that would train, a step or
        a commit raises.  Writes to a parameter change its average.  At both ends the optimizer's
        state is read and written once, with additional memory for a single unit.

        Example::

            optimizer = overspill.wrap(model, overspill.ema(AdamW(model.parameters()), 0.999))
            ...
            with optimizer.averaged(), torch.no_grad():
                validate(model)

        Raises:
            OffloadError: no average is kept (see ``overspill.ema``), or the model is running.
        """
        return self._engine.averaged(self._engine.model)

    def named_averages(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the averages of all weights, in fp32 on the CPU.

        This is otherwise like ``overspill.named_weights``.  A parameter that is not trained, or has
        taken no step, comes with its weight.

        Raises:
            OffloadError: no average is kept.
        """
        return self._engine.named_averages()

    def save_average(self, path: str | Path) -> None:
        """Write the averages to the new folder ``path`` in the format of ``save``.

        They have the dtypes of the weights.

        Raises:
            OffloadError: no average is kept, ``path`` exists already, or its disk has too little
                space; nothing was written.
        """
        out, engine = as_path(path, "path"), self._engine
        index = {id(p): number for number, p in enumerate(engine.parameters)}

        def read(t: torch.Tensor) -> torch.Tensor:
            if id(t) not in index:
                return t.detach().clone()
            return as_weight(engine.average(index[id(t)]), t.dtype)

        engine.require_average()
        export_model(engine.model, out, engine.step_count, read)


def optimizer_of(model: nn.Module) -> OffloadedOptimizer | None:
    """Return the optimizer that ``wrap`` returned for a model, or ``None`` if it is not wrapped."""
    made = model.__dict__.get(MADE)
    return made if isinstance(made, OffloadedOptimizer) else None


def accumulate(optimizer: torch.optim.Optimizer, *, final: bool) -> Declared:
    """Call ``optimizer.accumulate(final=...)`` of an optimizer returned by ``wrap``.

    Raises:
        TypeError: ``optimizer`` was not returned by ``wrap``.
    """
    if isinstance(optimizer, OffloadedOptimizer):
        return optimizer.accumulate(final=final)

    def check() -> None:
        raise TypeError(f"accumulate needs a wrapped optimizer, got {type(optimizer).__name__}")

    return Declared(check, nullcontext(enter_result=True))


def ema(optimizer: Given, decay: float) -> Given:
    """Keep an exponential moving average of the weights, as additional state on the tiers.

    Call it before ``wrap``.  The average takes 4 bytes per parameter, and is committed, resumed and
    rolled back with the other state.  After each step that updates a parameter, ``average += (1 -
    decay) * (weight - average)`` in fp32, with its master if it has one.  The first average is the
    weight after the first step, as in ``torch.optim.swa_utils``.  See
    ``OffloadedOptimizer.averaged``, ``named_averages`` and ``save_average``.

    The decay is a hyper-parameter of each param group, ``"average_decay"``, read at every step.
    For an optimizer that is already wrapped and keeps averages, this sets it.

    Returns:
        ``optimizer``.

    Raises:
        TypeError: ``optimizer`` is not a torch optimizer.
        ValueError: ``decay`` is not at least 0 and less than 1.
        OffloadError: the optimizer is wrapped, and keeps no average.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"ema takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
    check_decay(decay)
    if isinstance(optimizer, OffloadedOptimizer):
        optimizer._engine.require_average()
    for group in optimizer.param_groups:
        group[DECAY] = decay
    optimizer.defaults[DECAY] = decay
    return optimizer
