"""Copies that users got from state dicts, whose changes in place are written back.

In PyTorch the tensors of ``optimizer.state`` and of state dicts are the state itself, so that
``optimizer.state[p]["exp_avg"].zero_()`` resets a moment.  Here they are copies, and this finds out
which of them were changed.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

import torch

from ..io_engine.native import crc32
from ..training import torch_private

K = TypeVar("K", bound=Hashable)

# Note [Copies in state dicts]
# A copy has to be found even if its user has dropped it since: ``state_dict()["w"].zero_()`` holds
# it for one expression.  So each is held here until it has been looked at once more, when the
# engine is used next.  To hold a whole state dict for so long would double the memory of whoever
# saves one, so when the dict itself is freed, what nobody else has, and nobody has changed, is let
# go at once.  A weak reference to the dict tells of that; plain dicts have none, so the engine's
# state dicts are ordered ones.
#
# Changes are found by version counters, which cost nothing.  A change through ``.data`` or NumPy's
# memory does not count there, so bits are compared too.  A single parameter's state is small: a
# second copy of it is kept.  Of a state dict there is a checksum of each copy, compared when the
# copy is let go, when its parameter is read, and when the model is used next.  Not later
# (``stop_comparing``), because a dict that somebody keeps would be summed up at each forward.


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A checksum of a tensor's bits, on its device."""
    data = torch_private.bytes_of(tensor.untyped_storage())
    if data.device.type == "cpu":
        return torch.tensor(crc32(data.numpy()), device="cpu")
    whole = data.numel() // _COLUMNS * _COLUMNS
    return torch.cat([data[:whole].view(-1, _COLUMNS).sum(0), data[whole:].long()])


_COLUMNS = 1021  # no divisor or multiple of a matrix's rows, so that moved elements are found


class LentCopy(Generic[K]):
    """One copy: of what (``key``), and at which version of that it was taken."""

    def __init__(self, key: K, tensor: torch.Tensor, version: object, *, by_bits: bool) -> None:
        self.key, self.version = key, version
        self.tensor: torch.Tensor | None = tensor
        self._count = torch_private.version_of(tensor)
        self._watched = torch_private.Watched(tensor.detach()) if by_bits else None
        # Until `stop_comparing`
        self._sum = None if by_bits else torch_private.without_grad(_checksum)(tensor)

    @property
    def changed(self) -> bool:
        """Whether it was written to since it was taken, or accepted last."""
        if self.tensor is None:
            return False
        if self._watched is not None:
            return self._watched.changed
        return torch_private.version_of(self.tensor) != self._count

    @property
    def differs(self) -> bool:
        """Whether its bits are others than when it was taken, if that is known still."""
        if self.tensor is None or self._sum is None:
            return False
        return not torch.equal(torch_private.without_grad(_checksum)(self.tensor), self._sum)

    def stop_comparing(self) -> None:
        """Compare its bits no more."""
        self._sum = None

    def accept(self, version: object) -> None:
        """Take what it holds now for what the engine has at ``version``."""
        assert self.tensor is not None
        self.version, self._count = version, torch_private.version_of(self.tensor)
        self.stop_comparing()
        if self._watched is not None:
            self._watched.accept()

    @property
    def alone(self) -> bool:
        """Whether nobody but this holds it, or a tensor over its memory."""
        return self.tensor is None or (
            _references(self) == _KEPT and torch_private.is_alone(self.tensor, self._others)
        )

    @property
    def _others(self) -> int:
        """How many tensors besides its own lie over its memory."""
        base = self.tensor is not None and torch_private.counted_by(self.tensor) is not self.tensor
        return int(base) + int(self._watched is not None)

    def freed_with_dict(self) -> None:
        """Let go of it, if only a dict that is about to be freed has it, and nobody changed it."""
        if self.tensor is None or self.changed or _references(self) > _KEPT + 1:
            return
        if torch_private.is_alone(self.tensor, self._others) and not self.differs:
            self.tensor = None


def _references(copy: LentCopy[Any]) -> int:
    return sys.getrefcount(copy.tensor)


_KEPT = _references(LentCopy("", torch.empty(0, device="cpu"), 0, by_bits=False))


class LentCopies(Generic[K]):
    """All copies of one kind of state that one engine has given out."""

    def __init__(self) -> None:
        self._copies: dict[int, LentCopy[K]] = {}
        self._numbers = iter(range(sys.maxsize))
        self._dicts: dict[int, weakref.ref[Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._copies)

    def add(
        self, key: K, tensor: torch.Tensor, version: object, *, by_bits: bool = False
    ) -> LentCopy[K]:
        """Watch a copy of what is known by ``key``, as it is at ``version``."""
        copy = LentCopy(key, tensor, version, by_bits=by_bits)
        self._copies[next(self._numbers)] = copy
        return copy

    def add_all(self, state: dict[str, Any], lent: list[LentCopy[K]]) -> None:
        """Let go of copies when the dict that they are in is freed, unless somebody has them."""
        if not isinstance(state, OrderedDict) or not lent:
            return
        number = next(self._numbers)

        def freed(_: object) -> None:
            if torch_private is None:  # the interpreter ends
                return  # type: ignore[unreachable]
            self._dicts.pop(number, None)
            for each in lent:
                each.freed_with_dict()

        self._dicts[number] = weakref.ref(state, freed)

    def __iter__(self) -> Iterator[LentCopy[K]]:
        return iter(list(self._copies.values()))

    def changed(self, compare: Callable[[K], bool] = lambda key: False) -> list[LentCopy[K]]:
        """Give the copies that were changed, and forget those that nobody has any more.

        Args:
            compare: whether the bits of copies of this are compared, too; those of copies that are
                forgotten always are.
        """
        found: list[LentCopy[K]] = []
        for number, copy in list(self._copies.items()):
            alone = copy.alone
            if copy.changed or ((alone or compare(copy.key)) and copy.differs):
                found.append(copy)
            elif alone:
                self._copies.pop(number, None)
        return found

    def stop_comparing(self) -> None:
        """Compare bits no more: see Note [Copies in state dicts]."""
        for copy in self:
            copy.stop_comparing()

    def drop(self, key: K) -> None:
        """Stop watching the copies of what is known by ``key``."""
        for number, copy in list(self._copies.items()):
            if copy.key == key:
                self._copies.pop(number, None)

    def forget(self) -> None:
        """Stop watching all copies."""
        self._copies.clear()
