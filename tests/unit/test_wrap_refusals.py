"""Bad input: a clear error with need, have and remedy, and nothing left behind."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from tests.models import TinyLM, adamw, batch, train, weights

NVME: dict[str, Any] = {"device": "sim", "device_memory": "700KiB", "host_memory": "1500KiB"}


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path) -> Any:
    before = threading.active_count()
    yield
    assert threading.active_count() == before
    assert not [p for p in tmp_path.rglob("*") if p.name == "overspill.store"]


def refuse(kind: type[Exception], words: str, optimizer: Any = None, **options: Any) -> TinyLM:
    torch.manual_seed(0)
    model = TinyLM()
    expected = weights(model)
    with pytest.raises(kind, match=words):
        overspill.wrap(model, optimizer or adamw(model), **options)
    assert all(torch.equal(v, expected[k]) for k, v in weights(model).items())
    train(model, adamw(model), 1)
    return model


def test_device_too_small_for_one_unit(tmp_path: Path) -> None:
    refuse(
        overspill.BudgetError,
        r"unit 'blocks.0' with its gradient needs .* of device memory; 100 KiB of 100 KiB is free; "
        r"raise device_memory",
        nvme=tmp_path, device="sim", device_memory="100KiB", host_memory="1GiB",
    )  # fmt: skip


def test_host_too_small_for_one_unit(tmp_path: Path) -> None:
    refuse(
        overspill.BudgetError, "of host memory; 100 KiB of 100 KiB is free; raise host_memory",
        nvme=tmp_path, device="cpu", host_memory="100KiB",
    )  # fmt: skip


def test_host_too_small_without_a_disk() -> None:
    refuse(overspill.BudgetError, "give a directory with nvme=", device="cpu", host_memory="1MiB")


def test_disk_too_small(tmp_path: Path) -> None:
    refuse(
        overspill.BudgetError, "the store needs .* of nvme memory; .* durable=False",
        nvme=tmp_path, nvme_memory="100KiB", **NVME,
    )  # fmt: skip


def test_plan_never_raises_for_lack_of_room(tmp_path: Path) -> None:
    model = TinyLM()
    plan = overspill.plan(model, adamw(model), device="cpu", host_memory="100KiB", nvme=tmp_path)
    assert not plan.fits and plan.shortfalls[0].tier == "host"
    assert plan.shortfalls[0].need_bytes > plan.shortfalls[0].have_bytes == 100 * 1024
    assert "does not fit" in str(plan)
    good = overspill.plan(model, adamw(model), nvme=tmp_path, **NVME)
    assert good.fits and good.link_bytes["read"] > 0 and good.disk_bytes > 0
    assert good.tier_bytes["host"] <= 1500 * 1024  # type: ignore[index]
    assert len(good.placement) == 7 and "embed" in good.placement


def test_folder_missing(tmp_path: Path) -> None:
    refuse(ValueError, "is not a directory; create it first", nvme=tmp_path / "no", **NVME)


def test_unknown_option() -> None:
    refuse(TypeError, "did you mean 'host_memory'", host_memry="1GiB")


def test_split_master_of_fp32_weights() -> None:
    refuse(ValueError, "for bf16 weights", device="cpu", master="split")


def test_verbose_logs_every_unit(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    model = TinyLM()
    with caplog.at_level("INFO", logger="overspill"):
        overspill.wrap(model, adamw(model), nvme=tmp_path, verbose=True, threads=1, **NVME).close()
    assert len([r for r in caplog.records if "unit blocks." in r.message]) == 4


def test_unknown_device() -> None:
    refuse(ValueError, "sim", device="tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_device_that_is_not_there() -> None:
    refuse((ValueError, overspill.OffloadError), "cuda", device="cuda")  # type: ignore[arg-type]


def test_unsupported_optimizer() -> None:
    model = TinyLM()
    with pytest.raises(TypeError, match="AdamW"):
        overspill.wrap(model, torch.optim.LBFGS(model.parameters()), device="cpu")


def test_foreign_parameters() -> None:
    refuse(ValueError, "not in the model", torch.optim.AdamW(nn.Linear(2, 2).parameters()))


def test_parameter_on_the_wrong_device() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())

    class PlaceholderParam(nn.Parameter):
        device = torch.device("xpu")

    model[0]._parameters["bias"] = PlaceholderParam(torch.zeros(2))
    optimizer.param_groups[0]["params"] = list(model.parameters())
    with pytest.raises(ValueError, match=r"parameter '0.bias' is on xpu; move the model"):
        overspill.wrap(model, optimizer, device="cpu")


def test_wrapped_twice() -> None:
    model = TinyLM()
    with overspill.wrap(model, adamw(model), device="cpu", host_memory="1GiB"):
        with pytest.raises(overspill.OffloadError, match="wrapped already"):
            overspill.wrap(model, adamw(model), device="cpu")
        with pytest.raises(overspill.OffloadError, match="'inner' is wrapped already"):
            outer = nn.ModuleDict({"inner": model})
            overspill.wrap(outer, adamw(outer), device="cpu")


def test_device_memory_without_a_device() -> None:
    refuse(ValueError, "one memory tier", device="cpu", device_memory="1GiB")


class TestWeights:
    """Safetensors that are corrupt, or of another model."""

    def save(self, folder: Path, **changes: torch.Tensor | None) -> Path:
        from safetensors.torch import save_file

        torch.manual_seed(1)
        tensors = {**{k: v.contiguous() for k, v in TinyLM().state_dict().items()}, **changes}
        kept = {k: v for k, v in tensors.items() if v is not None}
        save_file(kept, folder / "model.safetensors")
        return folder

    def wrap_empty(self, path: Path, **options: Any) -> Any:
        with overspill.empty_init():
            model = TinyLM()
        assert all(p.is_meta for p in model.parameters())
        return model, overspill.wrap(model, adamw(model), weights=path, **{**NVME, **options})

    def test_streamed_in(self, tmp_path: Path) -> None:
        self.save(tmp_path)
        torch.manual_seed(1)
        expected = weights(TinyLM())
        model, optimizer = self.wrap_empty(tmp_path, nvme=tmp_path, durable=False)
        with optimizer:
            assert all(torch.equal(v, expected[k]) for k, v in weights(model).items())
            model(*batch(0)).backward()
            optimizer.step()

    def test_sharded_folder(self, tmp_path: Path) -> None:
        from safetensors.torch import save_file

        torch.manual_seed(1)
        state = TinyLM().state_dict()
        where = {name: f"part{i % 2}.safetensors" for i, name in enumerate(state)}
        for part in set(where.values()):
            save_file({k: v for k, v in state.items() if where[k] == part}, tmp_path / part)
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": where}))
        model, optimizer = self.wrap_empty(tmp_path, nvme=tmp_path, durable=False)
        with optimizer:
            assert all(torch.equal(v, state[k]) for k, v in weights(model).items())
        (tmp_path / "part1.safetensors").unlink()
        with pytest.raises(ValueError, match=r"lacks part1.safetensors"):
            self.wrap_empty(tmp_path, nvme=tmp_path)

    def test_missing_and_mismatched(self, tmp_path: Path) -> None:
        self.save(tmp_path, **{"norm.weight": None})
        with pytest.raises(ValueError, match=r"norm.weight is missing"):
            self.wrap_empty(tmp_path, nvme=tmp_path)
        self.save(tmp_path, **{"norm.weight": torch.zeros(3)})
        with pytest.raises(ValueError, match=r"norm.weight has shape \(3,\), expected \(64,\)"):
            self.wrap_empty(tmp_path, nvme=tmp_path)

    def test_corrupt(self, tmp_path: Path) -> None:
        file = tmp_path / "model.safetensors"
        file.write_bytes(b"\x10\0\0\0\0\0\0\0not json at all!")
        with pytest.raises(ValueError, match="cannot be read as safetensors"):
            self.wrap_empty(file, nvme=tmp_path)
        with pytest.raises(ValueError, match="does not exist"):
            self.wrap_empty(tmp_path / "nowhere", nvme=tmp_path)
        file.unlink()
        with pytest.raises(ValueError, match="holds none of"):
            self.wrap_empty(tmp_path, nvme=tmp_path)


def test_meta_models_are_initialised_unit_by_unit(tmp_path: Path) -> None:
    with overspill.empty_init():
        model = TinyLM()
    seen: list[int] = []

    def init(module: nn.Module) -> None:
        seen.append(sum(not p.is_meta for p in model.parameters()))
        for p in module.parameters(recurse=False):
            with torch.no_grad():
                p.fill_(0.5)

    with overspill.wrap(model, adamw(model), nvme=tmp_path, durable=False, init=init, **NVME):
        assert all((v == 0.5).all() for v in weights(model).values())
    with overspill.empty_init():
        again = TinyLM()
    with overspill.wrap(again, adamw(again), nvme=tmp_path, durable=False, **NVME) as optimizer:
        train(again, optimizer, 1)


def test_what_has_no_room_in_the_plan_is_said_and_trains(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With tokens, ``wrap`` makes the plan that was shown; activations that may stay over the
    budget do not end it, but for a policy that was named."""
    options: dict[str, Any] = {
        "device": "sim", "device_memory": "96KiB", "host_memory": "8MiB",
        "rates": overspill.Rates(1e9, 1e9),
    }  # fmt: skip

    def model_of() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        return model, torch.optim.AdamW(model.parameters())

    bare, few, many = (
        overspill.plan(*model_of(), **options, tokens=n).detail.layout for n in (0, 48, 4096)
    )
    assert bare is not None and few is not None and many is not None
    assert bare.regions.device_bytes > few.regions.device_bytes, "room is left"
    for tokens, planned in ((0, bare), (48, few), (4096, many)):
        model, adamw = model_of()
        with (
            caplog.at_level("WARNING", logger="overspill"),
            overspill.wrap(model, adamw, **options, tokens=tokens) as optimizer,
        ):
            assert optimizer.plan.detail.layout is not None
            assert optimizer.plan.detail.layout.homes == planned.homes
            assert optimizer.plan.detail.layout.saved == planned.saved
            model(torch.ones(8, 64)).sum().backward()
            optimizer.step()
        assert ("over the budget" in caplog.text) is (tokens == 4096)
    with pytest.raises(overspill.BudgetError, match="while it runs"):
        overspill.wrap(*model_of(), **options, tokens=4096, activations="host")
    with pytest.raises(ValueError, match="tokens must be a whole number"):
        overspill.wrap(*model_of(), **options, tokens=-1)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("[]", "is not a valid index"),
        ('{"weight_map": []}', "is not a valid index"),
        ('{"weight_map": {"weight": 1}}', "is not a valid index"),
        ('{"weight_map": {"weight": "../other.safetensors"}}', "outside of its folder"),
        ('{"weight_map": {"weight": "/etc/hosts"}}', "outside of its folder"),
    ],
)
def test_an_index_that_makes_no_sense(index: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match=words):
        overspill.wrap(model, torch.optim.SGD(model.parameters()), device="cpu", weights=tmp_path)
