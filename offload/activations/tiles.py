"""Feed-forward layers that run for some tokens at a time; see Note [Tiled layers]."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import ActivationError, ModelError
from ..logits.rows import autocast_dtype, under_autocast
from ..params.param_handle import PlaceholderParam
from ..params.param_handle import known as handle_of
from ..planning.partition import Partition
from ..planning.products import CONV1D, TILED
from ..private import checkpoint_private, torch_private
from ..private.checkpoint_private import (
    random_states,
    restore_random_states,
    same_random_states,
)
from .module_state import first_changed, set_modes, state_of
from .precision import exact

log = logging.getLogger("overspill")

Whole = Callable[[torch.Tensor], torch.Tensor]

# Note [Tiled layers]
# The inner tensors of a feed-forward layer are several times as wide as its input. A tiled layer
# splits the tokens of its input into tiles, and puts one of torch's non-reentrant checkpoints
# around each. So the inner tensors of one tile exist at a time, and only the input is kept.
#
# The checkpoints of the tiles keep no inputs of their own: ``_Input`` keeps that of the whole layer
# before the first tile. A unit that is recomputed in backward saves its last tensor there, so torch
# ends the recomputation before the tiles would run again.
#
# A layer that draws random numbers, or whose tokens depend on each other, cannot run in tiles. The
# first call compares tiles with the whole layer, until the comparison says something. Each call
# looks whether the tiles have moved torch's generators; if so, the layer runs whole from then on.
#
# The size of a tile depends on the layer's shape and on the number of tokens: results are the same
# under other budgets. Autograd sums the gradients of a weight over tiles in the weight's dtype, so
# there are at most ``MOST_TILES``.

TILE_BYTES = 256 << 20  # of the inputs and outputs of the layer's products in fp32, in a tile
LEAST_TOKENS = 256  # of a tile; the products are slow for fewer
MOST_TILES = 64  # of an input
SAME = 2e-2  # by how much a tile may differ from the whole layer, relative to the largest value
_SKELETONS = f"{__name__.partition('.')[0]}.train.skeletons"
_LIBRARIES = ("transformers.", "diffusers.", _SKELETONS)
_ENDINGS = ("MLP", "Mlp", "FeedForward", "FFN")  # of the names of classes
_OTHERS = ("Expert", "Mixer", "MoE", "Moe", "Sparse")  # in names of classes that may mix tokens
_NORMS = ("LayerNorm", "RMSNorm")  # endings of the names of classes
_INNER = (nn.Dropout, nn.Identity, nn.ModuleList, nn.ModuleDict, nn.ParameterDict, nn.Sequential)

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
        name = kind.__name__
        known = kind.__module__.startswith(_LIBRARIES) and name.endswith(_ENDINGS)
        if (
            known
            and not any(part in name for part in _OTHERS)
            and (_obstacle(module) is None and not _inside(module, found))
        ):
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
    if not layer.__class__.__module__.startswith(_SKELETONS):
        given = list(inspect.signature(type(layer).forward).parameters.values())[1:]
        more = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        required = [each for each in given if each.default is each.empty and each.kind not in more]
        if len(required) != 1 or required[0].kind is inspect.Parameter.KEYWORD_ONLY:
            return "does not take one tensor"
    for inner in layer.modules():
        if isinstance(inner, nn.Dropout) and inner.p > 0:
            return f"has dropout of {inner.p}"
        if inner is layer or _is_product(inner) or isinstance(inner, _INNER):
            continue
        if type(inner).__name__.endswith(_NORMS):
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

    def __init__(
        self, layers: Iterable[tuple[nn.Module, Callable[[], object]]], *, named: bool = False
    ) -> None:
        """
        Args:
            layers: each with a function that returns the version of its weights.
            named: the user has named them, so one that cannot run in tiles is an error.
        """
        self._placed: list[tuple[nn.Module, _TiledForward]] = []
        for layer, version in layers:
            forward = _TiledForward(layer, named=named)
            self._placed.append((layer, forward))
            TILED.add(layer)
            _VERSIONS[layer] = version
            layer.__dict__["forward"] = forward

    @staticmethod
    def of_engine(
        layers: Iterable[nn.Module], parts: Partition, versions: Sequence[int], *, named: bool
    ) -> TiledLayers:
        """Tile layers of an engine; ``versions``: by unit, those of its weights."""
        units = {id(p): unit for p, unit in zip(parts.parameters, parts.unit_of, strict=True)}

        def version(mine: frozenset[int]) -> object:
            return [versions[unit] for unit in mine]

        def units_of(layer: nn.Module) -> frozenset[int]:
            return frozenset(units[id(p)] for p in layer.parameters() if id(p) in units)

        each = ((layer, partial(version, units_of(layer))) for layer in layers)
        return TiledLayers(each, named=named)

    def remove(self) -> None:
        """Let the layers run as a whole again."""
        while self._placed:
            layer, forward = self._placed.pop()
            TILED.discard(layer)
            _VERSIONS.pop(layer, None)
            if layer.__dict__.get("forward") is forward:  # else it was replaced since
                del layer.__dict__["forward"]


class _TiledForward:
    """The forward of a layer that runs in tiles; copies of the layer have an ordinary one."""

    def __init__(self, layer: nn.Module, *, named: bool) -> None:
        self._layer, self._named = layer, named
        self._checked = False  # tiles were compared with the whole layer
        self._refused = self._told = False
        self._draws: set[bool] = set()  # the modes (training or not) in which it draws

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (type(self._layer).forward, self._layer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer, whole = self._layer, type(self._layer).forward
        given = [*args, *kwargs.values()]
        if layer not in TILED or torch.compiler.is_compiling() or len(given) != 1:
            return whole(layer, *args, **kwargs)
        x = given[0]
        if self._refused or layer.training in self._draws or not _fits(layer, x):
            return whole(layer, *args, **kwargs)
        self._checked = self._checked or self._shows_independence(x)
        if not self._checked:
            return whole(layer, *args, **kwargs)
        before = random_states(x.device)
        made = _run_in_tiles(layer, partial(whole, layer), x)
        if same_random_states(before, random_states(x.device)):
            return made
        del made
        self._drew()
        restore_random_states(before, x.device)
        return whole(layer, *args, **kwargs)

    def _drew(self) -> None:
        self._draws.add(self._layer.training)
        self._tell("draws random numbers")

    def _tell(self, why: str) -> None:
        if not self._told:
            self._told = True
            log.warning(
                "overspill: a %s %s, so it computes all tokens at once in spite of tile",
                type(self._layer).__name__, why,
            )  # fmt: skip

    def _refuse(self, why: str) -> bool:
        """Raise ``ModelError`` if the user has named the layer; otherwise run it whole."""
        if self._named:
            raise ModelError(
                f"tile: a {type(self._layer).__name__} {why}, so it cannot run in tiles; leave it "
                "out of tile"
            )
        self._refused = True
        self._tell(why)
        return False

    @torch.no_grad()
    def _shows_independence(self, x: torch.Tensor) -> bool:
        """Return whether tokens are seen not to depend on each other.

        Values that are not finite, zeros and random ones show nothing: a later call may.

        Raises:
            ModelError: they do, or the layer cannot run in tiles for another reason.
        """
        layer, tokens, whole = self._layer, _by_token(x.detach()), type(self._layer).forward
        some = tokens[:, : 2 * _tile_size(layer, tokens.shape[1])]
        half = some.shape[1] // 2
        drawn, state = random_states(x.device), state_of(layer)
        expected = whole(layer, some)
        if type(expected) is not torch.Tensor or expected.shape[:-1] != some.shape[:-1]:
            return self._refuse("does not return one tensor with its input's tokens")
        if (changed := first_changed(state, state_of(layer))) is not None:
            return self._refuse(f"changes {changed} when it runs")
        if not same_random_states(drawn, random_states(x.device)):
            restore_random_states(drawn, x.device)
            self._drew()
            return False
        largest = expected.float().abs().amax()
        if not bool(torch.isfinite(largest)) or not bool(largest > 0):
            return False
        for part in (slice(0, half), slice(half, None)):
            off = (whole(layer, some[:, part]).float() - expected[:, part].float()).abs().amax()
            if not bool(off <= SAME * largest):
                return self._refuse("gives outputs for some tokens that depend on the others")
        return True


def _fits(layer: nn.Module, x: Any) -> bool:
    """Return whether ``x`` has more tokens than a tile."""
    if type(x) is not torch.Tensor or not torch_private.has_memory(x) or x.dim() < 2:
        return False
    if not x.is_floating_point() or x.is_inference():
        return False
    return x.numel() // max(1, x.shape[-1]) > tile_tokens(layer)


def _tile_size(layer: nn.Module, count: int) -> int:
    """Return the number of tokens in a tile of an input with ``count`` tokens."""
    return max(tile_tokens(layer), -(-count // MOST_TILES))


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as (1, tokens, width)."""
    return x.reshape(1, -1, x.shape[-1])


def _run_in_tiles(layer: nn.Module, whole: Whole, x: torch.Tensor) -> torch.Tensor:
    """Return what ``whole`` computes from ``x`` (..., width), one tile of tokens after the other.

    Args:
        layer: holds the weights that ``whole`` reads.
    """
    grads = torch.is_grad_enabled()
    with exact:
        kept = _Input.apply(x) if grads and x.requires_grad else x  # type: ignore[no-untyped-call]
    tokens, made = _by_token(kept), list[torch.Tensor]()
    count = tokens.shape[1]
    size = _tile_size(layer, count)
    spans = [slice(start, min(start + size, count)) for start in range(0, count, size)]
    call = _Call(layer, whole, x, kept.grad_fn if kept is not x else None, len(spans))
    for span in spans:
        if not grads:
            made.append(whole(tokens[:, span]))
            continue
        tile = checkpoint_private.checkpoint(partial(call.again, span), [])
        next(tile)
        try:
            made.append(whole(tokens[:, span]))
        except BaseException:
            tile.close()
            raise
        next(tile, None)
    result = torch.cat(made, 1)
    return result.reshape(*x.shape[:-1], result.shape[-1])


class _Input(torch.autograd.Function):
    """Keeps the input of a tiled layer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad

    @staticmethod
    def jvp(_ctx: Any, tangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return tangent.view_as(tangent)


class _Call:
    """A call of a tiled layer: what its tiles need to be computed again, in backward."""

    def __init__(
        self, layer: nn.Module, whole: Whole, x: torch.Tensor, node: Any, tiles: int
    ) -> None:  # fmt: skip
        """
        Args:
            x: the layer's input.
            node: that of ``_Input``, which keeps it; ``None``: no gradient flows to it.
        """
        self._layer, self._whole, self._node, self._tiles = layer, whole, node, tiles
        self._kept = x if node is None else None
        self._kept_version = torch_private.version_of(x)
        self._state, self._version = state_of(layer), _version_of(layer)
        self._modes = [(each, each.training) for each in layer.modules()]
        self._autocast = x.device.type, autocast_dtype(x.device.type)
        # The input while a backward needs it: a checkpoint around the layer gives it only once.
        self._x: torch.Tensor | None = None
        self._task = self._left = 0  # that backward, and the tiles that it has not computed yet

    def again(self, span: slice) -> None:
        """Compute a tile again."""
        layer = self._layer
        if self._version != _version_of(layer):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"optimizer step, or in place: a weight of a tiled {type(layer).__name__}; run "
                "backward before step() and before such a change"
            )
        if (changed := first_changed(state_of(layer), self._state)) is not None:
            raise ActivationError(
                f"tile: {changed} of a {type(layer).__name__} has changed since its forward, which "
                "backward computes again with it; change it after backward, or leave it out of tile"
            )
        tokens = _by_token(self._input().detach())
        part = tokens[:, span].detach().requires_grad_(self._node is not None)
        now = [(each, each.training) for each, _ in self._modes]
        try:
            set_modes(self._modes)
            under_autocast(*self._autocast, lambda: _with_weights(layer, lambda: self._whole(part)))
        finally:
            set_modes(now)

    def _input(self) -> torch.Tensor:
        if self._kept is not None:
            if torch_private.version_of(self._kept) != self._kept_version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: the input of a tiled {type(self._layer).__name__}"
                )
            return self._kept
        x, task = self._x, torch_private.current_graph_task()
        if x is None or task != self._task:
            (x,) = self._node.saved_tensors
            self._x, self._task, self._left = x, task, self._tiles
        self._left -= 1
        if not self._left:
            self._x = None
        return x


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
