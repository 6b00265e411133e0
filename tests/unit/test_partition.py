"""Units found in models of many shapes, and their layouts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from overspill.planning.partition import partition, pinned_units
from overspill.planning.unit_discovery import find_units
from tests.models import Block, TinyLM


def names(model: nn.Module, **more: object) -> list[str]:
    return [unit.name for unit in find_units(model, **more)]  # type: ignore[arg-type]


def test_blocks_and_what_is_left() -> None:
    assert names(TinyLM()) == [
        "embed",
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "blocks.3",
        "norm",
        "head",
    ]


def test_own_parameters_of_the_model_are_a_unit_that_encloses() -> None:
    model = TinyLM(position=True)
    parts = partition(model, {})
    assert parts.units[0].name == "(root)" and parts.units[0].encloses
    assert [len(u.chunks[0].params) for u in parts.units[:2]] == [1, 1]


def test_tied_weights_belong_to_the_first_unit() -> None:
    model = TinyLM(tied=True)
    parts = partition(model, {})
    head = next(u for u in parts.units if u.name == "head")
    embed = next(u for u in parts.units if u.name == "embed")
    assert head.weight_bytes == 0 and head.shares == (embed.index,)


def test_sequential_of_unlike_members() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert names(model) == ["0", "2", "3"]


def test_nested_lists_are_cut_where_they_are_large() -> None:
    stages = nn.ModuleList(nn.ModuleList(Block(8) for _ in range(3)) for _ in range(2))
    assert len(names(nn.ModuleDict({"stages": stages, "end": nn.Linear(4, 4)}))) == 7


def test_modules_whose_weights_others_read_stay_whole() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2)
            self.out = nn.Linear(8, 8)

    assert names(Net()) == ["attention", "out"]


def test_parameter_lists_belong_to_their_owner() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompts = nn.ParameterList([nn.Parameter(torch.zeros(3)) for _ in range(2)])
            self.inner = nn.Linear(3, 3)

    parts = partition(Net(), {})
    assert [u.name for u in parts.units] == ["(root)", "inner"]
    assert len(parts.units[0].chunks[0].params) == 2


def test_named_units() -> None:
    model = TinyLM()
    assert "blocks.0.up" in names(model, names=["blocks.0.up"])
    with pytest.raises(ValueError, match="no module 'nope'"):
        find_units(model, ["nope"])


def test_layout_is_aligned_and_disjoint() -> None:
    model = TinyLM(width=20)
    groups = {p: int(p.dim() > 1) for p in model.parameters()}
    model.blocks[1].up.weight.requires_grad_(False)
    parts = partition(model, groups, dtype=torch.bfloat16)
    for unit in parts.units:
        ends = 0
        for chunk in unit.chunks:
            assert chunk.byte_offset % 4096 == 0 and chunk.byte_offset >= ends
            ends = chunk.byte_offset + chunk.nbytes
            last = 0
            for spec in chunk.params:
                assert spec.offset * 2 % 64 == 0 and spec.offset >= last
                last = spec.offset + spec.numel
            assert last <= chunk.numel
        assert unit.weight_bytes % 4096 == 0 and unit.weight_bytes >= ends
    frozen = [c for u in parts.units for c in u.chunks if c.group is None]
    assert [s.name for c in frozen for s in c.params] == ["blocks.1.up.weight"]
    assert len(parts.parameters) == len(list(model.parameters()))


def test_what_is_frozen_beside_trained_weights_is_a_unit_of_its_own() -> None:
    model = TinyLM(position=True, tied=True)
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.requires_grad_(False)
    model.blocks[2].norm.requires_grad_(False)
    parts = partition(model, {p: 0 for p in model.parameters() if p.requires_grad})
    found = {u.name: u for u in parts.units}
    frozen = [u.name for u in parts.units if not u.runs]
    assert frozen == ["blocks.1 (frozen)", "blocks.2 (frozen)"]
    for name in frozen:
        runner = found[name.removesuffix(" (frozen)")]
        assert runner.shares == (runner.index - 1,) == (found[name].index,)
        assert not found[name].trainable and runner.trainable and not found[name].flops
    assert not [c for u in parts.units for c in u.chunks if u.trainable and c.group is None]
    assert found["head"].shares == (found["embed"].index,) and not found["embed"].trainable
    assert [parts.found[i].name for i, _ in parts.running] == [f.name for f in find_units(model)]
    for unit in parts.units:
        for _, spec in unit.params:
            assert parts.unit_of[spec.index] == unit.index
    # Nothing before the root's own parameter is trained, so its gradient is needed everywhere.
    assert found["blocks.0"].backward_flops == found["blocks.0"].flops
    up = 2 * 64 * 256
    assert found["blocks.1"].backward_flops == 2 * found["blocks.1"].flops - up
    assert found["blocks.3"].backward_flops == 2 * found["blocks.3"].flops


def test_no_gradient_flows_to_what_is_before_all_that_is_trained() -> None:
    model = TinyLM()
    for each in (model.embed, *model.blocks[:3]):
        each.requires_grad_(False)
    parts = partition(model, {p: 0 for p in model.parameters() if p.requires_grad})
    assert [bool(u.backward_flops) for u in parts.units if u.flops] == [False] * 3 + [True] * 2


def test_strides_of_dense_parameters_are_kept() -> None:
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    parts = partition(nn.Sequential(conv), {})
    spec = parts.units[0].chunks[0].params[0]
    assert spec.stride == conv.weight.stride() != torch.empty(4, 3, 3, 3).stride()


def test_patterns_name_modules_of_every_layer() -> None:
    layers = nn.ModuleList(
        nn.ModuleDict({"a": nn.Linear(4, 4), "act": nn.ReLU(), "b": nn.Linear(4, 4)})
        for _ in range(2)
    )
    model = nn.ModuleDict({"layers": layers, "out": nn.Linear(4, 4)})
    parts = partition(model, {}, names=["layers.*.*"])
    assert [u.name for u in parts.units] == [
        "layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b", "out"
    ]  # fmt: skip
    assert pinned_units(model, parts, ["layers.*.b", "out"]) == {1, 3, 4}
    for name, message in (
        ("layers.*.c", "no module"), ("layer.*", "no module"), ("layers.*.act", "no parameters"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            partition(model, {}, names=[name])
