"""What cannot be right is found out, said, and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from tests.devices import CPU, SIM, about_cpu, plainly
from tests.models import adamw, batch, train, weights
from tests.parity.twins import NVME, close, make


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


@about_cpu
def test_moved_weights_are_found_out(pair: Any) -> None:
    model, _, _, _ = pair
    before = weights(model)
    model.to("cpu")
    model(*batch(0))
    with pytest.raises(overspill.OffloadError, match=r"'embed\.weight' was replaced by another"):
        model.embed.weight.data = model.embed.weight.data.half()
    close(weights(model), before, 0.0)
    model(*batch(0))


@about_cpu
@pytest.mark.parametrize("update", ["step", "next_forward"])
@pytest.mark.parametrize("device", [CPU, SIM])
def test_resident_weights_that_are_replaced_are_the_weights(update: str, device: str) -> None:
    """Else the engine would go on with its own, and the model with the user's."""
    model, plain = make(), make()
    theirs = plainly(overspill.optim.AdamW, adamw(plain).param_groups)
    with overspill.wrap(model, adamw(model), update=update, device=device) as optimizer:
        for m, o in ((model, optimizer), (plain, theirs)):
            m(*batch(0)).backward()
            m.to("cpu")
            m.head.weight.data = m.head.weight.data * 0.5
            o.step()
        assert torch.equal(model.head.weight, plain.head.weight)
        value = torch.full_like(model.head.weight, 0.25)
        model.head.weight.data = value
        assert torch.equal(model.state_dict()["head.weight"], value)


def test_a_stray_read_sees_the_weights(pair: Any) -> None:
    model, _, plain, _ = pair
    assert model.blocks[2].up.weight.shape == (256, 64)
    assert torch.equal(model.blocks[2].up.weight, plain.blocks[2].up.weight)


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
