"""Models sharded by FSDP2: the losses of FSDP2 with torch's AdamW on the same ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import overspill
from overspill.optim.formats import round_to_upper

from .spawned import RATES, Net, adamw, folder_of, loss_of, net, sharded, spawn, whole

STEPS = 5
CASES: list[dict[str, Any]] = [
    {"update": "step"}, {"update": "next_forward"}, {"update": "backward"},
    {"update": "step", "accumulate": 2}, {"update": "next_forward", "accumulate": 2},
    {"update": "backward", "accumulate": 2}, {"update": "next_forward", "clip": 0.5},
    {"update": "next_forward", "accumulate": 2, "clip": 0.5}, {"update": "step", "limit": 0.5},
    {"update": "next_forward", "limit": 0.5},
]  # fmt: skip
Losses = list[float]
SLOW = pytest.mark.soak  # each rank is a process that imports torch


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, *, accumulate: int = 1,
    clip: float | None = None, limit: float | None = None, update: str = "",
    clipping: Callable[..., Any] = torch.nn.utils.clip_grad_norm_,
) -> Losses:  # fmt: skip
    """``clip``: by the loop; ``limit``: by the engine, or by the loop where there is none."""
    losses = []
    inside = isinstance(optimizer, overspill.OffloadedOptimizer)
    most = clip or (None if inside else limit)
    for step in range(STEPS):
        for micro in range(accumulate):
            loss = loss_of(model, step * accumulate + micro, rank) / accumulate
            loss.backward()
            losses.append(loss.item())
        if most is not None:
            norm = clipping(list(model.parameters()), most)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            losses += [norm.item()] if clip else []
        optimizer.step()
        optimizer.zero_grad()
    return losses


def wrapped(model: nn.Module, folder: Path | None, case: dict[str, Any], device: str) -> Any:
    options = {k: v for k, v in case.items() if k in ("update", "accumulate")}
    return overspill.wrap(
        model, adamw(model), device=device, rates=RATES, host_memory="1GiB", nvme=folder,
        max_grad_norm=case.get("limit"), **options,
    )  # fmt: skip


def same_losses(rank: int, size: int, folder: Path, more: bool) -> int:
    count = 0
    for number, case in enumerate(CASES):
        model = sharded()
        expected = train(model, adamw(model), rank, **case)
        weights = whole(model)
        for device in ("cpu", "sim") if more else (("cpu", "sim")[number % 2],):
            nvme = folder_of(folder / f"{count}") if (number // 2) % 2 else None
            model = sharded()
            with wrapped(model, nvme, case, device) as optimizer:
                found = train(model, optimizer, rank, **case)
                assert found == pytest.approx(expected, rel=2e-6), (case, device)
                for name, value in whole(model).items():
                    off = (value - weights[name]).abs().max().item()
                    assert off <= 2e-5, (case, device, name, off)
            count += 1
    bf16_losses(rank, size, folder_of(folder / "bf16"))
    return count


@pytest.mark.parametrize(
    "size, more",
    [
        (2, False), pytest.param(1, True, marks=SLOW), pytest.param(2, True, marks=SLOW),
        pytest.param(4, True, marks=SLOW),
    ],
)  # fmt: skip
def test_losses_are_those_of_fsdp2(size: int, more: bool, tmp_path: Path) -> None:
    """Uneven and empty shards among them; weights within what one rank's are of plain torch's."""
    found = spawn(size, same_losses, tmp_path, more)
    assert found == [len(CASES) * (1 + more)] * size


def slow_losses(rank: int, size: int, folder: Path) -> None:
    """Shards that are copies, as uneven ones are, wait for weights that are on their way."""
    model = sharded()
    expected = train(model, adamw(model), rank)
    for slow in ({"disk_write_bytes_s": 1e7}, {"h2d_bytes_s": 1e6}, {"d2h_bytes_s": 1e6}):
        model = sharded()
        with overspill.wrap(
            model, adamw(model), device="sim", rates=replace(RATES, **slow), host_memory="1GiB",
            update="step", nvme=folder_of(folder / next(iter(slow))),
        ) as optimizer:  # fmt: skip
            assert train(model, optimizer, rank) == pytest.approx(expected, rel=2e-6), slow


def test_a_step_waits_for_copies_of_its_weights(tmp_path: Path) -> None:
    spawn(2, slow_losses, tmp_path)


def bf16_losses(rank: int, size: int, folder: Path) -> None:
    """Masters in fp32, of which each rank has those of its rows: by a loop, and by the engine."""
    model = sharded(torch.bfloat16)
    masters = [p.to_local().detach().float() for p in model.parameters()]  # type: ignore[attr-defined]
    adam = torch.optim.AdamW([nn.Parameter(m) for m in masters], lr=1e-2, weight_decay=0.1)
    expected: Losses = []
    for step in range(STEPS):
        loss = loss_of(model, step, rank)
        loss.backward()
        expected.append(loss.item())
        for p, m in zip(model.parameters(), adam.param_groups[0]["params"], strict=True):
            assert isinstance(p.grad, DTensor)
            m.grad = p.grad.to_local().float()
        adam.step()
        with torch.no_grad():
            for p, m in zip(model.parameters(), adam.param_groups[0]["params"], strict=True):
                p.to_local().copy_(round_to_upper(m))  # type: ignore[attr-defined]
        model.zero_grad()
    model = sharded(torch.bfloat16)
    with wrapped(model, folder, {"update": "next_forward"}, "cpu") as optimizer:
        found = train(model, optimizer, rank)
    assert found == pytest.approx(expected, rel=2e-3)


class Wire(TorchDispatchMode):
    """Counts the bytes that go into collectives, by their kind."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            given = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
            self.bytes[str(func)] += sum(each.nbytes for each in given)
        return func(*args, **(kwargs or {}))


def wire(rank: int, size: int) -> list[Counter[str]]:
    """What goes over the wire in three steps of FSDP2 alone, wrapped, and clipped as well."""
    found = []
    for options in (None, {}, {"max_grad_norm": 1.0}):
        model = sharded()
        optimizer: Any = adamw(model)
        if options is not None:
            optimizer = overspill.wrap(
                model, optimizer, device="cpu", rates=RATES, host_memory="1GiB", **options
            )
        with Wire() as counted:
            for number in range(3):
                loss_of(model, number, rank).backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append(counted.bytes)
        if options is not None:
            optimizer.close()
    return found


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 4])
def test_the_wire_carries_what_fsdp2_sends(size: int) -> None:
    """And two words of eight bytes a rank and step: the norm of all gradients, and whether the last
    update was finite."""
    for alone, *others in spawn(size, wire):
        assert sum(alone.values()) > 1e5
        for each in others:
            assert dict(each - alone) == {"c10d.allgather_.default": 3 * 2 * 8 * (size + 1)}
            assert not alone - each


# -- CPUOffloadPolicy -----------------------------------------------------------------------------


def offloading() -> Net:
    model, policy = net(), CPUOffloadPolicy(pin_memory=False)
    for layer in model.layers:
        fully_shard(layer, offload_policy=policy)
    fully_shard(model, offload_policy=policy)
    return model


def offloads(model: nn.Module) -> set[tuple[bool, type]]:
    """Of every group of parameters: whether FSDP2 offloads it, and its policy."""
    found = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                found |= {(p.offload_to_cpu, type(group.offload_policy)) for p in group.fsdp_params}
    return found


def with_policy(rank: int, size: int) -> None:
    losses = train(plain := offloading(), adamw(plain), rank)
    model = offloading()
    before = list(model.parameters())
    with pytest.raises(ValueError, match="not in the model"):
        overspill.wrap(model, adamw(net()), device="cpu", rates=RATES)
    assert offloads(model) == {(True, CPUOffloadPolicy)}
    optimizer = wrapped(model, None, {}, "cpu")
    assert offloads(model) == {(False, OffloadPolicy)}
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert train(model, optimizer, rank) == pytest.approx(losses, rel=1e-6)
    weights = whole(model)
    overspill.unwrap(model)
    assert offloads(model) == {(True, CPUOffloadPolicy)}
    assert all(torch.equal(whole(model)[name], value) for name, value in weights.items())
    losses = train(plain, adamw(plain), rank)
    assert train(model, adamw(model), rank) == pytest.approx(losses, rel=1e-5)


def test_fsdp2s_own_offloading_is_taken_over() -> None:
    spawn(2, with_policy)
