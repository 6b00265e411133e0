"""Which modules are known to compute the same again: torch's and transformers' own, and those whose
code shows it.

Code shows it if it reads its module, its arguments and constants, and calls torch, ``math`` and
code that shows it too.  Whatever else there is (a write to an attribute, a list that grows, an
object of a class that nobody knows) leaves it unknown: it may compute the same, but nobody can
tell.
"""

from __future__ import annotations

import argparse
import builtins
import dis
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from . import torch_private

_TRANSFORMERS = "transformers."
LIBRARIES = ("torch.nn.", _TRANSFORMERS)  # whose modules are known
_APART = ("torch.distributed", "torch.ops")  # what others wait for, and operations of anyone's
_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size, type(...),
)  # fmt: skip
_BUILTINS = (
    "abs all any bool dict divmod enumerate filter float frozenset int isinstance issubclass len "
    "list map max min pow range reversed round set slice sorted str sum super tuple type zip"
)
# What instructions begin with that change more than local variables, or leave the function's code.
_WRITES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_NAME", "STORE_SUBSCR", "STORE_SLICE", "DELETE_",
           "IMPORT_", "LOAD_BUILD_CLASS", "SEND")  # fmt: skip
_GENERATES = ("YIELD_", "RETURN_GENERATOR")
# Names of attributes that may stand for a call that changes what it belongs to or what is outside,
# or draws numbers that no checkpoint brings back.
_CHANGES = (
    "add add_module append appendleft apply backward clear compile data debug discard distributed "
    "eval extend info insert load_state_dict log_once manual_seed ops pop popitem popleft put "
    "record remove save seed send setdefault step train update warn warning write zero_grad"
)
_CHANGES_BEGIN = ("register", "set_")
_UNDERSCORED = ("__class__", "__name__")
_OWN_CALLS = ("__call__", "__getattr__", "__getattribute__", "__setattr__", "_call_impl")


def known(module: nn.Module) -> bool:
    """Whether the module, with all inside it, is known to compute the same from the same inputs,
    and to change nothing."""
    parts = list(module.modules())
    if not all(torch_private.calls_as_modules_do(each) for each in parts):
        return False
    if any("forward" in vars(each) for each in parts):
        return False
    return _Reader(parts).shows()


class _Reader:
    """Reads the code of forwards, and all that it may call of the modules': by their names, as code
    does not tell whose attribute it means."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = {id(each): each for each in parts}
        lines = (cls for each in parts for cls in type(each).__mro__)
        self._classes = [cls for cls in dict.fromkeys(lines) if not _of_library(cls)]
        self._read: set[CodeType] = set()

    def shows(self) -> bool:
        """Whether all that they hold and call is known."""
        if any(name in vars(cls) for cls in self._classes for name in _OWN_CALLS):
            return False
        for each in self._parts.values():
            held = (value for _, value in torch_private.own_attributes(each))
            if not type(each).__module__.startswith(_TRANSFORMERS) and not self._holds(held):
                return False
        return self._named("forward") and all(map(self._named, self._overridden()))

    def _overridden(self) -> set[str]:
        """What code of the libraries may call, and find as it is written here."""
        return {
            name for cls in self._classes for name in vars(cls)
            for base in cls.__mro__
            if base not in (object, nn.Module) and _of_library(base) and name in vars(base)
            and not name.startswith("__")
        }  # fmt: skip

    def _holds(self, values: Iterable[object]) -> bool:
        """Whether nothing that is held can be called, unless it is known."""
        return all(map(self._member, values))

    def _member(self, value: object) -> bool:
        if isinstance(value, nn.Module):
            return id(value) in self._parts
        if type(value) in (list, tuple, set, frozenset):
            return self._holds(value)  # type: ignore[arg-type]
        if type(value) is dict:
            return self._holds(value.values())
        if isinstance(value, torch.Tensor) or type(value).__module__.startswith(_TRANSFORMERS):
            return not callable(value)
        return self._value(value) or (_without_methods(value) and self._holds(vars(value).values()))

    def _named(self, name: str) -> bool:
        """Whether all that the modules' classes have by this name is known."""
        for cls in self._classes:
            found = vars(cls).get(name)
            if isinstance(found, property):
                found = found.fget
            elif isinstance(found, (staticmethod, classmethod)):
                found = found.__func__
            if not self._value(found):
                return False
        return True

    def _value(self, value: object) -> bool:
        """Whether a constant, or something to call, is known."""
        if isinstance(value, _PLAIN):
            return True
        if type(value) is tuple:
            return all(map(self._value, value))
        if isinstance(value, ModuleType):
            return value.__name__ == "math" or _of_torch(value.__name__)
        if isinstance(value, partial):
            given = (*value.args, *value.keywords.values())
            return self._value(value.func) and self._holds(given)
        if isinstance(value, type):
            return _of_torch(value.__module__) or issubclass(value, BaseException)
        if isinstance(value, (FunctionType, BuiltinFunctionType)):
            own = value.__globals__ if isinstance(value, FunctionType) else {}
            # A wrapper bears the module of what it wraps: whose code it is and what it calls.
            if all(_pure(where) for where in (value.__module__, own.get("__name__", "math"))):
                return True
            return isinstance(value, FunctionType) and self._function(value)
        return False

    def _function(self, function: FunctionType) -> bool:
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if set(function.__code__.co_freevars) - {"__class__"} or not self._value(defaults):
            return False
        return self._code(function.__code__, function.__globals__, ("__class__",))

    def _code(self, code: CodeType, scope: Mapping[str, Any], free: Sequence[str]) -> bool:
        if code in self._read:  # is being read, or was found well
            return True
        self._read.add(code)
        cells = (*free, *code.co_cellvars)
        writes = _WRITES if code.co_name == "<genexpr>" else (*_WRITES, *_GENERATES)
        return all(
            not each.opname.startswith(writes) and self._instruction(each, scope, cells)
            for each in dis.get_instructions(code)
        )

    def _instruction(
        self, instruction: dis.Instruction, scope: Mapping[str, Any], cells: Sequence[str]
    ) -> bool:
        kind, what = instruction.opname, instruction.argval
        if kind == "LOAD_GLOBAL":
            return self._value(scope[what]) if what in scope else _builtin(what)
        if "DEREF" in kind:
            return what in cells
        if kind in ("LOAD_ATTR", "LOAD_METHOD") or kind.startswith("LOAD_SUPER"):
            return _harmless(what) and self._named(what)
        if isinstance(what, CodeType):  # of a comprehension, or of a function within
            return self._code(what, scope, cells)
        return True


def _builtin(name: str) -> bool:
    found = getattr(builtins, name, None)
    error = isinstance(found, type) and issubclass(found, BaseException)
    return error or name in _BUILTINS.split()


def _harmless(name: str) -> bool:
    """Whether an attribute of that name is no call that changes something, by torch's habit of an
    underscore at the end, and by the usual names."""
    if name.startswith("__"):
        return name in _UNDERSCORED
    return not (
        name.endswith("_") or name in _CHANGES.split() or name.startswith(_CHANGES_BEGIN)
    )  # fmt: skip


def _pure(name: str | None) -> bool:
    """Whether functions of a module are known."""
    return name is not None and (
        name == "math" or _of_torch(name) or name.startswith(_TRANSFORMERS)
    )  # fmt: skip


def _of_torch(name: str) -> bool:
    return (name == "torch" or name.startswith("torch.")) and not name.startswith(_APART)


def _of_library(cls: type) -> bool:
    return cls is object or cls.__module__.startswith(LIBRARIES)


def _without_methods(value: object) -> bool:
    """Whether an object has members alone, as namespaces and most dataclasses do: nothing to call
    but what Python makes for every class."""
    cls = type(value)
    if cls in (argparse.Namespace, SimpleNamespace):
        return True
    if callable(value) or not hasattr(value, "__dict__") or cls.__module__ == "builtins":
        return False
    return not any(
        isinstance(found, (property, staticmethod, classmethod))
        or (callable(found) and not name.startswith("__"))
        or name in ("__getattr__", "__getattribute__")
        for each in cls.__mro__ if each is not object
        for name, found in vars(each).items()
    )  # fmt: skip
