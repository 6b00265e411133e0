"""What a model could be trained with: recipes, least budgets, the largest model that fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner

from overspill.cli.app import app
from overspill.facts.machine import Machine
from overspill.facts.tier import Tier
from overspill.planning import choose
from overspill.planning.plan import Plan
from overspill.plans import make_plan
from overspill.schedule.layout import Layout
from overspill.train import shapes
from overspill.train.choices import (
    Choice,
    choices,
    largest,
    least_budget,
    model_for,
    recipes,
)
from overspill.train.gains import planner
from overspill.train.shapes import plan_model
from overspill.train.skeletons import add_lora, skeleton_optimizer

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples/machines/rtx4090.toml"
OPTIONS: dict[str, Any] = {"precision": "bf16", "nvme": ["/scratch"], "durable": False}
MODEL, TOKENS = "llama-1b", 1024


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine.from_file(FILE)


@pytest.fixture(scope="module")
def found(machine: Machine) -> list[Choice]:
    return choices(MODEL, OPTIONS, machine, TOKENS)


def call(*args: str) -> Any:
    return CliRunner().invoke(app, ["plan", *args])


def test_every_way_is_told_with_its_own_plan(found: list[Choice]) -> None:
    whole = [each for each in found if not each.least]
    assert [each.recipe for each in whole] == recipes()
    assert all(each.plan.fits for each in whole)
    disk = {each.recipe.name: each.plan.disk_bytes for each in whole}
    state = {
        each.recipe.name: sum(
            s.nbytes for group in each.plan.detail.layout.subgroups for s in group
        )
        for each in whole
        if each.plan.detail.layout is not None
    }
    assert state["all, int8 moments"] < 0.6 * state["all, fp32 moments"]
    assert state["LoRA, rank 16"] < 0.02 * state["all, fp32 moments"]
    assert disk["LoRA, rank 16, base in nf4"] <= disk["LoRA, rank 16"]


def test_the_least_budget_is_the_least(found: list[Choice], machine: Machine) -> None:
    least = [each for each in found if each.least]
    assert {each.recipe.name for each in least} == {recipe.name for recipe in recipes()}
    for each in least:
        assert each.plan.fits and each.plan.detail.budgets is not None
        host = each.plan.detail.budgets.host
        make = planner(model_for(MODEL, each.recipe.lora_rank), {**OPTIONS, **each.recipe.options})
        less = make(machine, TOKENS, {"every_update": False, "host_memory": int(0.9 * host)})
        assert host <= 64 << 20 or not less.fits, each.recipe.name


def test_lora_trains_little_and_freezes_the_rest() -> None:
    model = plan_model("gpt2-1m")
    before = sum(p.numel() for p in model.parameters())
    add_lora(model, 4)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    # 128 wide: to 3 x 128, 128 and 4 x 128, and back from there; in four layers.
    more = 4 * 4 * ((128 + 384) + (128 + 128) + (128 + 512) + (512 + 128))
    assert sum(p.numel() for p in model.parameters()) == before + more
    with pytest.raises(ValueError, match="at least 1"):
        add_lora(plan_model("gpt2-1m"), 0)
    with pytest.raises(ValueError, match="no matrices"):
        add_lora(nn.Embedding(4, 4), 2)


def test_the_largest_model_is_the_largest(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**OPTIONS, "host_memory": "1GiB"}
    name, plan = largest(options, machine, TOKENS)
    assert plan.fits
    size = sum(p.numel() for p in plan_model(name).parameters())
    over = [
        other for other in ("llama-3b", "llama-8b", "llama-13b", "llama-70b")
        if sum(p.numel() for p in plan_model(other).parameters()) > size
    ]  # fmt: skip
    for other in over[:1]:
        make = planner(plan_model(other), options)
        assert not make(machine, TOKENS, {"every_update": False}).fits
    adapters, plan = largest(options, machine, TOKENS, lora_rank=8)
    assert plan.fits and sum(p.numel() for p in plan_model(adapters).parameters()) > size
    few = {name: shapes.SHAPES[name] for name in ("gpt2-124m", "gpt2-1m", "llama-30m")}
    monkeypatch.setattr("overspill.train.choices.SHAPES", few)
    none = {"host_memory": "1MiB", "device_memory": "1MiB"}
    small, plan = largest({**OPTIONS, **none}, machine, TOKENS)
    assert small == "gpt2-1m" and not plan.fits


def test_the_command_prints_a_table_and_json(found: list[Choice]) -> None:
    asked = [MODEL, "--rates", str(FILE), "--precision", "bf16", "--nvme", "/scratch",
             "--not-durable", "--options"]  # fmt: skip
    answer = call(*asked, "--seq", "512", "--batch", "2")
    assert answer.exit_code == 0, answer.output
    assert "the least" in answer.output and "LoRA, rank 16, base in nf4" in answer.output
    assert "--frozen nf4 --lora-rank 16" in answer.output
    told = json.loads(call(*asked, "--tokens", str(TOKENS), "--json").output)
    assert [each["step_s"] for each in told] == [each.plan.step_s for each in found]
    assert {each["recipe"] for each in told} == {recipe.name for recipe in recipes()}


def test_a_plan_takes_the_words_of_a_training_script() -> None:
    asked = [MODEL, "--rates", str(FILE), "--precision", "bf16", "--nvme", "/scratch", "--json"]
    plain = json.loads(call(*asked, "--tokens", "2048").output)
    same = json.loads(call(*asked, "--seq", "1024", "--batch", "2").output)
    assert plain["tokens"] == same["tokens"] == 2048
    sizes = [name for name in plain if name.endswith("_bytes")]
    assert sizes and all(plain[name] == same[name] for name in sizes)
    longer = json.loads(call(*asked, "--seq", "65536").output)
    fewer = json.loads(call(*asked, "--seq", "1024", "--batch", "64").output)
    assert longer["bound_s"] > 1.3 * fewer["bound_s"]  # attention
    lora = json.loads(call(*asked, "--tokens", "2048", "--lora-rank", "8").output)
    assert lora["step_s"] < plain["step_s"]
    again = json.loads(call(*asked, "--tokens", "2048", "--recompute").output)
    assert again["activation_bytes"] is not None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "4", "--seq", "2"], "give --tokens, or --seq and --batch"),
        (["--batch", "2"], "say how long they are with --seq"),
        (["--recompute", "--activations", "host"], "differ; give one"),
        (["gpt2-1m", "--largest"], "leave MODEL out"),
        (["gpt2-1m", "--model", "llama-8b"], "give one"),
        (["gpt2-1m", "--frozen", "nf4"], "nothing is frozen"),
        (["gpt2-1m", "--lora-rank", "99999999999"], "at most 128"),
        (["--options", "--measure"], "are of one plan"),
        (["--options", "--moments", "int8"], "all values of --moments; leave it out"),
        (["--options", "--every-unit"], "--options is a table"),
    ],
)
def test_words_that_contradict_are_refused(words: list[str], message: str) -> None:
    answer = call(*words)
    assert answer.exit_code == 2 and message in answer.output


def test_what_has_no_room_is_told_with_what_it_lacks() -> None:
    answer = call("gpt2-25m", "--device", "cpu", "--host-memory", "8MiB", "--options")
    assert answer.exit_code == 2
    assert "no room: " in answer.output and "the budget is 8 MiB" in answer.output


def test_a_budget_beyond_this_machine_is_told() -> None:
    answer = call("gpt2-1m", "--device", "cpu", "--host-memory", "64TiB")
    assert answer.exit_code == 0 and "more than the" in answer.output
    answer = call("gpt2-1m", "--rates", str(FILE), "--host-memory", "64TiB")
    assert "more than the" not in answer.output


def test_muon_gets_the_matrices_of_the_layers() -> None:
    """Also where a matrix has as many rows as an embedding, as in gpt2-350m."""
    model = model_for("gpt2-350m", None)
    joint = skeleton_optimizer(model, "muon")
    names = {p: name for name, p in model.named_parameters()}
    muon, rest = ({names[p] for p in group["params"]} for group in joint.param_groups)
    assert len(muon) == 24 * 4 and all(".h." in name and "weight" in name for name in muon)
    assert any("wte" in name for name in rest) and any("wpe" in name for name in rest)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[Layout]:
    """The layouts whose steps have been simulated to the end."""
    layouts: list[Layout] = []
    real = choose.plan_layout

    def plan_layout(*given: Any) -> choose.PlannedLayout:
        planned = real(*given)
        if planned.step_s is not None:
            layouts.append(planned.layout)
        return planned

    monkeypatch.setattr(choose, "plan_layout", plan_layout)
    return layouts


def test_only_plans_that_fit_are_simulated(machine: Machine, simulated: list[Layout]) -> None:
    small = replace(machine, device_memory=None)
    make = planner(model_for(MODEL, 16), OPTIONS)
    least = least_budget(make, small, 8192, Tier.HOST)
    assert least is not None and least.detail.budgets is not None
    assert least.detail.tiled  # activations fit only with tiles
    assert simulated == [least.detail.layout]
    simulated.clear()
    host = {"host_memory": least.detail.budgets.host, "every_update": False}
    assert make(small, 8192, host).step_s == least.step_s
    assert simulated == [least.detail.layout]


def test_a_plan_that_is_not_simulated_has_no_times(
    machine: Machine, simulated: list[Layout]
) -> None:
    make = planner(model_for(MODEL, 16), OPTIONS)
    small, short = replace(machine, device_memory=None), {"host_memory": "1100MiB"}
    made = make(small, 8192, {**short, "unless_short": True})
    assert not made.fits and made.detail.activations_short and simulated == []
    assert (made.step_s, made.bound_s, made.bottleneck) == (None, None, None)
    whole = make(small, 8192, short)
    assert whole.shortfalls == made.shortfalls and whole.step_s and whole.bound_s


@pytest.mark.parametrize(("host", "chunks"), [("4GiB", True), ("8GiB", False)])
def test_a_loss_in_chunks_is_chosen_before_simulation(
    machine: Machine, simulated: list[Layout], host: str, chunks: bool
) -> None:
    model = model_for(MODEL, 16)
    given = {**OPTIONS, "tokens": 8192, "host_memory": host, "loss": "auto"}
    made = make_plan(
        model, skeleton_optimizer(model, "adamw"), given, every_update=False,
        machine=replace(machine, device_memory=None),
    )  # fmt: skip
    assert made.fits and made.detail.loss_in_chunks == chunks
    assert simulated == [made.detail.layout]


def test_layers_run_in_tiles_only_if_no_layout_has_room_without(
    machine: Machine, simulated: list[Layout]
) -> None:
    model = model_for("llama-30m", 8)

    def made(host_memory: int) -> Plan:
        given = {
            "precision": "bf16", "loss": "auto", "tile": "auto", "tokens": 2048, "durable": False,
            "activations": "host", "update": "backward", "frozen": "int8",
            "device_memory": 160_679_981, "host_memory": host_memory,
        }  # fmt: skip
        optimizer = skeleton_optimizer(model, "adamw")
        return make_plan(model, optimizer, given, machine=machine, every_update=False)

    least = made(434_652_865)  # the usual layout, which prefetches more, has no room
    assert least.fits and not least.detail.tiled and least.detail.layout is not None
    assert least.detail.layout.prefetch_depth == 1 and simulated == [least.detail.layout]
    less = made(400_000_000)
    assert less.fits and less.detail.tiled
