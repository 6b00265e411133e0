"""Feed-forward layers that run for some tokens at a time; see Note [Tiled layers]."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ..errors import ModelError
from ..logits.rows import autocast_dtype, under_autocast
from ..params.param_handle import PlaceholderParam
from ..params.param_handle import known as handle_of
from ..planning.partition import Partition
from ..planning.products import CONV1D, TILED
from ..private import torch_private

# Note [Tiled layers]
# The inner tensors of a feed-forward layer are several times as wide as its input. A tiled layer
# splits the tokens of its input into tiles, computes one after the other, and keeps only the input.
# Backward computes each tile again. So the inner tensors of one tile exist at a time.
#
# ``_Tiles`` is an autograd Function with the input and the weights as its inputs, so autograd
# collects the gradient of a weight once, as without tiles. Sums over tiles are made in fp32.
#
# The input is saved by ``_Input``, which comes before. A unit that is recomputed in backward saves
# its last tensor there, so torch ends the recomputation before the tiles would run again.
#
# A layer that draws random numbers, or whose tokens depend on each other, cannot run in tiles.
# Layers of known libraries are taken by their class and structure; others by name, and their first
# call compares a tile with the whole layer.
#
# The size of a tile depends on the layer's shape alone: results are the same under other budgets.

TILE_BYTES = 256 << 20  # of the inputs and outputs of the layer's products in fp32, in a tile
LEAST_TOKENS = 256  # of a tile; the products are slow for fewer
SAME = 2e-2  # by how much a tile may differ from the whole layer, relative to the largest value
_SKELETONS = f"{__name__.partition('.')[0]}.train.skeletons"
_LIBRARIES = ("transformers.", "diffusers.", _SKELETONS)
_ENDINGS = ("MLP", "Mlp", "FeedForward", "FFN")  # of the names of classes
_INNER = (nn.Dropout, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.ModuleList, nn.Sequential)

_VERSIONS = weakref.WeakKeyDictionary[nn.Module, Callable[[], object]]()  # of tiled layers


def tile_tokens(layer: nn.Module) -> int:
    """Return the number of tokens in a tile of a layer."""
    width = sum(map(_widths, _products(layer)))
    return max(LEAST_TOKENS, TILE_BYTES // (4 * max(1, width)))


def _products(layer: nn.Module) -> list[nn.Module]:
    return [inner for inner in layer.modules() if _is_product(inner)]


def _is_product(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == CONV1D


def _widths(product: Any) -> int:
    """Return the features of a product's input and output."""
    if isinstance(product, nn.Linear):  # the weight of a subclass may be packed
        return product.in_features + product.out_features
    return sum(product.weight.shape)


def layers_in(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the feed-forward layers of known libraries that can run in tiles."""
    found = dict[nn.Module, None]()
    for module in model.modules():
        kind = type(module)
        known = kind.__module__.startswith(_LIBRARIES) and kind.__name__.endswith(_ENDINGS)
        if known and _obstacle(module) is None and not _inside(module, found):
            found[module] = None
    return tuple(found)


def _inside(module: nn.Module, others: Iterable[nn.Module]) -> bool:
    return any(module in other.modules() for other in others)


def require_layers(named: dict[str, nn.Module]) -> tuple[nn.Module, ...]:
    """Return the layers that are named in ``tile=``.

    Raises:
        ModelError: one of them cannot run in tiles.
    """
    for name, module in named.items():
        if (why := _obstacle(module)) is not None:
            raise ModelError(f"tile: {name!r} {why}, so it cannot run in tiles; leave it out")
    layers = list(named.values())
    return tuple(each for each in layers if not _inside(each, [x for x in layers if x is not each]))


def _obstacle(layer: nn.Module) -> str | None:
    """Return why a module does not look like a feed-forward layer, or ``None``."""
    if "forward" in vars(layer) and layer not in TILED:
        return "has a forward of its own"
    if len(_products(layer)) < 2:
        return "does not hold two linear layers"
    for inner in layer.modules():
        if inner is layer or _is_product(inner) or isinstance(inner, _INNER):
            continue
        if not any(True for _ in inner.parameters()) and not list(inner.buffers()):
            continue  # an activation function
        if not any(map(_is_product, inner.modules())):
            return f"holds a {type(inner).__name__}"
    return None


def tiled_layers(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the layers of a model that run in tiles now."""
    return tuple(module for module in model.modules() if module in TILED)


class TiledLayers:
    """Layers that run in tiles until ``remove``."""

    def __init__(self, layers: Iterable[tuple[nn.Module, Callable[[], object]]]) -> None:
        """
        Args:
            layers: each with a function that returns the version of its weights.
        """
        self._placed: list[tuple[nn.Module, _TiledForward]] = []
        for layer, version in layers:
            forward = _TiledForward(layer, trusted=_of_library(layer))
            self._placed.append((layer, forward))
            TILED.add(layer)
            _VERSIONS[layer] = version
            layer.__dict__["forward"] = forward

    @staticmethod
    def of_engine(
        layers: Iterable[nn.Module], parts: Partition, versions: Sequence[int]
    ) -> TiledLayers:
        """Tile layers of an engine; ``versions``: by unit, those of its weights."""
        units = {id(p): unit for p, unit in zip(parts.parameters, parts.unit_of, strict=True)}

        def version(mine: frozenset[int]) -> object:
            return [versions[unit] for unit in mine]

        return TiledLayers(
            (layer, partial(version, frozenset(units[id(p)] for p in layer.parameters()
                                               if id(p) in units)))
            for layer in layers
        )  # fmt: skip

    def remove(self) -> None:
        """Let the layers run as a whole again."""
        while self._placed:
            layer, forward = self._placed.pop()
            TILED.discard(layer)
            _VERSIONS.pop(layer, None)
            if layer.__dict__.get("forward") is forward:  # else it was replaced since
                del layer.__dict__["forward"]


def _of_library(layer: nn.Module) -> bool:
    return type(layer).__module__.startswith(_LIBRARIES)


class _TiledForward:
    """The forward of a layer that runs in tiles; copies of the layer have an ordinary one."""

    def __init__(self, layer: nn.Module, *, trusted: bool) -> None:
        self._layer, self._trusted = layer, trusted

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (type(self._layer).forward, self._layer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer, whole = self._layer, type(self._layer).forward
        given = [*args, *kwargs.values()]
        if layer not in TILED or torch.compiler.is_compiling() or len(given) != 1:
            return whole(layer, *args, **kwargs)
        x = given[0]
        if not _fits(layer, x) or _draws(layer):
            return whole(layer, *args, **kwargs)
        if not self._trusted:
            self._require_independent(x)
            self._trusted = True
        return run_in_tiles(layer, partial(whole, layer), x)

    def _require_independent(self, x: torch.Tensor) -> None:
        """Raise ``ModelError`` if a token's output depends on other tokens."""
        tokens = _by_token(x.detach())
        count, size = tokens.shape[1], tile_tokens(self._layer)
        some = tokens[:, max(0, count - 2 * size) :]
        with torch.no_grad():
            whole = type(self._layer).forward(self._layer, some)
            if type(whole) is torch.Tensor and whole.shape[:-1] == some.shape[:-1]:
                half = some.shape[1] // 2
                alone = type(self._layer).forward(self._layer, some[:, half:])
                there = whole[:, half:].float()
                off = (alone.float() - there).abs().amax()
                if bool(off <= SAME * there.abs().amax()):
                    return
        raise ModelError(
            f"tile: the output of a {type(self._layer).__name__} for some tokens depends on the "
            "others, so it cannot run in tiles; leave it out of tile"
        )


def _fits(layer: nn.Module, x: Any) -> bool:
    """Return whether ``x`` has more tokens than a tile."""
    if type(x) is not torch.Tensor or not torch_private.has_memory(x) or x.dim() < 2:
        return False
    if not x.is_floating_point() or x.is_inference():
        return False
    return x.numel() // max(1, x.shape[-1]) > tile_tokens(layer)


def _draws(layer: nn.Module) -> bool:
    return any(
        isinstance(inner, nn.Dropout) and inner.training and inner.p > 0
        for inner in layer.modules()
    )


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as (1, tokens, width)."""
    return x.reshape(1, -1, x.shape[-1])


def run_in_tiles(
    layer: nn.Module, whole: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """Return what ``whole`` computes from ``x`` (..., width), one tile of tokens after the other.

    Args:
        layer: holds the weights that ``whole`` reads.
    """
    trained = [p for p in layer.parameters() if p.requires_grad]
    if not torch.is_grad_enabled() or not (x.requires_grad or trained):
        return _computed(whole, x, tile_tokens(layer))
    kept = _Input.apply(x) if x.requires_grad else x  # type: ignore[no-untyped-call]
    made: torch.Tensor = _Tiles.apply(layer, whole, kept, *trained)  # type: ignore[no-untyped-call]
    return made


def _tiles_of(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _computed(
    whole: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, size: int
) -> torch.Tensor:
    tokens = _by_token(x)
    result: torch.Tensor | None = None
    for tile in _tiles_of(tokens.shape[1], size):
        part = whole(tokens[:, tile])
        if result is None:
            result = part.new_empty((1, tokens.shape[1], part.shape[-1]))
        result[:, tile] = part
    assert result is not None
    return result.reshape(*x.shape[:-1], result.shape[-1])


class _Input(torch.autograd.Function):
    """Saves the input of a tiled layer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


class _Tiles(torch.autograd.Function):
    """A layer in tiles, with the gradients of its input and its weights."""

    @staticmethod
    def forward(
        ctx: Any, layer: nn.Module, whole: Callable[[torch.Tensor], torch.Tensor],
        x: torch.Tensor, *trained: nn.Parameter,
    ) -> torch.Tensor:  # fmt: skip
        ctx.layer, ctx.whole, ctx.trained = layer, whole, trained
        ctx.version, ctx.autocast = _version_of(layer), autocast_dtype(x.device.type)
        ctx.kept = x.grad_fn if x.requires_grad else None
        if ctx.kept is None:
            ctx.save_for_backward(x)
        return _computed(whole, x, tile_tokens(layer))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer: nn.Module = ctx.layer
        if ctx.version != _version_of(layer):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"optimizer step, or in place: a weight of a tiled {type(layer).__name__}; run "
                "backward before step() and before such a change"
            )
        (x,) = ctx.saved_tensors if ctx.kept is None else ctx.kept.saved_tensors
        sums = _Sums(ctx.trained)
        run = partial(_differentiate, ctx, x, grad, sums)
        with torch.enable_grad():
            of_input = under_autocast(
                x.device.type, ctx.autocast, lambda: _with_weights(layer, run)
            )
        return None, None, of_input, *sums.grads()


def _differentiate(
    ctx: Any, x: torch.Tensor, grad: torch.Tensor, sums: _Sums
) -> torch.Tensor | None:
    """Add the gradients of the weights to ``sums``, and return that of the input."""
    tokens, grads = _by_token(x.detach()), _by_token(grad)
    result = torch.empty_like(tokens) if ctx.needs_input_grad[2] else None
    for tile in _tiles_of(tokens.shape[1], tile_tokens(ctx.layer)):
        part = tokens[:, tile].detach().requires_grad_(result is not None)
        of = [*((part,) if result is not None else ()), *ctx.trained]
        made = torch.autograd.grad(ctx.whole(part), of, grads[:, tile], allow_unused=True)
        if result is not None:
            result[:, tile] = 0 if made[0] is None else made[0]
        sums.add(made[len(of) - len(ctx.trained) :])
    return None if result is None else result.reshape(x.shape)


class _Sums:
    """Sums over tiles of the gradients of parameters, in fp32 if they have lower precision."""

    def __init__(self, trained: Sequence[nn.Parameter]) -> None:
        self._dtypes = [p.dtype for p in trained]
        self._sums: list[torch.Tensor | None] = [None] * len(trained)

    def add(self, grads: Iterable[torch.Tensor | None]) -> None:
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            total = self._sums[i]
            if total is None:
                # A view of a graph's tensor could change, so it is copied.
                self._sums[i] = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
            else:
                total += grad

    def grads(self) -> list[torch.Tensor | None]:
        return [
            None if total is None else total.to(dtype)
            for total, dtype in zip(self._sums, self._dtypes, strict=True)
        ]


def _version_of(layer: nn.Module) -> object:
    """Return what differs once weights of the layer have changed.

    Versions of an engine's weights are those of their units.
    """
    version = _VERSIONS.get(layer)
    plain = [p for p in layer.parameters() if type(p) is nn.Parameter]
    return None if version is None else version(), [torch_private.version_of(p) for p in plain]


def _with_weights(layer: nn.Module, run: Callable[[], Any]) -> Any:
    """Return what ``run`` computes with the weights of a layer, which may be offloaded."""
    hidden = [handle_of(p) for p in layer.parameters() if isinstance(p, PlaceholderParam)]
    if hidden:
        found = hidden[0].access.compute({mine.index for mine in hidden}, run)
        if found is not NotImplemented:
            return found
    return run()
