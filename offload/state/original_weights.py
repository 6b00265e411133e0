"""The model's values from before it was wrapped, and their restoration if wrapping fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..params.param_handle import managed
from ..planning.sections import Sections
from ..planning.stand_ins import is_hooked
from ..private import bitsandbytes_private, module_private, peft_private, torch_private
from ..schedule.units import ParamSpec, Unit
from .engine_resources import EngineResources
from .hub_names import forget_quantisation
from .module_states import KeptStates
from .unmanaged import unmanaged_tensors

log = logging.getLogger("overspill")


class OriginalWeights:
    """Tracks what ``wrap`` has taken from a model, to restore it if the model cannot be wrapped.

    After an error no parameter silently holds NaN: those whose exact values the engine has get them
    back, the others go to ``meta``, where using them raises.  Shards lose nothing by that, so no
    error is logged for them.
    """

    def __init__(
        self, model: nn.Module, groups: Sequence[dict[str, Any]], resources: EngineResources
    ) -> None:
        self._model, self._present, self._resources = model, groups, resources
        self._parts = resources.runtime.parts
        # By parameter index; the last field says whether the engine has its original values.
        self._was: dict[int, tuple[ParamSpec, torch.dtype, torch.device, bool]] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._buffers: list[tuple[nn.Module, str, torch.Tensor | None]] = []
        self._moved: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._groups: list[tuple[Any, dict[str, Any]]] = []
        self._contents: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._states: KeptStates | None = None
        self._restore_configs: Callable[[], None] = lambda: None

    def note(self) -> None:
        """Save hyper-parameters, buffers and unmanaged parameters before they are overwritten."""
        self._groups = [
            (group, {k: _kept(v) for k, v in group.items() if k != "params"})
            for group in self._present
        ]
        self._states = KeptStates(self._model)
        managed = set(map(id, self._parts.parameters))
        for tensor in unmanaged_tensors(self._model, managed).values():
            if not tensor.is_meta:
                self._contents.append((tensor, tensor.detach().clone()))
        for module in self._model.modules():
            for name in module_private.buffer_names(module):
                self._buffers.append((module, name, getattr(module, name)))

    def move_unmanaged(self) -> None:
        """Move every buffer, and every parameter that the engine does not manage, to the device."""
        device = self._resources.runtime.accelerator.device
        for module in self._model.modules():
            for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                if buffer.device != device:
                    self._buffers.append((module, name, buffer))
                    setattr(module, name, buffer.to(device))
        bitsandbytes_private.prepare(self._model, device, managed)
        peft_private.prepare(managed, Sections)
        self._restore_configs = forget_quantisation(self._model)
        mine = set(map(id, self._parts.parameters))
        for p in self._model.parameters():
            if id(p) not in mine and p.device != device:
                self._moved.append((p, p.data))
                p.data = p.data.to(device)

    def free(self, unit: Unit, *, theirs: bool) -> None:
        """Free the originals of a unit; its parameters keep their shape, over a single NaN.

        Args:
            theirs: whether the engine has the values that they had.
        """
        stubs = self._resources.stubs.of(unit)
        for (_, spec), stub in zip(unit.params, stubs, strict=True):
            p = self._parts.parameters[spec.index]
            self._was[spec.index] = spec, p.dtype, p.device, theirs
            torch_private.become(p, stub)

    def read(self) -> None:
        """Copy to the host what is to be restored; must be called before the engine is closed."""
        for unit in self._parts.units:
            wanted = [i for _, spec in unit.params if self._theirs(i := spec.index)]
            if not wanted:
                continue
            try:
                for spec, value in self._resources.contents.exact(unit.index):
                    self._values[spec.index] = value
            except Exception as error:
                log.warning("overspill: weights of %r cannot be read back: %s", unit.name, error)

    def _theirs(self, index: int) -> bool:
        return index in self._was and self._was[index][3]

    def give_back(self) -> None:
        """Restore everything, after the engine is closed."""
        for module, name, buffer in reversed(self._buffers):
            setattr(module, name, buffer)
        for moved, data in self._moved:
            moved.data = data
        for group, kept in self._groups:
            group.update(kept)
        for tensor, value in self._contents:
            tensor.detach().copy_(value)
        lost = 0
        for index, (spec, dtype, device, theirs) in self._was.items():
            p, value = self._parts.parameters[index], self._values.pop(index, _LOST)
            if not theirs or torch.promote_types(value.dtype, dtype) != value.dtype:
                lost += device.type != "meta" and is_hooked(self._model, p)
                _, _, shape, stride = spec.as_parameter(torch.float32)
                value = torch.empty_strided(shape, stride, device="meta")
                device = value.device
            if (known := managed(p)) is not None:  # the model was partly hooked up
                known.release(p, torch.empty(0, dtype=dtype, device="cpu"))
            torch_private.become(p, value.to(device, dtype))
        if lost:
            log.error(
                "overspill: the weights of %d parameters could not be given back; they are on the "
                "meta device now: build the model again", lost,
            )  # fmt: skip
        bitsandbytes_private.give_back(self._model)
        self._restore_configs()
        if self._states is not None:
            self._states.give_back()


# promotes to any weight's dtype, so it counts as lost
_LOST = torch.empty(0, dtype=torch.bool, device="meta")


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
