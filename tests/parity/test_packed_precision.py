"""Activations that move as int8: which of them lose precision, and which do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import overspill
from overspill.activations import offloader, tiles
from overspill.optim.activation_blocks import ActivationBlocks
from overspill.planning.recompute_choice import Recomputed
from tests.devices import SIM, normal
from tests.parity.chains import known_as_the_libraries_are
from tests.parity.packed import CLASSES, PLACES, TOKENS, WIDTH, Net, data, recorded, y


@pytest.fixture(autouse=True)
def small_ones_leave_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloader, "LEAST_BYTES", 1 << 10)


class Saves(torch.autograd.Function):
    """Saves some tensors, and shows what has become of them in backward."""

    @staticmethod
    def forward(ctx: Any, found: list[Any], x: torch.Tensor, *saved: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*saved)
        ctx.found = found
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.found.extend(t.clone() for t in ctx.saved_tensors)
        return None, grad, *[None] * len(ctx.saved_tensors)


def saving(found: list[Any], x: torch.Tensor, *saved: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = Saves.apply(found, x, *saved)  # type: ignore[no-untyped-call]
    return made


class Keeps(nn.Module):
    """A unit that saves tensors of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.saved: dict[str, torch.Tensor] = {}
        self.found: dict[str, list[torch.Tensor]] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        draw = torch.Generator("cpu").manual_seed(1)
        with torch.device("cpu"):
            mask, numbers = (torch.rand(x.shape, generator=draw).to(x.device) for _ in range(2))
            indices = torch.randint(1 << 30, x.shape, generator=draw).to(x.device)
        kinds = {
            "activation": x,
            "result": x.exp(),
            "mask": mask < 0.5,
            "numbers of a dropout": numbers,
            "indices": indices,
            "statistics": x.repeat(1, 1, 4).pow(2).mean(-1, keepdim=True).rsqrt(),
            "log_softmax": x.log_softmax(-1),
            "logsumexp": torch.logsumexp(x.repeat(1, 1, 4).view(*x.shape[:2], 4, -1), -1),
            "double": x.double(),
        }
        self.saved = {name: t.detach().clone() for name, t in kinds.items()}
        self.found = {name: [] for name in kinds}
        for name, t in kinds.items():
            x = saving(self.found[name], x, t)
        return x


def rounded(t: torch.Tensor) -> torch.Tensor:
    """What a tensor is after it has moved as int8."""
    blocks, flat = ActivationBlocks(t.dtype), t.cpu().contiguous().view(-1).view(torch.uint8)
    packed = torch.empty(blocks.packed_bytes(flat.numel()), dtype=torch.uint8, device="cpu")
    blocks.pack(flat, packed)
    back = torch.empty_like(flat)
    blocks.unpack(packed, back)
    return back.view(t.dtype).view(t.shape).to(t.device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_activations_are_rounded(tmp_path: Path, dtype: torch.dtype) -> None:
    model = nn.ModuleDict({"first": Keeps(), "rest": Net(2)}).to(dtype)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {**PLACES["device"], "units": ["first"], "nvme": tmp_path, "durable": False}
    with overspill.wrap(
        model, inner, activations="nvme", activations_format="int8", **options
    ) as optimizer:
        x = normal(1, 4, TOKENS, WIDTH).to(dtype)
        y = model["first"](x)
        loss = model["rest"](y).float().square().mean()
        optimizer._engine.runtime.executor.engine_port.catch_up()
        loss.backward()
    for name, before in model["first"].saved.items():
        (after,) = model["first"].found[name]
        if name in ("activation", "result"):
            assert torch.equal(after, rounded(before)), name
            assert not torch.equal(after, before), name
        else:
            assert torch.equal(after, before), name


class Attends(nn.Module):
    """Saves what attention saves, of which the last is too small to leave."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(WIDTH, WIDTH), kind
        self.saved: list[torch.Tensor] = []
        self.found: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        q, k, v = x * 2.0, x * 3.0, x[:, :1] * 4.0
        self.saved, self.found = [t.detach().clone() for t in (q, k, v)], []
        return saving(self.found, x, q, k, v) if self.kind == "all" else saving(self.found, x, q, k)


@pytest.mark.parametrize("reports", ["late", "at once"])
@pytest.mark.parametrize("kind", ["all", "two"])
def test_what_attention_saves_is_exact(
    tmp_path: Path, kind: str, reports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is known by its third activation; until then, the first ones are not reported."""
    monkeypatch.setattr(offloader, "LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(offloader, "TELL_SHARE", 1 if reports == "late" else 1 << 20)
    model = nn.ModuleDict({"first": Attends(kind), "rest": Net(2)})
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {**PLACES["device"], "units": ["first"], "nvme": tmp_path, "durable": False}
    with overspill.wrap(
        model, inner, activations="nvme", activations_format="int8", **options
    ) as optimizer:
        loss = model["rest"](model["first"](normal(1, 4, TOKENS, WIDTH))).square().mean()
        optimizer._engine.runtime.executor.engine_port.catch_up()
        loss.backward()
    for before, after in zip(model["first"].saved, model["first"].found, strict=False):
        assert torch.equal(after, before if kind == "all" else rounded(before))


class Reused(nn.Module):
    """Saves what attention saves, of which the first was saved and reported before."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(WIDTH, WIDTH), kind
        self.saved: list[torch.Tensor] = []
        self.found: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        q = torch.tanh(x)
        before = saving([], x, q)
        if self.kind == "attention":
            saved = (q, x * 3.0, x * 4.0)
        else:  # keys and values without gradients
            saved = (q, x.detach() * 3.0, x.detach() * 4.0)
        self.saved, self.found = [t.detach().clone() for t in saved], []
        return saving(self.found, before, *saved)


@pytest.mark.parametrize("kind", ["attention", "frozen"])
def test_attention_is_exact_whatever_was_saved_before(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloader, "TELL_SHARE", 1 << 20)  # reported at once
    model = nn.ModuleDict({"first": Reused(kind), "rest": Net(2)})
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {**PLACES["device"], "units": ["first"], "nvme": tmp_path, "durable": False}
    with overspill.wrap(
        model, inner, activations="nvme", activations_format="int8", **options
    ) as optimizer:
        loss = model["rest"](model["first"](normal(1, 4, TOKENS, WIDTH))).square().mean()
        optimizer._engine.runtime.executor.engine_port.catch_up()
        loss.backward()
    assert len(model["first"].found) == 3
    for before, after in zip(model["first"].saved, model["first"].found, strict=True):
        assert torch.equal(after, before)


def test_what_is_saved_before_a_unit_is_exact_after_an_interrupt(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.interrupted = Net(2), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.net(x * 2.0 + x.relu())
            return made

    def interrupt(*_: Any) -> None:
        if model.interrupted:
            raise KeyboardInterrupt

    model = Model()
    model.net.blocks[0].mlp[0].register_forward_pre_hook(interrupt)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {**PLACES["device"], "nvme": tmp_path, "durable": False}
    with overspill.wrap(model, inner, activations="nvme", activations_format="int8", **options):
        x = normal(1, 4, TOKENS // 4, WIDTH).requires_grad_()
        model.interrupted = True
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model.interrupted = False
        with recorded() as handles:
            model(x)
    first = handles[0][0]
    assert first.shape == x.shape
    assert first.shared.blocks is None


class Shared(nn.Module):
    """Saves one storage as an activation, then as bits that must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.saved, self.found = torch.empty(0), list[torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        self.saved = x.detach().clone()
        return saving(self.found, saving(self.found, x, x), x.detach().view(torch.int32))


@pytest.mark.parametrize("reported", [True, False])
def test_bits_that_must_not_change_do_not(
    tmp_path: Path, reported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the storage was reported to be packed, the bits get a storage of their own."""
    monkeypatch.setattr(offloader, "TELL_SHARE", 1 << 20 if reported else 1)
    model = nn.ModuleDict({"first": Shared(), "rest": Net(2)})
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {**PLACES["device"], "units": ["first"], "nvme": tmp_path, "durable": False}
    with overspill.wrap(
        model, inner, activations="nvme", activations_format="int8", **options
    ) as optimizer:
        loss = model["rest"](model["first"](normal(1, 4, TOKENS, WIDTH))).square().mean()
        optimizer._engine.runtime.executor.engine_port.catch_up()
        loss.backward()
    bits, x = model["first"].found
    assert torch.equal(bits.view(torch.float32), model["first"].saved)
    assert torch.equal(x, rounded(model["first"].saved) if reported else model["first"].saved)


@pytest.mark.parametrize("how", ["units", "attention", "tiles"])
def test_what_a_recomputation_begins_with_is_exact(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inputs of recomputed units, the attention that they keep, and the inputs of tiles."""
    monkeypatch.setattr(tiles, "LEAST_TOKENS", 16)
    monkeypatch.setattr(tiles, "TILE_BYTES", 1 << 18)
    known_as_the_libraries_are(monkeypatch, Net.__module__)
    options: dict[str, Any] = {**PLACES["device"], "nvme": tmp_path, "durable": False}
    if how == "tiles":
        options["tile"] = ["blocks.*.mlp"]
    model = Net(4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with overspill.wrap(
        model, inner, activations="auto", activations_format="int8", **options
    ) as optimizer:
        recompute = optimizer._engine._loop.tuner.recompute
        for step in range(2):
            with recorded() as handles:
                loss = F.cross_entropy(model(data(step, torch.float32)[0]).flatten(0, 1), y(step))
            begins = [handle.shared for handle, begins in handles if begins]
            others = [handle.shared for handle, begins in handles if not begins]
            loss.backward()
            optimizer.step()
            recompute.watching = False
            if how != "tiles":
                kept = frozenset({1, 2}) if how == "attention" else frozenset[int]()
                recompute.chosen = Recomputed(frozenset({1, 2}), kept)
        assert set(recompute.computed) == (set() if how == "tiles" else {1, 2})
    assert len(begins) >= {"units": 2, "attention": 4 if SIM == "sim" else 2, "tiles": 4}[how]
    assert all(shared.blocks is None for shared in begins)
    assert any(shared.blocks is not None for shared in others)


def test_what_is_saved_outside_of_units_is_exact(tmp_path: Path) -> None:
    model = Net(2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {**PLACES["device"], "nvme": tmp_path, "durable": False}
    wrapped: dict[str, Any] = {"model": model, "loss": WithLoss(model)}
    with overspill.wrap(
        wrapped["loss"], inner, activations="nvme", activations_format="int8", **options
    ) as optimizer:
        x, y = data(1, torch.float32)
        with recorded() as handles:
            loss = wrapped["loss"](x, y)
        inside = [h for h, _ in handles if h.shared.blocks is not None]
        outside = [h for h in inside if h.shape[-1] == CLASSES]
        assert inside
        assert not outside
        loss.backward()
        optimizer.step()


class WithLoss(nn.Module):
    """A model with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.model(x).flatten(0, 1)
        return (logits / logits.exp().sum(-1, keepdim=True).log()).square().mean()
