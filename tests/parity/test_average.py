"""``overspill.ema``: the average of a plain run, whatever the tiers, and in the weights' place."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import overspill
from overspill.errors import OffloadError
from overspill.optim.formats import join_master, round_to_upper
from tests.devices import CPU, SIM, plainly
from tests.models import TinyLM, adamw, batch, train, weights
from tests.robust.test_interrupted_anywhere import Interrupted, Tripwire

DECAY = 0.9
PLACES: dict[str, dict[str, Any]] = {
    "device": {"device": SIM, "device_memory": "700KiB", "host_memory": "64MiB"},
}
if CPU == "cpu":
    PLACES["disk"] = {"device": CPU, "host_memory": "1500KiB"}
    PLACES["memory"] = {"device": CPU, "host_memory": "64MiB"}
UPDATES = ("step", "next_forward", "backward")


def averaged(model: nn.Module) -> torch.optim.AdamW:
    return overspill.ema(adamw(model), DECAY)


def wrapped(model: nn.Module, path: Path, place: str, **more: Any) -> Any:
    return overspill.wrap(
        model, averaged(model), nvme=path, rates=overspill.Rates(), **{**PLACES[place], **more}
    )


class Plain:
    """The same model in memory, and the average of its weights, or masters, by hand."""

    def __init__(self, dtype: torch.dtype, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = TinyLM(unused=True).to(dtype)
        groups = adamw(self.model).param_groups
        self.optimizer = plainly(overspill.optim.AdamW, groups, **options)
        self.average: dict[str, torch.Tensor] = {}

    def masters(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, p in self.model.named_parameters():
            state = self.optimizer.state.get(p, {})
            weight = p.detach().cpu()
            low = state.get("master_lo")
            flat = weight.flatten()
            found[name] = (
                weight.float().clone()
                if low is None
                else join_master(flat, low.cpu().flatten()[: flat.numel()]).view(weight.shape)
            )
        return found

    def train(self, steps: int, start: int = 0) -> list[float]:
        losses = []
        for step in range(start, start + steps):
            loss = self.model(*batch(step))
            loss.backward()
            trained = [n for n, p in self.model.named_parameters() if p.grad is not None]
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
            now = self.masters()
            for name in trained:
                if name not in self.average:
                    self.average[name] = now[name].clone()
                average = self.average[name]
                average.add_((now[name] - average) * (1 - DECAY))
        return losses

    def averages(self) -> dict[str, torch.Tensor]:
        return {**{n: p.detach().cpu() for n, p in self.model.named_parameters()}, **self.average}


def run(model: nn.Module, optimizer: Any, steps: int, start: int = 0) -> list[float]:
    losses = []
    for step in range(start, start + steps):
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name].cpu(), right[name].cpu()) for name in left
    )


def cases() -> list[Any]:
    """Each way to update wherever fp32 is streamed; the rest by the default, and in the soak."""
    found = itertools.product((torch.float32, torch.bfloat16), PLACES, UPDATES)
    return [
        pytest.param(
            *case, id="-".join(map(str, case)),
            marks=() if case[2] == "next_forward" or (case[0].itemsize == 4 and case[1] != "memory")
            else pytest.mark.soak,
        )
        for case in found
    ]  # fmt: skip


@pytest.mark.parametrize(("dtype", "place", "update"), cases())
def test_it_is_that_of_the_plain_run(
    dtype: torch.dtype, place: str, update: Any, tmp_path: Path
) -> None:
    """In memory of its own and in the weights' place, in between steps; training goes on as if
    nobody had looked."""
    plain = Plain(dtype, master=None if dtype is torch.float32 else "split")
    model = TinyLM(unused=True).to(dtype)
    model.load_state_dict(plain.model.state_dict())
    with wrapped(model, tmp_path, place, update=update) as ours:
        for start in (0, 2, 4):
            assert run(model, ours, 2, start) == plain.train(2, start)
            expected, now = plain.averages(), weights(model)
            assert same(dict(ours.named_averages()), expected)
            shown = {
                name: round_to_upper(value) if dtype is torch.bfloat16 else value
                for name, value in expected.items()
                if name in plain.average
            }
            with ours.averaged() as inside, torch.no_grad():
                seen = weights(inside)
                loss = inside(*batch(100)).item()
            assert same({name: seen[name] for name in shown}, shown)
            twin = TinyLM(unused=True).to(dtype)
            twin.load_state_dict(seen)
            assert loss == twin(*batch(100)).item()
            assert same(weights(model), now)
        assert "average" not in ours.param_groups[0]


def test_it_is_near_torchs_own(tmp_path: Path) -> None:
    """Which multiplies and adds with one rounding less."""
    torch.manual_seed(0)
    plain, model = TinyLM(), TinyLM()
    model.load_state_dict(plain.state_dict())
    theirs = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    inner = torch.optim.AdamW(plain.parameters(), lr=3e-3)
    for step in range(5):
        plain(*batch(step)).backward()
        inner.step()
        inner.zero_grad()
        theirs.update_parameters(plain)
    mine = overspill.ema(torch.optim.AdamW(model.parameters(), lr=3e-3), DECAY)
    options: Any = PLACES["device"]
    with overspill.wrap(model, mine, nvme=tmp_path, rates=overspill.Rates(), **options) as ours:
        run(model, ours, 5)
        for name, value in ours.named_averages():
            own = theirs.module.get_parameter(name)
            torch.testing.assert_close(value.to(own.device), own.detach(), rtol=1e-5, atol=1e-6)


def test_the_decay_may_follow_a_schedule(tmp_path: Path) -> None:
    """It is read at every step, and can be set on what is wrapped."""
    torch.manual_seed(0)
    model = TinyLM()
    with wrapped(model, tmp_path, "device") as ours:
        run(model, ours, 2)
        overspill.ema(ours, 0.0)
        run(model, ours, 1, 2)
        assert same(dict(ours.named_averages()), weights(model))
        for wrong in (1.0, -0.1, float("nan")):
            with pytest.raises(ValueError, match="decay"):
                overspill.ema(ours, wrong)
        model(*batch(3)).backward()
        ours.param_groups[0]["average_decay"] = 1.5
        with pytest.raises(ValueError, match=r"decay.*1\.5"):
            ours.step()


def test_a_group_asks_for_it_before_wrap_or_never(tmp_path: Path) -> None:
    """Else a commit would be of another layout than its groups say, and could not be resumed."""
    torch.manual_seed(0)
    model = TinyLM()
    with wrapped(model, tmp_path, "device") as ours:
        model(*batch(0)).backward()
        decay = ours.param_groups[0].pop("average_decay")
        with pytest.raises(ValueError, match="lacks 'average_decay'"):
            ours.step()
        ours.param_groups[0]["average_decay"] = decay
        ours.step()
    (tmp_path / "plain").mkdir()
    other = TinyLM()
    options: Any = {**PLACES["device"], "rates": overspill.Rates(), "nvme": tmp_path / "plain"}
    with overspill.wrap(other, adamw(other), **options) as plain:
        with pytest.raises(ValueError, match="has 'average_decay'"):
            plain.load_state_dict(averaged(TinyLM()).state_dict())
        other(*batch(0)).backward()
        plain.param_groups[0]["average_decay"] = decay
        with pytest.raises(ValueError, match="has 'average_decay'"):
            plain.step()
        del plain.param_groups[0]["average_decay"]
        plain.step()


def test_it_is_committed_resumed_and_rolled_back(tmp_path: Path) -> None:
    plain = Plain(torch.float32)
    model = TinyLM(unused=True)
    model.load_state_dict(plain.model.state_dict())
    with wrapped(model, tmp_path, "device") as ours:
        run(model, ours, 2)
        plain.train(2)
        ours.commit()
        run(model, ours, 1, 2)
        ours.rollback()
        assert same(dict(ours.named_averages()), plain.averages())
        run(model, ours, 1, 2)
        plain.train(1, 2)
    again = TinyLM(unused=True)
    ours, _ = overspill.resume(again, tmp_path, rates=overspill.Rates(), device=CPU)
    with ours:
        assert ours.param_groups[0]["average_decay"] == DECAY
        run(again, ours, 2, 3)
        plain.train(2, 3)
        assert same(dict(ours.named_averages()), plain.averages())


def test_a_state_without_it_starts_it_at_the_weights(tmp_path: Path) -> None:
    """That of an optimizer that has trained before ``wrap``, and one that is loaded."""
    torch.manual_seed(0)
    model = TinyLM()
    before = adamw(model)
    train(model, before, 2)
    there = weights(model)
    state = before.state_dict()
    overspill.ema(before, DECAY)
    options: Any = {**PLACES["device"], "rates": overspill.Rates(), "durable": False}
    with overspill.wrap(model, before, **options) as ours:
        assert same(dict(ours.named_averages()), there)
        train(model, ours, 2)
        assert not same(dict(ours.named_averages()), there)
        kept = ours.state_dict()
        model.load_state_dict(there)
        ours.load_state_dict(state)
        assert same(dict(ours.named_averages()), there)
        ours.load_state_dict(kept)
        loaded = dict(ours.named_averages())
        for number, p in enumerate(p for group in ours.param_groups for p in group["params"]):
            name = next(name for name, each in model.named_parameters() if each is p)
            assert torch.equal(loaded[name].cpu(), kept["state"][number]["average"].cpu())


@pytest.mark.parametrize("units", [1, 3])
def test_averages_that_were_read_and_then_loaded_are_those_loaded(units: int) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(units)))
    optimizer = overspill.ema(adamw(model), DECAY)
    with overspill.wrap(
        model, optimizer, device=CPU, host_memory="64MiB", rates=overspill.Rates()
    ) as ours:
        model(torch.ones(2, 8)).sum().backward()
        ours.step()
        ours.zero_grad()
        next(iter(ours.named_averages()))
        state = ours.state_dict()
        for each in state["state"].values():
            each["average"] = torch.full_like(each["average"], 7.0)
        ours.load_state_dict(state)
        for name, average in ours.named_averages():
            assert torch.all(average == 7.0), name


def test_only_evaluation_goes_on_inside(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TinyLM()
    with wrapped(model, tmp_path, "device") as ours:
        run(model, ours, 1)
        now = weights(model)
        with ours.averaged():
            refused = [
                lambda: model(*batch(1)), lambda: model.blocks[0](torch.zeros(1, 64)), ours.step,
                ours.commit, ours.rollback, ours.state_dict, lambda: overspill.unwrap(model),
                lambda: ours.averaged().__enter__(), lambda: list(ours.named_averages()),
                lambda: overspill.materialized(model).__enter__(),
                lambda: ours.load_state_dict({"state": {}, "param_groups": []}),
            ]  # fmt: skip
            for use in refused:
                with pytest.raises(OffloadError, match="averages instead of its weights"):
                    use()
        assert same(weights(model), now)
        run(model, ours, 1, 1)


def test_a_step_that_is_half_taken_is_taken_first(tmp_path: Path) -> None:
    """``update="backward"`` has updated units whose step is to come."""
    torch.manual_seed(0)
    model = TinyLM()
    with wrapped(model, tmp_path, "device", update="backward") as ours:
        run(model, ours, 1)
        model(*batch(1)).backward()
        with pytest.raises(OffloadError, match="cannot be changed now"), ours.averaged():
            pass
        ours.step()
        ours.zero_grad()
        with ours.averaged(), torch.no_grad():
            model(*batch(2))
        run(model, ours, 1, 2)


def test_an_edit_inside_is_one_of_the_average(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TinyLM()
    with wrapped(model, tmp_path, "device") as ours, torch.no_grad():
        with torch.enable_grad():
            run(model, ours, 2)
        now = weights(model)
        with ours.averaged():
            model.head.weight.zero_()
        assert same(weights(model), now)
        averages = dict(ours.named_averages())
        assert not averages["head.weight"].any()
        assert averages["embed.weight"].any()


def test_without_one_it_says_so(tmp_path: Path) -> None:
    model = TinyLM()
    options: Any = {**PLACES["device"], "rates": overspill.Rates(), "durable": False}
    with overspill.wrap(model, adamw(model), **options) as ours:
        for use in (
            lambda: ours.averaged().__enter__(), lambda: list(ours.named_averages()),
            lambda: ours.save_average(tmp_path / "out"), lambda: overspill.ema(ours, DECAY),
        ):  # fmt: skip
            with pytest.raises(OffloadError, match=r"overspill\.ema\(optimizer, decay\) before"):
                use()
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("durable", [True, False])
def test_the_weights_come_back_whatever_ends_the_block(durable: bool, tmp_path: Path) -> None:
    """An exception at drawn lines of the engine, on the way in, inside and on the way out."""
    torch.manual_seed(0)
    model = TinyLM(width=32, depth=2)
    place: Any = {"device": SIM, "device_memory": "300KiB", "host_memory": "64MiB"}
    optimizer = overspill.wrap(
        model, averaged(model), nvme=tmp_path, rates=overspill.Rates(), durable=durable, **place
    )

    def look(at: int | None) -> int:
        with (
            Tripwire(at) as trip, contextlib.suppress(Interrupted), torch.no_grad(),
            optimizer.averaged(),
        ):  # fmt: skip
            model(*batch(0))
        return trip.lines

    with optimizer:
        run(model, optimizer, 2)
        now, averages = weights(model), dict(optimizer.named_averages())
        lines = look(None)
        for at in range(1, lines, max(1, lines // 60)):
            look(at)
            if at % 3 == 1:
                model(*batch(0)).backward()
            elif at % 3 == 2:
                optimizer.state_dict()
            optimizer.zero_grad()
            assert same(weights(model), now), at
            assert same(dict(optimizer.named_averages()), averages), at
        expected = run(model, optimizer, 1, 2)
    assert expected[0] > 0


def test_a_close_inside_commits_the_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TinyLM()
    optimizer = wrapped(model, tmp_path, "device", commit_every=100)
    run(model, optimizer, 3)
    now, averages = weights(model), dict(optimizer.named_averages())
    with optimizer.averaged():
        optimizer.close()
    again = TinyLM()
    ours, _ = overspill.resume(again, tmp_path, rates=overspill.Rates(), device=CPU)
    with ours:
        assert ours.step_count == 3
        assert same(weights(again), now)
        assert same(dict(ours.named_averages()), averages)


def test_it_is_saved_as_files_that_transformers_reads(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_head=2, n_layer=2, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    options: Any = {"device": SIM, "device_memory": "300KiB", "host_memory": "64MiB"}
    inner = overspill.ema(torch.optim.AdamW(model.parameters(), lr=1e-2), DECAY)
    ids = torch.arange(16).view(1, 16)
    with overspill.wrap(model, inner, durable=False, rates=overspill.Rates(), **options) as ours:
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
            ours.step()
            ours.zero_grad()
        averages = dict(ours.named_averages())
        ours.save_average(tmp_path / "average")
        with pytest.raises(OffloadError, match="there already"):
            ours.save_average(tmp_path / "average")
    read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "average")
    assert same({name: p.detach() for name, p in read.named_parameters()}, averages)
