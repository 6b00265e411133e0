"""Where a model's first values come from: its own parameters, a weights file, or an initialiser."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn

from ..errors import OffloadError
from ..optim import Rule
from ..optim.optimizer import torch_state
from ..planning.partition import FoundUnit, Partition
from ..schedule.units import ParamSpec
from ..training import torch_private
from .contents import Values

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OPTIMIZER = "optimizer.pt"  # in the folder of an export
DISTRIBUTED = ".metadata"  # in every folder of torch.distributed.checkpoint


class TensorFiles(Protocol):
    """Tensors by name in files, read one at a time."""

    path: Path

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor, or ``None`` where there is no such tensor."""
        ...

    def load(self, name: str) -> torch.Tensor:
        """One tensor."""
        ...


@contextlib.contextmanager
def empty_init() -> Iterator[None]:
    """Builds models without memory for their parameters: they are on ``meta`` until ``wrap``.

    Buffers are built as always.  Example::

        with overspill.empty_init():
            model = LlamaForCausalLM(config)
        optimizer = overspill.wrap(model, AdamW(model.parameters()), weights=PATH)
    """
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            empty = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            empty.__dict__.update(param.__dict__)
            param = empty
        register(module, name, param)

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class WeightFiles:
    """Tensors of a safetensors file or a (sharded) Hugging Face folder, read one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, Any] = {}
        self._where: dict[str, Path] = {}
        for file in self._list(path):
            for name in self._open(file).keys():  # noqa: SIM118 (not a mapping)
                self._where[name] = file

    @staticmethod
    def _list(path: Path) -> list[Path]:
        if path.is_file():
            return [path]
        if not path.is_dir():
            raise ValueError(f"weights: {path} does not exist")
        if (path / INDEX).is_file():
            try:
                names = json.loads((path / INDEX).read_text())["weight_map"].values()
            except (ValueError, KeyError, AttributeError) as error:
                raise ValueError(
                    f"weights: {path / INDEX} is not a valid index: {error}"
                ) from error
            files = [path / name for name in dict.fromkeys(names)]
            missing = [file.name for file in files if not file.is_file()]
            if missing:
                raise ValueError(f"weights: {path} lacks {', '.join(missing)}")
            return files
        if (path / SINGLE).is_file():
            return [path / SINGLE]
        raise ValueError(f"weights: {path} holds none of {SINGLE}, {INDEX} and {DISTRIBUTED}")

    def _open(self, file: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        key = str(file)
        if key not in self._files:
            try:
                self._files[key] = safe_open(key, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"weights: {file} cannot be read as safetensors: {error}"
                ) from error
        return self._files[key]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor, or ``None`` where there is no such tensor."""
        if name not in self._where:
            return None
        return tuple(self._open(self._where[name]).get_slice(name).get_shape())

    def load(self, name: str) -> torch.Tensor:
        """One tensor."""
        from safetensors import SafetensorError

        try:
            tensor = self._open(self._where[name]).get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"weights: {self._where[name]}: {name}: {error}") from error
        assert isinstance(tensor, torch.Tensor)
        return tensor


def match_files(files: TensorFiles, model: nn.Module, parts: Partition) -> dict[int, str]:
    """By parameter index, the tensor in the files that holds it; checked before anything moves.

    A tied parameter may stand under any of its names, with or without a leading module.

    Raises:
        ValueError: a parameter without a tensor, or one of another shape.
    """
    names: dict[int, list[str]] = {}
    index_of = {id(p): i for i, p in enumerate(parts.parameters)}
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) in index_of:
            names.setdefault(index_of[id(p)], []).append(name)
    prefix = getattr(model, "base_model_prefix", "")
    found: dict[int, str] = {}
    problems: list[str] = []
    for index, p in enumerate(parts.parameters):
        candidates = names[index]
        if prefix:
            candidates = [*candidates, *(n.removeprefix(f"{prefix}.") for n in names[index])]
            candidates += [f"{prefix}.{n}" for n in names[index]]
        match = next((n for n in candidates if files.shape(n) is not None), None)
        if match is None:
            problems.append(f"{names[index][0]} is missing")
        elif files.shape(match) != tuple(p.shape):
            problems.append(f"{match} has shape {files.shape(match)}, expected {tuple(p.shape)}")
        else:
            found[index] = match
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(
            f"weights: {files.path} does not match the model: {'; '.join(problems[:3])}{more}"
        )
    return found


def default_init(model: nn.Module) -> Callable[[nn.Module], None]:
    """The initialiser of a meta model: the model's own ``_init_weights``, else each module's
    ``reset_parameters``."""
    own: Any = getattr(model, "_init_weights", None)

    def reset(module: nn.Module) -> None:
        if own is not None:
            own(module)
        elif hasattr(module, "reset_parameters"):
            cast(Any, module).reset_parameters()
        elif any(True for _ in module.parameters(recurse=False)):
            raise OffloadError(
                f"{type(module).__name__} has parameters on meta and no reset_parameters; "
                "pass init=, a callable (module) -> None, or weights="
            )

    return reset


def initialise(
    found: FoundUnit, specs: Mapping[int, ParamSpec], parts: Partition,
    init: Callable[[nn.Module], None],
) -> dict[int, torch.Tensor]:  # fmt: skip
    """Gives the meta parameters of one unit memory, initialises them, and returns their values.

    Only this unit's memory is taken; the caller moves the values home and frees it.
    """
    values: dict[int, torch.Tensor] = {}
    for index in specs:
        p = parts.parameters[index]
        values[index] = torch.empty_strided(
            specs[index].shape, specs[index].stride, dtype=p.dtype, device="cpu"
        )
        torch_private.become(p, values[index])
    modules = [found.module] if found.direct_only else list(reversed(list(found.module.modules())))
    for module in modules:
        init(module)
    return values


def values_of_unit(
    rules: Sequence[Rule], parts: Partition, optimizer: torch.optim.Optimizer,
    weight_of: Callable[[int], torch.Tensor],
) -> Callable[[ParamSpec], Values]:  # fmt: skip
    """What ``Contents.fill`` asks for: the weight (its master, where the optimizer has one), and
    the moments that the optimizer has, or those that a rule starts with."""

    def values(spec: ParamSpec) -> Values:
        p = parts.parameters[spec.index]
        tensors = {"weight": weight_of(spec.index).detach()}
        group = parts.groups[spec.index]
        if group is None:
            return tensors
        rule = rules[group]
        for name, value in rule.initial(optimizer.param_groups[group]).items():
            if value != 0.0:
                tensors[name] = torch.full(spec.shape, value, device="cpu")
        for name, value in torch_state(optimizer, p).items():
            if name in (*rule.moments, "master") and value is not None:
                tensors["weight" if name == "master" else name] = value
        return tensors

    return values
