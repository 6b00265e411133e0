"""Every step is a checkpoint: a run that is resumed ends with the very bits of one that was not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from tests.devices import CPU, SIM
from tests.resumed import adamw, assert_same, build, options, train, weights, whole_run

MODES: list[dict[str, Any]] = [
    {"update": "step"},
    {"update": "next_forward"},
    {"update": "backward"},
    {"update": "next_forward", "host_memory": "64MiB"},
    {"update": "next_forward", "precision": "bf16", "moments": "int8", "max_grad_norm": 1.0},
    {"update": "backward", "precision": "bf16", "moments": "bf16", "host_memory": "64MiB"},
    {"device": SIM, "device_memory": "400KiB", "host_memory": "1MiB"},
    {"device": SIM, "device_memory": "64MiB", "host_memory": "64MiB", "update": "backward"},
]


@pytest.mark.parametrize("mode", MODES, ids=lambda m: "-".join(map(str, m.values())))
def test_resume_is_bit_for_bit(tmp_path: Path, mode: dict[str, Any], monkeypatch: Any) -> None:
    """Weights, moments, masters, counts, groups, schedule (in extra) and random states."""
    monkeypatch.setenv("OVERSPILL_VALIDATE", "1")
    wanted, state = whole_run(tmp_path / "whole", **mode)
    path = tmp_path / "cut"
    path.mkdir()
    model = build()
    made: dict[str, Any] = {}
    settings = options(path, extra=lambda: {"schedule": made["schedule"].state_dict()}, **mode)
    optimizer = overspill.wrap(model, adamw(model), **settings)
    torch.manual_seed(5)
    made["schedule"] = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    train(model, optimizer, 3, made["schedule"])
    optimizer.close()
    torch.manual_seed(77)
    with overspill.empty_init():
        again = build()
    torch.manual_seed(78)
    del settings["nvme"], settings["extra"]
    optimizer, extra = overspill.resume(again, path, adamw(again), **settings)
    with optimizer:
        assert optimizer.step_count == 3
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        schedule.load_state_dict(extra["schedule"])
        train(again, optimizer, 6, schedule)
        assert_same(weights(again), wanted)
        assert_same(optimizer.state_dict(), state)


OTHERS: list[dict[str, Any]] = [
    {"update": "backward", "host_memory": "64MiB"},
    {"update": "next_forward", "host_memory": "500KiB"},
    {"device": SIM, "device_memory": "400KiB", "host_memory": "1MiB"},
]


@pytest.mark.parametrize("first", [{"update": "step"}, OTHERS[0], OTHERS[2]])
def test_resume_elsewhere(tmp_path: Path, first: dict[str, Any]) -> None:
    """Budgets, tiers, the way to update and the device may differ from those of the run before."""
    wanted, _ = whole_run(tmp_path / "whole", **first)
    for number, other in enumerate(OTHERS):
        path = tmp_path / str(number)
        path.mkdir()
        model = build()
        with overspill.wrap(model, adamw(model), **options(path, **first)) as optimizer:
            torch.manual_seed(5)
            train(model, optimizer, 3, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
        again = build()
        settings = options(path, **other)
        del settings["nvme"]
        inner = None if number == 0 else adamw(again)  # None: made as the store says
        optimizer, _ = overspill.resume(again, path, inner, **settings)
        with optimizer:
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            schedule.last_epoch = 3
            optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.005
            train(again, optimizer, 6, schedule)
            assert_same(weights(again), wanted)


def test_the_store_of_another_model_is_refused(tmp_path: Path) -> None:
    model = build()
    with overspill.wrap(model, adamw(model), **options(tmp_path)) as optimizer:
        train(model, optimizer, 1)
    other = nn.Sequential(build(), nn.Linear(8, 8))
    with pytest.raises(overspill.OffloadError, match="the store does not fit: "):
        overspill.resume(other, tmp_path, adamw(other), device=CPU, rates=overspill.Rates())
    model = build()
    with pytest.raises(overspill.IoError, match="store committed at step 1; continue it with"):
        overspill.wrap(model, adamw(model), **options(tmp_path))


@pytest.mark.parametrize("made", [True, False])
def test_checksums_are_those_of_the_store(made: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    inner = torch.optim.AdamW(model.parameters())
    with overspill.wrap(model, inner, device=CPU, nvme=tmp_path, checksum=made) as optimizer:
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
    with pytest.raises(ValueError, match=f"made with checksum={made}"):
        overspill.resume(nn.Linear(64, 64), tmp_path, device=CPU, checksum=not made)
    again, _ = overspill.resume(nn.Linear(64, 64), tmp_path, device=CPU, checksum=made)
    again.close()


GIVEN: dict[str, dict[str, Any]] = {
    "lr": {"lr": 0.5},
    "weight_decay": {"weight_decay": 0.5},
    "betas": {"betas": (0.5, 0.6)},
    "": {"foreach": True},
}


@pytest.mark.parametrize("option", GIVEN)
def test_hyper_parameters_that_give_way_to_those_of_the_commit_are_named(
    option: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(64, 64)
    inner = torch.optim.AdamW(model.parameters())
    with overspill.wrap(model, inner, device=CPU, nvme=tmp_path) as optimizer:
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
    again = nn.Linear(64, 64)
    given = torch.optim.AdamW(again.parameters(), **GIVEN[option])
    with overspill.resume(again, tmp_path, given, device=CPU)[0] as optimizer:
        kept = optimizer.param_groups[0]
        assert all(kept[name] == inner.defaults[name] for name in ("lr", "weight_decay", "betas"))
        kept["lr"] = 0.25
        before = again.bias.detach().clone()
        again(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        assert 0.1 < (again.bias - before).abs().max() < 0.3
    said = [text for text in caplog.messages if "uses the hyper-parameters of the commit" in text]
    assert [f"{option}={inner.defaults[option]} (passed: " in text for text in said] == (
        [True] if option else []
    )


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 1e-4, 1e-3, cycle_momentum=True),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_learning_rate_that_a_scheduler_had_changed_is_expected(
    scheduler: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build()
    with overspill.wrap(model, adamw(model), **options(tmp_path)) as optimizer:
        train(model, optimizer, 3, SCHEDULERS[scheduler](optimizer))
    again = build()
    with overspill.resume(again, tmp_path, adamw(again), device=CPU)[0] as optimizer:
        assert optimizer.param_groups[0]["lr"] != adamw(again).defaults["lr"]
    assert "hyper-parameters" not in caplog.text


@pytest.mark.parametrize("back", ["resume", "rollback"])
def test_a_buffer_that_is_expanded_is_restored(back: str, tmp_path: Path) -> None:
    """Nothing can be copied into one whose elements share memory."""

    def built() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        model.register_buffer("scale", torch.ones(1, 5).expand(9, 5))
        return model

    model = built()
    inner = torch.optim.AdamW(model.parameters())
    with overspill.wrap(model, inner, device=CPU, nvme=tmp_path) as optimizer:
        model.scale = torch.full((1, 5), 3.0).expand(9, 5)
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        optimizer.commit()
        if back == "rollback":
            model.scale = torch.zeros(1, 5).expand(9, 5)
            optimizer.rollback()
            assert (model.scale == 3).all() and model.scale.shape == (9, 5)
    again = built()
    with overspill.resume(again, tmp_path, device=CPU)[0]:
        assert (again.scale == 3).all() and again.scale.shape == (9, 5)
