"""Stand-in models: a rank's shards as planning sees them.

Placement, state and budgets use the shards. Compute and activations use the whole model, which is
the one that runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from ..io_engine.shared_memory import SharedMemory
from .regions import TensorRegion
from .unit_discovery import FoundUnit, modules_named

DOT = "/"  # stands for "." in the names of modules and parameters, which may not contain it


class StandIn(nn.Module):
    """A module with a rank's shards of a unit, which is never called.

    Attributes:
        runs: the unit that computes with the whole parameters.
    """

    runs: FoundUnit

    def __init__(self, runs: FoundUnit) -> None:
        super().__init__()
        self.__dict__["runs"] = runs  # not a submodule


class StandInModel(nn.Module):
    """A model of ``StandIn`` modules.

    Attributes:
        whole: the model that is run.
        local_of: by id of a parameter of ``whole``, the rank's parameter.
        regions: by id of a rank's parameter, the region of the whole one that it is.
        tensor_ranks: among how many ranks products are divided (tensor parallelism). If there are
            several, they exchange activations within a forward, so all must run the same modules in
            the same order.
        ranks: the ranks from which weights are gathered for compute, this one included; 1 if every
            rank computes with its own.
        shared_memory: host memory for frozen weights that other ranks of this machine have too.
        hooked: ids of parameters that are no stand-ins, but the ones of ``whole``. The engine's
            hooks bring them to its modules, as on one device.
        stay: whether stand-ins stay on the device, because other code reads them at any time.
    """

    whole: nn.Module
    local_of: dict[int, nn.Parameter]
    regions: dict[int, TensorRegion]
    ranks: int
    tensor_ranks: int
    shared_memory: SharedMemory | None = None
    hooked: set[int]
    stay: bool = False

    def __init__(self, whole: nn.Module, ranks: int = 1, tensor_ranks: int = 1) -> None:
        super().__init__()
        self.ranks, self.tensor_ranks = ranks, tensor_ranks
        self.__dict__["whole"] = whole  # not a submodule
        self.local_of, self.regions, self.hooked = {}, {}, set()


def running(found: FoundUnit) -> FoundUnit:
    """Return the unit that computes in place of ``found``, or ``found`` itself."""
    return found.module.runs if isinstance(found.module, StandIn) else found


def whole_model(model: nn.Module) -> nn.Module:
    """Return the model that is run."""
    return model.whole if isinstance(model, StandInModel) else model


def whole_name(name: str) -> str:
    """Return the model's name of a parameter that is called ``name`` among a rank's shards."""
    return name.split(".", 1)[1].replace(DOT, ".")


def is_hooked(model: nn.Module, p: nn.Parameter) -> bool:
    """Return whether the engine's hooks bring a parameter's weights to the modules that run."""
    return not isinstance(model, StandInModel) or id(p) in model.hooked


def hooked_model(model: nn.Module) -> nn.Module:
    """Return the model whose modules read parameters of the engine."""
    return model.whole if isinstance(model, StandInModel) and model.hooked else model


def staying(model: nn.Module) -> frozenset[nn.Parameter]:
    """Return the parameters that must stay on the device."""
    if not isinstance(model, StandInModel) or not model.stay:
        return frozenset()
    return frozenset(p for p in model.parameters() if id(p) not in model.hooked)


def shared_memory_of(model: nn.Module) -> SharedMemory | None:
    """Return the memory for frozen weights that other ranks of this machine have too, if any."""
    return model.shared_memory if isinstance(model, StandInModel) else None


def sharers(model: nn.Module) -> int:
    """Return the number of ranks of this machine with the same frozen weights."""
    shared = shared_memory_of(model)
    return 1 if shared is None else len(shared.members)


def held_parameters(model: nn.Module, params: Iterable[nn.Parameter]) -> frozenset[nn.Parameter]:
    """Return the parameters of ``model`` that stand for these parameters of ``whole_model``."""
    if not isinstance(model, StandInModel):
        return frozenset(params)
    local = map(model.local_of.get, map(id, params))
    return frozenset(p for p in local if p is not None)


def parameters_named(model: nn.Module, names: Sequence[str]) -> frozenset[nn.Parameter]:
    """Return the parameters of the modules that are named as ``resident``.

    Raises:
        ValueError: there is no such module, or it holds no parameters.
    """
    modules = modules_named(whole_model(model), names, "resident").values()
    return held_parameters(model, (p for module in modules for p in module.parameters()))
