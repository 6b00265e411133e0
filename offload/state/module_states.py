"""Extra state of modules: entries of a state dict that are neither parameters nor buffers.

# Note [Extra state]
#
# Extra state comes from ``get_extra_state``, an overridden ``_save_to_state_dict`` (the scales of
# bitsandbytes' layers, torch.ao's) or state-dict hooks. The engine does not know what it means. It
# saves and loads it with the module's own code, as ``state_dict`` and ``load_state_dict`` do, for
# one module at a time, and skips the engine's own hooks, which are about weights.
#
# Commits hold all entries that can be read back without running code from them. Files hold those
# that are tensors. What is left out, or what a module does not take back, is named in a warning.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import StoreError
from ..private import module_private, torch_private
from .weight_files import DTYPES

log = logging.getLogger("overspill")

States = Mapping[str, Mapping[str, Any]]  # entries by the path of the module, and by name in it


def states_of(model: nn.Module, failed: Callable[[str, Exception], None]) -> dict[str, Any]:
    """Return what the modules of a model add to its state dict, as ``States``.

    Args:
        failed: called with a module's path and the error of its code.
    """
    found: dict[str, Any] = {}
    for path, module in _adding(model):
        try:
            added = module_private.added_state(module)
        except Exception as error:
            failed(path, error)
            continue
        if added:
            found[path] = added
    return found


def added_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that modules add, by state-dict name, and warn of other entries."""
    found, others = dict[str, torch.Tensor](), list[str]()
    for path, module in _adding(model, remove_duplicate=False):
        try:
            added = module_private.added_state(module)
        except Exception as error:
            _warn_of_code(path, error)
            continue
        for own, value in added.items():
            if _is_dense(value):
                found[_name(path, own)] = value.detach()
            else:
                others.append(_name(path, own))
    warn_not_tensors(others)
    return found


def named_tensors(states: States) -> dict[str, torch.Tensor]:
    """Return the tensors in a commit's states, by state-dict name, and warn of other entries."""
    named = {_name(path, own): v for path, each in states.items() for own, v in each.items()}
    found = {name: value for name, value in named.items() if _is_dense(value)}
    warn_not_tensors(named.keys() - found.keys())
    return found


def warn_not_tensors(names: Iterable[str]) -> None:
    """Warn of entries that files of tensors cannot hold."""
    if listed := ", ".join(sorted(names)):
        log.warning(
            "overspill: not saved, because safetensors files hold only dense tensors: %s; save it "
            "in a file of its own (torch.save)", listed,
        )  # fmt: skip


def warn_not_committed(model: nn.Module) -> None:
    """Warn of modules whose states are not in the commits of several ranks."""
    failed: dict[str, Exception] = {}
    if paths := sorted({**states_of(model, failed.__setitem__), **failed}):
        log.warning(
            "overspill: commits of several ranks do not include the extra state of these modules; "
            "save it in your script: %s",
            ", ".join(path or "(model)" for path in paths),
        )  # fmt: skip


_QUANT_STATE = ".quant_state.bitsandbytes__"  # in names: how a 4-bit weight is dequantised


class ModuleStates:
    """Entries to be loaded into the modules of a model.

    They are checked when this is made, so nothing has been changed if they do not fit.
    """

    def __init__(self, model: nn.Module, states: States) -> None:
        """
        Raises:
            OffloadError: the model has no such module, or it adds nothing to its state dict.
        """
        modules = dict(_adding(model, remove_duplicate=False))
        for path, entries in states.items():
            if path not in modules:
                raise StoreError(
                    f"the commit holds {_name(path, next(iter(entries)))!r}, which is neither a "
                    "parameter nor a buffer of this model, and no module adds it to its state "
                    "dict; build the model as it was at the commit"
                )
            if quantised := [own for own in entries if _QUANT_STATE in own]:
                present = module_private.added_state(modules[path])
                if not all(_is_equal(present.get(own), entries[own]) for own in quantised):
                    raise StoreError(
                        f"{path} is quantised otherwise in this model than at the commit; load the "
                        "same base in the same way"
                    )
        self._states = [(path, modules[path], entries) for path, entries in states.items()]

    def restore(self) -> None:
        """Load the entries with the modules' own code."""
        for path, module, entries in self._states:
            give_back(module, entries, path)


def give_back(module: nn.Module, entries: Mapping[str, Any], path: str) -> None:
    """Load entries that a module had added to a state dict, with the module's own code.

    Raises:
        Exception: any error of that code.
    """
    left = module_private.load_added(module, entries)
    if not left:
        return
    present = module_private.added_state(module)
    # no code loads them, such as bitsandbytes' scales: tensors are copied in place
    for own in left:
        there: Any = present.get(own)
        value = entries[own]
        tensors = isinstance(there, torch.Tensor) and isinstance(value, torch.Tensor)
        if tensors and there.shape == value.shape:
            there.detach().copy_(value)
    present = module_private.added_state(module)
    lost = [own for own in left if not _is_equal(present.get(own), entries[own])]
    if lost:
        log.warning(
            "overspill: not restored: %s. The module has no code to load it, or its shape differs; "
            "set it in your script, or build the model as it was at the commit",
            ", ".join(_name(path, own) for own in lost),
        )


class FoundStates:
    """Entries of a model's modules that are in files."""

    def __init__(
        self, model: nn.Module, names: Iterable[str], in_base: Callable[[str], str]
    ) -> None:
        """
        Args:
            names: tensors in the files that are neither parameters nor buffers of the model.
            in_base: maps a name to the one from before adapters were added.
        """
        there = set(names)
        # By module: the names in the files, by the names in the module.
        self._found: list[tuple[str, nn.Module, dict[str, str]]] = []
        for path, module in _adding(model, remove_duplicate=False):
            try:
                own = {*module_private.added_state(module), module_private.EXTRA}
            except Exception:  # for example, the module is not built yet
                own = {module_private.EXTRA}
            full = {each: _name(path, each) for each in sorted(own)}
            present = {
                each: name if name in there else in_base(name)
                for each, name in full.items()
                if name in there or in_base(name) in there
            }
            if present:
                self._found.append((path, module, present))
        self.names = {name for _, _, present in self._found for name in present.values()}

    def load(self, read: Callable[[str], torch.Tensor]) -> None:
        """Load the entries into the modules; ``read`` returns a tensor by its name in the files."""
        for path, module, present in self._found:
            give_back(module, {own: read(name) for own, name in present.items()}, path)


class KeptStates:
    """A copy of the states of all modules, to be restored after an error."""

    def __init__(self, model: nn.Module) -> None:
        self._kept: list[tuple[str, nn.Module, dict[str, Any]]] = []
        self._lost: list[tuple[str, Exception]] = []
        for path, module in _adding(model):
            try:
                self._kept.append((path, module, copy.deepcopy(module_private.added_state(module))))
            except Exception as error:
                self._lost.append((path, error))

    def give_back(self) -> None:
        """Restore the states; errors are logged."""
        for path, module, entries in self._kept:
            try:
                give_back(module, entries, path)
            except Exception as error:
                self._lost.append((path, error))
        for path, lost in self._lost:
            log.error("overspill: extra state of module %r was not given back: %s", path, lost)


def _adding(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules(remove_duplicate=remove_duplicate):
        if module_private.adds_state(module):
            yield path, module


def _name(path: str, own: str) -> str:
    return f"{path}.{own}" if path else own


def _warn_of_code(path: str, error: Exception) -> None:
    log.warning(
        "overspill: the extra state of module %r is not saved; its code raised %s: %s", path,
        type(error).__name__, error,
    )  # fmt: skip


def _is_dense(value: Any) -> bool:
    """Return whether a safetensors file can hold a value."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.dtype in DTYPES.values()
    )


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two entries have equal values, NaN included; ``False`` if that is unknown."""
    try:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            pair = [each.detach().cpu().contiguous().clone() for each in (one, other)]
            return one.shape == other.shape and torch_private.same_bits(*pair)
        return bool(type(one) is type(other) and one == other)
    except Exception:
        return False
