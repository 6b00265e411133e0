"""The parts of a model that move: units, chunks, parameters and state records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

PARAM_ALIGN = 64
PAGE = 4096


def align(nbytes: int, border: int) -> int:
    """Return the smallest multiple of ``border`` that is at least ``nbytes``."""
    return -(-nbytes // border) * border


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: its position in its chunk, and how to view it.

    A complex parameter is stored as real and imaginary parts, with a last dimension of two, as in
    ``torch.view_as_real``.  ``torch.optim`` updates it in this form.

    Attributes:
        index: number of the parameter among the model's managed parameters.
        shape, stride: view of its ``numel`` elements.
        offset: of its first element in the chunk, in elements.
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
        """Return the dtype, offset, shape and strides of the model's parameter, for a chunk of
        ``dtype``.  The offset in the chunk is in elements of the returned dtype."""
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
    """The parameters of a unit with one dtype and one param group, flattened.

    Attributes:
        group: index of the optimizer's param group; ``None`` for parameters that are never updated.
        numel: elements, with the padding between parameters.
        byte_offset: offset in the unit's weight slot, in bytes.
        grad_offset: offset in its gradient slot, in bytes, for gradients in the weights' dtype.
        whole: whether it is one parameter that is updated as a whole, so that it is not cut.
    """

    dtype: torch.dtype
    group: int | None
    numel: int
    byte_offset: int
    grad_offset: int
    params: tuple[ParamSpec, ...]
    whole: bool = False

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class PageFormat(Protocol):
    """How a parameter is stored in a page."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of the stored parameter."""
        ...

    def describe(self) -> Any:
        """Return the format as JSON values, for the description of a store."""
        ...


@dataclass(frozen=True)
class PagePart:
    """The position of a parameter in its unit's page, in bytes, and its format.

    ``form`` is ``None`` for a parameter that is stored as compute uses it.
    """

    form: PageFormat | None
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Unit:
    """Modules that run together.

    Attributes:
        shares: units whose weights it also reads: tied weights, and those of modules elsewhere that
            it runs.
        encloses: whether other units run inside its forward; it is then kept resident.
        weight_bytes, grad_bytes: sizes of its weight and gradient slots.
        flops, backward_flops: of the matrix products in its forward and backward, per token.
        activation_bytes: about what autograd keeps until backward, per token.
        input_bytes: about the size of its input, per token.
        attention_flops, attention_bytes: the part of ``flops`` in products of queries, keys and
            values, and the size of their results, per token; 0 if the sequence length is unknown.
        logits_bytes: of a head whose loss is computed from its whole output, per token.
        runs: whether it runs; otherwise it is the frozen weights of the next unit, which shares
            them.
        page: for frozen weights that are stored and moved in another format than compute uses, the
            parts of the page in the order of ``params``.
        page_bytes: size of the page.
        forward_only: whether plans assume that it has no backward: it is in a model of several
            that has nothing to train, such as a reference.
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
    attention_flops: int = 0
    attention_bytes: int = 0
    runs: bool = True
    page: tuple[PagePart, ...] = ()
    page_bytes: int = 0
    forward_only: bool = False

    @property
    def packed(self) -> bool:
        """Whether its weights are stored in another format than compute uses."""
        return bool(self.page)

    @property
    def stored_bytes(self) -> int:
        """Bytes of its weights as stored."""
        return self.page_bytes if self.page else self.weight_bytes

    @property
    def trainable(self) -> bool:
        return any(chunk.group is not None for chunk in self.chunks)

    @property
    def params(self) -> Iterator[tuple[Chunk, ParamSpec]]:
        return ((chunk, spec) for chunk in self.chunks for spec in chunk.params)


@dataclass(frozen=True)
class FieldPlace:
    """The position of a field in a state record: ``numel`` elements of ``dtype`` at ``offset``
    bytes, each for ``block`` parameter elements."""

    name: str
    dtype: torch.dtype
    offset: int
    numel: int
    block: int = 1

    def span(self, start: int, stop: int) -> slice:
        """Return the stored elements for parameter elements ``[start, stop)``.

        ``start`` must be a multiple of ``block``.
        """
        if not self.block:
            return slice(0, self.numel)
        return slice(start // self.block, -(-stop // self.block))


@dataclass(frozen=True)
class Subgroup:
    """Elements ``[start, start + count)`` of chunk ``chunk`` of unit ``unit``.

    Its state record holds ``fields`` and takes ``nbytes`` (whole pages) in memory and on disk.

    Attributes:
        flops, moved_bytes: of its update, if a kernel with a measured rate does not run it: FLOPs
            of matrix products, and bytes that its operators read and write.
        matrix: whether a device should update it; see Note [Device updates of matrices].
    """

    index: int
    unit: int
    chunk: int
    start: int
    count: int
    fields: tuple[FieldPlace, ...]
    nbytes: int
    flops: int = 0
    moved_bytes: int = 0
    matrix: bool = False
