"""``transformers.Trainer`` and its subclasses, with weights and state on several tiers.

Only one name in a script changes::

    from overspill.integrations.transformers import OverspillTrainer

    trainer = OverspillTrainer(
        model, args, train_dataset=dataset,
        overspill={"host_memory": "24GiB", "nvme": "/scratch/run"},
    )
    trainer.train()

``offloaded`` does the same for any trainer: ``offloaded(SFTTrainer)(..., overspill={...})``.

Other models of a trainer, such as ``ref_model`` or ``teacher_model`` of TRL's trainers, share the
engine and its budgets.  They are not trained.

The model is wrapped when the trainer creates its optimizer, before the first step, evaluation or
checkpoint load.  Checkpoints have the framework's own format, and are written and read tensor by
tensor.  A checkpoint appears complete or not at all, and ``resume_from_checkpoint=True`` uses the
newest complete one.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import Trainer, trainer_utils
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.training_args import OptimizerNames

from ..api import unwrap, wrap
from ..config import OffloadConfig
from ..durable.files import WEIGHTS, is_of_weights, torch_bytes, write_shards, write_torch
from ..durable.hub import of_model
from ..durable.tensors import lazy
from ..engine import engine_of
from ..errors import LifecycleError
from ..io_engine.atomic_files import remove_abandoned, replacing, replacing_folder, write_bytes
from ..optimizer import OffloadedOptimizer
from ..state.hub_names import is_of_transformers
from .checkpoints import LazyStateDict, newest_complete, problem_of
from .defaults import OptionsBlock, default_options
from .repeating import Repeating
from .trainer_ranks import OverRanks

log = logging.getLogger("overspill")
ADAPTER = "adapter_model.safetensors"
CARD = "README.md"
PREFIX = f"{trainer_utils.PREFIX_CHECKPOINT_DIR}-"

T = TypeVar("T", bound=Trainer)

# Optimizers with compact or paged state are replaced by AdamW with these moments.  Keys are values
# of ``OptimizerNames``, because older versions of transformers lack some members.
_AS_ADAMW: dict[str, str] = {
    "adamw_bnb_8bit": "int8",
    "adamw_8bit": "int8",
    "paged_adamw_32bit": "fp32",
    "paged_adamw_8bit": "int8",
    "adamw_torch_8bit": "int8",
    "adamw_torch_4bit": "int8",  # overspill has no 4-bit moments
}


class _Offloaded(OverRanks, Repeating):
    """Mixed in before a trainer's own class."""

    model: Any
    args: Any
    lr_scheduler: Any
    optimizer: Any
    _in_init: ExitStack | None

    def __init__(self, *args: Any, overspill: Mapping[str, Any] | None = None, **more: Any) -> None:
        self._options = {**(default_options() or {}), **(overspill or {})}
        OffloadConfig(**self._options)  # raises before anything is loaded or moved
        self._offloaded: OffloadedOptimizer | None = None
        self._others: dict[str, torch.nn.Module] = {}
        with ExitStack() as self._in_init:
            super().__init__(*args, **more)
        self._in_init = None
        self._refuse()

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # Trainers move other models to the device in `__init__`, and may compute there with one.
        computes = getattr(self.args, "precompute_ref_log_probs", False)
        if self._in_init is not None and not computes:
            self._in_init.enter_context(self._in_place())

    def _refuse(self) -> None:
        """Raises for what would take the weights from the engine, or copy all of them.

        Raises:
            ValueError: an argument of the trainer's is not supported.
        """
        args = self.args
        wrong = {
            "fp16_full_eval": args.fp16_full_eval,
            "bf16_full_eval": args.bf16_full_eval,
            "deepspeed": args.deepspeed,
            "FSDP of version 1 (set --fsdp-version 2)": self._is_fsdp1,
            "more than one GPU in one process (set CUDA_VISIBLE_DEVICES)": args.n_gpu > 1,
            "auto_find_batch_size": args.auto_find_batch_size,
            f"max_grad_norm={args.max_grad_norm} under update='backward', which leaves no gradient "
            "to clip (set max_grad_norm=0)": self._options.get("update") == "backward"
            and args.max_grad_norm > 0,
        }
        found = [name for name, is_set in wrong.items() if is_set]
        if found:
            raise ValueError(f"overspill does not go together with {', '.join(found)}")

    # -- what is wrapped, and when --------------------------------------------------------------

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Do nothing on one rank: the engine moves the weights to the device, unit by unit."""
        if self._over_ranks:
            super()._move_model_to_device(model, device)

    def call_model_init(self, trial: Any = None) -> Any:
        if self._offloaded is not None:  # for another model than this
            if self._others:
                unwrap({"model": self.model, **self._others})  # the others are used again
            else:
                self._offloaded.close()
            self._offloaded = None
        return super().call_model_init(trial)

    def create_optimizer(self, *args: Any, **more: Any) -> torch.optim.Optimizer:
        if self._over_ranks:  # `_prepare` wraps later, with the moments that this may set
            return self._plain_optimizer(self._options, *args, **more)
        if self._offloaded is None:
            options = self._options_for()
            inner = self._plain_optimizer(options, *args, **more)
            self._others = self._other_models()
            if self._others:
                models = {"model": self.model, **self._others}
                options |= _for_several(options, models)
                log.info("overspill: wrapping %s together", " and ".join(models))
                self._offloaded = self.optimizer = wrap(models, inner, **options)
            else:
                self._offloaded = self.optimizer = wrap(self.model, inner, **options)
        return self._offloaded

    def _plain_optimizer(
        self, options: dict[str, Any], *args: Any, **more: Any
    ) -> torch.optim.Optimizer:
        """Return the trainer's own optimizer; ``options`` may get another format of moments."""
        theirs = self.optimizer_cls_and_kwargs
        try:
            self.optimizer_cls_and_kwargs = self._as_adamw(options) or theirs
            made: torch.optim.Optimizer = super().create_optimizer(*args, **more)
            return made
        finally:
            self.optimizer_cls_and_kwargs = theirs

    def _other_models(self) -> dict[str, torch.nn.Module]:
        """Return models that the trainer has besides the one that it trains, by attribute."""
        mine, found = set(self.model.modules()), dict[str, torch.nn.Module]()
        for name, value in vars(self).items():
            if (
                isinstance(value, torch.nn.Module) and mine.isdisjoint(value.modules())
                and any(p.numel() for p in value.parameters())
                and all(value is not other for other in found.values())
            ):  # fmt: skip
                found[name] = value
        return found

    def _as_adamw(self, options: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """AdamW in the place of one with compact or paged state, whose format ``options`` get."""
        optim = OptimizerNames(self.args.optim).value
        moments = _AS_ADAMW.get(optim)
        if moments is None or self.optimizer is not None or self.optimizer_cls_and_kwargs:
            return None
        args = self.args
        if args.optim_args:
            raise ValueError(
                f"optim_args={args.optim_args!r} is not supported with optim={optim!r}, which "
                "overspill replaces by AdamW with moments=; leave optim_args out"
            )
        if optim == "adamw_torch_4bit" and "moments" not in options:
            log.info("overspill: optim=%r: using int8 moments, more precise than 4-bit ones", optim)
        options.setdefault("moments", moments)
        betas = (args.adam_beta1, args.adam_beta2)
        return torch.optim.AdamW, {
            "lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon,
        }  # fmt: skip

    def _options_for(self) -> dict[str, Any]:
        micro_steps = self.args.gradient_accumulation_steps
        own = {"device": self.args.device, "accumulate": micro_steps, "durable": False}
        if self._over_ranks:  # casts are accelerate's
            return {**own, **self._options}
        options = {"loss": "auto", "tile": "auto", **own, **self._options}
        trained = {p.dtype for p in self.model.parameters() if p.requires_grad}
        if self.args.bf16 and "precision" not in options and trained == {torch.float32}:
            options["precision"] = "bf16"
            log.info(
                "overspill: bf16=True: trained weights are bf16 with exact fp32 masters, instead "
                "of being cast at every use; losses are near those of autocast over fp32 weights, "
                'not the same bits (overspill={"precision": "fp32"} keeps fp32 weights)'
            )
        return options

    def _prepare_for_training(self, *args: Any, **more: Any) -> Any:
        with self._in_place():
            return super()._prepare_for_training(*args, **more)

    def evaluation_loop(self, *args: Any, **more: Any) -> Any:
        if not self._over_ranks:
            self.create_optimizer()
        with self._in_place():
            return super().evaluation_loop(*args, **more)

    def _in_place(self) -> AbstractContextManager[None]:
        """Inside, accelerate moves neither the model nor the optimizer's state anywhere."""
        places = self._over_ranks and self._offloaded is None  # before it is wrapped
        return nullcontext() if places else _Unplaced(self.accelerator)

    # -- checkpoints ----------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *a: Any, **more: Any) -> Any:
        """Train as the framework does.

        ``resume_from_checkpoint=True`` uses the newest complete checkpoint in ``output_dir``; a
        warning names skipped ones, and why.

        Raises:
            ValueError: the named checkpoint, or every existing one, is incomplete.
        """
        found = resume_from_checkpoint
        if found is True and self.args.output_dir is not None:
            newest = newest_complete(Path(self.args.output_dir), PREFIX, (TRAINER_STATE_NAME,))
            found = True if newest is None else str(newest)
        elif isinstance(found, (str, os.PathLike)) and Path(found).is_dir():
            problem = problem_of(Path(found), (TRAINER_STATE_NAME,))
            if problem is not None:
                raise ValueError(
                    f"the checkpoint is incomplete: {problem}; name another one, or pass "
                    "resume_from_checkpoint=True for the newest complete one"
                )
        return super().train(found, *a, **more)

    def _get_output_dir(self, *args: Any, **more: Any) -> str:
        staged = self.__dict__.get("_staged")
        return super()._get_output_dir(*args, **more) if staged is None else str(staged)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.__dict__.get("_staged") is None:  # else `_save_checkpoint` does it at its end
            super()._push_from_checkpoint(checkpoint_folder)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if engine_of(self.model) is None or state_dict is not None or not self.args.should_save:
            return super()._save(output_dir, state_dict)
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        staged = self.__dict__.get("_staged")
        if staged is not None and staged in folder.parents:
            return self._save_whole(folder)
        with replacing_folder(folder, is_part=is_of_weights, is_entry=_is_entry) as draft:
            if (folder / CARD).is_file():
                shutil.copy2(folder / CARD, draft)  # peft adds to the card that is there
            self._save_whole(draft)
        return None

    def _save_whole(self, folder: Path) -> None:
        """Write the model, with all that belongs to it, to a draft folder."""
        if not is_of_transformers(self.model) or _has_adapters(self.model):
            return super()._save(str(folder), LazyStateDict(self.model))
        super()._save(str(folder), {})  # all but the weights
        for file in WEIGHTS:
            (folder / file).unlink(missing_ok=True)
        write_shards(of_model(self.model), folder, lambda nbytes: None)
        return None

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        engine = engine_of(self.model)
        if engine is None or not self.args.should_save:
            return super()._save_optimizer_and_scheduler(output_dir)
        folder = Path(output_dir)
        tree = engine.streamed_state(
            lambda name, shape, read: lazy(name, torch.float32, shape, read)
        )
        with replacing(folder / OPTIMIZER_NAME) as draft:
            write_torch(tree, draft, lambda nbytes: None)
        write_bytes(folder / SCHEDULER_NAME, torch_bytes(self.lr_scheduler.state_dict()))
        return None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        if self._own_adapters and (folder / ADAPTER).is_file():
            return _load_adapter(self.model, folder / ADAPTER)
        if not self._loads_itself(folder):
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        log.info("overspill: loading weights from %s", folder)
        self.create_optimizer()
        self._engine().load_weights(folder, part=self.model)
        return None

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is not None and self._own_adapters and (Path(best) / ADAPTER).is_file():
            return _load_adapter(self.model, Path(best) / ADAPTER)
        if best is None or not self._loads_itself(Path(best)):
            return super()._load_best_model()
        log.info("overspill: loading the best model from %s", best)
        self._engine().load_weights(Path(best), part=self.model)
        return None

    def _loads_itself(self, folder: Path) -> bool:
        """Whether a folder has the whole model, and not an adapter, in files that are read tensor
        by tensor."""
        own = is_of_transformers(self.model) and not self._over_ranks
        return own and any((folder / name).is_file() for name in WEIGHTS)

    @property
    def _own_adapters(self) -> bool:
        return _has_adapters(self.model) and not self._over_ranks

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._offloaded is None or self._over_ranks:
            return super()._load_optimizer_and_scheduler(checkpoint)
        folder = Path(checkpoint)
        if (folder / OPTIMIZER_NAME).is_file() and (folder / SCHEDULER_NAME).is_file():
            self._offloaded.load_state_dict(folder / OPTIMIZER_NAME)
            self.lr_scheduler.load_state_dict(
                torch.load(folder / SCHEDULER_NAME, weights_only=True)
            )
        return None

    def _engine(self) -> Any:
        engine = engine_of(self.model)
        if engine is None:
            raise LifecycleError("the model is not wrapped by overspill any more")
        return engine


class _Whole(Trainer):
    """Base class placed after the trainer's own: checkpoint folders appear complete or not at all.

    ``Trainer`` writes it to a draft. Until it is published, ``_get_output_dir`` answers with the
    draft's own folder.
    """

    def _save_checkpoint(self, model: Any, trial: Any, *args: Any, **more: Any) -> None:
        if self.args.world_size > 1:  # several processes write to one folder
            return super()._save_checkpoint(model, trial, *args, **more)
        run, name = self._get_output_dir(trial=trial), f"{PREFIX}{self.state.global_step}"
        target = Path(run, name)
        remove_abandoned(Path(run), f"{PREFIX}[0-9]+")
        with replacing_folder(target, is_part=_is_of_checkpoint, is_entry=_is_entry) as draft:
            self._staged: Path | None = draft.parent
            try:
                best = f"{PREFIX}{getattr(self.state, 'best_global_step', None)}"
                if best != name and Path(run, best).is_dir():
                    (draft.parent / best).mkdir()  # the framework looks whether it is there
                super()._save_checkpoint(model, trial, *args, **more)
            finally:
                self._staged = None
                self._rename_best(draft.parent, run)
            self.state.save_to_json(str(draft / TRAINER_STATE_NAME))
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(target))
        self._rotate(run)
        return None

    def _rename_best(self, staged: Path, run: str) -> None:
        best = self.state.best_model_checkpoint
        if best is not None and Path(best).parent == staged:
            self.state.best_model_checkpoint = os.path.join(run, Path(best).name)

    def _rotate(self, run: str) -> None:
        """Remove older checkpoints beyond ``save_total_limit``, now that the new one is there."""
        if hasattr(trainer_utils, "rotate_checkpoints"):
            trainer_utils.rotate_checkpoints(
                output_dir=run, save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint, use_mtime=True,
            )  # fmt: skip
        else:  # before transformers 5
            rotate = self._rotate_checkpoints  # type: ignore[attr-defined]
            rotate(use_mtime=False, output_dir=run)


def _is_of_checkpoint(name: str) -> bool:
    """Whether a trainer writes files of this name to a checkpoint: an older one is replaced."""
    others = (OPTIMIZER_NAME, SCHEDULER_NAME, SCALER_NAME, TRAINER_STATE_NAME, ADAPTER)
    return is_of_weights(name) or name in others or name.startswith("rng_state")


def _is_entry(name: str) -> bool:
    return name in (*WEIGHTS, ADAPTER, TRAINER_STATE_NAME)


def _has_adapters(model: Any) -> bool:
    """Whether adapters were added by transformers' own ``add_adapter``."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def _load_adapter(model: Any, file: Path) -> None:
    """Puts the tensors of an adapter's file into the active one."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    tensors = {name.removeprefix("base_model.model."): t for name, t in load_file(file).items()}
    found: Any = set_peft_model_state_dict(model, tensors, adapter_name=model.active_adapters()[0])
    if strange := found.unexpected_keys:
        raise ValueError(f"{file} does not match the model: it has {strange[0]}")


def _for_several(
    options: Mapping[str, Any], models: Mapping[str, torch.nn.Module]
) -> dict[str, Any]:
    """Prefix names of modules with that of the trained model, and give its files to it."""
    found: dict[str, Any] = {}
    others = set(models) - {"model"}
    for name in ("units", "resident"):
        if options.get(name) is not None:
            found[name] = [
                each if each.partition(".")[0] in others else f"model.{each}"
                for each in options[name]
            ]
    if options.get("weights") is not None and not isinstance(options["weights"], Mapping):
        found["weights"] = {"model": options["weights"]}
    return found


class _Unplaced(AbstractContextManager[None]):
    """A block in which an accelerator places nothing."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __enter__(self) -> None:
        self._before = self._accelerator.device_placement
        self._accelerator.device_placement = False

    def __exit__(self, *_: object) -> None:
        self._accelerator.device_placement = self._before


@functools.cache
def offloaded(trainer_class: type[T]) -> type[T]:
    """Return a subclass of a trainer with one more argument: ``overspill``, options of ``wrap``.

    Clipping, schedulers, accumulation, evaluation, checkpoints, resuming and the best model are the
    trainer's own.  ``trainer.optimizer`` is what ``wrap`` returns; ``overspill.unwrap(model)``
    returns an ordinary model.  Three defaults differ from those of ``wrap``: ``bf16=True`` over
    fp32 weights trains bf16 weights with exact masters (``precision="bf16"``); 8-bit and paged
    kinds of AdamW (``optim=``) are AdamW with moments of as many bits; and steps are not committed
    (``durable=False``), because a trainer resumes from its own checkpoints.

    Raises:
        TypeError: it is no subclass of ``transformers.Trainer``.
    """
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise TypeError(
            f"offloaded takes a subclass of transformers.Trainer, got {trainer_class!r}"
        )
    if issubclass(trainer_class, _Offloaded):
        return trainer_class
    bases = (
        (_Offloaded, _Whole) if trainer_class is Trainer else (_Offloaded, trainer_class, _Whole)
    )
    made = type(f"Overspill{trainer_class.__name__}", bases, {})
    made.__module__ = trainer_class.__module__
    made.__doc__ = trainer_class.__doc__
    return made


OverspillTrainer = offloaded(Trainer)


def with_options(options: Mapping[str, Any]) -> OptionsBlock:
    """Give options of ``wrap`` to every trainer created inside; see ``overspill.offloading``."""
    if Trainer.__new__ is not _new:
        # Libraries look there for the arguments that a trainer takes.
        _new.__signature__ = inspect.signature(Trainer.__init__)  # type: ignore[attr-defined]
        Trainer.__new__ = staticmethod(_new)  # type: ignore[method-assign, assignment]
    return OptionsBlock(options)


def _new(cls: type[Trainer], *args: Any, **more: Any) -> Trainer:
    """Create a trainer, of the offloaded class inside of a block.

    ``type.__call__`` then calls the ``__init__`` of that class.  Outside it does what
    ``object.__new__`` does, so that it can stay in place: CPython refuses the arguments of
    ``__init__`` in classes whose ``__new__`` was deleted (python/cpython issue 49572).
    """
    copied = not args and not more and cls.__new__ is _new  # by ``copy`` and ``pickle``
    inside = default_options() is not None and not copied
    return object.__new__(offloaded(cls) if inside else cls)  # type: ignore[arg-type]
