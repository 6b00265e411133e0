"""The training loop stays as it is: what users do around the optimizer works unchanged."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from tests.models import TinyLM, adamw, batch, train, weights

NVME: dict[str, Any] = {
    "device": "sim", "device_memory": "700KiB", "host_memory": "1500KiB", "durable": False
}  # fmt: skip


def make(**changes: Any) -> TinyLM:
    torch.manual_seed(0)
    return TinyLM(**changes)


@pytest.fixture
def pair(tmp_path: Path) -> Any:
    """A wrapped model with its optimizer, and a plain twin with its own."""
    plain, model = make(), make()
    optimizer = overspill.wrap(model, adamw(model), nvme=tmp_path, **NVME)
    yield model, optimizer, plain, adamw(plain)
    optimizer.close()


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], atol: float = 2e-5) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=atol, rtol=1e-4, msg=name)


def test_scheduler_made_before_and_after(tmp_path: Path) -> None:
    plain, model = make(), make()
    theirs, inner = adamw(plain), adamw(model)
    before = torch.optim.lr_scheduler.StepLR(inner, 2, 0.5)
    expected = torch.optim.lr_scheduler.StepLR(theirs, 2, 0.5)
    with overspill.wrap(model, inner, nvme=tmp_path, **NVME) as ours:
        assert ours.param_groups[0] is inner.param_groups[0]
        for step in range(4):
            for m, o, s in ((plain, theirs, expected), (model, ours, before)):
                m(*batch(step)).backward()
                o.step()
                s.step()
                o.zero_grad()
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
        close(weights(model), weights(plain))
        torch.optim.lr_scheduler.LambdaLR(ours, lambda step: 0.5)


def test_clip_grad_norm_is_exact(pair: Any) -> None:
    model, ours, plain, theirs = pair
    for step in range(3):
        norms = []
        for m, o in ((plain, theirs), (model, ours)):
            m(*batch(step)).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5).item())
            o.step()
            o.zero_grad()
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    close(weights(model), weights(plain))


@pytest.mark.parametrize("where", [NVME, {"device": "sim"}, {"device": "cpu"}])
def test_max_grad_norm_inside(where: dict[str, Any], tmp_path: Path) -> None:
    plain, model = make(), make()
    theirs = adamw(plain)
    with overspill.wrap(model, adamw(model), nvme=tmp_path, max_grad_norm=0.5, **where) as ours:
        for step in range(3):
            plain(*batch(step)).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            theirs.step()
            theirs.zero_grad()
            model(*batch(step)).backward()
            ours.step()
            ours.zero_grad()
        close(weights(model), weights(plain))


def test_frozen_parameters_have_no_state_and_stay(tmp_path: Path) -> None:
    model = make()
    for p in model.blocks[1].parameters():
        p.requires_grad_(False)
    frozen = {k: v.clone() for k, v in model.blocks[1].state_dict().items()}
    optimizer = adamw(model)
    with overspill.wrap(model, optimizer, nvme=tmp_path, **NVME) as ours:
        train(model, ours, 2)
        for name, value in model.blocks[1].state_dict().items():
            assert torch.equal(value, frozen[name])
        total = sum(len(group["params"]) for group in ours.param_groups)
        assert len(ours.state_dict()["state"]) == total - 6


def test_unused_parameters_lag(tmp_path: Path) -> None:
    plain, model = make(unused=True), make(unused=True)
    theirs = adamw(plain)
    with overspill.wrap(model, adamw(model), nvme=tmp_path, **NVME) as ours:
        train(plain, theirs, 2)
        train(model, ours, 2)
        state = ours.state_dict()["state"]
        assert len(state) == len(theirs.state_dict()["state"]) < len(list(model.parameters()))
        close(weights(model), weights(plain))


def test_state_dict_round_trip_through_torch(pair: Any, tmp_path: Path) -> None:
    model, ours, plain, theirs = pair
    train(plain, theirs, 3)
    train(model, ours, 3)
    buffer = io.BytesIO()
    torch.save(ours.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    expected = theirs.state_dict()
    assert state["param_groups"][0]["params"] == expected["param_groups"][0]["params"]
    for number, entry in expected["state"].items():
        assert float(entry["step"]) == float(state["state"][number]["step"]) == 3
        for name in ("exp_avg", "exp_avg_sq"):
            got = state["state"][number][name]
            assert got.dtype == torch.float32
            torch.testing.assert_close(got, entry[name], atol=1e-6, rtol=1e-3)
    # Into another engine, from torch's own: both go on alike.
    again = make()
    folder = tmp_path / "again"
    folder.mkdir()
    with overspill.wrap(again, adamw(again), nvme=folder, **NVME) as third:
        again.load_state_dict(plain.state_dict())
        third.load_state_dict(copy.deepcopy(expected))
        train(plain, theirs, 2)
        train(again, third, 2)
        close(weights(again), weights(plain))


def test_state_of_the_given_optimizer_is_taken_over(tmp_path: Path) -> None:
    plain, model = make(), make()
    theirs, inner = adamw(plain), adamw(model)
    train(plain, theirs, 3)
    train(model, inner, 3)
    with overspill.wrap(model, inner, nvme=tmp_path, **NVME) as ours:
        train(plain, theirs, 2)
        train(model, ours, 2)
        close(weights(model), weights(plain))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.01}),
        (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    ],
)
def test_other_optimizers(kind: Any, options: dict[str, Any], tmp_path: Path) -> None:
    plain, model = make(), make()
    theirs, inner = kind(plain.parameters(), **options), kind(model.parameters(), **options)
    train(plain, theirs, 2)
    train(model, inner, 2)  # its state is taken over
    with overspill.wrap(model, inner, nvme=tmp_path, **NVME) as ours:
        train(plain, theirs, 3)
        train(model, ours, 3)
        close(weights(model), weights(plain))


def test_state_dict_is_small_before_the_first_step(pair: Any) -> None:
    _, ours, _, _ = pair
    assert ours.state_dict()["state"] == {}


def test_zero_grad_to_zeros_and_to_none(pair: Any) -> None:
    model, ours, plain, theirs = pair
    for step in range(3):
        for m, o in ((plain, theirs), (model, ours)):
            m(*batch(step)).backward()
            o.step()
            o.zero_grad(set_to_none=step == 1)
    close(weights(model), weights(plain))


def test_eval_without_grad_between_steps(pair: Any) -> None:
    model, ours, plain, theirs = pair
    for step in range(3):
        for m, o in ((plain, theirs), (model, ours)):
            train(m, o, 1)
            m.eval()
            with torch.no_grad():
                loss = m(*batch(100 + step))
            m.train()
            if m is plain:
                expected = loss
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)


def test_closure(pair: Any) -> None:
    model, ours, plain, theirs = pair

    def closure(m: nn.Module, o: torch.optim.Optimizer) -> torch.Tensor:
        o.zero_grad()
        loss: torch.Tensor = m(*batch(0))
        loss.backward()
        return loss

    for _ in range(2):
        a = theirs.step(lambda: closure(plain, theirs))
        b = ours.step(lambda: closure(model, ours))
        assert float(a) == pytest.approx(float(b), rel=1e-5)


def test_gradients_set_and_dropped_by_hand(pair: Any) -> None:
    model, ours, plain, theirs = pair
    for m, o in ((plain, theirs), (model, ours)):
        m(*batch(0)).backward()
        m.norm.weight.grad = None
        m.norm.bias.grad = torch.full_like(m.norm.bias, 0.5)
        m.head.weight.grad.mul_(2.0)
        o.step()
    close(weights(model), weights(plain))


def test_gradient_reads_true(pair: Any) -> None:
    model, _, plain, _ = pair
    plain(*batch(0)).backward()
    model(*batch(0)).backward()
    for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert p.grad.shape == q.grad.shape
        torch.testing.assert_close(p.grad + 0, q.grad, msg=name)


def test_materialized_reads_and_edits(pair: Any) -> None:
    model, ours, plain, theirs = pair
    train(plain, theirs, 1)
    train(model, ours, 1)
    with overspill.materialized(model):
        torch.testing.assert_close(model.head.weight.data, plain.head.weight.data)
        model.head.weight.data.zero_()
    with overspill.materialized(model, writeback=True):
        assert model.head.weight.data.any()
        model.norm.weight.data.mul_(2)
    plain.norm.weight.data.mul_(2)
    train(plain, theirs, 1)
    train(model, ours, 1)
    close(weights(model), weights(plain))


def test_unwrap_gives_back_an_ordinary_model(pair: Any) -> None:
    model, ours, plain, theirs = pair
    train(plain, theirs, 2)
    train(model, ours, 2)
    assert overspill.unwrap(model) is model
    close(weights(model), weights(plain))
    assert not any(h for m in model.modules() for h in (m._forward_pre_hooks, m._forward_hooks))
    copy.deepcopy(model)
    train(model, adamw(model), 1)
    with pytest.raises(overspill.OffloadError, match="not wrapped"):
        overspill.unwrap(model)


def test_after_close_everything_refuses(pair: Any) -> None:
    model, ours, _, _ = pair
    ours.close()
    ours.close()
    with pytest.raises(overspill.OffloadError, match="closed"):
        model(*batch(0))
    with pytest.raises(overspill.OffloadError, match="closed"):
        ours.step()
    with pytest.raises(overspill.OffloadError, match="closed"):
        model.state_dict()


def test_copies_of_a_wrapped_model_are_refused(pair: Any) -> None:
    model, _, _, _ = pair
    with pytest.raises(overspill.OffloadError, match="cannot be copied"):
        copy.deepcopy(model)
    with pytest.raises(overspill.OffloadError, match="cannot be pickled"):
        pickle.dumps(model)


def test_moved_weights_are_found_out(pair: Any) -> None:
    model, _, _, _ = pair
    model.to("cpu")
    model(*batch(0))
    model.half()
    with pytest.raises(overspill.OffloadError, match="was replaced"):
        model(*batch(0))


def test_a_stray_read_shows_nan(pair: Any) -> None:
    model, _, _, _ = pair
    assert model.blocks[2].up.weight.shape == (256, 64)
    assert model.blocks[2].up.weight.isnan().all()


def test_exception_in_forward_and_backward(pair: Any) -> None:
    model, ours, plain, theirs = pair

    def bad(*_: Any) -> None:
        raise ZeroDivisionError

    handle = model.blocks[2].up.register_forward_hook(bad)
    with pytest.raises(ZeroDivisionError):
        model(*batch(0))
    handle.remove()
    loss = model(*batch(0))
    handle = loss.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    ours.zero_grad()
    train(plain, theirs, 2)
    train(model, ours, 2)
    close(weights(model), weights(plain))


def test_two_live_graphs_and_retain_graph(pair: Any) -> None:
    model, ours, plain, theirs = pair
    for m, o in ((plain, theirs), (model, ours)):
        first, second = m(*batch(0)), m(*batch(1))
        second.backward(retain_graph=True)
        first.backward()
        second.backward()
        o.step()
        o.zero_grad()
    close(weights(model), weights(plain))


def test_backward_after_step_is_found_out(pair: Any) -> None:
    model, ours, _, _ = pair
    loss = model(*batch(0))
    loss.backward(retain_graph=True)
    ours.step()
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


def test_autocast(tmp_path: Path) -> None:
    plain, model = make(), make()
    theirs = adamw(plain)
    with overspill.wrap(model, adamw(model), nvme=tmp_path, **NVME) as ours:
        for step in range(3):
            for m, o in ((plain, theirs), (model, ours)):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = m(*batch(step))
                loss.backward()
                o.step()
                o.zero_grad()
        close(weights(model), weights(plain), atol=3e-3)  # bf16 noise; gradients agree


def test_backward_mode_refuses_late_reads(tmp_path: Path) -> None:
    model = make()
    with overspill.wrap(model, adamw(model), nvme=tmp_path, update="backward", **NVME) as ours:
        model(*batch(0)).backward()
        with pytest.raises(overspill.OffloadError, match="update='backward'"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        ours.step()


def test_hyper_parameters_changed_too_late(tmp_path: Path) -> None:
    model = make()
    with overspill.wrap(model, adamw(model), nvme=tmp_path, update="backward", **NVME) as ours:
        model(*batch(0)).backward()
        ours.param_groups[0]["lr"] = 1.0
        with pytest.raises(overspill.OffloadError, match="'lr' was changed"):
            ours.step()


def test_nonfinite_update_raises(pair: Any) -> None:
    model, ours, _, _ = pair
    (model(*batch(0)) * float("inf")).backward()
    with pytest.raises(overspill.OffloadError, match="not finite"):
        ours.step()


def test_state_dict_of_a_part_is_current(pair: Any) -> None:
    model, ours, _, _ = pair
    before = {k: v.clone() for k, v in model.blocks[1].state_dict().items()}
    train(model, ours, 1)
    after = model.blocks[1].state_dict()
    assert all(not torch.equal(before[k], v) for k, v in after.items())


def test_grad_scaler_with_fp16_weights(tmp_path: Path) -> None:
    model = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    with overspill.wrap(model, adamw(model), nvme=tmp_path, precision="fp16", **NVME) as ours:
        losses = []
        for step in range(4):
            loss = model(*batch(0))
            scaler.scale(loss if step != 2 else loss * float("inf")).backward()
            before = weights(model)
            scaler.step(ours)
            scaler.update()
            ours.zero_grad()
            same = all(torch.equal(v, before[k]) for k, v in weights(model).items())
            assert same == (step == 2)  # a skipped step leaves all as it was
            losses.append(loss.item())
        assert losses[-1] < losses[0]


def test_everything_is_freed(tmp_path: Path) -> None:
    before = threading.active_count()
    model = make()
    ours = overspill.wrap(model, adamw(model), nvme=tmp_path, **NVME)
    train(model, ours, 1)
    model(*batch(0)).backward()
    engine = weakref.ref(model.__dict__["_overspill_engine"])
    ours.close()
    del ours, model
    gc.collect()
    assert engine() is None
    assert threading.active_count() == before
    assert list(tmp_path.iterdir()) == []


def test_buffers_stay_and_integers_too(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    twin = copy.deepcopy(model)
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.01)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    with overspill.wrap(model, inner, nvme=tmp_path, **NVME) as ours:
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            for m, o in ((twin, theirs), (model, ours)):
                m(x).square().sum().backward()
                o.step()
                o.zero_grad()
        got, expected = weights(model), weights(twin)
        for name in ("0.bias", "1.running_mean"):  # the gradient is zero but for rounding
            del got[name], expected[name]
        close(got, expected)


def test_frozen_weights_on_disk_can_be_loaded(tmp_path: Path) -> None:
    model = make()
    model.blocks.requires_grad_(False)
    with overspill.wrap(model, adamw(model), nvme=tmp_path, update="backward", **NVME) as ours:
        train(model, ours, 1)
        twice = {name: value * 2 for name, value in model.state_dict().items()}
        model.load_state_dict(twice)
        assert all(torch.equal(v, twice[k]) for k, v in model.state_dict().items())
        train(model, ours, 1)
