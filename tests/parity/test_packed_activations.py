"""Activations that move as int8: how many bytes move, and how much results change."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import overspill
from overspill.activations import offloader
from overspill.optim import activation_blocks
from tests.devices import NAME, SIM, about_cpu, normal
from tests.parity.packed import PLACES, TOKENS, WIDTH, Net, data, recorded

CASES = [("device", "host"), ("device", "nvme"), ("staged", "nvme"), ("cpu", "nvme")]


@pytest.fixture(autouse=True)
def small_ones_leave_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloader, "LEAST_BYTES", 1 << 10)


def fit(
    folder: Path, place: str, steps: int = 3, dtype: torch.dtype = torch.float32, **options: Any
) -> list[float]:
    """The losses."""
    torch.manual_seed(0)
    model = Net().to(dtype)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    given = {**PLACES[place], "nvme": folder, "durable": False, "tokens": TOKENS, **options}
    losses = []
    with overspill.wrap(model, adamw, **given) as optimizer:
        for step in range(steps):
            x, y = data(step, dtype)
            loss = F.cross_entropy(model(x).flatten(0, 1).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("place", "policy"), CASES)
def test_a_byte_and_a_share_of_a_scale_move_for_an_element(
    tmp_path: Path, place: str, policy: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = Net().to(dtype)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {**PLACES[place], "nvme": tmp_path, "durable": False}
    with overspill.wrap(
        model, inner, activations=policy, activations_format="int8", **options
    ) as optimizer:
        with recorded() as handles:
            loss = model(data(1, dtype)[0]).float().square().mean()
        optimizer._engine.runtime.executor.engine_port.catch_up()
        storages = {handle.shared.saved.number: handle.shared for handle, _ in handles}
        whole = {n: shared.saved.nbytes for n, shared in storages.items()}
        packed = {
            n: shared.blocks.dtype.itemsize for n, shared in storages.items() if shared.blocks
        }
        # Of 16 tensors as wide as the model, attention saves 4, 3 of them in one storage.
        assert sum(whole[n] for n in packed) > 0.7 * sum(whole.values())
        del handles, storages
        loss.backward()
        optimizer.step()
        spans = [s for s in optimizer._engine.trace.spans() if s.name.startswith("saved")]
    sizes = whole.copy()
    for n, itemsize in packed.items():
        elements = whole[n] // itemsize
        sizes[n] = elements + -(-elements // 128) * 4
    back = Counter[int]()
    for span in spans:
        if span.lane == "copy_in":
            back[int(span.name.split()[1])] += span.nbytes
    assert len(back) > 10
    wrong = {n: (nbytes, sizes[n], whole[n]) for n, nbytes in back.items() if nbytes % sizes[n]}
    assert not wrong, "in one part or several"
    if policy == "nvme":
        written = sum(s.nbytes for s in spans if s.lane == "write")
        pages = sum(-(-nbytes // 4096) for nbytes in sizes.values())
        assert 0 < written <= 4096 * (pages + len(sizes))  # parts end with a page each


@pytest.mark.parametrize(
    ("place", "policy", "update"),
    [
        ("device", "host", "step"), ("device", "auto", "next_forward"),
        ("staged", "nvme", "backward"), ("cpu", "nvme", "next_forward"), ("cpu", "auto", "step"),
    ],
)  # fmt: skip
def test_losses_are_nearly_those_of_keep(
    tmp_path: Path, place: str, policy: str, update: str
) -> None:
    options = {"max_grad_norm": 1.0} if update != "backward" else {}
    kept = fit(tmp_path, "device", 10, activations="keep", update=update, **options)
    found = fit(
        tmp_path, place, 10, activations=policy, activations_format="int8", update=update, **options
    )
    assert found[0] == kept[0], "forward is exact"
    assert found != kept or policy == "auto"
    torch.testing.assert_close(found, kept, rtol=0, atol=2e-3)


class Ordinary(nn.Module):
    """Operators whose backward depends on small differences of what they saved."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.kind == "relu":
            x = x.relu()
        elif self.kind == "logsumexp":
            masked = (x * 20).masked_fill(x.detach() > 1.0, -1e9)
            x = x + masked.logsumexp(-1, keepdim=True)
        elif self.kind == "normalize":
            scales = torch.logspace(-2, 1, x.shape[1], device=x.device)
            x = F.normalize(x * scales[:, None], dim=-1)
        elif self.kind == "channels":
            mean = x.mean(1, keepdim=True)
            x = (x - mean) / ((x - mean).square().mean(1, keepdim=True) + 1e-6).sqrt()
        made: torch.Tensor = self.second(x)
        return made


@pytest.mark.parametrize("kind", ["relu", "logsumexp", "normalize", "channels"])
def test_gradients_are_nearly_those_of_torch(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleDict({"first": Ordinary(kind), "rest": Net(2)})
    model = nn.ModuleDict({"first": Ordinary(kind), "rest": Net(2)})
    model.load_state_dict(plain.state_dict())
    x = normal(1, 4, TOKENS, WIDTH)
    plain.to(x.device)
    plain["rest"](plain["first"](x)).square().mean().backward()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {**PLACES["device"], "units": ["first"], "nvme": tmp_path, "durable": False}
    with overspill.wrap(
        model, inner, activations="nvme", activations_format="int8", update="step", **options
    ) as optimizer:
        loss = model["rest"](model["first"](x)).square().mean()
        optimizer._engine.runtime.executor.engine_port.catch_up()
        loss.backward()
        for name in ("first.weight", "second.weight"):
            p = model["first"].get_parameter(name)
            expected = plain["first"].get_parameter(name).grad
            found = p.grad.to(x.device) + 0.0
            assert torch.linalg.norm(found - expected) < 0.03 * torch.linalg.norm(expected), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_reported(tmp_path: Path, bad: float) -> None:
    model = Net(3)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {**PLACES["device"], "nvme": tmp_path, "durable": False, "update": "step"}
    with overspill.wrap(
        model, inner, activations="nvme", activations_format="int8", **options
    ) as optimizer:
        x = normal(1, 4, TOKENS, WIDTH)
        x[0, 5, 7] = bad
        model(x).square().mean().backward()
        with pytest.raises(overspill.OffloadError, match="not finite"):
            optimizer.step()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_the_user_work(tmp_path: Path, reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            logits: torch.Tensor = self.head(x)
            return logits

    torch.manual_seed(0)
    model = Checkpointed(3)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {**PLACES["device"], "nvme": tmp_path, "durable": False}
    with overspill.wrap(
        model, inner, activations="nvme", activations_format="int8", **options
    ) as optimizer:
        for step in range(2):
            x, y = data(step, torch.float32)
            F.cross_entropy(model(x).flatten(0, 1), y).backward()
            optimizer.step()
            optimizer.zero_grad()


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["keep", "recompute", "selective"])
def test_policies_that_move_nothing_are_refused(policy: str) -> None:
    model = Net(1)
    adamw = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="nothing is moved that may lose precision"):
        overspill.wrap(model, adamw, activations=policy, activations_format="int8")  # type: ignore[call-overload]


@about_cpu
def test_formats_are_checked() -> None:
    model = Net(1)
    with pytest.raises(ValueError, match="activations_format must be one of None, 'int8'"):
        overspill.plan(model, activations_format="fp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pass activations='host' or 'nvme'"):
        overspill.wrap(model, activations_format="int8")
    adamw = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="pass nvme="):
        overspill.wrap(model, adamw, device="cpu", activations_format="int8")


def test_the_memory_to_pack_in_is_within_the_least_budget() -> None:
    model = Net(4)
    adamw = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {"device": SIM, "host_memory": "64MiB", "activations": "host"}
    none = overspill.plan(model, adamw, device_memory=0, **options)
    least = none.detail.fitting["device_memory"]
    assert overspill.plan(model, adamw, device_memory=least, **options).fits
    plan = overspill.plan(model, adamw, device_memory=least, **options, activations_format="int8")
    assert not plan.fits
    assert "to pack activations" in plan.shortfalls[0].what


def test_plans_count_packed_bytes() -> None:
    model = Net(8)
    adamw = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {
        "device": SIM, "device_memory": "256MiB", "host_memory": "600MiB", "tokens": 1 << 14,
        "activations": "host",
    }  # fmt: skip
    whole = overspill.plan(model, adamw, **options)
    packed = overspill.plan(model, adamw, **options, activations_format="int8")
    assert not whole.fits
    assert packed.fits
    assert ", moved as int8" in str(packed)
    assert packed.detail.activation_bytes == whole.detail.activation_bytes
    assert packed.link_bytes["copy_out"] < 0.7 * whole.shortfalls[0].need_bytes


@pytest.mark.skipif(NAME != "testdev", reason="counts what the device allocates")
def test_staging_is_within_the_budget_and_freed_by_sleep(tmp_path: Path) -> None:
    memory, held = torch.accelerator.memory_allocated, []
    for options in ({}, {"activations_format": "int8"}):
        model = Net(2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {**PLACES["device"], "nvme": tmp_path, "durable": False, "activations": "host"}
        before = memory()
        with overspill.wrap(model, inner, **given, **options) as optimizer:  # type: ignore[call-overload]
            tier = optimizer.memory[overspill.Tier.DEVICE]
            held.append(memory() - before)
            assert tier.held_bytes >= held[-1] - (1 << 16)
            optimizer.sleep()
            assert memory() - before < 1 << 16
            optimizer.wake()
            model(data(0, torch.float32)[0]).square().mean().backward()
            optimizer.step()
        del model, inner, optimizer
    assert held[1] - held[0] >= 2 * activation_blocks.WINDOW_BYTES
