"""Muon: the bits of ``torch.optim.Muon``, and its matrix products on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.facts.machine import Machine
from overspill.facts.tier import Tier
from overspill.optim.muon import MuonRule
from overspill.optim.registry import rules_for
from overspill.planning.bounds import device_update_flops, step_flops
from overspill.planning.plan import Preference
from overspill.train.choices import model_for
from overspill.train.gains import planner
from tests.devices import CPU, DEVICE, SIM, about_cpu, about_sim, normal, plainly

from .test_streamed_optimizers import TIGHT, same

WIDE, INNER = 48, 96
MACHINES = Path(__file__).resolve().parents[2] / "examples" / "machines"
ROOMY_DEVICE = {"device": SIM, "device_memory": "400KiB", "host_memory": "400KiB"}
PLACES = {**TIGHT, "device": ROOMY_DEVICE}
# Products as fast as the CPU's, copies slow: where they run decides about the time.
RATES = overspill.Rates(
    h2d_bytes_s=1e9, d2h_bytes_s=1e9, dram_bytes_s=1e10, update_params_s=1e9, host_flops_s=1e9,
    device_flops_s=1e12, device_memory_bytes_s=1e11,
)  # fmt: skip


def matrices() -> nn.Sequential:
    """Wide, tall and transposed matrices."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDE, INNER, bias=False), nn.Tanh(), nn.Linear(INNER, WIDE, bias=False),
        nn.Tanh(), nn.Linear(WIDE, WIDE, bias=False),
    ).to(DEVICE)  # fmt: skip
    model[4].weight = nn.Parameter(model[4].weight.detach().T.contiguous().T)
    return model


def train(model: nn.Module, optimizer: Any, numbers: Sequence[int]) -> list[float]:
    losses = []
    dtype = next(model.parameters()).dtype
    for number in numbers:
        loss = model(normal(number, 4, WIDE).to(dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
@pytest.mark.parametrize(
    "options",
    [
        {"lr": torch.tensor([0.03], device="cpu")},
        {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
    ],
)
def test_the_bits_of_torchs_muon(
    place: str, update: str, options: dict[str, Any], tmp_path: Path
) -> None:
    plain, model = matrices(), matrices()
    options = {"lr": 0.02, **options}
    its = plainly(torch.optim.Muon, plain.parameters(), **options)
    inner = torch.optim.Muon(model.parameters(), **options)
    assert isinstance(rules_for(inner)[0], MuonRule)
    with overspill.wrap(
        model, inner, nvme=tmp_path, update=update, rates=overspill.Rates(), **PLACES[place]
    ) as optimizer:
        assert train(model, optimizer, range(4)) == train(plain, its, range(4))
        layout = optimizer.plan.detail.layout
        assert layout is not None
        there = PLACES[place]["device"] != "cpu"
        assert layout.matrices_visit == there and (device_update_flops(layout) > 0) == there
        numel = sum(p.numel() for p in model.parameters())
        kept = [f.numel * f.dtype.itemsize for s in layout.records for f in s.fields]
        assert sum(kept) == 4 * numel, "the momentum alone"
        same(model, plain)


class Whitened(torch.optim.Optimizer):
    """Has no rule: its own step has many products, state of other shapes, and a count."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for g in self.param_groups for p in g["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                size = (len(p), len(p))
                state.update(gram=torch.zeros(size, device=p.device), sizes=[p.numel()], step=0)
            state["step"] += 1
            state["gram"] = 0.9 * state["gram"] + p.grad @ p.grad.T
            update = p.grad
            for _ in range(8):
                update = (state["gram"] @ update) / (1 + update.norm())
            p.sub_(update, alpha=self.param_groups[0]["lr"] / math.sqrt(state["step"]))


@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
@pytest.mark.parametrize("nvme", [False, True])
def test_an_optimizers_own_products_on_the_device(update: str, nvme: bool, tmp_path: Path) -> None:
    plain, model = matrices(), matrices()
    its = plainly(Whitened, plain.parameters())
    options: dict[str, Any] = {**ROOMY_DEVICE, **({"nvme": tmp_path} if nvme else {})}
    with overspill.wrap(
        model, Whitened(model.parameters()), update=update, rates=overspill.Rates(), **options
    ) as optimizer:
        assert train(model, optimizer, range(5)) == train(plain, its, range(5))
        assert optimizer.plan.detail.device_update_share == 1
        same(model, plain)
        assert optimizer.state[model[0].weight]["step"] == 5


@about_cpu
def test_what_the_device_has_no_room_for_is_updated_on_the_cpu(tmp_path: Path) -> None:
    model = matrices()
    inner = torch.optim.Muon(model.parameters(), lr=0.02)
    small: dict[str, Any] = {
        "device": SIM, "host_memory": "1MiB", "nvme": tmp_path, "rates": overspill.Rates(),
    }  # fmt: skip
    least = overspill.plan(model, inner, device_memory="1KiB", **small).detail.fitting
    plan = overspill.plan(model, inner, **{**small, **least})
    assert plan.fits and plan.detail.layout is not None and plan.detail.layout.matrices_visit
    room = int(least["device_memory"].removesuffix("KiB")) - 4
    plan = overspill.plan(model, inner, device_memory=f"{room}KiB", **small)
    assert plan.fits and plan.detail.layout is not None
    assert not plan.detail.layout.matrices_visit and plan.detail.device_update_share == 0
    with overspill.wrap(model, inner, device_memory=f"{room}KiB", **small) as optimizer:
        plain = matrices()
        its = plainly(torch.optim.Muon, plain.parameters(), lr=0.02)
        assert train(model, optimizer, range(3)) == train(plain, its, range(3))


@about_sim
def test_the_device_holds_what_updates_take(tmp_path: Path) -> None:
    """The plan counts slots and temporaries of updates on the device, within the budget."""
    model = matrices()
    inner = torch.optim.Muon(model.parameters(), lr=0.02)
    plan = overspill.plan(
        model, inner, device=SIM, device_memory="400KiB", host_memory="1MiB", nvme=tmp_path,
        rates=RATES,
    )  # fmt: skip
    layout = plan.detail.layout
    assert layout is not None and layout.regions.visit_slots == 3
    temporary = plan.tier_bytes[Tier.DEVICE] - layout.regions.device_bytes
    largest = max(p.numel() for p in model.parameters())
    assert 8 * largest < temporary < 24 * largest
    assert plan.tier_bytes[Tier.DEVICE] <= 400 * 1024


@about_cpu
@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_a_compact_momentum(moments: str, tmp_path: Path) -> None:
    exact, model = matrices().bfloat16(), matrices().bfloat16()
    losses = []
    for name, each, more in (("exact", exact, {}), ("compact", model, {"moments": moments})):
        (tmp_path / name).mkdir()
        inner = torch.optim.Muon(each.parameters(), lr=0.02)
        options = {"rates": overspill.Rates(), "device": CPU, "host_memory": "500KiB", **more}
        with overspill.wrap(each, inner, nvme=tmp_path / name, **options) as optimizer:
            losses.append(train(each, optimizer, [0] * 20))
            bits = optimizer.plan.detail.layout.records[0].nbytes / exact[0].weight.numel() * 8
            assert bits == pytest.approx({"bf16": 32, "int8": 24}[moments] if more else 48, rel=0.2)
    assert losses[1][-1] < 0.8 * losses[1][0]
    assert losses[1][-1] == pytest.approx(losses[0][-1], rel=0.05)


def a_llama(kind: Any) -> tuple[nn.Module, list[Any]]:
    """A tiny Llama, with Muon for the matrices of its layers and AdamW for the rest."""
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config)
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and ".layers." in n]
    own = set(matrices)
    others = [p for p in model.parameters() if p not in own]
    muon = torch.optim.Muon(matrices, lr=2e-3, adjust_lr_fn="match_rms_adamw")
    return model, [muon, kind(others, lr=2e-3)]


@about_cpu
@pytest.mark.parametrize(("precision", "apart"), [(None, 0.0), ("bf16", 1e-3)])
def test_a_llama_with_muon_and_adamw(precision: str | None, apart: float, tmp_path: Path) -> None:
    """With fp32 weights, the losses of the two optimizers; with bf16 weights, about these."""
    model, mine = a_llama(torch.optim.AdamW)
    runs = [a_llama(overspill.optim.AdamW)]
    made: Any = overspill.wrap(
        model, mine, device=SIM, device_memory="1500KiB", host_memory="3MiB", nvme=tmp_path,
        rates=overspill.Rates(), precision=precision,
    )  # fmt: skip
    runs.append((model, made))
    losses: list[list[float]] = [[], []]
    for number in range(20):
        draw = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 64, (4, 32), generator=draw)
        for (each, optimizers), found in zip(runs, losses, strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision is not None):
                loss = each(input_ids=tokens, labels=tokens).loss
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            found.append(float(loss.detach()))
    assert losses[1] == pytest.approx(losses[0], abs=apart, rel=0)
    assert losses[0][-1] < losses[0][0] - 0.5
    plan = made[0].plan
    assert plan.detail.layout.matrices_visit and plan.detail.device_update_share > 0.5
    made[0].close()


@about_cpu
def test_an_average_beside_it(tmp_path: Path) -> None:
    plain, model = matrices(), matrices()
    average = torch.optim.swa_utils.AveragedModel(
        plain, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    its = plainly(torch.optim.Muon, plain.parameters(), lr=0.02)
    inner = overspill.ema(torch.optim.Muon(model.parameters(), lr=0.02), 0.9)
    options = {"rates": overspill.Rates(), **ROOMY_DEVICE}
    with overspill.wrap(model, inner, nvme=tmp_path, **options) as optimizer:
        for number in range(3):
            train(plain, its, [number])
            average.update_parameters(plain)
            train(model, optimizer, [number])
        same(model, plain)
        with optimizer.averaged():
            for mine, theirs in zip(model.parameters(), average.module.parameters(), strict=True):
                torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients must be three numbers, got 2"),
        ({"ns_steps": 100}, "ns_steps must be a whole number below 100, got 100"),
        ({"ns_steps": 2.5}, "ns_steps must be a whole number below 100, got 2.5"),
    ],
)
def test_wrong_options_are_refused_before_the_step(wrong: dict[str, Any], reason: str) -> None:
    model = matrices()
    inner = torch.optim.Muon(model.parameters(), lr=0.02)
    with overspill.wrap(
        model, inner, device=CPU, host_memory="4MiB", rates=overspill.Rates()
    ) as optimizer:
        before = model[0].weight.detach().clone()
        right = {name: optimizer.param_groups[0][name] for name in wrong}
        optimizer.param_groups[0].update(wrong)
        model(normal(0, 4, WIDE)).sum().backward()
        with pytest.raises(ValueError, match=reason):
            optimizer.step()
        assert torch.equal(model[0].weight, before)
        optimizer.param_groups[0].update(right)
        optimizer.step()
        assert not torch.equal(model[0].weight, before)

    other = matrices()
    also = torch.optim.Muon(other.parameters(), **wrong)
    with pytest.raises(ValueError, match=reason):
        overspill.plan(other, also, device=CPU, host_memory="4MiB", rates=overspill.Rates())


@about_cpu
def test_what_is_short_is_named() -> None:
    """If the CPU could update all with more host memory, the device's memory is not asked for."""
    model = matrices()
    inner = torch.optim.Muon(model.parameters(), lr=0.02)
    given: dict[str, Any] = {"device": SIM, "device_memory": "100KiB", "rates": overspill.Rates()}
    plan = overspill.plan(model, inner, host_memory="150KiB", **given)
    assert not plan.fits and list(plan.detail.fitting) == ["host_memory"]
    (short,) = plan.shortfalls
    assert "of working memory to update parameters, needs" in str(short) and ",," not in str(short)
    assert overspill.plan(model, inner, **{**given, **plan.detail.fitting}).fits


Made = Callable[..., Any]


@pytest.fixture(scope="module")
def eight_billion() -> Made:
    return planner(model_for("llama-8b", None, None), {"precision": "bf16"}, "muon")


def planned(make: Made, machine: Machine, update: str = "next_forward") -> Any:
    fixed = {"prefer": Preference(), "prefetch_depth": 3, "every_update": False, "update": update}
    return make(machine, 8192, {"nvme": "/scratch", "durable": False, **fixed})


def test_a_step_of_eight_billion_parameters(eight_billion: Made) -> None:
    """On an RTX 4090: products of the update count in bound and step, on the device's side."""
    machine = Machine.from_file(MACHINES / "rtx4090.toml")
    plan = planned(eight_billion, machine)
    layout, rates = plan.detail.layout, machine.rates
    assert plan.fits and layout.matrices_visit and plan.detail.device_update_share > 0.8
    flops = device_update_flops(layout)
    matrix = [(4096, 4096), (1024, 4096), (14336, 4096)]
    counts = [2, 2, 3]
    assert flops == 32 * sum(
        count * 5 * (4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3)
        for s, count in zip(matrix, counts, strict=True)
    )
    compute_s = (flops + step_flops(layout.units, 8192)) / rates.device_flops_s
    assert plan.bound_s >= compute_s and plan.step_s >= plan.bound_s
    state = sum(s.nbytes for s in layout.records if s.flops)
    numel = sum(s.count for s in layout.records if s.flops)
    assert state / numel == pytest.approx(6, rel=0.01), "momentum, and half of the split master"

    slower = replace(machine, rates=replace(rates, device_flops_s=rates.device_flops_s / 4))
    assert planned(eight_billion, slower).bound_s >= 4 * compute_s


def test_the_same_on_the_cpu_takes_minutes(eight_billion: Made) -> None:
    """Without a device's products the plan says what they cost."""
    machine = Machine.from_file(MACHINES / "rtx4090.toml")
    on_cpu = replace(machine, device_memory=None)
    plan = planned(eight_billion, on_cpu)
    flops = sum(s.flops for s in plan.detail.layout.records)
    assert flops and device_update_flops(plan.detail.layout) == 0
    assert plan.bound_s > flops / machine.rates.host_flops_s
    unknown = replace(on_cpu, rates=replace(machine.rates, host_flops_s=None))
    with pytest.raises(ValueError, match="host_flops_s not known"):
        planned(eight_billion, unknown)


@about_cpu
def test_a_large_matrix_is_not_cut(tmp_path: Path) -> None:
    """A rule whose state is only as large as the weight also gets whole parameters."""
    side = 320  # more elements than the smallest records have
    made = []
    for kind in (torch.optim.Muon, None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(side, side, bias=False)).to(DEVICE)
        inner: Any = plainly(torch.optim.Muon, model.parameters(), lr=0.02)
        if kind is not None:
            inner = overspill.wrap(
                model, kind(model.parameters(), lr=0.02), nvme=tmp_path, host_memory="3200KiB",
                device=CPU, rates=overspill.Rates(),
            )  # fmt: skip
            assert math.prod(model[0].weight.shape) > 2**16
        model(normal(0, 4, side)).square().mean().backward()
        inner.step()
        made.append(model[0].weight.detach().clone())
    assert torch.equal(*made)
