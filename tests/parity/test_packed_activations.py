"""Activations that move as int8: which do, how many bytes move, and how much results change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import overspill
from overspill.activations import activations, tiles
from overspill.activations.activations import SavedHandle, SavedTensorOffloader
from overspill.activations.precision import exact
from overspill.optim import activation_blocks
from overspill.optim.activation_blocks import ActivationBlocks
from overspill.planning.recompute import Recomputed
from tests.devices import CPU, NAME, SIM, normal
from tests.parity.chains import known_as_the_libraries_are

WIDTH, TOKENS, CLASSES = 128, 512, 40
PLACES: dict[str, dict[str, Any]] = {
    "device": {"device": SIM, "device_memory": "24MiB", "host_memory": "64MiB"},
    "staged": {"device": SIM, "device_memory": "24MiB", "host_memory": "12MiB"},
    "cpu": {"device": CPU, "host_memory": "24MiB"},
}
CASES = [("device", "host"), ("device", "nvme"), ("staged", "nvme"), ("cpu", "nvme")]


@pytest.fixture(autouse=True)
def small_ones_leave_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "LEAST_BYTES", 1 << 10)


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.view(*x.shape[:-1], 4, -1).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        made: torch.Tensor = x + self.mlp(self.norm(x))
        return made


class Net(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def data(step: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and classes that follow from them."""
    x = normal(step, 4, TOKENS // 4, WIDTH)
    return x.to(dtype), x[..., :CLASSES].argmax(-1).flatten()


def y(step: int) -> torch.Tensor:
    return data(step, torch.float32)[1]


def fit(
    folder: Path, place: str, steps: int = 3, dtype: torch.dtype = torch.float32, **options: Any
) -> list[float]:
    """The losses."""
    torch.manual_seed(0)
    model = Net().to(dtype)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    given = {**PLACES[place], "nvme": folder, "durable": False, "tokens": TOKENS, **options}
    losses = []
    with overspill.wrap(model, adamw, **given) as optimizer:
        for step in range(steps):
            x, y = data(step, dtype)
            loss = F.cross_entropy(model(x).flatten(0, 1).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("place", "policy"), CASES)
def test_a_byte_and_a_share_of_a_scale_move_for_an_element(
    tmp_path: Path, place: str, policy: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = Net().to(dtype)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {**PLACES[place], "nvme": tmp_path, "durable": False}
    with overspill.wrap(
        model, inner, activations=policy, activations_format="int8", **options
    ) as optimizer:
        with recorded() as handles:
            loss = model(data(1, dtype)[0]).float().square().mean()
        optimizer._engine.runtime.executor.engine_port.catch_up()
        storages = {handle.shared.saved.number: handle.shared for handle, _ in handles}
        whole = {n: shared.saved.nbytes for n, shared in storages.items()}
        packed = {
            n: shared.blocks.dtype.itemsize for n, shared in storages.items() if shared.blocks
        }
        # Of 16 tensors as wide as the model, attention saves 4, 3 of them in one storage.
        assert sum(whole[n] for n in packed) > 0.7 * sum(whole.values())
        del handles, storages
        loss.backward()
        optimizer.step()
        spans = [s for s in optimizer._engine.trace.spans() if s.name.startswith("saved")]
    sizes = whole.copy()
    for n, itemsize in packed.items():
        elements = whole[n] // itemsize
        sizes[n] = elements + -(-elements // 128) * 4
    back = Counter[int]()
    for span in spans:
        if span.lane == "copy_in":
            back[int(span.name.split()[1])] += span.nbytes
    assert len(back) > 10
    wrong = {n: (nbytes, sizes[n], whole[n]) for n, nbytes in back.items() if nbytes % sizes[n]}
    assert not wrong, "in one part or several"
    if policy == "nvme":
        written = sum(s.nbytes for s in spans if s.lane == "write")
        pages = sum(-(-nbytes // 4096) for nbytes in sizes.values())
        assert 0 < written <= 4096 * (pages + len(sizes))  # parts end with a page each


@pytest.mark.parametrize(("place", "policy"), [*CASES, ("device", "auto"), ("cpu", "auto")])
@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
def test_losses_are_nearly_those_of_keep(
    tmp_path: Path, place: str, policy: str, update: str
) -> None:
    options = {"max_grad_norm": 1.0} if update != "backward" else {}
    kept = fit(tmp_path, "device", 20, activations="keep", update=update, **options)
    found = fit(
        tmp_path, place, 20, activations=policy, activations_format="int8", update=update, **options
    )
    assert found[0] == kept[0], "forward is exact"
    assert found != kept
    torch.testing.assert_close(found, kept, rtol=0, atol=2e-3)


# -- what is packed -------------------------------------------------------------------------------


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
    monkeypatch.setattr(activations, "LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(activations, "TELL_SHARE", 1 if reports == "late" else 1 << 20)
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
    monkeypatch.setattr(activations, "TELL_SHARE", 1 << 20 if reported else 1)
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


@contextmanager
def recorded() -> Iterator[list[tuple[SavedHandle, bool]]]:
    """The handles of what is saved in the block, and whether a recomputation begins with it."""
    made, pack = list[tuple[SavedHandle, bool]](), SavedTensorOffloader.pack

    def recording(self: SavedTensorOffloader, t: torch.Tensor) -> SavedHandle | None:
        handle = pack(self, t)
        if handle is not None:
            made.append((handle, exact.depth > 0))
        return handle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedTensorOffloader, "pack", recording)
        yield made


@pytest.mark.parametrize("how", ["units", "attention", "tiles"])
def test_what_a_recomputation_begins_with_is_exact(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inputs of recomputed units, the attention that they keep, and the inputs of tiles."""
    monkeypatch.setattr(tiles, "LEAST_TOKENS", 16)
    monkeypatch.setattr(tiles, "TILE_BYTES", 1 << 18)
    known_as_the_libraries_are(monkeypatch, __name__)
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


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_reported(tmp_path: Path, bad: float) -> None:
    model = Net(3)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {**PLACES["device"], "nvme": tmp_path, "durable": False, "update": "step"}
    with overspill.wrap(
        model, inner, activations="nvme", activations_format="int8", **options
    ) as optimizer:
        x = normal(1, 4, TOKENS, WIDTH)
        x[0, 5, 7] = bad
        model(x).square().mean().backward()
        with pytest.raises(overspill.OffloadError, match="not finite"):
            optimizer.step()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_the_user_work(tmp_path: Path, reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            logits: torch.Tensor = self.head(x)
            return logits

    torch.manual_seed(0)
    model = Checkpointed(3)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {**PLACES["device"], "nvme": tmp_path, "durable": False}
    with overspill.wrap(
        model, inner, activations="nvme", activations_format="int8", **options
    ) as optimizer:
        for step in range(2):
            x, y = data(step, torch.float32)
            F.cross_entropy(model(x).flatten(0, 1), y).backward()
            optimizer.step()
            optimizer.zero_grad()


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["keep", "recompute", "selective"])
def test_policies_that_move_nothing_are_refused(policy: str) -> None:
    model = Net(1)
    adamw = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="nothing is moved that may lose precision"):
        overspill.wrap(model, adamw, activations=policy, activations_format="int8")  # type: ignore[call-overload]


def test_formats_are_checked() -> None:
    model = Net(1)
    with pytest.raises(ValueError, match="activations_format must be one of None, 'int8'"):
        overspill.plan(model, activations_format="fp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pass activations='host' or 'nvme'"):
        overspill.wrap(model, activations_format="int8")


def test_plans_count_packed_bytes() -> None:
    model = Net(8)
    adamw = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {
        "device": SIM, "device_memory": "256MiB", "host_memory": "400MiB", "tokens": 1 << 14,
        "activations": "host",
    }  # fmt: skip
    whole = overspill.plan(model, adamw, **options)
    packed = overspill.plan(model, adamw, **options, activations_format="int8")
    assert not whole.fits
    assert packed.fits
    assert ", moved as int8" in str(packed)
    assert packed.detail.activation_bytes == whole.detail.activation_bytes
    assert packed.link_bytes["copy_out"] < 0.5 * whole.shortfalls[0].need_bytes


@pytest.mark.skipif(NAME != "testdev", reason="counts what the device allocates")
def test_staging_is_within_the_budget_and_freed_by_sleep(tmp_path: Path) -> None:
    memory, held = torch.accelerator.memory_allocated, []
    for options in ({}, {"activations_format": "int8"}):
        model = Net(2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {**PLACES["device"], "nvme": tmp_path, "durable": False, "activations": "host"}
        before = memory()
        with overspill.wrap(model, inner, **given, **options) as optimizer:  # type: ignore[call-overload]
            tier = optimizer.memory[overspill.Tier.DEVICE]
            held.append(memory() - before)
            assert tier.held_bytes >= held[-1] - (1 << 16)
            optimizer.sleep()
            assert memory() - before < 1 << 16
            optimizer.wake()
            model(data(0, torch.float32)[0]).square().mean().backward()
            optimizer.step()
        del model, inner, optimizer
    assert held[1] - held[0] >= 2 * activation_blocks.WINDOW_BYTES
