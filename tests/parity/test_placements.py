"""The same bits whatever the tiers, budgets, modes and accelerators."""

from __future__ import annotations

import copy
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from tests.devices import CPU, SIM
from tests.models import TinyLM, adamw, train, weights

STEPS = 20
PLACEMENTS: dict[str, dict[str, Any]] = {
    "cpu all in memory": {"device": CPU, "host_memory": "1GiB"},
    "cpu nvme": {"device": CPU, "host_memory": "1400KiB", "nvme": True},
    "cpu partly nvme": {"device": CPU, "host_memory": "3MiB", "nvme": True},
    "sim streamed from host": {
        "device": SIM, "device_memory": "700KiB", "host_memory": "1GiB"
    },
    "sim nvme": {
        "device": SIM, "device_memory": "700KiB", "host_memory": "1500KiB", "nvme": True
    },
    "sim partly resident": {
        "device": SIM, "device_memory": "1200KiB", "host_memory": "4MiB", "nvme": True
    },
    "sim all on the device": {
        "device": SIM, "device_memory": "1GiB", "host_memory": "1MiB", "nvme": True
    },
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "checkpointed": {"checkpointed": "yes"},
    "reentrant": {"checkpointed": "reentrant", "tied": True},
    "odd": {"twice": True, "unused": True, "position": True},
}


def make(kind: str, **changes: Any) -> TinyLM:
    torch.manual_seed(0)
    return TinyLM(**{**MODELS[kind], **changes})


def wrapped(model: TinyLM, folder: Path, options: dict[str, Any], **more: Any) -> Any:
    options = {**options, **more}
    if options.get("nvme"):
        options["nvme"] = tempfile.mkdtemp(dir=folder)
    return overspill.wrap(model, adamw(model), **options)


@cache
def reference(
    kind: str, steps: int = STEPS, micro_steps: int = 1, **more: Any
) -> tuple[list[float], dict[str, Any]]:
    """The same engine with everything in memory."""
    model = make(kind)
    with overspill.wrap(model, adamw(model), device=CPU, host_memory="1GiB", **more) as opt:
        return train(model, opt, steps, micro_steps=micro_steps), weights(model)


@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", MODELS)
def test_bits_do_not_depend_on_placement(
    kind: str, placement: str, update: str, tmp_path: Path
) -> None:
    losses, final = reference(kind)
    model = make(kind)
    with wrapped(model, tmp_path, PLACEMENTS[placement], update=update) as optimizer:
        assert train(model, optimizer, STEPS) == losses
        for name, value in weights(model).items():
            assert torch.equal(value, final[name]), name


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_accumulation_in_fp32(precision: str, placement: str, tmp_path: Path) -> None:
    more = {"precision": precision, "accumulate": 3}
    losses, final = reference("tied", 4, micro_steps=3, **more)
    for update in ("step", "backward", "next_forward"):
        model = make("tied")
        with wrapped(model, tmp_path, PLACEMENTS[placement], update=update, **more) as optimizer:
            assert train(model, optimizer, 4, micro_steps=3) == losses
            for name, value in weights(model).items():
                assert torch.equal(value, final[name]), name


def test_accumulation_needs_no_hint_in_fp32(tmp_path: Path) -> None:
    losses, final = reference("plain", 4, micro_steps=2)
    model = make("plain")
    with wrapped(model, tmp_path, PLACEMENTS["sim nvme"]) as optimizer:
        assert train(model, optimizer, 4, micro_steps=2) == losses
        assert all(torch.equal(v, final[k]) for k, v in weights(model).items())


def test_close_to_torch() -> None:
    """At most three times the difference that torch's own variants show, tensor by tensor."""

    def apart(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a - b).double().square().mean().sqrt())

    runs = []
    for flags in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        model = make("odd")
        optimizer = adamw(model, lr=1e-3)
        for group in optimizer.param_groups:
            group.update(flags)
        runs.append((train(model, optimizer, 20), weights(model)))
    model = make("odd")
    with overspill.wrap(model, adamw(model, lr=1e-3), device=CPU) as wrapped_optimizer:
        losses, ours = train(model, wrapped_optimizer, 20), weights(model)
    assert losses == pytest.approx(runs[0][0], rel=1e-6)
    for name, value in ours.items():
        torchs = [final[name] for _, final in runs]
        own = max(apart(a, b) for a in torchs for b in torchs)
        rounding = float(value.abs().max()) * 2**-24  # where torch's variants happen to agree
        assert min(apart(value, a) for a in torchs) <= max(3 * own, rounding), name


def test_split_master_equals_a_plain_fp32_master(tmp_path: Path) -> None:
    results = []
    for master in ("split", "fp32"):
        model = make("plain")
        with wrapped(
            model, tmp_path, PLACEMENTS["sim nvme"], precision="bf16", master=master
        ) as optimizer:
            losses = train(model, optimizer, STEPS)
            engine = model.__dict__["_overspill_engine"]
            masters = {spec.name: value for spec, value in engine.masters()}
            results.append((losses, masters))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(v, results[1][1][k]) for k, v in results[0][1].items())


def test_two_engines_in_one_process(tmp_path: Path) -> None:
    losses, final = reference("plain")
    first, second = make("plain"), make("plain")
    with (
        wrapped(first, tmp_path, PLACEMENTS["sim nvme"]) as a,
        wrapped(second, tmp_path, PLACEMENTS["cpu nvme"]) as b,
    ):
        got = [(train(first, a, 1), train(second, b, 1)) for _ in range(1)]
        assert got[0] == (losses[:1], losses[:1])
    copied = copy.deepcopy(make("plain"))
    assert set(weights(copied)) == set(final)
