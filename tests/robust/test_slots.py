"""Slots that somebody still points into: handed on only after the last kernel that may read them,
never seen again after a rollback, never used as scratch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from tests.devices import CPU, NAME, SIM, about_cpu, plainly
from tests.models import TinyLM, adamw, batch, train, weights
from tests.patience import WAIT_S

PLACES: dict[str, dict[str, Any]] = {
    "streamed": {"device": CPU, "host_memory": "1800KiB", "prefetch_depth": 4},
    "streamed in": {"device": SIM, "device_memory": "800KiB", "host_memory": "2MiB"},
}
if NAME:
    del PLACES["streamed"]  # host memory is no device there


class Keeper:
    """Keeps a tensor over a unit's weights from inside its forward, as ``ctx.w = weight`` does."""

    def __init__(self, layer: nn.Linear) -> None:
        self.kept: list[torch.Tensor] = []
        self._handle = layer.register_forward_pre_hook(self._keep)

    def _keep(self, module: Any, *_: Any) -> None:
        self.kept.append(module.weight.detach())

    def stop(self) -> None:
        self._handle.remove()


def test_a_slot_waits_for_kernels_that_came_after_its_unit(tmp_path: Path) -> None:
    """A late kernel reads a view of old weights after the unit was let go; then the view goes, and
    the slot is given to another unit: the copy into it comes after that read."""
    torch.manual_seed(0)
    model = TinyLM(depth=6)
    with overspill.wrap(
        model, adamw(model), nvme=tmp_path, rates=overspill.Rates(), **PLACES["streamed in"]
    ) as optimizer:
        train(model, optimizer, 2)
        accelerator = optimizer._engine.runtime.accelerator
        large, inputs = torch.ones(1500, 1500), batch(0)
        for block in model.blocks:  # not every one of their slots is handed on at once
            expected = block.up.weight.detach().clone()
            keeper = Keeper(block.up)
            with torch.no_grad():
                model(*batch(0))
            keeper.stop()
            for _ in range(2):  # the first of its kind is waited for on the test device
                large @ large @ large @ large @ large
                read = keeper.kept[0] + 0
            accelerator.used(keeper.kept[0].view(torch.uint8).flatten())
            keeper.kept.clear()
            held = (
                optimizer._engine._onloaded_units._held.watches
            )  # a kernel may hold what it reads
            deadline = time.monotonic() + WAIT_S
            while not all(watch.expired for watch in held) and time.monotonic() < deadline:
                time.sleep(0.01)
            with torch.no_grad():
                model(*inputs)  # nothing in it makes the host wait for that read
            train(model, optimizer, 2)  # a missing wait raises in the background
            assert torch.equal(read, expected)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", ["rollback", "load", "edit"])
def test_weights_that_were_replaced_are_not_seen_again(
    place: str, how: str, tmp_path: Path
) -> None:
    """Whoever keeps a slot of old weights keeps them, and nobody else sees them any more."""
    torch.manual_seed(0)
    model, plain = TinyLM(depth=8), TinyLM(depth=8)
    with overspill.wrap(
        model, adamw(model), nvme=tmp_path, commit_every=100, rates=overspill.Rates(),
        **PLACES[place],
    ) as optimizer:  # fmt: skip
        train(model, optimizer, 1)
        optimizer.commit()
        committed = weights(model)
        train(model, optimizer, 2)
        homes = optimizer.plan.placement
        streamed = [b for n, b in enumerate(model.blocks) if not homes[f"blocks.{n}"].resident]
        assert streamed
        keepers = [Keeper(streamed[0].up)]
        with torch.no_grad():
            model(*batch(5))
        for keeper in keepers:
            keeper.stop()
        before = [keeper.kept[0].clone() for keeper in keepers]
        if how == "rollback":
            optimizer.rollback()
        elif how == "load":
            model.load_state_dict(committed)
        else:
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(committed[name])
        optimizer.state_dict()  # brings records to host memory, beside what is kept
        plain.load_state_dict(committed)
        with torch.no_grad():
            assert torch.equal(model(*batch(6)), plain(*batch(6)))
        for keeper, value in zip(keepers, before, strict=True):
            assert torch.equal(keeper.kept[0], value), "a slot was used again"
        for name, value in committed.items():
            assert torch.equal(weights(model)[name], value), name
        del keepers, keeper
        train(model, optimizer, 2)


@about_cpu
def test_graphs_that_keep_all_room_end_in_a_clear_error(tmp_path: Path) -> None:
    """Updates find no room; when the graphs are gone, they go on, and nothing is lost."""
    model, roomy = TinyLM(depth=8), TinyLM(depth=8)
    roomy.load_state_dict(model.state_dict())
    options: dict[str, Any] = {"update": "step", "rates": overspill.Rates()}
    with (
        overspill.wrap(roomy, adamw(roomy), device=CPU, host_memory="64MiB", **options) as other,
        overspill.wrap(
            model, adamw(model), nvme=tmp_path, **PLACES["streamed"], **options
        ) as optimizer,
    ):
        homes = optimizer.plan.placement
        assert not homes["blocks.7"].resident and not homes["head"].resident
        train(roomy, other, 1)
        train(model, optimizer, 1)
        model(*batch(1)).backward()
        keepers = [Keeper(model.blocks[7].up), Keeper(model.head)]  # two slots, which is all
        with torch.no_grad():
            model(*batch(2))
        with pytest.raises(overspill.BudgetError, match="free graphs that still hold weights"):
            optimizer.step()
        for keeper in keepers:
            keeper.stop()
            keeper.kept.clear()
        optimizer.zero_grad()
        roomy(*batch(1)).backward()
        other.step()
        other.zero_grad()
        assert optimizer.step_count == other.step_count
        train(model, optimizer, 2)
        train(roomy, other, 2)
        assert optimizer.step_count == other.step_count
        expected = weights(roomy)
        for name, value in weights(model).items():
            assert torch.equal(value, expected[name]), name


class Borrower(nn.Module):
    """Another module's weight is the input of one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 64)
        self.blocks = nn.ModuleList(TinyLM().blocks[n] for n in range(4))
        self.relative, self.norm = nn.Embedding(16, 64), nn.LayerNorm(64)
        self.head = nn.Linear(64, 300, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.norm(self.relative.weight).sum(0)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("factor", [1.0, 1.05, 1.5])
def test_a_weight_of_another_module_as_input_comes_to_an_end(factor: float, tmp_path: Path) -> None:
    """Compute waits for one update, which waits behind another, which has no room while compute
    has its own: it goes before that one."""
    torch.manual_seed(0)
    model = Borrower()
    needed = 600 << 10
    tokens = torch.randint(0, 300, (2, 16))
    while True:
        inner = torch.optim.AdamW(model.parameters(), 1e-3)
        try:
            optimizer = overspill.wrap(
                model, inner, device=CPU, host_memory=int(needed * factor), nvme=tmp_path,
                rates=overspill.Rates(),
            )  # fmt: skip
            break
        except overspill.BudgetError:
            needed += 16 << 10
    with optimizer:
        for number in range(12):
            model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 3 == 1:
                assert all(p.detach().isfinite().all() for p in model.parameters())
                with torch.no_grad():
                    model(tokens)
        assert optimizer.step_count == 12


class TiedLater(nn.Module):
    """The weight that embedding and head share belongs to the one that backward comes to first."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.embed = nn.Linear(64, 300, bias=False), nn.Embedding(300, 64)
        self.embed.weight = self.head.weight
        self.blocks = nn.ModuleList(TinyLM().blocks[n] for n in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def test_an_update_in_backward_waits_for_all_that_share_the_weight() -> None:
    torch.manual_seed(0)
    model, plain = TiedLater(), TiedLater()
    plain.load_state_dict(model.state_dict())
    inner = torch.optim.AdamW(plain.parameters(), 1e-3)
    theirs = plainly(overspill.optim.AdamW, inner.param_groups)
    tokens = torch.randint(0, 300, (2, 16))
    with overspill.wrap(
        model, torch.optim.AdamW(model.parameters(), 1e-3), device=SIM, update="backward",
        device_memory="400KiB", host_memory="64MiB", rates=overspill.Rates(),
    ) as optimizer:  # fmt: skip
        for _ in range(4):
            for each, its in ((model, optimizer), (plain, theirs)):
                each(tokens).backward()
                its.step()
                its.zero_grad()
        for name, value in weights(plain).items():
            assert torch.equal(weights(model)[name], value), name
