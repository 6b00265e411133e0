"""Detection of modules whose recomputation gives the same result and changes nothing.

These are modules of torch and transformers, LoRA layers of peft, and modules whose code shows it.
Code shows it if it only reads its module, its arguments and constants, and calls torch, ``math``
and code that shows it too. Anything else (a write to an attribute, a list that grows, an object of
an unknown class) leaves the module unknown, although it may compute the same.

See Note [Recomputation of units] in ``recompute.py``.
"""

from __future__ import annotations

import argparse
import builtins
import dis
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from inspect import unwrap
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..planning.products import TILED
from ..private import module_private

_OTHERS = ("transformers.", "peft.tuners.lora.", "peft.tuners.tuners_utils")
LIBRARIES = ("torch.nn.", *_OTHERS)  # whose modules are known
_APART = ("torch.distributed", "torch.ops")  # collectives, and operations of other libraries
_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size, type(...),
)  # fmt: skip
_BUILTINS = (
    "abs all any bool dict divmod enumerate filter float frozenset int isinstance issubclass len "
    "list map max min pow range reversed round set slice sorted str sum super tuple type zip"
)
# Prefixes of instructions that change more than local variables, or leave the function's code.
_WRITES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_NAME", "STORE_SUBSCR", "STORE_SLICE",
           "DELETE_ATTR", "DELETE_DEREF", "DELETE_GLOBAL", "DELETE_NAME", "DELETE_SUBSCR",
           "IMPORT_", "LOAD_BUILD_CLASS", "MATCH_CLASS", "SEND")  # fmt: skip
_GENERATES = ("YIELD_", "RETURN_GENERATOR")
# Names of attributes that may stand for a call that changes its object or outside state, or draws
# random numbers that no checkpoint restores.
_CHANGES = (
    "add add_module append appendleft apply backward batch_norm clear compile data debug discard "
    "distributed eval extend extendleft grad info insert instance_norm load_state_dict log_once "
    "manual_seed numpy ops pop popitem popleft put record remove reverse save seed send setdefault "
    "sort step train update warn warning write zero_grad"
)
_CHANGES_BEGIN = ("register", "reset_", "set_")
_CHANGES_END = ("_", "_update")
_GIVEN_TO_CHANGE = ("out", "inplace")  # torch keywords for what a call writes to
_UNDERSCORED = ("__class__", "__name__")
# Methods that Python calls implicitly, and that change nothing when called in a forward.
_UNCALLED = ("__annotate__", "__annotate_func__", "__class__", "__eq__", "__hash__", "__init__",
             "__post_init__", "__replace__", "__repr__")  # fmt: skip
_OF_TENSORS = ("torch", __name__.partition(".")[0])  # of tensors, and of placeholders
_OF_OBJECTS = ("__dict__", "__weakref__")
_ATTENTIONS = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


def known(module: nn.Module) -> bool:
    """Return whether a module, with all inside it, computes the same again and changes nothing.

    Never raises.
    """
    try:
        parts = list(module.modules())
        return all(map(_as_usual, parts)) and _Reader(parts).shows()
    except Exception:  # modules hold anything; what fails is unknown
        return False


def _as_usual(module: nn.Module) -> bool:
    """Return whether nothing runs around the module's forward, and it changes no state."""
    held = type(module) in (nn.ParameterDict, nn.ParameterList)  # these cannot be called
    if not (held or module_private.calls_as_modules_do(module)) or (
        "forward" in vars(module) and module not in TILED
    ):
        return False
    if parametrize.is_parametrized(module) or getattr(module, "running_mean", None) is not None:
        return False
    if getattr(module, "max_norm", None) is not None:  # its weights are scaled when it runs
        return False
    if getattr(module, "lora_variant", None):  # DoRA and others; hooks pass more to some of them
        return False
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    if any(type(each).__module__.partition(".")[0] not in _OF_TENSORS for each in tensors):
        return False
    config = getattr(module, "config", None)
    return getattr(config, "_attn_implementation", None) in _ATTENTIONS


class _Reader:
    """A reader of the code of forwards, and of what they may call in the modules' classes.

    Attributes are looked up by name in all classes, because code does not tell whose attribute it
    reads.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = {id(each): each for each in parts}
        lines = [cls for each in parts for cls in module_private.own_classes(each)]
        self._classes = [cls for cls in dict.fromkeys(lines) if not _of_library(cls)]
        self._libraries = [cls for cls in dict.fromkeys(lines) if _of_library(cls)]
        self._read: set[tuple[int, int]] = set()

    def shows(self) -> bool:
        """Return whether everything that the modules hold and call is known."""
        if any(_called_by_python(cls) for cls in self._classes):
            return False
        forwards = (vars(cls).get("forward") for cls in self._libraries)
        if not all(_of_libraries(each) for each in forwards if isinstance(each, FunctionType)):
            return False
        for each in self._parts.values():
            held = (
                value for name, value in module_private.own_attributes(each)
                if name != "forward" or each not in TILED
            )  # fmt: skip
            cls = module_private.own_classes(each)[0]
            if not cls.__module__.startswith(_OTHERS) and not self._holds(held):
                return False
        return self._named("forward") and all(map(self._named, self._overridden()))

    def _overridden(self) -> set[str]:
        """Return the names that library code may call, and that these classes override."""
        return {
            name for cls in self._classes for name in vars(cls)
            for base in cls.__mro__
            if base not in (object, nn.Module) and _of_library(base) and name in vars(base)
            and not name.startswith("__")
        }  # fmt: skip

    def _holds(self, values: Iterable[object]) -> bool:
        """Return whether none of the values can be called, except known ones."""
        return all(map(self._member, values))

    def _member(self, value: object) -> bool:
        if isinstance(value, nn.Module):
            return id(value) in self._parts
        if type(value) in (list, tuple, set, frozenset):
            return self._holds(value)  # type: ignore[arg-type]
        if type(value) is dict:
            return self._holds(value) and self._holds(value.values())
        if type(value) in (torch.Tensor, nn.Parameter):
            return True
        if type(value).__module__.startswith(_OTHERS):
            return not callable(value)
        return self._value(value) or (_without_methods(value) and self._holds(vars(value).values()))

    def _named(self, name: str) -> bool:
        """Return whether everything of this name in the modules' classes is known."""
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
        """Return whether a constant, or a callable, is known."""
        if type(value) in _PLAIN:
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
            if not _harmless(value.__name__):
                return False
            if _of_a_library(value):
                return True
            return isinstance(value, FunctionType) and self._function(value)
        return False

    def _function(self, function: FunctionType) -> bool:
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if set(function.__code__.co_freevars) - {"__class__"} or not self._value(defaults):
            return False
        return self._code(function.__code__, function.__globals__, ("__class__",))

    def _code(self, code: CodeType, scope: Mapping[str, Any], free: Sequence[str]) -> bool:
        if (id(code), id(scope)) in self._read:  # is being read, or was found to be known
            return True
        self._read.add((id(code), id(scope)))
        names = [name for each in code.co_consts if type(each) is tuple for name in each]
        if any(name in names for name in _GIVEN_TO_CHANGE):
            return False
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
            if what not in scope:
                return _builtin(what)
            return _harmless(what) and self._value(scope[what])
        if kind.startswith("BINARY_OP") and instruction.argrepr.endswith("="):
            return False  # in place, on an unknown object
        if "DEREF" in kind:
            return what in cells
        if kind in ("LOAD_ATTR", "LOAD_METHOD") or kind.startswith("LOAD_SUPER"):
            return _harmless(what) and self._named(what)
        if isinstance(what, CodeType):  # a comprehension, or an inner function
            return self._code(what, scope, cells)
        return True


def _builtin(name: str) -> bool:
    found = getattr(builtins, name, None)
    error = isinstance(found, type) and issubclass(found, BaseException)
    return error or name in _BUILTINS.split()


def _harmless(name: str) -> bool:
    """Return whether an attribute of that name is not a call that changes something.

    Judged by torch's convention of a trailing underscore, and by common names.
    """
    if name.startswith("__"):
        return name in _UNDERSCORED
    if name in _CHANGES.split() or name.startswith(_CHANGES_BEGIN):
        return False
    return not name.endswith(_CHANGES_END)


def _of_a_library(function: FunctionType | BuiltinFunctionType) -> bool:
    # ``__module__`` of a wrapper is that of the wrapped function, so its globals are checked too.
    own = function.__globals__ if isinstance(function, FunctionType) else {}
    return all(_pure(where) for where in (function.__module__, own.get("__name__", "math")))


def _of_libraries(function: FunctionType) -> bool:
    """Return whether a library function, and what it calls by a global name, are the library's own.

    Either may have been patched.
    """
    inner = unwrap(function)
    named = (inner.__globals__.get(name) for name in inner.__code__.co_names)
    return _of_a_library(function) and all(
        _of_a_library(each) for each in named if isinstance(each, FunctionType)
    )


def _called_by_python(cls: type) -> bool:
    """Return whether a class has code that Python runs without a call by name."""
    return any(
        name.startswith("__") and callable(found) and name not in _UNCALLED
        for name, found in vars(cls).items()
    ) or "_call_impl" in vars(cls)


def _pure(name: str | None) -> bool:
    """Return whether the functions of a module are known."""
    return name is not None and (
        name == "math" or _of_torch(name) or name.startswith(_OTHERS)
    )  # fmt: skip


def _of_torch(name: str) -> bool:
    return (name == "torch" or name.startswith("torch.")) and not name.startswith(_APART)


def _of_library(cls: type) -> bool:
    return cls is object or cls.__module__.startswith(LIBRARIES)


def _without_methods(value: object) -> bool:
    """Return whether an object only has members, like namespaces and most dataclasses.

    It has nothing to call but what Python makes for every class.
    """
    cls = type(value)
    if cls in (argparse.Namespace, SimpleNamespace):
        return True
    if callable(value) or not hasattr(value, "__dict__") or cls.__module__ == "builtins":
        return False
    return not any(
        (callable(found) and name not in _UNCALLED and not name.startswith("__dataclass_"))
        or (hasattr(found, "__get__") and name not in (*_UNCALLED, *_OF_OBJECTS))
        for each in cls.__mro__ if each is not object
        for name, found in vars(each).items()
    )  # fmt: skip
