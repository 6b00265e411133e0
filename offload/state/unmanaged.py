"""Tensors of a model that the engine does not manage.

These are buffers, integer parameters, and parameters that were added after ``wrap``.  They stay on
the device; commits and exports include them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

import torch
from torch import nn

from ..errors import ModelError, StoreError, format_bytes
from ..private import module_private, torch_private
from .hub_names import tensors_of

log = logging.getLogger("overspill")

LARGE_SHARE = 0.1  # of the managed bytes, above which unmanaged tensors are reported
PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
QUANTISED = (
    ". To move weights that another library has quantised, load the model unquantised and pass "
    "frozen='nf4' or 'int8'"
)


def unmanaged_tensors(model: nn.Module, managed: Container[int]) -> dict[str, torch.Tensor]:
    """Return the tensors of ``state_dict`` that are not managed, each once, without copies.

    Args:
        managed: ids of the managed parameters.
    """
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in tensors_of(model).items():
        if id(tensor) not in managed:
            found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def warn_of_large(model: nn.Module, parameters: Iterable[nn.Parameter], *, commits: bool) -> None:
    """Warn of large tensors that stay on the device, often another library's quantised weights.

    Args:
        parameters: the managed parameters.
        commits: whether every commit writes unmanaged tensors.
    """
    managed = {id(p): _nbytes(p) for p in parameters}
    found = unmanaged_tensors(model, managed)
    nbytes = sum(map(_nbytes, found.values()))
    if nbytes <= LARGE_SHARE * sum(managed.values()):
        return
    largest = max(found, key=lambda name: _nbytes(found[name]))
    quantised = sum(_nbytes(each) for each in found.values() if _is_quantised(each))
    log.warning(
        "overspill: buffers and integer parameters (%s) stay on the device%s; the largest is %s "
        "(%s)%s", format_bytes(nbytes), ", and every commit writes them" if commits else "",
        largest, type(found[largest]).__name__, QUANTISED if 2 * quantised > nbytes else "",
    )  # fmt: skip


def _is_quantised(tensor: torch.Tensor) -> bool:
    """Return whether it looks like another library's quantised weights."""
    if type(tensor) not in PLAIN:
        return True
    codes = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    return codes or (tensor.is_floating_point() and tensor.element_size() == 1)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def current_names(
    model: nn.Module, names: Iterable[str], parameters: Iterable[nn.Parameter]
) -> dict[int, str]:
    """Return the names of tensors in a model now, by their ids.

    A parameter has the name of ``names`` if it still has it, else the first that it has.
    """
    present = tensors_of(model)
    found = {id(tensor): name for name, tensor in reversed(present.items())}
    kept = {id(p): n for n, p in zip(names, parameters, strict=True) if present.get(n) is p}
    return found | kept


def renamed_parameters(
    model: nn.Module, names: Sequence[str], parameters: Sequence[nn.Parameter]
) -> dict[str, str | None]:
    """Return the parameters that no longer have their name in the model, by their old name.

    The values are the new names, or ``None`` if a parameter has left the model.
    """
    found = current_names(model, names, parameters)
    now = ((name, found.get(id(p))) for name, p in zip(names, parameters, strict=True))
    return {name: other for name, other in now if other != name}


def require_values(model: nn.Module, initialised: Container[int]) -> None:
    """Raise if a tensor has no values, and no initialiser gives it any.

    Args:
        initialised: ids of parameters that files or initialisers fill.

    Raises:
        OffloadError: an integer parameter or a buffer is on meta, and no file provides its values.
    """
    for name, tensor in unmanaged_tensors(model, initialised).items():
        if tensor.is_meta:
            raise ModelError(
                f"{name!r} ({tensor.dtype}) is on meta and has no values; build it with memory "
                "(outside of overspill.empty_init() or torch.device('meta')), or name files that "
                "have it in weights="
            )
    require_buffers(model)


def require_buffers(model: nn.Module, known: Container[str] = ()) -> None:
    """Raise if a buffer is on ``meta``; ``known``: names of buffers whose values will be loaded.

    Raises:
        OffloadError: a buffer is.
    """
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in known:
            raise ModelError(
                f"buffer {name!r} is on meta, and no file holds its values (it is not persistent); "
                "build the model inside overspill.empty_init(), where buffers have memory, instead "
                "of torch.device('meta')"
            )


class UnmanagedState:
    """A commit's values of unmanaged tensors, to be restored into a model.

    They are checked when this is made, so nothing has been changed if they do not fit.
    """

    def __init__(
        self, model: nn.Module, stored: Mapping[str, torch.Tensor], added: Collection[str] = ()
    ) -> None:
        """
        Args:
            stored: the tensors of the commit, by name.
            added: names of tensors that were added to the model after it was wrapped.

        Raises:
            OffloadError: the model has no such tensor, or has a parameter of another shape.
        """
        self._model, self._stored = model, dict(stored)
        modules = _modules(model)
        missing = [name for name in added if _owner(modules, name) is None]
        for name in missing:
            del self._stored[name]
        if missing:
            log.warning(
                "overspill: the commit also holds tensors that were added to the model after wrap, "
                "and that this model does not have; they were not restored, and `overspill export` "
                "writes them: %s", ", ".join(missing),
            )  # fmt: skip
        for name, value in self._stored.items():
            _check(modules, name, value)

    def restore(self) -> None:
        """Copy the values into the model.

        A buffer of another shape is replaced, because some modules size their buffers when they
        first run. So is an expanded one, which nothing can be copied into.
        """
        modules = _modules(self._model)
        for name, value in self._stored.items():
            module, own = _owner(modules, name), name.rpartition(".")[2]
            assert module is not None, "checked when this was made"
            there = getattr(module, own)
            if there is None:
                like = next(self._model.buffers(), next(self._model.parameters(), value))
                setattr(module, own, value.to(like.device))
            elif there.shape != value.shape or torch_private.overlaps_itself(there):
                setattr(module, own, value.to(there.device, there.dtype))
            else:
                there.detach().copy_(value)


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    return dict(model.named_modules(remove_duplicate=False))


def _owner(modules: Mapping[str, nn.Module], name: str) -> nn.Module | None:
    """Return the module that has a parameter or buffer of this name, even an empty one."""
    path, _, own = name.rpartition(".")
    module = modules.get(path)
    if module is None:
        return None
    parameter = module_private.own_parameters(module).get(own)
    return module if parameter is not None or own in module_private.buffer_names(module) else None


def _check(modules: Mapping[str, nn.Module], name: str, value: torch.Tensor) -> None:
    module, own = _owner(modules, name), name.rpartition(".")[2]
    if module is None:
        raise StoreError(
            f"the commit holds {name!r}, of shape {tuple(value.shape)}, and the model has no such "
            "parameter or buffer; build the model as it was then"
        )
    there = module_private.own_parameters(module).get(own)
    if there is not None and there.shape != value.shape:
        raise StoreError(
            f"parameter {name!r} has shape {tuple(value.shape)} in the commit and "
            f"{tuple(there.shape)} in the model; build the model as it was then"
        )
