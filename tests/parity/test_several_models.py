"""Several models under one engine: the losses and weights of plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import overspill
from tests.devices import CPU, DEVICE, SIM, about_sim, normal
from tests.parity.nets import (
    PLACES,
    UPDATES,
    WIDTH,
    Net,
    Nets,
    adam,
    adversarial,
    apart,
    chained,
    distillation,
    frozen_judge,
    nets,
    one,
    over_all,
    preference,
    two,
    wrapped,
)  # fmt: skip
from tests.remedies.table import same, says

Case = Callable[[Nets, list[Any], int], list[torch.Tensor]]
Optimizers = Callable[..., list[Any]]
CASES: dict[str, tuple[Case, Optimizers]] = {
    "preference": (preference, one), "distillation": (distillation, one),
    "chained": (chained, over_all), "chained, two": (chained, two),
    "adversarial": (adversarial, two), "apart": (apart, two), "frozen": (frozen_judge, two),
}  # fmt: skip
APART = ("adversarial", "apart")  # not possible where backward applies the gradients of all


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_plain_torch(case: str, place: str, update: str, tmp_path: Path) -> None:
    run, optimizers_of = CASES[case]
    if case in APART and update == "backward":
        pytest.skip("backward has applied what the generator's loss leaves in the discriminator")
    plain, models = nets(), nets()
    its = optimizers_of(plain, plain=True)
    made = wrapped(
        models, optimizers_of(models, plain=False), nvme=tmp_path, update=update, **PLACES[place]
    )
    for number in range(5):
        ours, theirs = run(models, made, number), run(plain, its, number)
        assert all(map(torch.equal, ours, theirs)), number
    for name in plain:
        same(models[name], plain[name])
    assert made[0].memory[overspill.Tier.HOST].peak_bytes <= 8 << 20
    made[0].close()


@pytest.mark.parametrize("activations", ["host", "nvme", "recompute", "auto"])
def test_activations_of_all_models_move(activations: str, tmp_path: Path) -> None:
    plain, models = nets(), nets()
    its = over_all(plain, plain=True)
    made = wrapped(
        models, over_all(models, plain=False), nvme=tmp_path, activations=activations,
        device=SIM, device_memory="300KiB", host_memory="2MiB",
    )  # fmt: skip
    for number in range(3):
        assert torch.equal(*(chained(n, o, number)[0] for n, o in ((models, made), (plain, its))))
    for name in plain:
        same(models[name], plain[name])
    made[0].close()


def test_a_model_may_run_inside_another(tmp_path: Path) -> None:
    """Or be a part of it, and be called alone, too."""

    class Outer(Net):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__(3)
            self.__dict__["inner"] = inner  # not a child

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](x)
            x = x + self.inner(x)
            return super().forward(x)

    def build() -> Nets:
        inner = Net(1)
        return {"a": inner, "b": Outer(inner), "c": inner.blocks[1]}

    plain, models = build(), build()
    both = [adam([*each["a"].parameters(), *each["b"].parameters()], plain=each is plain)
            for each in (plain, models)]  # fmt: skip
    made = wrapped(models, both[1:], nvme=tmp_path, **PLACES["device"])
    for number in range(4):
        x = normal(number, 6, WIDTH)
        losses = [(n["b"](x) + n["a"](x) + n["c"](x)).square().mean() for n in (models, plain)]
        assert torch.equal(*losses)
        for loss, optimizer in zip(losses, (made[0], both[0]), strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for name in plain:
        same(models[name], plain[name])
    made[0].close()


@pytest.mark.parametrize("place", PLACES)
def test_inference_of_a_model_that_calls_another(place: str, tmp_path: Path) -> None:
    """A forward inside another one is a part of it, in the figures, too."""

    class Outer(Net):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__(3)
            self.__dict__["inner"] = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.inner(x))

    plain, inner = Outer(Net(1)), Net(1)
    outer = Outer(inner)
    with torch.no_grad(), overspill.wrap(
        {"outer": outer, "inner": inner}, nvme=tmp_path, rates=overspill.Rates(), **PLACES[place]
    ) as handle:  # fmt: skip
        for number in range(4):
            x = normal(number, 6, WIDTH)
            assert torch.equal(outer(x), plain(x))
        assert handle._engine.trace.steps[-1].index == 4
        assert torch.equal(inner(x), plain.inner(x))


@pytest.mark.parametrize("kind", ["dict", "list", "nested"])
def test_a_container_that_is_not_called_itself(kind: str, tmp_path: Path) -> None:
    plain, models = nets(), nets()
    container = {
        "dict": nn.ModuleDict(models), "list": nn.ModuleList(models.values()),
        "nested": nn.ModuleDict({"x": nn.ModuleList([models["a"]]), "y": models["b"]}),
    }[kind]  # fmt: skip
    its = one(plain, plain=True)
    made = overspill.wrap(
        container, one(models, plain=False)[0], nvme=tmp_path, rates=overspill.Rates(),
        **PLACES["device"],
    )  # fmt: skip
    for number in range(3):
        assert torch.equal(preference(models, [made], number)[0], preference(plain, its, number)[0])
    with says("cannot be copied"):
        copy.deepcopy(models["a"])
    with says("wrapped together with others, as Module"):
        overspill.unwrap(models["a"])
    assert overspill.unwrap(container) is container
    for name in plain:
        same(models[name], plain[name])


def test_a_model_without_a_forward_of_its_own() -> None:
    """Such as an agent, whose methods call its networks; it may be the first one."""
    agent = nn.ModuleDict({"actor": Net(1), "critic": Net(2)})
    models: Nets = {"agent": agent, "other": Net(3)}
    made = wrapped(models, [torch.optim.AdamW(agent.parameters())], device=CPU)
    found = dict(overspill.named_weights(agent))
    assert found.keys() == dict(agent.named_parameters()).keys()
    assert dict(overspill.named_weights(models))
    with overspill.materialized(agent) as given:
        assert type(given["actor"].first.weight) is nn.Parameter
    assert overspill.unwrap(models) is models
    assert made[0].step_count == 0


@pytest.mark.parametrize("place", PLACES)
def test_weights_of_one_model_and_of_all(place: str, tmp_path: Path) -> None:
    models, plain = nets(), nets()
    (optimizer,) = wrapped(models, one(models, plain=False), nvme=tmp_path, **PLACES[place])
    for given, names in (
        (models["b"], dict(plain["b"].named_parameters())),
        (models, {f"{n}.{k}": p for n, m in plain.items() for k, p in m.named_parameters()}),
    ):
        found = dict(overspill.named_weights(given))  # type: ignore[arg-type]
        assert found.keys() == names.keys()
        assert all(torch.equal(found[name], names[name]) for name in names)
    with overspill.materialized(models["b"], writeback=True) as given:
        assert given is models["b"]
        assert all(type(p) is nn.Parameter for p in given.parameters())
        assert any(type(p) is not nn.Parameter for p in models["a"].parameters())
        with torch.no_grad():
            for p in given.parameters():
                p.fill_(0.5)
    for p in plain["b"].parameters():
        p.data.fill_(0.5)
    with overspill.materialized(models) as all_of_them:
        assert all_of_them is models
        for name in plain:
            for p, q in zip(models[name].parameters(), plain[name].parameters(), strict=True):
                assert torch.equal(p, q)
    same(models["b"], plain["b"])
    same(models["a"], plain["a"])
    with says("unwrap all of them in one call, with what was given to wrap"):
        overspill.unwrap(models["a"])
    with says("the model is wrapped already"):
        overspill.wrap(models, one(models, plain=False)[0])
    with says("wrapped already"):
        overspill.wrap({"b": models["b"]}, None)
    with says("these models were wrapped as a and b"):
        overspill.unwrap({"b": models["b"]})
    assert overspill.unwrap(dict(models)) == models
    for name in plain:
        same(models[name], plain[name])
    assert optimizer.step_count == 0


@pytest.mark.parametrize("activations", ["auto", "host", "recompute"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_an_adapter_outside_of_a_base_without_an_optimizer(
    activations: str, checkpointed: bool, tmp_path: Path
) -> None:
    """As kohya's scripts train LoRA: they replace ``forward`` of layers of the base."""
    from torch.utils.checkpoint import checkpoint

    def build() -> tuple[Net, nn.ModuleList, Any]:
        base, adapters = Net(1).requires_grad_(False), nn.ModuleList()
        for block in base.blocks:
            layer = block[0]
            down, up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, 2 * WIDTH, bias=False)
            adapters.append(nn.Sequential(down, up).to(DEVICE))
            first, adapter = layer.forward, adapters[-1]
            layer.forward = lambda x, f=first, a=adapter: f(x) + a(x)
        torch.manual_seed(5)
        for p in adapters.parameters():
            nn.init.normal_(p, std=0.1)
        return base, adapters, torch.optim.AdamW(adapters.parameters(), lr=0.01)

    def loss(base: Net, x: torch.Tensor) -> torch.Tensor:
        if not checkpointed:
            return base(x).square().mean()  # type: ignore[no-any-return]
        x = base.first(x)
        for block in base.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return base.last(x).square().mean()  # type: ignore[no-any-return]

    base, adapters, optimizer = build()
    plain, its_adapters, its = build()
    options = {**PLACES["device"], "activations": activations, "rates": overspill.Rates()}
    with overspill.wrap(base, nvme=tmp_path, **options) as handle:
        for number in range(3):
            inputs = [normal(number, 64, WIDTH).requires_grad_() for _ in range(2)]
            losses = [loss(b, x) for b, x in zip((base, plain), inputs, strict=True)]
            assert torch.equal(*losses)
            for each, after in zip(losses, (optimizer, its), strict=True):
                each.backward()
                after.step()
                after.zero_grad()
            assert torch.equal(*(x.grad for x in inputs))
        same(adapters, its_adapters)
        figures = handle.memory[overspill.Tier.DEVICE]
        assert figures.peak_bytes <= figures.budget_bytes


def test_what_cannot_be_models() -> None:
    first = Net(1)
    optimizer = one({"a": first}, plain=False)[0]
    for given, kind, remedy in (
        ({}, ValueError, "pass at least one model"),
        (
            {"a.b": first},
            ValueError,
            "names of models must be strings without dots and slashes, got 'a.b'",
        ),
        (
            {"/a": first},
            ValueError,
            "names of models must be strings without dots and slashes, got '/a'",
        ),
        ({1: first}, ValueError, "names of models must be strings without dots and slashes, got 1"),
        ({"a": first, "b": first}, ValueError, "are the same module; give it once"),
        (
            {"a": first, "b": "text"},
            TypeError,
            "got a dict in which 'b' is str; give modules by name",
        ),
    ):
        for call in (overspill.wrap, overspill.plan):
            with says(remedy, kind):
                call(given, optimizer)  # type: ignore[operator]
    with says("wrap all models that it trains together: wrap({'a': a, 'b': b}, optimizer)"):
        overspill.wrap({"b": Net(2)}, optimizer)
    with says("weights is a dict, and there is only one model", ValueError):
        overspill.wrap(first, optimizer, weights={"a": "/nowhere"})
    with says("weights is an empty dict", ValueError):
        overspill.wrap({"a": first}, optimizer, weights={})
    with says("weights: no model is named 'c'; there are ['a']", ValueError):
        overspill.wrap({"a": first}, optimizer, weights={"c": "/nowhere"})
    plan = overspill.plan({"a": first, "b": Net(2)}, optimizer, device=CPU, host_memory="8MiB")
    assert plan.fits and {name.split(".")[0] for name in plan.placement} == {"a", "b"}


@pytest.mark.parametrize("activations", ["auto", "host", "nvme", "recompute"])
def test_a_frozen_model_that_passes_gradients_on(activations: str, tmp_path: Path) -> None:
    """Plans assume that a model with nothing to train has no backward; this one has."""
    losses: list[list[float]] = []
    for plain in (True, False):
        base, adapter = Net(1, depth=8).requires_grad_(False), Net(2, depth=1)
        optimizer = adam(adapter.parameters(), plain=plain)
        if not plain:
            (optimizer,) = wrapped(
                {"base": base, "adapter": adapter}, [optimizer], nvme=tmp_path, tokens=256,
                device=SIM, device_memory="200KiB", host_memory="4MiB", activations=activations,
            )  # fmt: skip
        losses.append([])
        for number in range(3):
            loss = base(adapter(normal(number, 256, WIDTH))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    optimizer.close()
    assert losses[0] == losses[1]


class Moved:
    """Bytes that a step copies to the device: as planned, and on average of the last four."""

    def __init__(self, names: str) -> None:
        models = {name: Net(1, depth=12) for name in names}
        for name in names[1:]:
            models[name].requires_grad_(False)
        (optimizer,) = wrapped(
            models, [adam(models["a"].parameters(), plain=False)], device=SIM,
            device_memory="128KiB", host_memory="8MiB",
            rates=overspill.Rates(h2d_bytes_s=2e7, d2h_bytes_s=2e7),
        )  # fmt: skip
        with optimizer:
            units = optimizer.plan.detail.layout.units
            self.beside = sum(unit.weight_bytes for unit in units if unit.forward_only)
            self.planned = optimizer.plan.link_bytes["copy_in"]
            self.peak = optimizer.plan.tier_bytes[overspill.Tier.DEVICE]
            copied = []
            for number in range(8):
                x, target = normal(number, 6, WIDTH), torch.zeros(6, WIDTH)
                with torch.no_grad():
                    for name in names[1:]:
                        target = target + models[name](x)
                (models["a"](x) - target).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                spans = optimizer._engine.trace.spans()
                copied.append(sum(s.nbytes for s in spans if s.lane == "copy_in"))
            self.copied = (copied[-1] - copied[-5]) / 4


@about_sim
def test_a_reference_adds_one_forward_of_its_weights() -> None:
    """The device holds no more, and what the policy keeps there it keeps beside a reference."""
    alone, both = Moved("a"), Moved("ab")
    assert both.peak <= alone.peak + 8192
    assert both.beside >= sum(p.nbytes for p in Net(1, depth=12).parameters())
    assert both.planned - alone.planned == pytest.approx(both.beside, rel=0.05)
    assert both.copied - alone.copied == pytest.approx(both.beside, rel=0.15)


def test_an_untrained_model_without_weights_is_refused(tmp_path: Path) -> None:
    """Its weights would be random: a reference model that TRL made, for example."""
    with overspill.empty_init():
        models = {"policy": nn.Linear(8, 8), "reference": nn.Linear(8, 8)}
    optimizer = torch.optim.SGD(models["policy"].parameters(), lr=0.1)
    with says("name its files, weights={'reference': PATH, ...}"):
        overspill.wrap(models, optimizer, device=CPU)
    assert all(p.is_meta for m in models.values() for p in m.parameters())
    weight, bias = normal(0, 8, 8), normal(1, 8)
    path = tmp_path / "reference.safetensors"
    safetensors.torch.save_file({"weight": weight.cpu(), "bias": bias.cpu()}, path)
    with overspill.wrap(models, optimizer, device=CPU, weights={"reference": path}):
        x = normal(2, 2, 8)
        assert torch.equal(models["reference"](x), torch.nn.functional.linear(x, weight, bias))
