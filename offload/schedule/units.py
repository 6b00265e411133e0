"""What a model is made of, for whoever moves it: units, chunks, parameters, records of state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

PARAM_ALIGN = 64
PAGE = 4096


def align(nbytes: int, border: int) -> int:
    """The smallest multiple of ``border`` that is at least ``nbytes``."""
    return -(-nbytes // border) * border


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: where it lies in its unit, and how to view it.

    ``numel`` elements start at ``offset`` (elements, in the chunk); ``shape`` and ``stride`` view
    them.  ``index`` numbers the model's managed parameters.

    A complex parameter is stored as real and imaginary parts, a last dimension of two, as
    ``torch.view_as_real`` has it: ``torch.optim`` updates it so.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    numel: int
    offset: int
    is_complex: bool = False

    def as_parameter(
        self, dtype: torch.dtype
    ) -> tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]:
        """Return the dtype, offset (elements of it, in the chunk), shape and strides that the
        model's parameter has, for a chunk of ``dtype``."""
        if not self.is_complex:
            return dtype, self.offset, self.shape, self.stride
        stride = tuple(step // 2 for step in self.stride[:-1])
        return dtype.to_complex(), self.offset // 2, self.shape[:-1], stride

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """View ``flat``, the parameter's ``numel`` elements, in the parameter's shape and dtype."""
        view = flat.as_strided(self.shape, self.stride, flat.storage_offset())
        return torch.view_as_complex(view) if self.is_complex else view


@dataclass(frozen=True)
class Chunk:
    """Parameters of one dtype and one group, flat: ``numel`` elements, borders included.

    ``group`` is the optimizer's param-group index, ``None`` for parameters that are never
    updated.  ``byte_offset`` is the chunk's place in the unit's weight slot, ``grad_offset`` that
    in its gradient slot (bytes, in the weights' dtype).
    """

    dtype: torch.dtype
    group: int | None
    numel: int
    byte_offset: int
    grad_offset: int
    params: tuple[ParamSpec, ...]

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class PagePart:
    """Where a parameter lies in its unit's page, in bytes, and in which format; ``None``: as
    compute has it."""

    form: str | None
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Unit:
    """Modules that run together.  ``shares`` are units whose weights it reads too: tied weights,
    and those of modules elsewhere that it runs.

    ``encloses`` says that other units run inside this one's forward: it is then kept resident.
    ``runs``: else it is the frozen weights of the unit behind it, which shares them.
    ``flops`` are those of its forward's matrix products, per token, ``backward_flops`` those of its
    backward; ``activation_bytes`` is about what autograd keeps of them, per token, and
    ``input_bytes`` what goes into it.
    ``logits_bytes``: per token, of a head whose loss is computed from all that comes out of it.
    ``page``: of frozen weights that are kept and moved in another format than compute has them in,
    its parts in the order of ``params``; ``page_bytes`` in all.
    """

    index: int
    name: str
    chunks: tuple[Chunk, ...]
    shares: tuple[int, ...]
    encloses: bool
    weight_bytes: int
    grad_bytes: int
    flops: int = 0
    backward_flops: int = 0
    activation_bytes: int = 0
    input_bytes: int = 0
    logits_bytes: int = 0
    runs: bool = True
    page: tuple[PagePart, ...] = ()
    page_bytes: int = 0

    @property
    def packed(self) -> bool:
        """Whether its weights are kept in another format than compute has them in."""
        return bool(self.page)

    @property
    def stored_bytes(self) -> int:
        """Of its weights where they wait."""
        return self.page_bytes if self.page else self.weight_bytes

    @property
    def trainable(self) -> bool:
        return any(chunk.group is not None for chunk in self.chunks)

    @property
    def params(self) -> Iterator[tuple[Chunk, ParamSpec]]:
        return ((chunk, spec) for chunk in self.chunks for spec in chunk.params)


@dataclass(frozen=True)
class FieldPlace:
    """Where a field lies in a record: ``numel`` elements of ``dtype`` at ``offset`` bytes, each of
    which serves ``block`` parameters."""

    name: str
    dtype: torch.dtype
    offset: int
    numel: int
    block: int = 1

    def span(self, start: int, stop: int) -> slice:
        """The stored elements of parameters ``[start, stop)``; ``start`` begins a block."""
        return slice(start // self.block, -(-stop // self.block))


@dataclass(frozen=True)
class Subgroup:
    """Elements ``[start, start + count)`` of chunk ``chunk`` of unit ``unit``.

    Its record holds ``fields`` and takes ``nbytes`` (whole pages) in memory and on disk.
    """

    index: int
    unit: int
    chunk: int
    start: int
    count: int
    fields: tuple[FieldPlace, ...]
    nbytes: int
