"""Plans of several ranks, made in one process, beside runs of these ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import overspill
from overspill.facts.machine import Machine
from overspill.planning.unit_discovery import units_to_shard
from overspill.ranks.planned import planned_shards
from overspill.ranks.shards import gathered_bytes
from overspill.train.gains import planner
from overspill.train.shapes import plan_model

from .spawned import RATES, VOCABULARY, Net, adamw, loss_of, net, spawn

SIM: dict[str, Any] = {"device": "sim", "rates": RATES}


class Received(TorchDispatchMode):
    """Counts what a rank gets from the others in FSDP2's collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith(("c10d._allgather_base_", "c10d._reduce_scatter_base_")):
            output, given = (
                each if isinstance(each, torch.Tensor) else each[0] for each in args[:2]
            )
            self.nbytes[name] += abs(output.nbytes - given.nbytes)
        return func(*args, **(kwargs or {}))


def sharded(model: Net) -> Net:
    for found in units_to_shard(model):
        fully_shard(found.module)  # type: ignore[arg-type]
    fully_shard(model)
    return model


def as_planned(rank: int, size: int) -> None:
    """The plan of a run is the one that was made before, and so are its bytes on the wire."""
    budgets = {"device_memory": "100KiB", "host_memory": "1GiB", "tokens": 32}
    before = overspill.plan(model := net(), adamw(model), ranks=size, **SIM, **budgets)
    assert before.detail.layout is not None
    model = sharded(net())
    with overspill.wrap(model, adamw(model), **SIM, **budgets) as optimizer:
        plan = optimizer.plan
        assert plan.detail.layout is not None
        if rank == 0:
            assert plan.tier_bytes == before.tier_bytes
            assert plan.link_bytes == before.link_bytes
            assert plan.detail.layout.homes == before.detail.layout.homes
        for number in range(2):
            with Received() as received:
                loss_of(model, number, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
    wire = plan.link_bytes["wire"]
    # FSDP2 pads parameters of which the ranks have unequally many rows.
    assert sum(received.nbytes.values()) == pytest.approx(wire, rel=0.02), received.nbytes


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_a_run_is_as_planned(size: int) -> None:
    spawn(size, as_planned)


def test_shards_are_those_of_the_first_rank() -> None:
    model = net()
    for size in (2, 3, 4):
        shards = planned_shards(model, size)
        whole = dict(model.named_parameters())
        assert sum(p.numel() for p in shards.parameters()) < sum(p.numel() for p in whole.values())
        for shard, local in zip(shards.shards, shards.local, strict=True):
            rows = -(-len(whole[shard.name]) // size)
            assert torch.equal(local, whole[shard.name][:rows])
    assert [n.replace("/", ".") for n in shards.units] == [
        "(model)", "embed", "layers.0", "layers.1", "layers.2"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{"device": "cpu"}, {"device": "sim", "leave": "10MiB"},
     {"device": "sim", "device_memory": "1MiB", "host_memory": "auto", "leave": "10MiB"}],
)  # fmt: skip
def test_options_are_those_of_one_rank(options: dict[str, Any]) -> None:
    """Also where there is no device memory, and what is left is of the other tier."""
    for ranks in (1, 2):
        model = net()
        given = {"host_memory": "1GiB", "rates": RATES, **options}
        assert overspill.plan(model, adamw(model), ranks=ranks, **given).fits


def test_fsdp2s_own_memory() -> None:
    """The root twice, for gradients too; of blocks three times the weights, and two gradients."""
    model = net()
    blocks = {name: _nbytes(part) for name, part in model.layers.named_children()}
    embed = _nbytes(model.embed)
    root = _nbytes(model) - sum(blocks.values()) - embed
    largest = max(*blocks.values(), embed)
    assert gathered_bytes(planned_shards(model, 2)) == 2 * root + 5 * largest
    for p in model.layers.parameters():
        p.requires_grad_(False)
    frozen = gathered_bytes(planned_shards(model, 2))
    assert frozen == 2 * root + 3 * largest + 2 * embed
    assert gathered_bytes(planned_shards(model, 2), torch.bfloat16) == frozen // 2


def _nbytes(module: nn.Module) -> int:
    """As FSDP2 gathers it from two ranks: with an even number of rows."""
    return sum((len(p) + len(p) % 2) * p[0].numel() * p.element_size() for p in module.parameters())


def test_tied_embeddings_are_gathered_with_the_model() -> None:
    model = net()
    model.head = nn.Linear(model.embed.weight.shape[1], VOCABULARY, bias=False)
    model.head.weight = model.embed.weight
    assert [found.name for found in units_to_shard(model)] == ["layers.0", "layers.1", "layers.2"]
    shards = planned_shards(model, 2)
    assert sum(p is model.embed.weight for p in (s.param for s in shards.shards)) == 1


MACHINES = Path(__file__).parents[2] / "examples/machines"


def test_a_model_that_no_card_holds() -> None:
    """70 B on two cards of 24 GB, and on eight of a server, which take an eighth of the state."""
    make = {n: planner(plan_model("llama-70b"), {"precision": "bf16", "durable": False}, ranks=n)
            for n in (1, 2, 8)}  # fmt: skip
    desktop = Machine.from_file(MACHINES / "rtx4090.toml")
    server = Machine.from_file(MACHINES / "h200.toml")
    quick = {"every_update": False, "nvme": ["/scratch"]}
    two = make[2](desktop, 2048, quick)
    assert two.fits, two
    one, eight = (make[n](server, 4096, quick) for n in (1, 8))
    assert one.fits and eight.fits and one.step_s and eight.step_s
    weights = 2 * 70e9
    # Gathered twice, and gradients once; all but the root's, and a rank's own part.
    assert eight.link_bytes["wire"] == pytest.approx(3 * weights * 7 / 8, rel=0.02)
    assert sum(eight.tier_bytes.values()) < sum(one.tier_bytes.values()) / 4
    assert eight.step_s < one.step_s


def test_the_wire_may_be_what_a_step_waits_for() -> None:
    desktop = Machine.from_file(MACHINES / "rtx4090.toml")
    slow = Machine(**{
        **vars(desktop), "rates": overspill.Rates(**{**vars(desktop.rates), "wire_bytes_s": 1e8})
    })  # fmt: skip
    make = planner(plan_model("llama-1b"), {"precision": "bf16", "durable": False}, ranks=2)
    quick = {"every_update": False, "nvme": ["/scratch"]}
    fast, waits = make(desktop, 4096, quick), make(slow, 4096, quick)
    assert waits.bottleneck == "wire" and waits.bound_s and waits.step_s and fast.step_s
    assert waits.bound_s == pytest.approx(waits.link_bytes["wire"] / 1e8)
    assert waits.step_s >= waits.bound_s > 5 * fast.step_s


def test_what_cannot_be_planned() -> None:
    model = net()
    for ranks in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="whole number"):
            overspill.plan(model, adamw(model), ranks=ranks, **SIM)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give tokens= instead"):
        example = lambda: loss_of(model, 0, 0)  # noqa: E731
        overspill.plan(model, adamw(model), ranks=2, example=example, **SIM)
    with pytest.raises(ValueError, match="for a sharded model"):
        overspill.plan(model, adamw(model), ranks=2, loss="chunked", **SIM)
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    with pytest.raises(TypeError, match="needs whole parameters"):
        overspill.plan(model, torch.optim.Muon(matrices), ranks=2, **SIM)
    grace = Machine.from_file(MACHINES / "gh200.toml")
    with pytest.raises(ValueError, match="wire_bytes_s not known"):
        overspill.plan(model, adamw(model), ranks=2, machine=grace, tokens=32)
