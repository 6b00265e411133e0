"""What modules add to their state dicts by themselves is committed, saved, exported and resumed."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import overspill
from overspill.durable.export import export_store
from overspill.state.module_states import added_tensors
from tests.devices import CPU, DEVICE, normal


class Counting(nn.Linear):
    """Its extra state is a dict; it may keep a tensor that is neither buffer nor parameter too."""

    def __init__(self, *, scaled: bool = False) -> None:
        super().__init__(8, 8)
        self.rows, self.note = 0, [1]
        self.scale = torch.ones(3, device=DEVICE) if scaled else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += len(x)
        if self.scale is not None:
            self.scale.add_(1)
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return {"rows": self.rows, "note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.rows, self.note = state["rows"], state["note"]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.scale is not None:
            destination[prefix + "scale"] = self.scale if keep_vars else self.scale.detach()


class Tallying(nn.Linear):
    """Its extra state is a tensor."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.rows = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += len(x)
        return super().forward(x)

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([self.rows], device="cpu")

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.rows = int(state)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Counting(scaled=True), Tallying(), Counting())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for number in range(steps):
        model(normal(number, 4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def states(model: Any) -> tuple[Any, ...]:
    first, second, third = model
    return first.rows, first.note, first.scale.tolist(), second.rows, third.rows


def test_it_is_resumed(tmp_path: Path) -> None:
    model = build()
    with overspill.wrap(model, adamw(model), nvme=tmp_path, device=CPU) as optimizer:
        model[0].note = [1, "two"]
        train(model, optimizer, 3)
    assert states(model) == (12, [1, "two"], [4.0] * 3, 12, 12)
    again = build()
    optimizer, _ = overspill.resume(again, tmp_path, adamw(again), device=CPU)
    assert states(again) == states(model)
    optimizer.close()


def test_a_resume_that_fails_changes_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    with overspill.wrap(model, adamw(model), nvme=tmp_path, device=CPU) as optimizer:
        train(model, optimizer, 3)
    again = build()
    before = states(again)
    monkeypatch.setattr(overspill.engine.Engine, "restart", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        overspill.resume(again, tmp_path, adamw(again), device=CPU)
    assert states(again) == before


def test_a_model_without_it_is_refused(tmp_path: Path) -> None:
    model = build()
    with overspill.wrap(model, adamw(model), nvme=tmp_path, device=CPU) as optimizer:
        train(model, optimizer, 1)
    other = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(overspill.OffloadError, match=r"the commit holds '0\.\w+'.*build the model"):
        overspill.resume(other, tmp_path, adamw(other), device=CPU)
    as_then = build()
    overspill.resume(as_then, tmp_path, adamw(as_then), device=CPU)[0].close()
    assert as_then[0].rows == 4
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_what_has_no_place_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    with overspill.wrap(model, adamw(model), nvme=tmp_path, device=CPU) as optimizer:
        train(model, optimizer, 1)
    longer = build()
    longer[0].scale = torch.ones(4, device=DEVICE)
    optimizer, _ = overspill.resume(longer, tmp_path, adamw(longer), device=CPU)
    optimizer.close()
    assert "not restored: 0.scale" in caplog.text
    caplog.clear()
    as_then = build()
    optimizer, _ = overspill.resume(as_then, tmp_path, adamw(as_then), device=CPU)
    optimizer.close()
    assert as_then[0].scale.tolist() == [2.0] * 3 and not caplog.records


def test_tensors_of_it_are_in_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = tmp_path / "store"
    store.mkdir()
    model = build()
    with overspill.wrap(model, adamw(model), nvme=store, device=CPU) as optimizer:
        train(model, optimizer, 2)
        optimizer.save(tmp_path / "saved")
        assert (
            "not saved, because safetensors files hold only dense tensors: 0._extra" in caplog.text
        )
        names = set(model.state_dict())
        torch.save(model[0].get_extra_state(), tmp_path / "state.pt")  # the remedy
    caplog.clear()
    export_store(store, tmp_path / "exported")
    assert "not saved, because safetensors files hold only dense tensors: 0._extra" in caplog.text
    for out in ("saved", "exported"):
        file = load_file(tmp_path / out / "model.safetensors")
        assert file["0.scale"].tolist() == [3.0] * 3
        assert file["1._extra_state"].tolist() == [8]
        assert names - set(file) == {"0._extra_state", "2._extra_state"}
        again = build()
        with overspill.wrap(
            again, adamw(again), device=CPU, weights=tmp_path / out / "model.safetensors"
        ):
            again[0].set_extra_state(torch.load(tmp_path / "state.pt"))
            assert again[0].rows == again[1].rows == 8 and again[0].scale.tolist() == [3.0] * 3


def test_what_cannot_be_read_back_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build()
    model[0].note = [Path("a")]
    with overspill.wrap(model, adamw(model), nvme=tmp_path, device=CPU) as optimizer:
        train(model, optimizer, 3)
    (told,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "commits do not include extra state 0._extra_state" in told.getMessage()
    again = build()
    optimizer, _ = overspill.resume(again, tmp_path, adamw(again), device=CPU)
    assert again[0].rows == 0 and again[2].rows == 12
    optimizer.close()


class Computed(nn.Linear):
    """As torch.ao's: an entry is made for the state dict, and read by code of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__(8, 8)
        self.kind, self.count = kind, 0
        if kind == "hooks":
            self.register_state_dict_post_hook(lambda *given: self.written(*given))
            self.register_load_state_dict_pre_hook(lambda *given: self.loaded(*given))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x)

    def written(self, _: Any, state: Any, prefix: str, meta: Any) -> None:
        state[prefix + "count"] = torch.tensor(self.count)

    def loaded(self, _: Any, state: Any, prefix: str, *more: Any) -> None:
        found = state.pop(prefix + "count", self.count)
        self.count = int(found.to_dense() if isinstance(found, torch.Tensor) else found)

    def _save_to_state_dict(self, state: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        if self.kind != "hooks":
            count = torch.tensor(self.count)
            made = {"int": self.count, "sparse": count.view(1).to_sparse()}
            made["complex128"] = count.to(torch.complex128)
            state[prefix + "count"] = made.get(self.kind, count)

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        if self.kind != "hooks":
            self.loaded(None, state, prefix)
        super()._load_from_state_dict(state, prefix, *more)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", ["tensor", "int", "sparse", "hooks"])
def test_entries_that_modules_compute(kind: str, shared: bool, tmp_path: Path) -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        first = Computed(kind)
        return nn.Sequential(first, nn.Linear(8, 8), *([first] if shared else []))

    store = tmp_path / "store"
    store.mkdir()
    model = made()
    with overspill.wrap(model, adamw(model), nvme=store, device=CPU) as optimizer:
        train(model, optimizer, 3)
        optimizer.save(tmp_path / "out")
        count = model[0].count
        assert count == (6 if shared else 3)
        model[0].count = 100
        optimizer.rollback()
        assert model[0].count == count
    again = made()
    optimizer, _ = overspill.resume(again, store, adamw(again), device=CPU)
    assert again[0].count == count
    optimizer.close()
    if kind in ("tensor", "hooks"):
        loaded = made()
        with overspill.wrap(loaded, adamw(loaded), device=CPU, weights=tmp_path / "out"):
            assert loaded[0].count == count


class Failing(nn.Linear):
    """Its extra state raises, or cannot be copied."""

    def __init__(self, kind: str) -> None:
        super().__init__(8, 8)
        self.kind = kind

    def get_extra_state(self) -> Any:
        if self.kind == "error":
            raise RuntimeError("not built yet")
        return {"lock": threading.Lock()}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("there was none")


@pytest.mark.parametrize("kind", ["error", "lock"])
def test_extra_state_that_raises_or_cannot_be_copied(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on; one warning says that commits do not have it."""
    model = nn.Sequential(Failing(kind), nn.Linear(8, 8))
    with overspill.wrap(model, adamw(model), device=CPU) as optimizer:
        train(model, optimizer, 1)
        overspill.unwrap(model)
    assert not caplog.records
    with overspill.wrap(model, adamw(model), nvme=tmp_path, device=CPU) as optimizer:
        train(model, optimizer, 3)
    (told,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "commits do not include extra state 0" in told.getMessage()
    optimizer, _ = overspill.resume(model := nn.Sequential(Failing(kind), nn.Linear(8, 8)),
                                    tmp_path, adamw(model), device=CPU)  # fmt: skip
    train(model, optimizer, 1)
    optimizer.close()


def test_sparse_buffers(tmp_path: Path) -> None:
    def made() -> nn.Module:
        model = nn.Linear(8, 8)
        model.register_buffer("graph", torch.eye(8, device=DEVICE).to_sparse())
        return model

    model = made()
    with overspill.wrap(model, adamw(model), nvme=tmp_path, device=CPU) as optimizer:
        train(model, optimizer, 2)
    again = made()
    optimizer, _ = overspill.resume(again, tmp_path, adamw(again), device=CPU)
    assert torch.equal(again.graph.to_dense(), torch.eye(8, device=DEVICE))
    optimizer.close()


class Renaming(nn.Linear):
    """Its weight has another name in files."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_state_dict_post_hook(lambda _, state, prefix, meta: state.__setitem__(
            prefix + "w", state.pop(prefix + "weight")))  # fmt: skip
        self.register_load_state_dict_pre_hook(lambda _, state, prefix, *more: state.update(
            {prefix + "weight": state.pop(prefix + "w")} if prefix + "w" in state else {}
        ))  # fmt: skip


class Container(nn.Sequential):
    """Its hook writes an entry of a child's, changes one, and one that no module loads."""

    def __init__(self, *, strict: bool) -> None:
        super().__init__(nn.Linear(8, 8))

        def written(_: Any, state: Any, prefix: str, meta: Any) -> None:
            state[prefix + "0.scale"] = torch.ones(2)
            state[prefix + "all"] = [torch.ones(2), torch.tensor(float("nan"))]
            if strict:
                state[prefix + "0.w"] = state[prefix + "0.weight"]

        self.register_state_dict_post_hook(written)


@pytest.mark.parametrize("kind", ["renaming", "container", "strict container"])
def test_hooks_that_expect_a_whole_state_dict(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are called for one module alone: what that does not give is named, or is no state."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        first = Renaming() if kind == "renaming" else Container(strict=kind != "container")
        return nn.Sequential(first, nn.Linear(8, 8))

    store = tmp_path / "store"
    store.mkdir()
    model = made()
    with overspill.wrap(model, adamw(model), nvme=store, device=CPU) as optimizer:
        train(model, optimizer, 2)
        optimizer.save(tmp_path / "out")
        state = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert ("commits do not include extra state 0" in caplog.text) == ("strict" in kind)
    caplog.clear()
    assert not added_tensors(made()).keys() - {"0.0.scale"}
    assert ("extra state of module '0' is not saved" in caplog.text) == ("strict" in kind)
    caplog.clear()
    again = made()
    optimizer, _ = overspill.resume(again, store, adamw(again), device=CPU)
    assert ("not restored" in caplog.text) == (kind == "container")
    train(again, optimizer, 1)
    optimizer.close()
    file = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(file[name], value) for name, value in state.items())


def test_an_error_of_a_module_while_it_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The weights are given back all the same."""
    model = build()
    with overspill.wrap(model, adamw(model), nvme=tmp_path, device=CPU) as optimizer:
        train(model, optimizer, 1)
    again = build()

    def refuse(self: Any, state: Any) -> None:
        raise RuntimeError("not now")

    monkeypatch.setattr(Tallying, "set_extra_state", refuse)
    with pytest.raises(RuntimeError, match="not now"):
        overspill.resume(again, tmp_path, adamw(again), device=CPU)
    assert "extra state of module '1' was not given back: not now" in caplog.text


def test_a_dtype_that_files_lack(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Computed("complex128"), nn.Linear(8, 8))
    (tmp_path / "store").mkdir()
    with overspill.wrap(model, adamw(model), device=CPU, nvme=tmp_path / "store") as optimizer:
        train(model, optimizer, 1)
        optimizer.save(tmp_path / "out")
    assert "safetensors files hold only dense tensors: 0.count" in caplog.text


def test_extra_state_of_a_base_with_adapters(tmp_path: Path) -> None:
    """In files it has the name from before the adapters."""
    peft = pytest.importorskip("peft")
    file = tmp_path / "base.safetensors"
    base = nn.Sequential(Tallying(), nn.Linear(8, 8))
    base[0].rows = 7
    save_file({name: value.cpu() for name, value in base.state_dict().items()}, file)
    again = nn.Sequential(Tallying(), nn.Linear(8, 8))
    model = peft.get_peft_model(again, peft.LoraConfig(r=2, target_modules=["1"]))
    with overspill.wrap(model, adamw(model), device=CPU, weights=file):
        assert again[0].rows == 7
