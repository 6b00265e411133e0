"""``accelerate`` loops whose models and optimizers are wrapped.

Use ``OffloadAccelerator`` in place of ``accelerate.Accelerator``, with the options of ``wrap``::

    accelerator = OffloadAccelerator(overspill={"nvme": "/scratch/run"})
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

``prepare`` then wraps the model: with one process before it is prepared, and with several after
accelerate has sharded it by FSDP2 or put it into ``DistributedDataParallel``.

With one process, models can also be wrapped before ``prepare``::

    accelerator = OffloadAccelerator()
    optimizer = overspill.wrap(
        model, torch.optim.AdamW(model.parameters()), nvme="/scratch/run", durable=False
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The rest of the loop stays unchanged.  ``durable=False``: the loop saves and resumes checkpoints of
its own, so overspill need not commit each step as well.  With an ordinary ``Accelerator``, pass
``device_placement=[False, False, True]`` to ``prepare``, and save and load with the functions here:
``accelerator.save_state`` and ``load_state`` hold all weights and state in memory at once.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from accelerate.accelerator import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils.constants import MODEL_NAME, OPTIMIZER_NAME, SAFE_MODEL_NAME
from safetensors.torch import load_model
from torch import nn

from ..api import wrap as wrap
from ..config import OffloadConfig
from ..durable.files import is_of_weights, write_safetensors, write_torch
from ..durable.hub import of_state_dict
from ..durable.tensors import lazy
from ..engine import Engine
from ..errors import LifecycleError
from ..io_engine.atomic_files import make_folder, remove_abandoned, replacing, replacing_folder
from ..open_engines import open_engines
from ..optimizer import OffloadedOptimizer
from .checkpoints import newest_complete

log = logging.getLogger("overspill")
CHECKPOINTS, FOLDER = "checkpoints", "checkpoint_"  # as accelerate names them
REQUIRED = ("random_states_0.pkl",)  # written after all else of accelerate's
_OF_STATE = re.compile(
    r"(model(_\d+)?\.safetensors|pytorch_model(_\d+)?\.bin|(optimizer|scheduler|sampler)(_\d+)?\.bin"
    r"|dl_state_dict(_\d+)?\.bin|scaler\.pt|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl)"
)


class OffloadAccelerator(Accelerator):
    """``accelerate.Accelerator`` that leaves wrapped models and optimizers where they are.

    ``prepare`` places everything else as usual.  If any model is wrapped, ``save_state`` and
    ``load_state`` write and read the usual files tensor by tensor; see the functions below.  The
    names in the files are those of the model without ``torch.compile``.  Models on several ranks
    have accelerate's own files.
    """

    def __init__(self, *args: Any, overspill: Mapping[str, Any] | None = None, **more: Any) -> None:
        """
        Args:
            overspill: options of ``wrap``, which ``prepare`` calls; ``None``: it wraps nothing.
                ``durable`` is off by default.

        Raises:
            TypeError, ValueError: an option is unknown, or has an invalid value.
        """
        self._overspill = None if overspill is None else {"durable": False, **overspill}
        OffloadConfig(**(self._overspill or {}))  # raises before anything is prepared
        super().__init__(*args, **more)

    def prepare(self, *args: Any, **more: Any) -> Any:
        """Prepare as accelerate does, and wrap a model with its optimizer, if options were given.

        Raises:
            ValueError: there are options, and several models, or several optimizers.
        """
        again = prepared_again(self, super().prepare, args, **more)
        if again is not None:
            return again
        kinds = [isinstance(each, torch.optim.Optimizer) for each in args]
        if self._overspill is None or not any(kinds):
            return super().prepare(*args, **more)
        model, optimizer = _one_of_each(args, torch.optim.Optimizer)
        if self.num_processes > 1:
            prepared = super().prepare(*args, **more)
            wrap_prepared(prepared, self._overspill)
            return prepared
        made = wrap(model, optimizer, **self._overspill)
        return super().prepare(*(made if each is optimizer else each for each in args), **more)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        placed = device_placement if _engine_over(_plain(self, model)) is None else False
        prepared: nn.Module = super().prepare_model(model, placed, evaluation_mode)
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        placed = False if isinstance(optimizer, OffloadedOptimizer) else device_placement
        return super().prepare_optimizer(optimizer, placed)

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **more: Any
    ) -> str:
        more["safe_serialization"] = safe_serialization
        if self._any_wrapped():
            return _save_state(self, super().save_state, output_dir, more)
        folder: str = super().save_state(output_dir, **more)
        return folder

    def load_state(
        self, input_dir: str | None = None, load_kwargs: Any = None, **more: Any
    ) -> None:
        load = super().load_state
        if self._any_wrapped():
            _load_state(self, load, input_dir, {"load_kwargs": load_kwargs, **more})
        else:
            load(input_dir, load_kwargs, **more)

    def _any_wrapped(self) -> bool:
        return any(_engine_over(_plain(self, each)) is not None for each in self._models)


def wrap_prepared(prepared: Sequence[Any], options: Mapping[str, Any]) -> OffloadedOptimizer:
    """Wrap the model of a rank after accelerate has prepared it for several, and let accelerate's
    optimizer step what ``wrap`` returns.

    Args:
        prepared: what ``prepare`` has returned, with one model and one optimizer.
        options: of ``wrap``.

    Raises:
        ValueError: there is not one of each.
    """
    model, accelerated = _one_of_each(prepared, AcceleratedOptimizer)
    made: OffloadedOptimizer = wrap(model, accelerated.optimizer, **options)
    accelerated.optimizer = made
    return made


def prepared_again(
    accelerator: Accelerator, prepare: Callable[..., Any], args: Sequence[Any], *,
    device_placement: Sequence[bool] | None = None,
) -> Any | None:  # fmt: skip
    """Prepare objects among which is an optimizer that was prepared and wrapped before.

    Models and optimizers that are prepared stay as they are: an accelerator that was emptied
    (``free_memory``) gets them again, but must not shard again.

    Args:
        prepare: prepares the others.

    Returns:
        All of them, as ``Accelerator.prepare`` does; ``None``: no optimizer was wrapped before.
    """
    optimizers = [each for each in args if isinstance(each, AcceleratedOptimizer)]
    if not any(isinstance(each.optimizer, OffloadedOptimizer) for each in optimizers):
        return None
    new = [not _is_prepared(each) for each in args]
    if device_placement is not None:
        device_placement = list(compress(device_placement, new))
    found = prepare(*compress(args, new), device_placement=device_placement) if any(new) else ()
    rest = iter(found if isinstance(found, tuple) else (found,))
    for each in filter(_is_prepared, args):
        is_model = isinstance(each, nn.Module)
        known = accelerator._models if is_model else accelerator._optimizers
        if all(each is not other for other in known):
            known.append(each)
    everything = tuple(
        next(rest) if is_new else each for each, is_new in zip(args, new, strict=True)
    )
    return everything if len(everything) > 1 else everything[0]


def _is_prepared(each: Any) -> bool:
    """Return whether something is a model or an optimizer that accelerate has prepared."""
    if isinstance(each, AcceleratedOptimizer):
        return True
    return isinstance(each, nn.Module) and getattr(each, "_is_accelerate_prepared", False)


def _one_of_each(given: Sequence[Any], kind: type[Any]) -> tuple[nn.Module, Any]:
    """Return the only model and the only optimizer of this class."""
    models = [each for each in given if isinstance(each, nn.Module)]
    optimizers = [each for each in given if isinstance(each, kind)]
    if len(models) != 1 or len(optimizers) != 1:
        raise ValueError(
            f"overspill= wraps one model with one optimizer, and {len(models)} and "
            f"{len(optimizers)} are prepared together; prepare one of each in one call, or, on one "
            "rank, call overspill.wrap before prepare instead"
        )
    return models[0], optimizers[0]


def save_state(accelerator: Accelerator, output_dir: str | None = None, **more: Any) -> str:
    """Save like ``accelerator.save_state``; ``accelerator.load_state`` of a plain run can load it.

    With one process, the folder appears complete or not at all.  An existing folder is replaced,
    except for files that accelerate does not write.  Beyond ``total_limit``, old folders are
    removed once the new one is complete.

    Returns:
        The folder.

    Raises:
        OffloadError: an optimizer of the accelerator, or a model that one trains, is not wrapped.
        IoError: the folder cannot be written; what was there before is as it was.
        ValueError: ``output_dir`` is missing, the next automatic name is taken, or other files
            than safetensors are asked for.
    """
    if isinstance(accelerator, OffloadAccelerator):
        return accelerator.save_state(output_dir, **more)
    return _save_state(accelerator, accelerator.save_state, output_dir, more)


def _save_state(
    accelerator: Accelerator, save: Callable[..., Any], output_dir: str | None,
    more: dict[str, Any],
) -> str:  # fmt: skip
    """Save with ``save``, the accelerator's own method, what is not streamed."""
    if not more.get("safe_serialization", True):
        raise ValueError("save_state writes safetensors only; leave safe_serialization out")
    ours, naming = _Ours(accelerator), _Naming(accelerator, output_dir)
    if accelerator.num_processes > 1:  # several processes write to one folder
        with naming:
            make_folder(naming.folder)
            _save(accelerator, save, ours, naming.folder, more)
    else:
        with (
            naming,
            replacing_folder(
                naming.folder, is_part=_is_of_state, is_entry=_is_entry, beside=naming.beside
            ) as draft,
        ):
            _save(accelerator, save, ours, draft, more)
    if accelerator.is_main_process:
        naming.remove_oldest()
    return str(naming.folder)


def _save(
    accelerator: Accelerator, save: Callable[..., Any], ours: _Ours, folder: Path,
    more: dict[str, Any],
) -> None:  # fmt: skip
    left: list[dict[str, Any]] = []

    def take(models: Any, states: list[dict[str, Any]], path: str) -> None:
        left.extend(states)  # that the hooks before have left
        states.clear()

    hook = accelerator.register_save_state_pre_hook(take)
    try:
        with ours:
            save(str(folder), **more)
    finally:
        hook.remove()
    if accelerator.is_main_process:
        for number, state in enumerate(left):
            name = f"{_numbered(SAFE_MODEL_NAME, number)}.safetensors"
            with replacing(folder / name) as draft:
                write_safetensors(of_state_dict(state, ours.parameters), draft, lambda nbytes: None)
        for number, optimizer in enumerate(ours.optimizers):
            tree = optimizer.streamed_state(
                lambda name, shape, read: lazy(name, torch.float32, shape, read)
            )
            with replacing(folder / f"{_numbered(OPTIMIZER_NAME, number)}.bin") as draft:
                write_torch(tree, draft, lambda nbytes: None)


class _Naming:
    """The folder that a state is saved to.  Inside its ``with`` block, accelerate's automatic
    naming is off, and the folder is passed to it."""

    def __init__(self, accelerator: Accelerator, output_dir: str | None) -> None:
        """
        Raises:
            ValueError: no folder is given, or the next automatic one exists already.
        """
        self._project = accelerator.project_configuration
        self._automatic = bool(self._project.automatic_checkpoint_naming)
        self.beside: Path | None = None
        if not self._automatic:
            if output_dir is None:
                raise ValueError("save_state needs output_dir, or automatic_checkpoint_naming")
            self.folder = Path(output_dir).absolute()
            return
        # Not in the checkpoints folder: accelerate takes everything there for a checkpoint.
        self.beside = Path(accelerator.project_dir).absolute()
        name = f"{FOLDER}{accelerator.save_iteration}"
        self.folder = self.beside / CHECKPOINTS / name
        if self.folder.exists():
            raise ValueError(
                f"{self.folder} exists already; set "
                "accelerator.project_configuration.iteration to a number that is not in use"
            )
        remove_abandoned(self.beside, f"{FOLDER}[0-9]+")

    def __enter__(self) -> None:
        self._before = self._project.iteration
        self._project.automatic_checkpoint_naming = False
        make_folder(self.folder.parent)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._project.automatic_checkpoint_naming = self._automatic
        if kind is not None:
            self._project.iteration = self._before

    def remove_oldest(self) -> None:
        """Remove automatic folders beyond ``total_limit``."""
        limit = self._project.total_limit
        if not self._automatic or limit is None:
            return
        named = re.compile(FOLDER + r"([0-9]+)")
        numbered = {
            int(match[1]): each
            for each in self.folder.parent.iterdir()
            if (match := named.fullmatch(each.name))
        }
        for number in sorted(numbered)[: max(0, len(numbered) - max(1, limit))]:
            log.info("overspill: removing %s (total_limit=%d)", numbered[number], limit)
            shutil.rmtree(numbered[number])


def _is_of_state(name: str) -> bool:
    """Whether accelerate writes files of this name to a folder of state."""
    return is_of_weights(name) or _OF_STATE.fullmatch(name) is not None


def _is_entry(name: str) -> bool:
    return name in (f"{SAFE_MODEL_NAME}.safetensors", f"{OPTIMIZER_NAME}.bin")


def load_state(accelerator: Accelerator, input_dir: str | None = None, **more: Any) -> None:
    """Load a state saved by this module's ``save_state`` or by Accelerate's.

    Without ``input_dir``, load the newest complete one of the automatically named folders; a
    warning names skipped ones.

    Raises:
        OffloadError: an optimizer of the accelerator, or a model that one trains, is not wrapped.
        ValueError: the files do not fit the model, or no folder is complete.
    """
    if isinstance(accelerator, OffloadAccelerator):
        accelerator.load_state(input_dir, **more)
    else:
        _load_state(accelerator, accelerator.load_state, input_dir, more)


def _load_state(
    accelerator: Accelerator, load: Callable[..., Any], input_dir: str | None,
    more: dict[str, Any],
) -> None:  # fmt: skip
    """Load with ``load``, the accelerator's own method, what is not streamed."""
    project = accelerator.project_configuration
    if input_dir is None and project.automatic_checkpoint_naming:
        newest = newest_complete(Path(accelerator.project_dir) / CHECKPOINTS, FOLDER, REQUIRED)
        input_dir = None if newest is None else str(newest)
    found: list[Path] = []
    left: list[Any] = []

    def take(models: list[Any], path: str) -> None:
        found.append(Path(path))
        left.extend(models)  # that the hooks before have left
        models.clear()

    ours = _Ours(accelerator)
    hook = accelerator.register_load_state_pre_hook(take)
    try:
        with ours:
            load(input_dir, **more)
    finally:
        hook.remove()
    (folder,) = found
    for number, each in enumerate(left):
        model = _plain(accelerator, each)
        engine = next((engine for wrapped, engine in ours.models if wrapped is model), None)
        file = folder / f"{_numbered(SAFE_MODEL_NAME, number)}.safetensors"
        old = folder / f"{_numbered(MODEL_NAME, number)}.bin"
        if engine is None and file.is_file():
            load_model(model, file)
        elif engine is not None and (file.is_file() or not old.is_file()):
            engine.load_weights(file, hub=False, part=model)
        else:
            model.load_state_dict(torch.load(old, mmap=True, weights_only=True))
    for number, optimizer in enumerate(ours.optimizers):
        optimizer.load_state_dict(folder / f"{_numbered(OPTIMIZER_NAME, number)}.bin")


def _numbered(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name


def _plain(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Return the model without what accelerate and ``torch.compile`` have put around it."""
    plain: nn.Module = accelerator.unwrap_model(model, keep_torch_compile=False)
    return plain


def _engine_over(model: nn.Module) -> Engine | None:
    """Return the engine of ``model``, or of the wrapped model that contains it (members of an
    ``nn.ModuleList`` that share an optimizer, say)."""
    return next((engine for engine in open_engines() if engine.has(model)), None)


class _Ours:
    """What is wrapped of an accelerator's.  Inside its block weights are not read for a state dict,
    but stand there as their parameters, and the accelerator knows of no optimizer."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        found = [_plain(accelerator, each) for each in accelerator._models]
        inner = [getattr(each, "optimizer", each) for each in accelerator._optimizers]
        self.models = [(m, engine) for m in found if (engine := _engine_over(m)) is not None]
        engines = list({id(engine): engine for _, engine in self.models}.values())
        self.parameters = [p for engine in engines for p in engine.parameters]
        made = (each.made for each in engines)
        ours = [one for optimizer in made if isinstance(optimizer, OffloadedOptimizer)
                for one in optimizer.all_optimizers]  # fmt: skip
        self.optimizers = [one for each in inner for one in ours if one is each]
        trained = {id(p) for each in inner for g in each.param_groups for p in g["params"]}
        plain = [m for m in found if _engine_over(m) is None]
        lacking = len(self.optimizers) < len(inner) or any(
            id(p) in trained for model in plain for p in model.parameters()
        )
        if lacking or not self.models:
            raise LifecycleError(
                "save_state and load_state are for wrapped models and optimizers; wrap all that is "
                "trained before accelerator.prepare, or use accelerate.Accelerator.save_state and "
                "load_state"
            )

    def __enter__(self) -> None:
        self._before = self._accelerator._optimizers
        self._accelerator._optimizers = []
        self._accelerator.__dict__["get_state_dict"] = self._state_dict

    def _state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        found: dict[str, Any] = _plain(self._accelerator, model).state_dict(keep_vars=True)
        return found

    def __exit__(self, *_: object) -> None:
        del self._accelerator.__dict__["get_state_dict"]
        self._accelerator._optimizers = self._before
