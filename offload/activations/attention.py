"""Outputs of attention that recomputed units keep; see Note [Kept outputs of attention]."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ActivationError
from ..private import checkpoint_private, torch_private

# Note [Kept outputs of attention]
# With long sequences, attention takes most of a unit's time, but its outputs are a small part of
# what autograd saves.  A recomputed unit can keep them: its forward stores what the operators of
# attention return (``_Keeping``), and its recomputation takes the stored results instead of
# calling these operators (``_Taking``).  Both run below autograd, as torch's selective activation
# checkpointing does, so the graph is that of an ordinary recomputation, with the same bits.
#
# Stored outputs are offloaded and reloaded like other saved tensors.  An operator with dropout runs
# again, because it draws random numbers.  So does one whose output was changed in place since.

_ATEN = {
    "_efficient_attention_forward", "_flash_attention_forward",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
}  # fmt: skip
_LIBRARIES = ("flash_attn", "flash_attn_2", "flash_attn_3")  # namespaces of their operators

Pack = Callable[[torch.Tensor], object]
Unpack = Callable[[Any], torch.Tensor]


def _keeps(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether ``func`` is an operator of attention that draws no random numbers."""
    if not hasattr(func, "overloadpacket"):  # a higher-order operator
        return False
    if not args or type(args[0]) is not torch.Tensor:  # as where code is compiled
        return False
    name = func.overloadpacket.__name__
    if func.namespace in _LIBRARIES:
        if "forward" not in name:
            return False
    elif func.namespace != "aten" or name not in _ATEN:
        return False
    return not checkpoint_private.operator_argument(func, "dropout_p", args, kwargs)


class KeptAttention:
    """The outputs of attention of one forward, and how its recomputation takes them."""

    def __init__(self, pack: Pack, unpack: Unpack) -> None:
        self._pack, self._unpack = pack, unpack
        # Operators, their packed results, and what shows whether these were changed in place.
        self._kept: list[tuple[Any, Any, list[tuple[torch.Tensor, int]]]] = []

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return what surrounds the forward, and each recomputation."""
        return _Keeping(self), _Taking(self)

    def keep(self, func: Any, result: Any) -> None:
        """Store what an operator returned."""

        versions: list[tuple[torch.Tensor, int]] = []

        def packed(each: Any) -> Any:
            if not isinstance(each, torch.Tensor):
                return each
            counter = torch_private.version_counter(each)
            versions.append((counter, torch_private.version_of(counter)))
            return _Packed(self._pack(each.detach()))

        with checkpoint_private.counting_versions():
            self._kept.append((func, torch_private.tree_map(packed, result), versions))

    def take(self, place: int, func: Any) -> Any:
        """Return the result of the ``place``-th operator.

        ``NotImplemented``: it was changed in place since, so it has to be computed again.
        """
        if place >= len(self._kept) or self._kept[place][0] is not func:
            raise ActivationError(
                f"a unit that backward computes again calls {func} where its forward did not; make "
                "its forward the same each time, or pass activations='host'"
            )
        if any(torch_private.version_of(t) != version for t, version in self._kept[place][2]):
            return NotImplemented

        def unpacked(each: Any) -> Any:
            if not isinstance(each, _Packed):
                return each
            return self._unpack(each.value).detach()

        with checkpoint_private.counting_versions():
            return torch_private.tree_map(unpacked, self._kept[place][1])


class _Packed:
    """A stored output."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value: Any = value


class _Mode(TorchDispatchMode):
    """A mode that leaves ``torch.compile`` on: compiled code is not looked into."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __exit__(self, *raised: Any) -> None:
        # An interrupted forward may have left modes above this one, or this one in another thread.
        above = checkpoint_private.take_modes_above(self)
        if above is not None:
            super().__exit__(*raised)
            checkpoint_private.put_modes(above)


class _Keeping(_Mode):
    """Stores the outputs of attention."""

    def __init__(self, kept: KeptAttention) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        if _keeps(func, args, given):
            self._kept.keep(func, result)
        return result


class _Taking(_Mode):
    """Takes stored outputs of attention instead of calling its operators."""

    def __init__(self, kept: KeptAttention) -> None:
        super().__init__()
        self._kept, self._place = kept, 0

    def __enter__(self) -> Any:
        self._place = 0
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if _keeps(func, args, given):
            place, self._place = self._place, self._place + 1
            result = self._kept.take(place, func)
            if result is not NotImplemented:
                return result
        return func(*args, **given)


class AttentionMeter(_Mode):
    """Measures the attention of a forward that is not recomputed.

    Attributes:
        nbytes: bytes of its outputs.
        flops: FLOPs of its two products; half of them if it is causal.
        seconds: time in its operators, if they run synchronously.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = self.flops = 0
        self.seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if not _keeps(func, args, given):
            return func(*args, **given)
        began_s = time.perf_counter()
        result = func(*args, **given)
        self.seconds += time.perf_counter() - began_s
        leaves = torch_private.tree_leaves(result)
        self.nbytes += sum(t.nbytes for t in leaves if isinstance(t, torch.Tensor))
        query, key = args[0], args[1]
        keys = key.shape[1 if func.namespace in _LIBRARIES else -2]
        causal = checkpoint_private.operator_argument(func, "is_causal", args, given)
        self.flops += 4 * query.numel() * keys // (2 if causal else 1)
        return result
