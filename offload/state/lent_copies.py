"""Copies of state that users got from state dicts, and whose in-place changes are written back.

In PyTorch the tensors of ``optimizer.state`` and of state dicts are the state itself, so
``optimizer.state[p]["exp_avg"].zero_()`` resets a moment.  Here they are copies, and this module
detects which of them were changed.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ..io_engine.native import crc32
from ..private import torch_private

K = TypeVar("K", bound=Hashable)

# Note [Tensors over parameters]
# In PyTorch a tensor made from a parameter (``p.data``, ``p.detach()``, a view) shares its memory.
# Here the parameter may be a placeholder, so ``ParamAccess`` makes one copy of the weight, which
# all such tensors share, and tracks it in a ``Loan``.  ``reconcile`` brings copy and weight
# together before either is used.  If the bits of the copy have changed, they are written to the
# weight.  If the weight has a newer version, the copy is overwritten.  If both have happened, one
# change would be lost, and that is an error.  Bits are compared because ``.data`` shares no version
# counter with the parameter.  ``reconcile`` drops a copy whose storage no other tensor uses.

# Note [Copies in state dicts]
# A change to a copy must be found even if the user keeps no reference to it: in
# ``state_dict()["w"].zero_()`` the copy lives for one expression.  So ``LentCopies`` holds each
# copy until the engine is used next, and checks it then.  If it held every copy of a whole state
# dict until then, saving a model would take twice the memory.  So when the dict is freed, copies
# without changes and other references are dropped at once.  A weak reference to the dict reports
# this.  A plain dict supports no weak references, so the engine's state dicts are ordered ones.
#
# Changes are found by tensor version counters, at no cost.  A change through ``.data`` or NumPy's
# memory is not counted there, so bits are compared too.  For the state of a single parameter, which
# is small, a second copy is kept to compare with.  For state dicts, a checksum of each copy is
# kept.  It is compared when the copy is dropped, when its parameter is read, and when the model is
# used next.  After that it is discarded (``stop_comparing``): otherwise each forward would compute
# the checksums of every dict that a user keeps.  On a device, comparing waits for the device.


@dataclass(eq=False)
class Loan:
    """The engine's own copy of a weight, which all tensors over the parameter share.

    ``version`` is the weight's version when the copy last equalled it.  See Note [Tensors over
    parameters].
    """

    watched: torch_private.Watched
    version: tuple[int, int]

    @property
    def copy(self) -> torch.Tensor:
        return self.watched.tensor


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a checksum of a tensor's bits, on its device."""
    data = torch_private.bytes_of(tensor.untyped_storage())
    if data.device.type == "cpu":
        return torch.tensor(crc32(data.numpy()), device="cpu")
    whole = data.numel() // _COLUMNS * _COLUMNS
    rows = data[:whole].view(-1, _COLUMNS)  # squares find what cancels in a sum
    return torch.cat([rows.sum(0), (rows * rows).sum(0), data[whole:].long()])


_COLUMNS = 1021  # prime, so that elements that are moved usually come to another column


class LentCopy(Generic[K]):
    """A copy of the state known by ``key``, as it was at ``version``."""

    def __init__(self, key: K, tensor: torch.Tensor, version: object, *, by_bits: bool) -> None:
        self.key, self.version = key, version
        self.tensor: torch.Tensor | None = tensor
        self._count = torch_private.version_of(tensor)
        self._watched = torch_private.Watched(tensor.detach()) if by_bits else None
        # `None` after `stop_comparing`
        self._sum = None if by_bits else torch_private.without_grad(_checksum)(tensor)

    @property
    def changed(self) -> bool:
        """Whether the copy was written to since it was made or last accepted."""
        if self.tensor is None:
            return False
        if self._watched is not None:
            return self._watched.changed
        return torch_private.version_of(self.tensor) != self._count

    @property
    def differs(self) -> bool:
        """Whether its bits differ from the original ones; ``False`` after ``stop_comparing``."""
        if self.tensor is None or self._sum is None:
            return False
        return not torch.equal(torch_private.without_grad(_checksum)(self.tensor), self._sum)

    def stop_comparing(self) -> None:
        """Discard the checksum, so that bits are not compared any more."""
        self._sum = None

    def accept(self, version: object) -> None:
        """Treat the present contents as equal to the engine's state at ``version``."""
        assert self.tensor is not None
        self.version, self._count = version, torch_private.version_of(self.tensor)
        if self._sum is not None:
            self._sum = torch_private.without_grad(_checksum)(self.tensor)
        if self._watched is not None:
            self._watched.accept()

    @property
    def alone(self) -> bool:
        """Whether nothing but this object refers to the tensor or its memory."""
        return self.tensor is None or (
            _references(self) == _KEPT and torch_private.is_alone(self.tensor, self._others)
        )

    @property
    def _others(self) -> int:
        """The number of tensors over the same memory that this object holds besides ``tensor``."""
        base = self.tensor is not None and torch_private.counted_by(self.tensor) is not self.tensor
        return int(base) + int(self._watched is not None)

    def freed_with_dict(self) -> None:
        """Drop the tensor if it is unchanged and only a dict that is being freed refers to it."""
        if self.tensor is None or self.changed or _references(self) > _KEPT + 1:
            return
        if torch_private.is_alone(self.tensor, self._others) and not self.differs:
            self.tensor = None


def _references(copy: LentCopy[Any]) -> int:
    return sys.getrefcount(copy.tensor)


_KEPT = _references(LentCopy("", torch.empty(0, device="cpu"), 0, by_bits=False))


class LentCopies(Generic[K]):
    """All copies of one kind of state that an engine has given out.

    See Note [Copies in state dicts].
    """

    def __init__(self) -> None:
        self._copies: dict[int, LentCopy[K]] = {}
        self._numbers = iter(range(sys.maxsize))
        self._dicts: dict[int, weakref.ref[Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._copies)

    def add(
        self, key: K, tensor: torch.Tensor, version: object, *, by_bits: bool = False
    ) -> LentCopy[K]:
        """Track a copy of the state known by ``key``, as it is at ``version``."""
        copy = LentCopy(key, tensor, version, by_bits=by_bits)
        self._copies[next(self._numbers)] = copy
        return copy

    def add_all(self, state: dict[str, Any], lent: list[LentCopy[K]]) -> None:
        """Drop copies when the dict that holds them is freed, unless other references exist."""
        if not isinstance(state, OrderedDict) or not lent:
            return
        number, finalizing = next(self._numbers), sys.is_finalizing

        def freed(_: object) -> None:
            if finalizing():  # then modules are being emptied
                return
            self._dicts.pop(number, None)
            for each in lent:
                each.freed_with_dict()

        self._dicts[number] = weakref.ref(state, freed)

    def __iter__(self) -> Iterator[LentCopy[K]]:
        return iter(list(self._copies.values()))

    def changed(self, compare: Callable[[K], bool] = lambda key: False) -> list[LentCopy[K]]:
        """Return the copies that were changed, and forget those without other references.

        Args:
            compare: returns whether copies with this key are also compared by their bits.  Copies
                about to be forgotten always are.
        """
        found: list[LentCopy[K]] = []
        for number, copy in list(self._copies.items()):
            alone = copy.alone
            if copy.changed or ((alone or compare(copy.key)) and copy.differs):
                found.append(copy)
            elif alone:
                self._copies.pop(number, None)
        return found

    def stop_comparing(self, of: Callable[[K], bool] = lambda key: True) -> None:
        """Stop comparing bits of copies of these keys: see Note [Copies in state dicts]."""
        for copy in self:
            if of(copy.key):
                copy.stop_comparing()

    def drop(self, key: K) -> None:
        """Stop tracking the copies of the state known by ``key``."""
        for number, copy in list(self._copies.items()):
            if copy.key == key:
                self._copies.pop(number, None)

    def drop_over(self, tensor: torch.Tensor) -> None:
        """Stop tracking copies over the memory of a tensor."""
        key = torch_private.storage_key(tensor)
        for number, copy in list(self._copies.items()):
            if copy.tensor is not None and torch_private.storage_key(copy.tensor) == key:
                self._copies.pop(number, None)

    def forget(self) -> None:
        """Stop tracking all copies."""
        self._copies.clear()


def changed_otherwise(
    changed: Iterable[LentCopy[K]], others: Mapping[K, torch.Tensor]
) -> list[LentCopy[K]]:
    """Return the copies with another value than another changed copy of the same state.

    Args:
        others: further changed copies, by key.
    """
    first, found = dict(others), []
    for copy in changed:
        assert copy.tensor is not None, "it was changed"
        other = first.setdefault(copy.key, copy.tensor)
        if other is not copy.tensor and not torch.equal(other, copy.tensor):
            found.append(copy)
    return found
