"""``model.to()``, ``half()``, ``cuda()`` and the like, called on a wrapped model.

# Note [Conversions of a wrapped model]
#
# Training scripts convert a model after the last step, for instance to write an adapter in fp32
# (`unet = unet.to(torch.float32)`). An error there would lose the training, and a conversion would
# need memory for the whole model. So the model keeps its dtype and its device, and a warning says
# so. Nothing is converted, buffers neither: a buffer whose dtype or device differs from that of the
# weights would make the next forward fail or compute other values.
#
# All these calls come to `nn.Module._apply`, first that of the module they were made on, then those
# of its children. Each module with managed parameters below it has an `_apply` of its own, which
# decides for all that is below. Inside a forward, where the rest of the code relies on the
# conversion, it stays an error.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

import torch
from torch import nn

from ..private import module_private, torch_private
from .param_handle import managed

log = logging.getLogger("overspill")

Convert = Callable[[torch.Tensor], torch.Tensor]


class Conversions:
    """A guard that makes a wrapped model keep its dtype and device, until ``remove``."""

    def __init__(
        self, model: nn.Module, held: Callable[[nn.Parameter], bool], closed: Callable[[], bool]
    ) -> None:
        """
        Args:
            held: returns whether an engine holds a parameter's weights now.
            closed: returns whether the weights were released with the engine.
        """
        self._held, self._closed = held, closed
        self._modules: list[nn.Module] = []
        me = weakref.ref(self)
        for module in holders(model, held):
            module_private.set_apply(module, Kept(module, me))
            self._modules.append(module)

    def remove(self) -> None:
        """Give the modules their own conversions back."""
        for module in self._modules:
            module_private.set_apply(module, None)
        self._modules.clear()

    def keep(self, module: nn.Module, convert: Convert) -> bool:
        """Return whether ``module`` is to stay as it is instead of being converted; if so, warn."""
        kinds = dict.fromkeys((p.dtype, p.device) for p in filter(self._held, module.parameters()))
        asked = {kind: _converted(convert, *kind) for kind in kinds}
        changes = [kind for kind in kinds if asked[kind] != kind]
        if not changes or self._closed() or torch_private.in_module():
            return False
        have, want = (" and ".join(map(_named, kinds)) for kinds in (
            changes, dict.fromkeys(asked[kind] for kind in changes)
        ))  # fmt: skip
        log.warning(
            "overspill: %s keeps weights of %s and was not converted to %s: to(), half(), cuda(), "
            "cpu() and the like do not convert a wrapped model. Values, state_dict() and training "
            "are unchanged. To convert the model, call overspill.unwrap(model) first",
            type(module).__name__, have, want,
        )  # fmt: skip
        return True


class Kept:
    """The ``_apply`` of a wrapped module.

    Copies and pickles of the module leave it out: see ``pickling``.
    """

    def __init__(self, module: nn.Module, conversions: weakref.ref[Conversions]) -> None:
        self._module, self._conversions = weakref.ref(module), conversions

    def __call__(self, convert: Convert, recurse: bool = True) -> nn.Module:
        module, conversions = self._module(), self._conversions()
        assert module is not None, "only the module has this"
        if conversions is not None and conversions.keep(module, convert):
            return module
        return module_private.apply_of_class(module, convert, recurse)


def in_engine(p: nn.Parameter) -> bool:
    """Return whether an engine holds a parameter's weights; not so inside ``materialized``."""
    found = managed(p)
    return found is not None and not found.given


def holders(model: nn.Module, held: Callable[[nn.Parameter], bool]) -> list[nn.Module]:
    """Return the modules with parameters that an engine holds, and those above them."""
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if held(p)]
    parts = (name.split(".")[:-1] for name in names)
    above = {".".join(each[:count]) for each in parts for count in range(len(each) + 1)}
    found = {
        id(module): module
        for name, module in model.named_modules(remove_duplicate=False)
        if name in above
    }
    return list(found.values())


def _converted(
    convert: Convert, dtype: torch.dtype, device: torch.device
) -> tuple[torch.dtype, torch.device]:
    """Return the dtype and device that a conversion gives, tried on an empty tensor."""
    with torch.no_grad():
        found = convert(torch.empty(0, dtype=dtype, device=device))
    return found.dtype, found.device


def _named(kind: tuple[torch.dtype, torch.device]) -> str:
    dtype, device = kind
    return f"{str(dtype).removeprefix('torch.')} on {device}"
