"""Recomputation of units in backward, so that autograd keeps only their inputs.

See Note [Recomputation of units].
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from ..errors import ActivationError
from ..planning.partition import Partition
from ..planning.recompute_choice import Recomputed
from ..private import checkpoint_private, torch_private
from .attention import AttentionMeter, KeptAttention
from .known_code import known
from .module_state import (
    State,
    draw_from,
    first_changed,
    random_numbers,
    set_modes,
    state_of,
    weights_of,
)
from .offloader import SavedHandle, SavedTensorOffloader
from .precision import exact

log = logging.getLogger("overspill")

Checkpoint = Generator[None, None, None]
_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip
_GROWN = 1.1  # inputs larger by this factor are another load
_CHANCES = 3  # forwards that may change their module: the first may fill a cache


# Note [Recomputation of units]
# Module hooks put torch's own non-reentrant checkpoint around a unit's forward (``_Checkpointed``).
# A forward that changes its own module would change it twice, so a unit is recomputed only once it
# is steady, which is decided separately for training and evaluation mode:
#
# - If its code is known not to change anything (see ``known_code``), it is steady at once.
# - Otherwise its forwards are only watched at first (``_Watched``): buffers, attributes, weights,
#   inputs and random number generators are compared before and after. If nothing changed, the unit
#   is proven, and steady from the next step on. After ``_CHANCES`` forwards that changed something,
#   it is never recomputed.
#
# A recomputed forward is compared in the same way. If it changes something after all, a warning
# says so, and the unit is watched again from the next step on. If its module has changed by the
# time backward recomputes it, that is an error.
#
# A watched unit becomes steady only between steps: a checkpoint of the user's own must recompute
# units in the same way as they ran. Torch restores its own random numbers; those of Python and
# NumPy are restored here, if the forward has drawn any.


class Around(Protocol):
    """A context around a unit's forward, which has begun and is ended by ``end``."""

    def end(self, *, completed: bool) -> None:
        """End the context; ``completed`` is false if the forward raised."""


class _Again(threading.local):
    """The units that the current thread recomputes."""

    def __init__(self) -> None:
        self.units: list[int] = []


class Recompute:
    """The units that are recomputed, with a checkpoint around each of their forwards.

    See Note [Recomputation of units].

    Attributes:
        chosen: the units to recompute, and those of them that keep the outputs of attention.
        able: the units that can be recomputed.
        watching: whether all ``able`` units are watched and measured, to choose ``units``.
        input_bytes: by unit, the inputs of its largest forward while watching.
        grown: the factor by which inputs have grown since.
        attention: by unit, the attention of its largest forward while watching.
        computed: how often each unit was recomputed, until a caller clears it.
        keeps_below: the share of ``input_bytes`` up to which nothing needs to be recomputed.
    """

    def __init__(
        self, parts: Partition, chosen: Recomputed, device: torch.device, *, watching: bool,
        exclude: frozenset[int], saved_offloader: SavedTensorOffloader | None,
    ) -> None:  # fmt: skip
        """
        Args:
            chosen: the units to recompute at first.
            watching: they are still to be chosen, among the ``known`` ones.
            exclude: units that are never recomputed.
            saved_offloader: offloads the outputs of attention that are kept.
        """
        self.chosen, self.watching = chosen, watching
        self.able = (parts.recomputable if chosen.units or watching else frozenset()) - exclude
        self.attention = [AttentionMeter() for _ in parts.units]
        self._offloader = saved_offloader
        self.input_bytes = [0] * len(parts.units)
        self.grown, self.keeps_below = 1.0, 0.0
        self.computed = Counter[int]()
        self._found, self._device = parts.found, device
        self._again = _Again()
        # Units, with their mode (training or not), that do not change when they run.
        self._steady: set[tuple[int, bool]] = set()
        self._proven: set[tuple[int, bool]] = set()  # steady from the next step on
        self._read = set[tuple[int, bool]]()  # whose code was read
        self._changes = Counter[int]()
        self._told = set[str]()  # reasons in the arguments of units

    @property
    def units(self) -> frozenset[int]:
        """The units to recompute."""
        return self.chosen.units

    def kept_attention(self, unit: int) -> KeptAttention | None:
        """Return what keeps the outputs of attention of a forward, or ``None``."""
        if unit not in self.chosen.keep_attention:
            return None
        return KeptAttention(self._pack, self._unpack)

    def _pack(self, t: torch.Tensor) -> object:
        if self._offloader is None:
            return t
        if (rest := self._offloader.rest_for(t)) is not None:
            return t, rest
        with exact:
            return self._offloader.pack(t) or t

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, SavedHandle):
            assert self._offloader is not None
            return self._offloader.unpack(packed)
        found: torch.Tensor = packed[0] if isinstance(packed, tuple) else packed
        return found

    def begin(
        self, unit: int, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Around | None:
        """Begin a checkpoint or a watch around a forward, and return it, or ``None``."""
        wanted = unit in self.units
        if not (self.watching or wanted) or unit not in self.able:
            return None
        if not torch.is_grad_enabled() or unit in self._again.units:
            return None
        leaves, structure = torch_private.tree_flatten((tuple(args), dict(kwargs)))
        small = self._measure(unit, leaves)
        if (unit, module.training) not in self._steady and not (
            wanted and self._shows(unit, module)
        ):
            return _Watched(self, unit, module, leaves)
        if small or not wanted:
            return None
        if (why := _obstacle(leaves)) is not None:
            if why in self._told:
                self._leave_out(unit)
            else:
                self._told.add(why)
                self._keep(unit, f"and maybe others, {why}")
            return None
        if not any(
            isinstance(leaf, torch.Tensor) and leaf.device == self._device for leaf in leaves
        ):
            # By these tensors torch finds the device whose random numbers to restore.
            return None
        return _Checkpointed(self, unit, module, leaves, structure)

    def _shows(self, unit: int, module: nn.Module) -> bool:
        """Return whether the unit's code, read once, shows that it does not change when it runs."""
        case = unit, module.training
        if case in self._read:
            return False
        self._read.add(case)
        shows = known(module)
        if shows:
            self._steady.add(case)
            self._proven.add(case)
        return shows

    def known(self, units: frozenset[int]) -> frozenset[int]:
        """Return those of the units whose recomputation is known to give the same result."""
        return frozenset(unit for unit in units & self.able if known(self._found[unit].module))

    def _keep(self, unit: int, why: str) -> None:
        """Never recompute the unit from now on."""
        if unit in self.units:
            log.warning(
                "overspill: unit %s %s: it cannot be computed again, and what autograd saves of it "
                "is kept", self._found[unit].name, why,
            )  # fmt: skip
        self._leave_out(unit)

    def _leave_out(self, unit: int) -> None:
        self.chosen = Recomputed(self.units - {unit}, self.chosen.keep_attention - {unit})
        self.able -= {unit}

    def name(self, unit: int) -> str:
        """Return the name of a unit."""
        return self._found[unit].name

    def watched(self, unit: int, changed: str | None, *, training: bool) -> None:
        """Record a watched forward; ``changed`` names what it changed, or is ``None``."""
        if changed is None:
            self._proven.add((unit, training))
            return
        self._changes[unit] += 1
        if self._changes[unit] >= _CHANCES:
            self._keep(unit, f"changes {changed} when it runs")

    def surprised(self, unit: int, changed: str, again: str) -> None:
        """Warn that a recomputed unit has changed something that it did not change before.

        Args:
            changed: what it has changed.
            again: the effect of the recomputation on that.
        """
        log.warning(
            "overspill: unit %s has changed %s when it ran, as it did not before; backward "
            "computes it once more, and %s; pass activations='host' if it must not",
            self._found[unit].name, changed, again,
        )  # fmt: skip
        self._proven = {each for each in self._proven if each[0] != unit}

    def stepped(self) -> None:
        """Apply the findings of the step that has ended."""
        self._steady = set(self._proven)

    def measured(self, unit: int, meter: AttentionMeter) -> None:
        """Record the attention of a watched forward."""
        if self.watching and meter.nbytes >= self.attention[unit].nbytes:
            self.attention[unit] = meter

    def _measure(self, unit: int, leaves: Sequence[Any]) -> bool:
        """Measure a unit's inputs, and return whether they are so small that it can be kept."""
        known = self.input_bytes[unit]
        nbytes = sum(t.nbytes for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad)
        if self.watching:
            self.input_bytes[unit] = max(known, nbytes)
        elif known and nbytes > known * _GROWN:
            self.grown = max(self.grown, nbytes / known)
        return 0 < nbytes <= known * self.keeps_below

    def watch(self) -> None:
        """Watch and measure all units again, for another load."""
        self.watching, self.input_bytes = True, [0] * len(self.input_bytes)
        self.attention = [AttentionMeter() for _ in self.attention]

    def grow(self) -> None:
        """Scale ``input_bytes`` to the larger inputs seen since."""
        self.input_bytes = [int(nbytes * self.grown) for nbytes in self.input_bytes]
        self.grown = 1.0

    def compute(self, unit: int, function: partial[Any]) -> None:
        """Run ``function``, which computes a unit's forward again."""
        self.computed[unit] += 1
        self._again.units.append(unit)
        try:
            function()
        finally:
            self._again.units.remove(unit)


class _Checkpointed:
    """A checkpoint around a forward."""

    def __init__(
        self, recompute: Recompute, unit: int, module: nn.Module, leaves: list[Any], structure: Any
    ) -> None:
        inputs: dict[int, torch.Tensor] = {}
        places: list[tuple[int, int]] = []  # tensors by leaf and input index
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                inputs.setdefault(id(leaf), leaf)
                places.append((i, list(inputs).index(id(leaf))))
                leaves[i] = None  # autograd keeps them, and may offload them
        modes = [(each, each.training) for each in module.modules()]
        self._inputs = _versions(inputs.values())

        after: list[State] = []  # the module's state after the forward

        def again(*inputs: torch.Tensor) -> None:
            if after and (changed := first_changed(state_of(module), after[0])) is not None:
                raise ActivationError(
                    f"{type(module).__name__}: {changed} has changed since its forward, which "
                    "backward computes again with it; change it after backward, or pass "
                    "activations='host'"
                )
            given = list(leaves)
            for i, number in places:
                given[i] = inputs[number]
            args, kwargs = torch_private.tree_unflatten(given, structure)
            now = [(each, each.training) for each, _ in modes]
            drawn_now = [random_numbers() for _ in drawn]
            try:
                set_modes(modes)
                draw_from(drawn)
                recompute.compute(unit, partial(module, *args, **kwargs))
            finally:
                set_modes(now)
                draw_from(drawn_now)

        self._recompute, self._unit, self._module = recompute, unit, module
        # Emptied if the forward has drawn nothing: other threads may draw.
        drawn = [random_numbers()]
        self._before, self._drawn, self._after = state_of(module), drawn, after
        self._weights = weights_of(module)
        self._attention = recompute.kept_attention(unit)
        contexts = () if self._attention is None else (self._attention.contexts,)
        self._checkpoint: Checkpoint = checkpoint_private.checkpoint(
            again, list(inputs.values()), *contexts
        )
        with exact:
            next(self._checkpoint)

    def end(self, *, completed: bool) -> None:
        inputs, self._inputs = self._inputs, []  # this lives as long as the graph
        if not completed:
            self._checkpoint.close()
            return
        next(self._checkpoint, None)
        if _written(inputs):
            raise ActivationError(
                f"unit {self._recompute.name(self._unit)} changes its input in place when it runs, "
                "so that backward cannot compute it again; pass activations='host', or recompute "
                "a larger part of the model with torch.utils.checkpoint"
            )
        self._after.append(state_of(self._module))
        changed = first_changed(self._before, self._after[0])
        if changed is None:
            changed = first_changed(self._weights, weights_of(self._module))
        if changed is not None:
            self._recompute.surprised(self._unit, changed, "may change that again")
        if (changed := first_changed(self._drawn[0], random_numbers())) is None:
            self._drawn.clear()
        else:
            self._recompute.surprised(self._unit, changed, "draws the same again")


class _Watched:
    """A forward that is not recomputed, and is watched for changes to its module."""

    def __init__(
        self, recompute: Recompute, unit: int, module: nn.Module, leaves: Sequence[Any]
    ) -> None:
        self._recompute, self._unit, self._module = recompute, unit, module
        self._before, self._training = self._now(), module.training
        self._inputs = _versions(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        self._meter = AttentionMeter()
        self._meter.__enter__()

    def _now(self) -> State:
        return state_of(self._module) | weights_of(self._module) | random_numbers()

    def end(self, *, completed: bool) -> None:
        self._meter.__exit__(None, None, None)
        if completed:
            self._recompute.measured(self._unit, self._meter)
            changed = first_changed(self._before, self._now())
            if _written(self._inputs):
                changed = "its input"
            self._recompute.watched(self._unit, changed, training=self._training)


def _versions(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    return [(t, torch_private.version_of(t)) for t in tensors]


def _written(before: Sequence[tuple[torch.Tensor, int]]) -> bool:
    """Return whether one of the tensors was changed in place since ``_versions``."""
    return any(torch_private.version_of(t) != version for t, version in before)


def _obstacle(leaves: Sequence[Any]) -> str | None:
    """Return why a forward with these arguments cannot be recomputed, or ``None``."""
    for leaf in leaves:
        if isinstance(leaf, nn.Parameter):
            return "is called with a weight"
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            return (
                f"is called with an object of class {type(leaf).__name__} that it may change (for "
                "a cache, set model.config.use_cache = False)"
            )
    return "runs in compiled code" if torch_private.in_compiled_code() else None
