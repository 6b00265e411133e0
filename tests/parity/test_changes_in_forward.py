"""Modules that change their own weights in place when they run, as Gemma 3n clamps some."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import overspill
from tests.devices import CPU, DEVICE, SIM, normal, plainly
from tests.parity.test_in_place import READER

PLACES: dict[str, dict[str, Any]] = {
    "host": {"device": CPU, "host_memory": "4MiB"},
    "disk": {"device": CPU, "host_memory": "90KiB"},
    "device": {"device": SIM, "device_memory": "4MiB", "host_memory": "4MiB"},
    "streamed": {"device": SIM, "device_memory": "40KiB", "host_memory": "90KiB"},
}
if CPU != "cpu":
    PLACES["disk"] = PLACES["streamed"]


@torch.no_grad()
def _clamps_nothing(weight: nn.Parameter) -> None:
    weight.data.clamp_(-100.0, 100.0)


def clamps(weight: nn.Parameter) -> None:
    weight.data.clamp_(-0.05, 0.05)


@torch.no_grad()
def _clamps_without_grad(weight: nn.Parameter) -> None:
    weight.clamp_(-0.05, 0.05)


def _decays(weight: nn.Parameter) -> None:
    """Another change in every forward, that of a checkpoint included."""
    weight.data.mul_(0.98)


CHANGES = [_clamps_nothing, clamps, _clamps_without_grad, _decays]


class Changes(nn.Module):
    """``after``: the change comes when the weight was used."""

    def __init__(self, change: Callable[[nn.Parameter], None], frozen: bool, after: bool) -> None:
        super().__init__()
        self.inner, self.other = nn.Linear(32, 32), nn.Linear(32, 32)
        self.inner.weight.requires_grad_(not frozen)
        self.change, self.after = change, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not self.after:
            self.change(self.inner.weight)
        found = self.inner(x) + self.other(x)
        if self.training and self.after:
            self.change(self.inner.weight)
        return found + x


class Net(nn.Sequential):
    """``how``: with a checkpoint around each layer, reentrant or not."""

    how = "plain"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            if self.how == "plain":
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.how == "reentrant")
        return x


def build(change: Any, *, frozen: bool = False, after: bool = False, how: str = "plain") -> Net:
    torch.manual_seed(0)
    model = Net(*(Changes(change, frozen, after) for _ in range(4))).to(DEVICE)
    model.how = how
    return model


def _losses(model: nn.Module, optimizer: Any) -> list[float]:
    found = []
    for number in range(4):
        loss = model(normal(number, 4, 32).requires_grad_()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def _compare(made: Callable[[], Net], place: str, folder: Path, **options: Any) -> None:
    plain, model = made(), made()
    expected = _losses(plain, plainly(overspill.optim.AdamW, plain.parameters(), lr=0.01))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    units = [f"{n}" for n in range(4)]
    # A commit that saves the very memory that a module changes is refused.
    durable = place in ("device", "streamed") or made()[0].change is _clamps_nothing
    options = {"nvme": folder, "durable": durable, "units": units, **PLACES[place], **options}
    with overspill.wrap(model, inner, **options) as optimizer:
        assert _losses(model, optimizer) == expected
        state = plain.state_dict()
        assert all(torch.equal(v, state[n]) for n, v in model.state_dict().items())


@pytest.mark.parametrize("update", ["step", "next_forward", "backward"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change", CHANGES)
def test_the_weights_are_those_of_torch(
    change: Callable[[nn.Parameter], None], place: str, update: str, tmp_path: Path
) -> None:
    _compare(lambda: build(change), place, tmp_path, update=update)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("change", [clamps, _decays])
def test_after_the_use_and_of_a_frozen_weight(
    change: Callable[[nn.Parameter], None], frozen: bool, place: str, tmp_path: Path
) -> None:
    _compare(lambda: build(change, frozen=frozen, after=True), place, tmp_path)


@pytest.mark.parametrize("update", ["step", "next_forward"])
@pytest.mark.parametrize("how", ["checkpoint", "reentrant"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change", CHANGES)
def test_under_a_checkpoint(
    change: Callable[[nn.Parameter], None], place: str, how: str, update: str, tmp_path: Path
) -> None:
    _compare(lambda: build(change, how=how), place, tmp_path, update=update)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_unit_that_would_be_computed_again(
    change: Callable[[nn.Parameter], None], place: str, tmp_path: Path
) -> None:
    """Its weights would be changed twice, so its activations are kept."""
    _compare(lambda: build(change), place, tmp_path, activations="recompute")


@pytest.mark.parametrize("how", ["checkpoint", "reentrant"])
@pytest.mark.parametrize("place", PLACES)
def test_a_change_in_backward_after_the_update_is_refused(
    place: str, how: str, tmp_path: Path
) -> None:
    model = build(_decays, how=how)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"nvme": tmp_path, "update": "backward", "durable": False, **PLACES[place]}
    with (
        overspill.wrap(model, inner, **options) as optimizer,
        pytest.raises(overspill.OffloadError, match=r"during backward.*Use update='next_forward'"),
    ):
        _losses(model, optimizer)


@pytest.mark.parametrize("place", PLACES)
def test_after_the_use_by_the_parent_of_its_module(place: str, tmp_path: Path) -> None:
    """Backward uses what the weight was changed to, as in plain PyTorch, or says that it cannot."""
    plain, model = (build(_decays, after=True) for _ in range(2))
    its = plainly(overspill.optim.AdamW, plain.parameters(), lr=0.01)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    units = [f"{n}.{name}" for n in range(4) for name in ("inner", "other")]
    options = {"nvme": tmp_path, "durable": False, "units": units, **PLACES[place]}
    with overspill.wrap(model, inner, **options) as optimizer:
        if place in ("host", "device"):
            assert _losses(model, optimizer) == _losses(plain, its)
        else:
            with pytest.raises(RuntimeError, match=r"in place after the forward.*'\d\.inner'"):
                _losses(model, optimizer)


class _Base(nn.Linear):
    """A unit that is not trained."""

    def __init__(self, change: Callable[[nn.Parameter], None]) -> None:
        super().__init__(64, 64, bias=False)
        self.weight.requires_grad_(False)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self.weight)
        return super().forward(x).tanh()


def _based(change: Callable[[nn.Parameter], None]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(_Base(change) for _ in range(8)), nn.Linear(64, 64)).to(DEVICE)


def _steps(model: nn.Sequential, optimizer: Any) -> list[float]:
    found = []
    for number in range(4):
        loss = model(normal(number, 4, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


IN_FORMAT: dict[str, dict[str, Any]] = {
    "host": {"device": CPU, "host_memory": "4MiB"},
    "disk": {"device": CPU, "host_memory": "250KiB"},
    "device": {"device": SIM, "device_memory": "64MiB", "host_memory": "4MiB"},
    "streamed": {"device": SIM, "device_memory": "120KiB", "host_memory": "2MiB"},
}
IN_PLACE: dict[str, dict[str, Any]] = {
    "host": {"device": CPU, "host_memory": f"{READER + 1000}KiB"},
    "disk": {"device": CPU, "host_memory": f"{READER + 120}KiB"},
    "device": {"device": SIM, "device_memory": "64MiB", "host_memory": f"{READER + 1000}KiB"},
    "streamed": {"device": SIM, "device_memory": "120KiB", "host_memory": f"{READER + 140}KiB"},
}


@pytest.mark.parametrize("kept", ["nf4", "int8", "in place"])
@pytest.mark.parametrize("place", IN_FORMAT if CPU == "cpu" else ["device", "streamed"])
@pytest.mark.parametrize("change", [_clamps_nothing, _decays])
@pytest.mark.parametrize("durable", [False, True])
def test_of_what_cannot_be_changed(
    durable: bool, change: Callable[[nn.Parameter], None], place: str, kept: str, tmp_path: Path
) -> None:
    """It is refused where the change would be lost; one to the same bits is none."""
    model, store = _based(change), tmp_path / "store"
    store.mkdir()
    options = {"nvme": store, "durable": durable}
    if kept == "in place":
        file = tmp_path / "base.safetensors"
        save_file({n: t.cpu().clone() for n, t in model.state_dict().items()}, file)
        options |= {"weights": file, **IN_PLACE[place]}
    else:
        options |= {"frozen": kept, **IN_FORMAT[place]}
    inner = torch.optim.AdamW(model[-1].parameters(), lr=0.01)
    with overspill.wrap(model, inner, rates=overspill.Rates(), **options) as optimizer:
        fixed = len(optimizer._engine.runtime.executor.layout.unchangeable)
        before = {n: t.clone() for n, t in model[:-1].state_dict().items()}
        if place == "device" and not durable:  # the only copy is the one that compute uses
            assert fixed == (0 if kept == "in place" else 8)
            twin = _based(change)
            twin.load_state_dict(model.state_dict())
            its = plainly(overspill.optim.AdamW, twin[-1].parameters(), lr=0.01)
            assert _steps(model, optimizer) == _steps(twin, its)
            return
        assert fixed == 8
        if change is _clamps_nothing:
            _steps(model, optimizer)
        else:
            with pytest.raises(overspill.OffloadError, match="be changed by its module's forward"):
                _steps(model, optimizer)
        assert all(torch.equal(t, before[n]) for n, t in model[:-1].state_dict().items())


def test_a_clamp_that_changes_nothing_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later ones are compared with what the parameter held when its module began."""
    from overspill.state.param_access import ParamAccess

    written: list[int] = []
    write = ParamAccess._write
    monkeypatch.setattr(
        ParamAccess, "_write",
        lambda self, values, **how: (written.extend(values), write(self, values, **how)),
    )  # fmt: skip
    _compare(lambda: build(_clamps_nothing), "streamed", tmp_path)
    assert len(written) == 4, "one parameter of each of four layers, in the first forward"


def test_a_change_is_committed_and_resumed(tmp_path: Path) -> None:
    def made() -> Net:
        return build(_decays, frozen=True)

    plain, model = made(), made()
    its = plainly(overspill.optim.AdamW, plain.parameters(), lr=0.01)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    with overspill.wrap(model, inner, nvme=tmp_path, **PLACES["streamed"]) as optimizer:
        _losses(model, optimizer)
    _losses(plain, its)
    again = made()
    inner = torch.optim.AdamW(again.parameters(), lr=0.01)
    optimizer, _ = overspill.resume(again, tmp_path, inner, **PLACES["streamed"])
    with optimizer:
        for name, value in again.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name]), name
        assert _losses(again, optimizer) == _losses(plain, its)


def test_after_the_forward_by_a_tensor_of_then_is_refused(tmp_path: Path) -> None:
    kept = []

    def keeps(weight: nn.Parameter) -> None:
        if not kept:
            kept.append(weight.detach())

    model = build(keeps)
    inner = torch.optim.AdamW(model.parameters())
    with overspill.wrap(model, inner, nvme=tmp_path, **PLACES["streamed"]) as optimizer:
        model(normal(0, 4, 32)).square().mean().backward()
        optimizer.step()
        kept[0].zero_()
        with pytest.raises(overspill.OffloadError, match=r"0\.inner\.weight.*made in it"):
            model(normal(0, 4, 32))
        kept.clear()


def test_a_change_before_an_error_stays(tmp_path: Path) -> None:
    class Fails(Changes):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise ValueError("amid forward")

    model = build(clamps)
    model[3] = Fails(clamps, False, False).to(DEVICE)
    before = model[3].inner.weight.detach().clone()
    inner = torch.optim.AdamW(model.parameters())
    with overspill.wrap(model, inner, nvme=tmp_path, **PLACES["streamed"]):
        with pytest.raises(ValueError, match="amid forward"):
            model(normal(0, 4, 32))
        assert torch.equal(model[3].inner.weight, before.clamp(-0.05, 0.05))


@pytest.mark.parametrize("update", ["step", "next_forward", "backward"])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("ends", [False, True])
def test_training_goes_on_or_ends_after_an_exception(
    ends: bool, kind: type[BaseException], update: str, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def interrupted(weight: nn.Parameter) -> None:
        weight.data.mul_(0.98)
        if raises:
            raise kind

    raises: list[int] = []
    model = build(_decays)
    model[3].change = interrupted
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"units": list("0123"), "update": update, **PLACES["streamed"]}
    with overspill.wrap(model, inner, nvme=tmp_path, **options) as optimizer:
        _losses(model, optimizer)
        raises.append(1)
        with pytest.raises(kind):
            model(normal(2, 4, 32))
        raises.clear()
        if not ends:
            _losses(model, optimizer)
    assert not caplog.records


@pytest.mark.parametrize("activations", ["auto", "recompute"])
@pytest.mark.parametrize("place", PLACES)
def test_an_embedding_that_renormalises(place: str, activations: str, tmp_path: Path) -> None:
    """``max_norm`` scales the rows that are looked up, in place."""

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        table = nn.Embedding(64, 32, max_norm=1.0)
        return nn.Sequential(table, *(nn.Linear(32, 32) for _ in range(4))).to(DEVICE)

    def losses(model: nn.Sequential, optimizer: Any) -> list[float]:
        found = []
        for number in range(4):
            ids = (normal(number, 16).abs() * 30).long().clamp(max=63)
            loss = model(ids).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    plain, model = build(), build()
    expected = losses(plain, plainly(overspill.optim.AdamW, plain.parameters(), lr=0.01))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"nvme": tmp_path, "durable": False, "activations": activations, **PLACES[place]}
    with overspill.wrap(model, inner, **options) as optimizer:
        assert losses(model, optimizer) == expected
        assert torch.equal(model[0].weight.detach(), plain[0].weight.detach())


@pytest.mark.parametrize("activations", ["auto", "recompute"])
def test_gemma_3n_trains(activations: str, tmp_path: Path) -> None:
    hf = pytest.importorskip("transformers")
    config = hf.Gemma3nTextConfig(
        vocab_size=64, vocab_size_per_layer_input=64, hidden_size=32, intermediate_size=64,
        hidden_size_per_layer_input=8, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, laurel_rank=4, num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.0] * 4, altup_coef_clip=0.1,
        layer_types=["full_attention"] * 4,
    )  # fmt: skip

    def made() -> Any:
        torch.manual_seed(0)
        return hf.Gemma3nForCausalLM(config).train().to(DEVICE)

    def losses(model: Any, optimizer: Any) -> list[float]:
        found = []
        for number in range(3):
            ids = (normal(number, 2, 8) * 100).long().abs() % 64
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    plain, model = made(), made()
    its = plainly(overspill.optim.AdamW, plain.parameters(), lr=0.01)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    with overspill.wrap(
        model, inner, nvme=tmp_path, device=CPU, host_memory="300KiB", rates=overspill.Rates(),
        activations=activations,
    ) as optimizer:  # fmt: skip
        assert losses(model, optimizer) == losses(plain, its)
