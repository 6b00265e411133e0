"""Remedies of what ``wrap``, ``plan`` and their options refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from tests.devices import CPU, SIM, about_cpu, about_sim, normal, plainly
from tests.models import TinyLM, batch
from tests.remedies.table import (
    WIDTH,
    adamw,
    net,
    plain_run,
    same,
    says,
    step,
    trains,
    tries,
    wrapped,
)  # fmt: skip

ARGUMENTS, CHECKS, CONFIG = "offload/arguments.py", "offload/checks.py", "offload/config.py"


@tries(CHECKS, "supported; wrap the plain model, on one device")
def test_parameters_that_are_no_plain_tensors() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    model = net()
    plain = model[0][0].weight.detach().clone()
    model[0][0].weight = nn.Parameter(TwoTensor(plain, plain.clone()))
    with says("'0.0.weight' is no plain tensor"):
        wrapped(model)
    model[0][0].weight = nn.Parameter(plain)
    with wrapped(model) as optimizer:
        trains(model, optimizer)


class Net(nn.Sequential):
    """A model whose class can be called without arguments."""

    def __init__(self) -> None:
        super().__init__(*net())


@tries(ARGUMENTS, "call it", "the model comes first: wrap(model, optimizer)")
def test_what_is_no_model() -> None:
    with says("call it"):
        wrapped(Net, torch.optim.SGD([nn.Parameter(torch.zeros(1))]))  # type: ignore[arg-type]
    with says("the model comes first: wrap(model, optimizer)"):
        model = Net()
        overspill.wrap(adamw(model), model)  # type: ignore[call-overload]
    with wrapped(model) as optimizer:
        trains(model, optimizer)


@tries(ARGUMENTS, "to wrap several models, pass a dict")
def test_several_models_and_optimizers() -> None:
    first, second = net(), nn.Linear(4, 4)
    with says("; to wrap several models, pass a dict: wrap({'a': a, 'b': b}, optimizer)"):
        wrapped((first, second), adamw(first))  # type: ignore[arg-type]
    both = nn.Sequential(first, second)
    one = torch.optim.AdamW(
        [{"params": first.parameters(), "lr": 0.01}, {"params": second.parameters(), "lr": 0.02}]
    )
    with wrapped(both, one) as optimizer:
        trains(both, optimizer)


@tries(ARGUMENTS, "build a new torch optimizer over the parameters of this model")
def test_an_optimizer_of_another_model() -> None:
    first, second = net(), net()
    with wrapped(first) as optimizer:
        with says("build a new torch optimizer over the parameters of this model"):
            wrapped(second, optimizer)
        with wrapped(second, adamw(second)) as other:
            trains(second, other)


@tries("offload/api.py", "overspill.wrap(model, ...) first")
def test_a_model_that_is_not_wrapped() -> None:
    model = net()
    with says("overspill.wrap(model, ...) first"):
        overspill.unwrap(model)
    optimizer = wrapped(model)
    for number in range(2):
        step(model, optimizer, number)
    same(overspill.unwrap(model), plain_run(2))


@tries(CHECKS, "overspill.unwrap(model) before close() keeps them",
       "call overspill.unwrap(model) first", "is wrapped already; unwrap it first",
       "belongs to another wrapped model; unwrap that one first")  # fmt: skip
def test_what_is_wrapped_already() -> None:
    model = net()
    optimizer = wrapped(model)
    step(model, optimizer)
    with says("call overspill.unwrap(model) first"):
        wrapped(model)
    around = nn.Sequential(model)
    with says("is wrapped already; unwrap it first"):
        wrapped(around)
    part = nn.Sequential(model[0][0])
    with says("belongs to another wrapped model; unwrap that one first"):
        wrapped(part)
    overspill.unwrap(model)
    same(model, plain_run(1))
    with wrapped(around) as optimizer:
        trains(around, optimizer)
    with says("overspill.unwrap(model) before close() keeps them"):
        wrapped(around)
    again = nn.Sequential(net())
    with wrapped(again) as optimizer:
        trains(again, optimizer)


@tries(CHECKS, "has no shape yet (a lazy module); run one forward of the model before wrap",
       "run one forward of the model before wrap")  # fmt: skip
def test_lazy_modules() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    with says("has no shape yet (a lazy module); run one forward of the model before wrap"):
        wrapped(model, torch.optim.AdamW(model.parameters()))
    model(torch.ones(1, WIDTH))
    with wrapped(model) as optimizer:
        trains(model, optimizer)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyBatchNorm1d(affine=False))
    with says("has buffers without a shape yet (a lazy module); run one forward"):
        wrapped(model)
    model(torch.ones(2, WIDTH))
    with wrapped(model) as optimizer:
        trains(model, optimizer)


@tries(CHECKS, "build the optimizer from model.parameters(), or wrap all models that it trains")
def test_an_optimizer_of_other_parameters() -> None:
    model = net()
    with says("build the optimizer from model.parameters()"):
        wrapped(model, torch.optim.AdamW(net().parameters()))
    with wrapped(model, torch.optim.AdamW(model.parameters(), lr=0.01)) as optimizer:
        trains(model, optimizer)
    models = [net(seed=1), net(seed=2)]
    both = torch.optim.AdamW([p for each in models for p in each.parameters()], lr=0.01)
    with says("wrap all models that it trains together: wrap({'a': a, 'b': b}, optimizer)"):
        wrapped(models[0], both)
    plain = [net(seed=1), net(seed=2)]
    theirs = plainly(overspill.optim.AdamW, nn.ModuleList(plain).parameters(), lr=0.01)
    with wrapped({"a": models[0], "b": models[1]}, both) as optimizer:
        for its, (one, other) in ((optimizer, models), (theirs, plain)):
            for number in range(2):
                x = normal(number, 5, WIDTH)
                (one(x).square().mean() + other(x).square().mean()).backward()
                its.step()
                its.zero_grad()
        for ours, their in zip(models, plain, strict=True):
            same(ours, their)


@tries(CHECKS, "replace it by a dense one (p.to_dense(), p.dequantize()) before wrap",
       "make it contiguous, or train the tensor that it was expanded from",
       "tie them as one parameter: module.weight = other.weight")  # fmt: skip
def test_parameters_that_are_no_plain_memory() -> None:
    model = net()
    model[0][0].weight = nn.Parameter(torch.eye(WIDTH).to_sparse(), requires_grad=False)
    with says("replace it by a dense one (p.to_dense(), p.dequantize()) before wrap"):
        wrapped(model)
    model[0][0].weight = nn.Parameter(model[0][0].weight.to_dense())
    model[1][0].weight = nn.Parameter(torch.ones(1, WIDTH).expand(WIDTH, WIDTH))
    with says("make it contiguous, or train the tensor that it was expanded from"):
        wrapped(model)
    model[1][0].weight = nn.Parameter(model[1][0].weight.detach().contiguous())
    model[2][0].weight.data = model[1][0].weight.data
    with says("tie them as one parameter: module.weight = other.weight"):
        wrapped(model)
    model[2][0].weight = model[1][0].weight
    with wrapped(model) as optimizer:
        trains(model, optimizer)


@tries(CHECKS, "or freeze it (requires_grad_(False))")
def test_a_parameter_that_cannot_be_trained() -> None:
    model = net()
    model.register_parameter("x", nn.Parameter(torch.zeros(4, dtype=torch.float64)))
    with says("or freeze it (requires_grad_(False))"):
        wrapped(model, torch.optim.AdamW(model.parameters()))
    model.x.requires_grad_(False)
    with wrapped(model) as optimizer:
        trains(model, optimizer)


@tries(CHECKS, "pass moments={} to wrap, or leave it out of the optimizer")
def test_moments_that_differ() -> None:
    model = net()
    inner = overspill.optim.AdamW(model.parameters(), lr=0.01, moments="int8")
    with says("to wrap, or leave it out of the optimizer"):
        wrapped(model, inner, moments="bf16")
    with wrapped(model, inner, moments="int8") as optimizer:
        trains(model, optimizer)
    model = net()
    plain = overspill.optim.AdamW(model.parameters(), lr=0.01)
    with wrapped(model, plain, moments="bf16") as optimizer:
        trains(model, optimizer)


OPTIONS: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
    ("as a size; write '10GiB', '80%' or 'auto'", {"host_memory": "much"},
     [{"host_memory": "1GiB"}, {"host_memory": "5%"}, {"host_memory": "auto"}]),
    ("use update='next_forward' or drop max_grad_norm",
     {"update": "backward", "max_grad_norm": 1.0},
     [{"update": "step", "max_grad_norm": 1.0}, {"update": "backward"}]),
    ("pass nvme= (a directory) and leave durable=True, or leave them out", {"commit_every": 2},
     [{"commit_every": 2, "nvme": "here"}, {}]),
    ("pass nvme= (a directory) and leave durable=True, or use 'skip'",
     {"on_nonfinite": "rollback"},
     [{"on_nonfinite": "rollback", "nvme": "here"}, {"on_nonfinite": "skip"}]),
    ("use on_nonfinite='rollback', or another update",
     {"on_nonfinite": "skip", "update": "backward", "nvme": "here"},
     [{"on_nonfinite": "rollback", "update": "backward", "nvme": "here"},
      {"on_nonfinite": "skip", "update": "step", "nvme": "here"}]),
    ("ignore_weights says what to ignore of weights=; give both or neither",
     {"ignore_weights": ["x"]}, [{}]),
    ("pass precision='bf16' or leave master out", {"master": "split"},
     [{"master": "split", "precision": "bf16"}, {}]),
    ("is an empty path; write '.' for the current directory", {"nvme": ""}, [{"nvme": "."}]),
    ("is an empty list; give at least one directory", {"nvme": []}, [{"nvme": ["here"]}]),
    ("is not a directory; create it first", {"nvme": "new", "host_memory": "60KiB"},
     [{"nvme": "mkdir new", "host_memory": "60KiB"}]),
]  # fmt: skip


@about_cpu
@tries(CONFIG, "as a size; write '10GiB', '80%' or 'auto'",
       "use update='next_forward' or drop max_grad_norm",
       "commit_every and extra belong to a durable store; pass nvme=",
       "on_nonfinite='rollback' goes back to the last commit; pass nvme=",
       "use on_nonfinite='rollback', or another update",
       "ignore_weights says what to ignore of weights=; give both or neither")  # fmt: skip
@tries("offload/blueprints.py", "pass precision='bf16' or leave master out")
@tries("offload/paths.py", "write '.' for the current directory", "give at least one directory")
@tries("offload/planning/budgets.py", "is not a directory; create it first")
@pytest.mark.parametrize(("part", "bad", "good"), OPTIONS, ids=[o[0][:40] for o in OPTIONS])
def test_options(
    part: str, bad: dict[str, Any], good: list[dict[str, Any]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    model = net()
    with says(part):
        wrapped(model, **bad)
    for number, options in enumerate(good):
        if str(options.get("nvme", "")).startswith("mkdir "):
            options = {**options, "nvme": options["nvme"].removeprefix("mkdir ")}
            (tmp_path / options["nvme"]).mkdir()
        elif options.get("nvme") in ("here", ["here"]):
            place = tmp_path / f"here{number}"
            place.mkdir()
            options = {**options, "nvme": [place] if options["nvme"] == ["here"] else place}
        model = net()
        with wrapped(model, **options) as optimizer:
            trains(model, optimizer)


@about_sim
@tries(CONFIG, "device='cpu' has one memory tier; set host_memory instead")
@tries("offload/planning/budgets.py", "leave it out and set host_memory, or pass device='sim'")
@tries("offload/movement/accelerators/make.py", "use device='cpu', or 'sim' to try offloading")
def test_a_device_that_is_not_there() -> None:
    model = net()
    with says("set host_memory instead"):
        wrapped(model, device="cpu", device_memory="1MiB")
    with wrapped(model, device="cpu", host_memory="1MiB") as optimizer:
        trains(model, optimizer)
    if torch.accelerator.is_available():
        pytest.skip("there is a device here")
    model = net()
    with says("leave it out and set host_memory, or pass device='sim'"):
        wrapped(model, device=None, device_memory="1MiB")
    with says("use device='cpu', or 'sim' to try offloading"):
        wrapped(model, device="cuda")
    for options in ({"device": "sim", "device_memory": "1MiB"}, {"device": "cpu"}):
        with wrapped(model := net(), **options) as optimizer:  # type: ignore[arg-type]
            trains(model, optimizer)


@about_sim
@tries(CONFIG, "lower it, or use 'auto' or a share such as '80%'")
@tries("offload/planning/budgets.py", "name 'host' alone, or pass device='sim'")
def test_memory_for_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    with says("host_memory is given in bytes, so it leaves all other memory free; lower it, or"):
        wrapped(net(), device="cpu", host_memory="1GiB", leave="1MiB")
    for options in ({"host_memory": "1GiB"}, {"leave": "1MiB"},
                    {"leave": "1MiB", "host_memory": "80%"}):  # fmt: skip
        with wrapped(model := net(), device="cpu", **options) as optimizer:
            trains(model, optimizer)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with says("leave: there is no device here; name 'host' alone, or pass device='sim'"):
        wrapped(net(), device=None, leave={"device": "1MiB"})
    for options in ({"leave": {"host": "1MiB"}, "device": None},
                    {"leave": {"device": "1MiB"}, "device": "sim"}):  # fmt: skip
        with wrapped(model := net(), **options) as optimizer:  # type: ignore[arg-type]
            trains(model, optimizer)


@tries(CONFIG, "leave it out, or give an optimizer")
def test_options_of_training_without_an_optimizer() -> None:
    model = net()
    with says("leave it out, or give an optimizer"):
        overspill.wrap(model, device=CPU, max_grad_norm=1.0)
    with wrapped(model, max_grad_norm=1.0) as optimizer:
        trains(model, optimizer)
    model = net()
    with overspill.wrap(model, device=CPU), torch.no_grad():
        assert torch.equal(model(torch.ones(1, WIDTH)), net()(torch.ones(1, WIDTH)))


class Reads(nn.Module):
    """Reads the parameters of its part without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.attention(x[None], x[None], x[None])[0][0]
        return y


@tries("offload/planning/unit_discovery.py", "name {} instead, or leave units out")
def test_units_that_are_read_from_outside() -> None:
    model = nn.Sequential(Reads(), Reads())
    with says("instead, or leave units out"):
        wrapped(model, units=["0.attention.out_proj"])
    for units in (["0.attention"], None):
        torch.manual_seed(0)
        model = nn.Sequential(Reads(), Reads())
        with wrapped(model, units=units) as optimizer:
            step(model, optimizer)


@tries("offload/movement/page_conversion.py", "leave frozen= out, or mend the weight")
@tries("offload/state/loading.py", "leave frozen= out, or mend the weight")
@pytest.mark.parametrize("way", ["left out", "mended"])
def test_a_frozen_weight_that_cannot_be_packed(way: str) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, 256), nn.Linear(256, 256), nn.Linear(256, 4))
        model.bfloat16()[1].requires_grad_(False)
        with torch.no_grad():
            model[1].weight[0, 0] = float("inf")
        return model

    model = build()
    with says("leave frozen= out, or mend the weight"):
        wrapped(model, frozen="int8")
    model = build()
    if way == "mended":
        with torch.no_grad():
            model[1].weight[0, 0] = 1.0
        with wrapped(model, frozen="int8") as optimizer:
            trains(model, optimizer)
    else:
        with wrapped(model):
            assert torch.isinf(model.state_dict()["1.weight"][0, 0])


@about_sim
@tries("offload/planning/fitting.py",
       "raise host_memory, use fewer tokens, or activations='auto' or 'recompute'",
       "raise nvme_memory, use fewer tokens, or activations='recompute'")  # fmt: skip
@pytest.mark.parametrize(("policy", "remedy"), [
    *((policy, remedy) for policy in ("host", "nvme") for remedy in (
        {f"{policy}_memory": "80MiB"}, {"tokens": 64}, {"activations": "recompute"})),
    ("host", {"activations": "auto"}),
])  # fmt: skip
def test_activations_that_are_known_not_to_fit(
    policy: str, remedy: dict[str, Any], tmp_path: Path
) -> None:
    """By their tokens, before training begins."""
    torch.manual_seed(0)
    model = TinyLM(width=128, depth=6)
    given = {
        "device": SIM, "device_memory": "6MiB", "host_memory": "16MiB", "tokens": 512,
        "nvme": tmp_path, "nvme_memory": "12MiB", "durable": False, "activations": policy,
    }  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with says(f"raise {policy}_memory, use fewer tokens, or activations="):
        wrapped(model, optimizer, **given)
    with wrapped(model, optimizer, **{**given, **remedy}):
        model(*batch(0, rows=1, length=64)).backward()


@about_sim
@tries("offload/movement/engine_port.py", "_memory, use fewer tokens, or pass activations=")
@pytest.mark.parametrize("remedy", [
    {"host_memory": "80MiB"}, {"rows": 1}, {"activations": "auto"}, {"activations": "recompute"},
])  # fmt: skip
def test_activations_that_fill_host_memory(remedy: dict[str, Any]) -> None:
    """The memory that is full is that of the host, and not that of the device."""

    def run(rows: int = 8, **options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = TinyLM(width=128, depth=6)
        given = {"device": SIM, "device_memory": "6MiB", "host_memory": "16MiB", **options}
        with wrapped(model, torch.optim.SGD(model.parameters(), 0.1), **given) as optimizer:
            for number in range(2):
                model(*batch(number, rows=rows, length=64)).backward()
                optimizer.step()
                optimizer.zero_grad()
            return [value for _, value in overspill.named_weights(model)]

    with says("raise host_memory, use fewer tokens, or pass activations='auto' or 'recompute'"):
        run(activations="host")
    given = {"activations": "host", **remedy}
    ample = {"activations": "keep", "device_memory": "1GiB", "host_memory": "1GiB"}
    for one, other in zip(run(**given), run(**{**remedy, **ample}), strict=True):
        assert torch.equal(one, other)
