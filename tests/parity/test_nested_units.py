"""Units that run inside others although the module tree does not show it: adapters that replace
``forward``.  Losses are those of plain training, in every budget that ``wrap`` accepts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import overspill
from tests.devices import DEVICE, SIM, normal, plainly

WIDTH, RANK, DEPTH = 64, 16, 3
REGISTRY: dict[int, nn.Module] = {}  # where nothing that a module holds refers to


class Adapter(nn.Module):
    """kohya's: takes the place of a layer's ``forward``."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)
        self.before = [layer.forward]  # no module of its own

    def added(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.before[0](x) + self.added(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(torch.relu(self.first(x)))


class Base(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.how == "checkpoint of the module":
                x = checkpoint(block, x, use_reentrant=False)
            elif self.how == "checkpoint of its forward":
                x = checkpoint(block.forward, x, use_reentrant=False)
            else:
                x = block(x)
        return x


def _by_method(layer: nn.Linear, adapter: Adapter) -> None:
    layer.forward = adapter.forward  # type: ignore[method-assign]


def _by_partial(layer: nn.Linear, adapter: Adapter) -> None:
    def both(adapter: Adapter, before: Any, x: torch.Tensor) -> torch.Tensor:
        return before(x) + adapter.added(x)

    layer.forward = partial(both, adapter, layer.forward)  # type: ignore[method-assign]


def _by_closure(layer: nn.Linear, adapter: Adapter) -> None:
    before = layer.forward
    layer.forward = lambda x: before(x) + adapter.added(x)  # type: ignore[method-assign]


def _by_hook(layer: nn.Linear, adapter: Adapter) -> None:
    layer.register_forward_hook(lambda module, args, output: output + adapter.added(args[0]))


class Added(Adapter):
    """Is called itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.added(x)


def _by_registry(layer: nn.Linear, adapter: Adapter) -> None:
    number, before = id(layer), layer.forward
    REGISTRY[number] = adapter
    layer.forward = lambda x: before(x) + REGISTRY[number](x)  # type: ignore[method-assign]


TIES: dict[str, Callable[[nn.Linear, Adapter], None]] = {
    "method": _by_method, "partial": _by_partial, "closure": _by_closure, "hook": _by_hook,
}  # fmt: skip
HOWS = [
    "plain", "checkpoint of the module", "checkpoint of its forward", "around its forward",
    "reentrant around its forward",
]  # fmt: skip


def _build(how: str, tie: Callable[[nn.Linear, Adapter], None], *, trained: bool = False) -> Any:
    """A base, frozen or ``trained``, and the adapters over it, in one container."""
    torch.manual_seed(0)
    base, adapters = Base(how).requires_grad_(trained), nn.ModuleList()
    for block in base.blocks:
        for layer in (block.first, block.last):
            adapter = (Added if tie is _by_registry else Adapter)(layer)
            adapters.append(adapter)
            tie(layer, adapter)
        if "around" in how:
            reentrant, inner = how.startswith("reentrant"), block.forward
            block.forward = partial(checkpoint, inner, use_reentrant=reentrant)
    return nn.ModuleList([base, adapters]).to(DEVICE)


def _losses(model: Any, optimizer: Any, steps: int = 3) -> list[float]:
    found = []
    for number in range(steps):
        x = normal(number, 8, WIDTH).requires_grad_()
        loss = model[0](x).square().mean()
        loss.backward()
        assert x.grad is not None and bool(x.grad.isfinite().all())
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _plain(how: str, tie: Any, **more: Any) -> list[float]:
    model = _build(how, tie, **more)
    return _losses(model, plainly(overspill.optim.AdamW, _trained(model), lr=0.01))


def _wrapped(model: nn.Module, **options: Any) -> Any:
    return overspill.wrap(model, torch.optim.AdamW(_trained(model), lr=0.01), **options)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("update", ["step", "next_forward", "backward"])
@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("how", HOWS)
def test_adapters_that_replace_forward_train_as_in_torch(
    how: str, tie: str, update: str, trained: bool
) -> None:
    model = _build(how, TIES[tie], trained=trained)
    memory = "240KiB" if update == "backward" else "120KiB" if trained else "76KiB"
    options = {"device": SIM, "device_memory": memory, "host_memory": "2MiB", "update": update}
    with _wrapped(model, **options) as optimizer:
        streamed = [h for name, h in optimizer.plan.placement.items() if "blocks" in name]
        assert update == "backward" or not all(home.resident for home in streamed)
        assert _losses(model, optimizer) == _plain(how, TIES[tie], trained=trained)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("activations", ["auto", "keep"])
def test_every_budget_that_is_accepted_is_enough(how: str, activations: Any) -> None:
    expected, refused = _plain(how, _by_method), 0
    for kib in range(36, 140, 6):
        model = _build(how, _by_method)
        options = {"device": SIM, "device_memory": f"{kib}KiB", "host_memory": "2MiB"}
        try:
            optimizer = _wrapped(model, activations=activations, **options)
        except overspill.BudgetError:
            refused += 1
            continue
        with optimizer:
            assert _losses(model, optimizer) == expected, kib
    assert refused, "a budget for the block alone is refused: its adapters run inside"


@pytest.mark.parametrize("how", HOWS)
def test_on_disk_too(how: str, tmp_path: Path) -> None:
    model = _build(how, _by_method)
    options = {
        "device": SIM, "device_memory": "150KiB", "host_memory": "150KiB", "nvme": tmp_path,
    }  # fmt: skip
    with _wrapped(model, **options) as optimizer:
        assert not all(home.resident for home in optimizer.plan.placement.values())
        assert _losses(model, optimizer) == _plain(how, _by_method)


@pytest.mark.parametrize("how", ["plain", "checkpoint of the module", "around its forward"])
def test_what_nothing_refers_to_is_onloaded_in_turns_and_said_once(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Under a checkpoint backward needs both at once, which no plan could know: an error."""
    expected = _plain(how, _by_registry)
    model = _build(how, _by_registry)
    options = {"device": SIM, "device_memory": "58KiB", "host_memory": "2MiB"}
    with caplog.at_level(logging.WARNING, "overspill"), _wrapped(model, **options) as optimizer:
        if how == "plain":
            assert _losses(model, optimizer) == expected
        else:
            with pytest.raises(overspill.BudgetError, match="raise device_memory"):
                _losses(model, optimizer)
    told = [each.message for each in caplog.records if "runs inside" in each.message]
    assert len(told) == 1 and "resident=['1." in told[0]
    for remedy in ({"device_memory": "140KiB", "resident": ["1"]}, {"device_memory": "400KiB"}):
        caplog.clear()
        model = _build(how, _by_registry)
        with _wrapped(model, **{**options, **remedy}) as optimizer:
            assert _losses(model, optimizer) == expected
        assert not [each for each in caplog.records if "runs inside" in each.message]
    REGISTRY.clear()


def _outside(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Asks no tensor's class, as compiled extensions do not."""
    with torch._C.DisableTorchFunctionSubclass():
        return nn.functional.linear(x, weight) * x


def test_a_placeholder_that_autograd_would_save_is_named() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return _outside(x, self.layers[0].weight)

    def build() -> Reads:
        torch.manual_seed(0)
        return Reads().to(DEVICE)

    plain, model, x = build(), build(), normal(0, 2, WIDTH)
    options: dict[str, Any] = {"device": SIM, "device_memory": "60KiB", "host_memory": "2MiB"}
    message = r"'layers\.0\.weight' was used while its"
    with _wrapped(model, **options), pytest.raises(overspill.OffloadError, match=message):
        model(x)
    model = build()  # both remedies
    with _wrapped(model, resident=["layers.0"], **{**options, "device_memory": "100KiB"}):
        assert torch.equal(model(x), plain(x))
    model = build()
    with _wrapped(model, **options):
        weight = model.layers[0].weight.data.clone()
        assert torch.equal(_outside(x, weight), _outside(x, plain.layers[0].weight))
