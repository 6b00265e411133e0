"""What a loop may do between backward and step, and after the end: right, or told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.errors import OffloadError
from tests.devices import CPU, SIM, plainly
from tests.models import TinyLM, adamw, batch, train, weights
from tests.parity.test_readers import PLACES, same
from tests.patience import WAIT_S


def make() -> TinyLM:
    torch.manual_seed(0)
    return TinyLM()


@pytest.mark.parametrize("place", ["resident", "streamed"])
@pytest.mark.parametrize("through", ["data", "detach", "parameter"])
def test_a_write_after_the_update_is_reported_once(through: str, place: str) -> None:
    """The step can then be taken, with the bits of one without that write."""
    memory = {"resident": "1GiB", "streamed": "320KiB"}[place]

    def trained(writes: bool) -> dict[str, torch.Tensor]:
        model = make()
        with overspill.wrap(
            model, adamw(model), device=SIM, device_memory=memory, host_memory="64MiB",
            update="backward", rates=overspill.Rates(),
        ) as optimizer:  # fmt: skip
            train(model, optimizer, 1)
            model(*batch(1)).backward()
            if writes:
                p = model.head.weight
                with pytest.raises(OffloadError, match="update='backward' ha"), torch.no_grad():
                    {"data": p.data, "detach": p.detach(), "parameter": p}[through].mul_(1.5)
                    optimizer.step()
            optimizer.step()
            optimizer.zero_grad()
            train(model, optimizer, 2)
            return weights(model)

    found = trained(writes=True)
    assert all(torch.equal(found[n], value) for n, value in trained(writes=False).items())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_forward_between_backward_and_step(place: str, accumulate: int, tmp_path: Path) -> None:
    """With updates in backward it sees the updated weights, all of them, every time."""
    model = make()
    with overspill.wrap(
        model, adamw(model), nvme=tmp_path, update="backward", accumulate=accumulate,
        rates=overspill.Rates(), **PLACES[place],
    ) as optimizer:  # fmt: skip
        for number in range(5):
            for micro in range(accumulate):
                model(*batch(2 * number + micro)).backward()
            with torch.no_grad():
                between = model(*batch(99))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                assert torch.equal(model(*batch(99)), between), number


@pytest.mark.parametrize("place", PLACES)
def test_a_gradient_that_was_applied_cannot_be_dropped(place: str, tmp_path: Path) -> None:
    """``backward(); zero_grad(); backward()``: the first has changed the weights already."""
    for to_none in (True, False):
        folder = tmp_path / str(to_none)
        folder.mkdir()
        model, plain = make(), make()
        theirs = plainly(overspill.optim.AdamW, adamw(plain).param_groups)
        with overspill.wrap(
            model, adamw(model), nvme=folder, update="backward", rates=overspill.Rates(),
            **PLACES[place],
        ) as optimizer:  # fmt: skip
            train(model, optimizer, 2)
            model(*batch(7)).backward()
            with pytest.raises(
                OffloadError, match=r"has already applied the gradients.*rollback\(\)"
            ):
                optimizer.zero_grad(set_to_none=to_none)
            optimizer.rollback()
            assert optimizer.step_count == 2
            train(model, optimizer, 2)
            for _ in range(2):
                train(plain, theirs, 2)
            same(model, plain)


def test_zeroed_gradients_are_not_stepped_with_after_they_were_applied() -> None:
    model = make()
    with overspill.wrap(model, adamw(model), device=CPU, update="backward") as optimizer:
        model(*batch(0)).backward()
        with pytest.raises(OffloadError, match="has already applied the gradients"):
            optimizer.zero_grad(set_to_none=False)
        optimizer.step()


@pytest.mark.parametrize("update", ["step", "next_forward"])
@pytest.mark.parametrize("place", PLACES)
def test_norms_are_those_of_the_gradients_now(place: str, update: str, tmp_path: Path) -> None:
    """Clipped by value first, in this step or in the one before; and added to since."""
    model, plain = make(), make()
    theirs = plainly(overspill.optim.AdamW, adamw(plain).param_groups)
    with overspill.wrap(
        model, adamw(model), nvme=tmp_path, update=update, rates=overspill.Rates(), **PLACES[place]
    ) as ours:
        for number in range(5):
            found = []
            for m in (model, plain):
                m(*batch(3 * number)).backward()
                if number in (0, 3):
                    torch.nn.utils.clip_grad_value_(m.parameters(), 1e-3)
                if number in (1, 3):
                    m(*batch(3 * number + 1)).backward()
                if number in (1, 2, 3):
                    found.append(torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01))
            if found:
                torch.testing.assert_close(*found, rtol=1e-5, atol=0)
            for o in (ours, theirs):
                o.step()
                o.zero_grad()
        for name, value in weights(plain).items():
            torch.testing.assert_close(weights(model)[name], value, atol=1e-6, rtol=1e-5)


def test_parameters_that_are_unfrozen_later() -> None:
    """They have no state: training goes on with an error that says what to do, or not at all."""
    model, plain = make(), make()
    for m in (model, plain):
        m.blocks[0].requires_grad_(False)
        m.embed.requires_grad_(False)
    theirs = plainly(overspill.optim.AdamW, adamw(plain).param_groups)
    with overspill.wrap(model, adamw(model), device=CPU) as ours:
        train(model, ours, 2)
        train(plain, theirs, 2)
        for m in (model, plain):
            m.blocks[0].requires_grad_(True)
        with pytest.raises(
            OffloadError, match=r"blocks\.0\.norm\.weight, .* and 3 more required no"
        ):
            model(*batch(0))
        with pytest.raises(OffloadError, match="wrap the model again"):
            ours.step()
        with torch.no_grad():
            model(*batch(0))
        state = ours.state_dict()
        overspill.unwrap(model)
    with overspill.wrap(model, adamw(model), device=CPU) as ours:
        ours.load_state_dict(state)
        train(model, ours, 2)
        train(plain, theirs, 2)
        same(model, plain)


def test_shards_are_refused() -> None:
    """DTensors that are not FSDP2's, as those of tensor parallelism."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        mesh = init_device_mesh("cpu", (1,))
        distribute_module(model, mesh)
        with pytest.raises(OffloadError, match=r"'0\.weight' is not sharded by fully_shard"):
            overspill.wrap(model, torch.optim.AdamW(model.parameters()), device=CPU)
    finally:
        dist.destroy_process_group()


def test_a_parameter_of_two_models_is_refused() -> None:
    model = make()
    other = nn.Sequential(model.head)
    with overspill.wrap(model, adamw(model), device=CPU) as ours:
        with pytest.raises(OffloadError, match=r"parameter '0\.weight' belongs to another wrapped"):
            overspill.wrap(other, torch.optim.AdamW(other.parameters()), device=CPU)
        train(model, ours, 1)


END = """
import gc, sys, threading, torch, overspill
import tests.devices
from torch import nn
place, how = sys.argv[1:]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
more = {"device_memory": "64MiB"} if place != "cpu" else {}
optimizer = overspill.wrap(model, torch.optim.AdamW(model.parameters()), device=place,
                           host_memory="64MiB", update="step", **more)
loss = model(torch.ones(1, 512)).sum()
kept = [model[0].weight.detach(), model[2].weight[3:5], model[0].bias.data]
before = [each.clone() for each in kept]
loss.backward()
weight = model[0].weight
if how == "close":
    optimizer.close()
else:
    del optimizer, model
    gc.collect()
assert not [t for t in threading.enumerate() if t.name.startswith("overspill")]
assert all(torch.equal(a, b) for a, b in zip(kept, before)), "what somebody holds stays"
print(weight)
assert weight.shape == (512, 512)
try:
    weight.sum()
except overspill.OffloadError as error:
    assert "unwrap" in str(error), error
else:
    raise AssertionError("weights without an engine")
try:
    loss.backward()
except RuntimeError as error:
    print(error)
del kept, before, loss, weight
again = nn.Linear(8, 8)
overspill.wrap(again, torch.optim.AdamW(again.parameters()), device=place, **more).close()
from overspill.movement.pools import HeldMemory
assert not HeldMemory._lingering, "it is freed when nobody holds it"
print("well")
"""


@pytest.mark.parametrize("how", ["close", "collect"])
@pytest.mark.parametrize("place", [CPU, SIM])
def test_weights_after_the_end(place: str, how: str) -> None:
    """Printing them ends no process; tensors that somebody holds over them stay as they are."""
    done = subprocess.run(
        [sys.executable, "-c", END, place, how], capture_output=True, text=True, timeout=WAIT_S,
        cwd=Path(__file__).parents[2], check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stdout[-2000:], done.stderr[-2000:])
    assert done.stdout.endswith("well\n")


def test_options_of_groups_are_the_groups_own(tmp_path: Path) -> None:
    """amsgrad and momentum of one group are not those of another; nor are they ignored later."""
    kinds: list[tuple[Any, Any, list[dict[str, Any]]]] = [
        (torch.optim.AdamW, overspill.optim.AdamW, [{"amsgrad": True}, {"amsgrad": False}]),
        (torch.optim.Adam, overspill.optim.Adam,
         [{"maximize": True, "weight_decay": 0.1}, {"amsgrad": True, "betas": (0.5, 0.6)}]),
        (torch.optim.SGD, overspill.optim.SGD,
         [{"momentum": 0.9, "nesterov": True}, {"momentum": 0.0, "dampening": 0.5}]),
        (torch.optim.Adagrad, overspill.optim.Adagrad,
         [{"weight_decay": 0.1}, {"lr_decay": 0.1}]),
    ]  # fmt: skip
    for number, (kind, reference, options) in enumerate(kinds):
        folder = tmp_path / str(number)
        folder.mkdir()
        model, plain, torchs = make(), make(), make()

        def groups(m: nn.Module, options: Any = options) -> list[dict[str, Any]]:
            params = list(m.parameters())
            return [{"params": params[:5], **options[0]}, {"params": params[5:], **options[1]}]

        theirs = plainly(reference, groups(plain), lr=1e-2)
        torchs_own = kind(groups(torchs), lr=1e-2)
        with overspill.wrap(
            model, kind(groups(model), lr=1e-2), nvme=folder, device=CPU, host_memory="1MiB",
            rates=overspill.Rates(),
        ) as ours:  # fmt: skip
            for m, o in ((model, ours), (plain, theirs), (torchs, torchs_own)):
                train(m, o, 4)
            same(model, plain)
            for name, value in weights(torchs).items():
                torch.testing.assert_close(weights(model)[name], value, atol=2e-5, rtol=1e-4)
            kept = ours.state_dict()["state"]
            for index, state in torchs_own.state_dict()["state"].items():
                held = {k for k, v in state.items() if v is not None and k != "step"}
                assert held == kept.get(index, {}).keys() - {"step"}, (kind, index)
            wanted = weights(model)
        model = make()
        optimizer, _ = overspill.resume(
            model, folder, device=CPU, host_memory="1MiB", rates=overspill.Rates()
        )
        with optimizer:  # the store knows the options
            for name, value in wanted.items():
                assert torch.equal(weights(model)[name], value)


def test_options_that_change_the_state_cannot_change_later() -> None:
    model = make()
    with overspill.wrap(model, adamw(model), device=CPU) as ours:
        train(model, ours, 1)
        before = weights(model)
        ours.param_groups[0]["amsgrad"] = True
        model(*batch(0)).backward()
        with pytest.raises(ValueError, match="amsgrad is True, but the state was laid out"):
            ours.step()
        ours.param_groups[0]["amsgrad"] = False
        ours.param_groups[1]["lr"] = float("nan")
        with pytest.raises(ValueError, match="lr must be finite"):
            ours.step()
        assert ours.step_count == 1
        for name, value in weights(model).items():
            assert torch.equal(before[name], value)
        ours.param_groups[1]["lr"] = 1e-3
        ours.step()
        assert ours.step_count == 2
