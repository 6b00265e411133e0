"""Where updates go on behind compute, so do moves; and what must wait for them does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.schedule.messages import Await, AwaitUpdate, GradRoom, Need, Signal, Step, Until
from tests.devices import NAME, SIM, link
from tests.models import TinyLM, adamw, batch


@pytest.mark.alone
@pytest.mark.parametrize("update", ["backward", "next_forward"])
def test_updates_and_io_lie_under_compute(update: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TinyLM(width=256, depth=8)
    with link(2e9) as rates, overspill.wrap(
        model, adamw(model), nvme=tmp_path, update=update, rates=rates,
        device=SIM, device_memory="10MiB", host_memory="24MiB",
        activations="keep",  # without disk rates, "auto" may move them, which is not meant here
    ) as optimizer:  # fmt: skip
        trace = model.__dict__["_overspill_engine"].runtime.trace
        shares = []
        for step in range(63):
            if step >= 15 and max(shares) >= 0.7:
                break
            model(*batch(step, rows=16, length=64)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 4 == 2 and step > 2:  # four steps each; what else the machine does hurts one
                window = trace.steps[-4].started_ns, trace.steps[-1].finished_ns
                shares.append(trace.covered_share(("read", "write", "update"), *window))
        assert max(shares) >= 0.7, shares
        assert optimizer.stats.step_s >= optimizer.stats.bound_s > 0
        picture, chrome = tmp_path / "lanes.png", tmp_path / "trace.json"
        optimizer.trace(picture)
        optimizer.trace(chrome)
        assert picture.stat().st_size > 10_000
        assert '"traceEvents"' in chrome.read_text()


def test_gradients_left_at_zero_wait_for_the_last_update() -> None:
    """A unit that a step does not use still has its zeroed gradients: the update takes them while
    the weights of the update before may be on their way to the device."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(2))
    adamw = torch.optim.AdamW(model.parameters())
    with link(5e6) as slow, overspill.wrap(
        model, adamw, device=SIM, device_memory="1MiB", rates=slow
    ) as optimizer:  # fmt: skip
        assert optimizer.plan.detail.device_update_share == 0, "updates come from the host"
        x = torch.ones(2, 256)
        for turn in (0, 1, 0):
            model[turn](x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("update", ["step", "next_forward"])
@pytest.mark.parametrize("where", [{}, {"device": SIM}])
def test_what_is_at_hand_is_not_asked_for(
    update: str, where: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that stay where they are gathered need no room; weights that stay are waited for,
    unit by unit, only while their updates may still run: not where nothing moves."""
    torch.manual_seed(0)
    model = TinyLM(depth=6)
    with overspill.wrap(
        model, adamw(model), update=update, max_grad_norm=1.0, **where
    ) as optimizer:
        executor = model.__dict__["_overspill_engine"].runtime.executor
        asked: list[Signal] = []
        request = executor.protocol._ask

        def noted(make: Any, *args: Any) -> Any:
            asked.append(make(0))
            return request(make, *args)

        def unhurried(unit: int, told: int) -> Any:
            executor.protocol.wait(Until.QUIET)  # else what was told before may still be on its way
            return home(unit, told)

        home = executor.engine_port.gradient_home
        monkeypatch.setattr(executor.protocol, "_ask", noted)
        monkeypatch.setattr(executor.engine_port, "gradient_home", unhurried)
        for step in range(2):
            asked.clear()
            model(*batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    kinds = [type(signal) for signal in asked]
    settled = [s for s in asked if isinstance(s, Await) and s.until is Until.ARRIVED]
    assert GradRoom not in kinds and len(settled) == kinds.count(Step) == 1
    assert executor.layout.still == (not where and not NAME)
    assert (AwaitUpdate in kinds) == (update == "next_forward" and not executor.layout.still)
    assert Need not in kinds
