"""``wrap`` without an optimizer: the same outputs, weights that come once a forward, no writes."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from tests.devices import CPU, SIM, about_sim, normal
from tests.patience import on_slower_machines

RATES = overspill.Rates(
    h2d_bytes_s=1e9, d2h_bytes_s=1e9, dram_bytes_s=2e10, update_params_s=1e9,
    disk_read_bytes_s=1e9, disk_write_bytes_s=1e9,
)  # fmt: skip
WIDTH, BLOCKS = 64, 8
PLACES: dict[str, dict[str, Any]] = {
    "memory": {"device": CPU, "host_memory": "10MiB"},
    "disk": {"device": CPU, "host_memory": "400KiB"},
    "device": {"device": SIM, "device_memory": "500KiB", "host_memory": "10MiB"},
    "all tiers": {"device": SIM, "device_memory": "400KiB", "host_memory": "600KiB"},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.relu(self.inner(self.norm(x))))


def build(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def offloaded(model: nn.Module, place: str, folder: Path, **more: Any) -> Any:
    options = {"nvme": folder, "rates": RATES, **PLACES[place], **more}
    if place in ("memory", "device"):
        del options["nvme"]
    return overspill.wrap(model, **options)


@pytest.mark.alone  # on a busy machine, more is evicted and read again
@pytest.mark.parametrize("place", PLACES)
def test_outputs_are_those_of_the_model_and_nothing_is_written(place: str, tmp_path: Path) -> None:
    plain, model = build().to(normal(0, 1).device), build()
    counts, planned = Counter[str](), {}
    with torch.no_grad(), offloaded(model, place, tmp_path) as made:
        assert isinstance(made, overspill.OffloadedInference)
        planned = made.plan.link_bytes
        for number in range(8):
            x = normal(number, 3, 5, WIDTH)
            assert torch.equal(model(x), plain(x))
            assert made.stats.tokens == 15 and made.stats.tokens_s > 0
            if number >= 2:
                counts.update({lane: s.bytes for lane, s in made.stats.lanes.items()})
        layout, held = made.plan.detail.layout, made.memory
    weights = sum(unit.weight_bytes for unit in layout.units)
    assert not counts["write"] and not counts["copy_out"] and not counts["update"]
    for lane in ("read", "copy_in"):
        assert counts[lane] == pytest.approx(6 * planned[lane], rel=0.12), (lane, counts, planned)
        assert planned[lane] <= 1.13 * weights, "weights come once, but for one that came too early"
    for tier in held.values():
        assert tier.peak_bytes <= tier.budget_bytes
    assert not any("overspill" in name for name in os.listdir(tmp_path)), "nothing is kept"


@about_sim
def test_the_units_of_the_next_forward_come_while_this_one_computes(tmp_path: Path) -> None:
    """From the second forward on the order is known, around its end too."""

    def computes_meanwhile(slowness: float) -> None:
        slow = overspill.Rates(
            h2d_bytes_s=1e7 / slowness, d2h_bytes_s=1e7 / slowness, dram_bytes_s=2e10,
            update_params_s=1e9, device_flops_s=2e7 / slowness,
        )  # fmt: skip
        model = build()
        options: Any = {"device": "sim", "device_memory": "600KiB", "host_memory": "10MiB"}
        with torch.no_grad(), overspill.wrap(model, **options, rates=slow) as made:
            waited = []
            for number in range(5):
                model(normal(number, 1, 8, WIDTH))
                lane = made.stats.copy_in
                waited.append(lane.stall_s / lane.busy_s)
            assert lane.bytes > 5e5
        assert max(waited[2:]) < 0.4 < waited[0], waited

    on_slower_machines(computes_meanwhile)


def test_a_forward_that_raises_leaves_nothing_behind(tmp_path: Path) -> None:
    plain, model = build().to(normal(0, 1).device), build()

    def fails(_module: nn.Module, _args: Any) -> None:
        raise KeyboardInterrupt

    with torch.no_grad(), offloaded(model, "all tiers", tmp_path) as made:
        for at in range(BLOCKS):
            handle = model[at].inner.register_forward_pre_hook(fails)
            with pytest.raises(KeyboardInterrupt):
                model(normal(0, 3, WIDTH))
            handle.remove()
            x = normal(at, 3, WIDTH)
            assert torch.equal(model(x), plain(x))
        assert made.stats.lanes["write"].bytes == 0


def test_options_that_say_how_to_train_are_refused(tmp_path: Path) -> None:
    wrong: dict[str, Any]
    for wrong in ({"accumulate": 2}, {"update": "step"}, {"max_grad_norm": 1.0},
                  {"moments": "bf16"}, {"on_nonfinite": "skip"},
                  {"commit_every": 2, "nvme": tmp_path}):  # fmt: skip
        with pytest.raises(ValueError, match="says how to train"):
            overspill.wrap(build(), device=CPU, **wrong)
        with pytest.raises(ValueError, match="says how to train"):
            overspill.plan(build(), device=CPU, **wrong)
    with pytest.raises(TypeError, match="did you mean 'host_memory'"):
        overspill.wrap(build(), host_memroy="1GiB")  # type: ignore[call-overload]
    assert not list(tmp_path.iterdir())


@about_sim
def test_a_model_too_large_is_refused_before_anything_is_taken(tmp_path: Path) -> None:
    model = build()
    with pytest.raises(overspill.BudgetError):
        overspill.wrap(model, device=CPU, host_memory="100KiB", nvme=tmp_path, rates=RATES)
    assert not list(tmp_path.iterdir())
    x = normal(0, 3, WIDTH).cpu()
    assert torch.equal(model(x), build()(x))


@pytest.mark.parametrize("place", PLACES)
def test_weights_can_be_read_edited_and_given_back(place: str, tmp_path: Path) -> None:
    plain, model = build(), build()
    made = offloaded(model, place, tmp_path)
    for name, weight in overspill.named_weights(model):
        assert torch.equal(weight.cpu(), plain.get_parameter(name).cpu()), name
    with torch.no_grad():
        for each in (plain, model):
            each.get_parameter("3.out.bias").add_(1.0)
        with overspill.materialized(model, writeback=True):
            model.get_parameter("0.inner.bias").mul_(2.0)
        plain.get_parameter("0.inner.bias").mul_(2.0)
        model.load_state_dict({**model.state_dict(), "5.out.bias": torch.ones(WIDTH)})
        plain.get_parameter("5.out.bias").fill_(1.0)
        x = normal(0, 3, WIDTH)
        assert torch.equal(model(x), plain(x))
        overspill.unwrap(model)
        made.close()
        for name, p in plain.named_parameters():
            assert torch.equal(model.get_parameter(name).cpu(), p.cpu()), name


def test_what_was_served_can_be_trained(tmp_path: Path) -> None:
    losses = []
    for served in (False, True):
        model = build()
        if served:
            with torch.no_grad(), offloaded(model, "all tiers", tmp_path):
                model(normal(0, 3, WIDTH))
                overspill.unwrap(model)
        adamw = torch.optim.AdamW(model.parameters())
        with overspill.wrap(model, adamw, device=CPU, rates=RATES) as optimizer:
            for number in range(3):
                loss = model(normal(number, 3, WIDTH)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
    assert losses[:3] == losses[3:]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = build()

    def forward(self, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) * scale
        return out


def test_arguments_without_tokens_do_no_harm(tmp_path: Path) -> None:
    model, x = Scaled(), normal(0, 3, WIDTH)
    half = torch.tensor(0.5, device=x.device)
    with torch.no_grad():
        expected = Scaled().to(x.device)(half, x)
        with offloaded(model, "all tiers", tmp_path) as made:
            assert torch.equal(model(half, x), expected)
            assert made.stats.tokens == 3


def test_tokens_of_a_forward_need_no_room_until_a_backward(tmp_path: Path) -> None:
    model = build()
    with torch.no_grad(), offloaded(model, "all tiers", tmp_path, tokens=10_000):
        model(normal(0, 3, WIDTH))
    assert overspill.plan(build(), **PLACES["device"], rates=RATES, tokens=10_000).fits
    with pytest.raises(ValueError, match="runs a backward"):
        overspill.plan(build(), device=CPU, example=lambda: torch.zeros(()))


@about_sim
def test_an_interrupt_while_a_copy_comes_leaves_the_next_forward_right() -> None:
    slow = overspill.Rates(h2d_bytes_s=2e7, d2h_bytes_s=1e9, dram_bytes_s=2e10, update_params_s=1e9)
    for at in range(1, 12):
        plain, model = build(), build()
        options: Any = {"device": "sim", "device_memory": "400KiB", "host_memory": "10MiB"}
        with torch.no_grad(), overspill.wrap(model, **options, rates=slow) as made:
            accelerator = made._engine.runtime.accelerator
            real, calls = accelerator.wait, [0]

            def wait(event: Any, at: int = at, real: Any = real, calls: Any = calls) -> None:
                calls[0] += 1
                if calls[0] == at:
                    raise KeyboardInterrupt
                real(event)

            accelerator.wait = wait
            for number in range(4):
                x = normal(number, 3, WIDTH)
                try:
                    assert torch.equal(model(x), plain(x))
                except KeyboardInterrupt:
                    assert number < 3
            assert calls[0] > at


def test_after_the_end_one_is_told_what_helps(tmp_path: Path) -> None:
    model = build()
    offloaded(model, "all tiers", tmp_path).close()
    for call in (lambda: model(normal(0, 3, WIDTH)), lambda: overspill.wrap(model, device=CPU)):
        with pytest.raises(overspill.OffloadError, match="build the model again"):
            call()
