"""Files that ``weights=`` names are used completely, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import overspill
from tests.devices import CPU, DEVICE, SIM

KEPT: dict[str, Any] = {"device": CPU, "host_memory": "2MiB"}


def _build(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def _values() -> dict[str, torch.Tensor]:
    model = _build()
    model[1].running_mean.fill_(3.0)
    model[1].num_batches_tracked.fill_(7)
    return {name: value.cpu() for name, value in model.state_dict().items()}


def _folder(folder: Path, values: dict[str, torch.Tensor], config: Any = None) -> Path:
    save_file(values, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def _wrap(model: nn.Module, **options: Any) -> Any:
    return overspill.wrap(model, torch.optim.AdamW(model.parameters()), **{**KEPT, **options})


@pytest.mark.parametrize("empty", [True, False])
@pytest.mark.parametrize("device", sorted({CPU, SIM}))
def test_buffers_come_from_the_files_too(device: str, empty: bool, tmp_path: Path) -> None:
    folder = _folder(tmp_path, _values())
    if empty:
        with overspill.empty_init():
            model = _build(1)
    else:
        model = _build(1)
    with _wrap(model, weights=folder, device=device):
        for name, value in _values().items():
            assert torch.equal(model.state_dict()[name].cpu(), value), name


def test_integer_parameters_on_meta_come_from_the_files(tmp_path: Path) -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.table = nn.Parameter(torch.arange(6), requires_grad=False)

    folder = _folder(tmp_path, {k: v.cpu() for k, v in Counted().state_dict().items()})
    with overspill.empty_init():
        model = Counted()
    trained = [model.layer.weight, model.layer.bias]
    with pytest.raises(overspill.OffloadError, match=r"'table' \(torch\.int64\) is on meta"):
        overspill.wrap(model, torch.optim.AdamW(trained), **KEPT)
    with overspill.wrap(model, torch.optim.AdamW(trained), weights=folder, **KEPT):
        assert model.table.tolist() == [0, 1, 2, 3, 4, 5]
        assert model.table.device.type == DEVICE.type


@pytest.mark.parametrize("call", ["wrap", "plan", "load"])
def test_tensors_that_the_model_does_not_use_are_refused(call: str, tmp_path: Path) -> None:
    values = {**_values(), "head.weight": torch.ones(3), "head.bias": torch.ones(1)}
    folder = _folder(tmp_path, values)
    model = _build(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    message = r"does not use: head\.(bias, head\.weight|weight, head\.bias); .*ignore_weights"
    with pytest.raises(ValueError, match=message):
        if call == "wrap":
            _wrap(model, weights=folder)
        elif call == "plan":
            overspill.plan(model, torch.optim.AdamW(model.parameters()), weights=folder, **KEPT)
        else:
            with _wrap(model) as optimizer:
                optimizer._engine.load_weights(folder)
    if call != "load":
        for name, value in before.items():
            assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize("allowed", [["head.weight", "head.bias"], ["head.*"], ("*.bias", "head*")])
def test_tensors_are_allowed_by_name(allowed: Any, tmp_path: Path) -> None:
    values = {**_values(), "head.weight": torch.ones(3), "head.bias": torch.ones(1)}
    folder = _folder(tmp_path, values)
    model = _build(1)
    with _wrap(model, weights=folder, ignore_weights=allowed):
        assert torch.equal(model[0].weight.cpu(), _values()["0.weight"])
    with pytest.raises(ValueError, match="ignore_weights says what to ignore of weights="):
        _wrap(_build(1), ignore_weights=allowed)
    with pytest.raises(ValueError, match=r"does not use: head\.bias"):
        _wrap(_build(1), weights=folder, ignore_weights=["head.weight"])


def _quantised() -> dict[str, tuple[dict[str, torch.Tensor], Any, str]]:
    plain = _values()
    weight = plain["0.weight"]
    codes = (weight * 1000).to(torch.float8_e4m3fn)
    one, fp8 = torch.ones(1), {"quantization_config": {"quant_method": "fp8"}}
    unused = r"does not use: 0\.{}; they look like scales"
    without = {name: value for name, value in plain.items() if name != "0.weight"}
    return {
        "fp8 by blocks": ({**plain, "0.weight": codes, "0.weight_scale_inv": torch.ones(3, 1)},
                          None, r"0\.weight of \(.*\) has scales of \(3, 1\), which do not fit"),
        "fp8 without a scale": ({**plain, "0.weight": codes}, fp8,
                                r"0\.weight is fp8 and has no scale"),
        "int8": ({**plain, "0.weight": (weight * 100).to(torch.int8)}, None,
                 r"0\.weight is torch\.int8: codes of a quantised weight"),
        "bf16 with a scale": ({**plain, "0.weight": weight.bfloat16(), "0.weight_scale": one}, None,
                              unused.format("weight_scale")),
        "gptq": ({**without, "0.qweight": torch.ones(1, 8, dtype=torch.int32),
                  "0.qzeros": torch.ones(1, 1, dtype=torch.int32), "0.scales": one}, None,
                 r"GPTQ and AWQ weights need the folder's config\.json"),
        "bitsandbytes": ({**plain, "0.weight": (weight * 9).to(torch.uint8).view(-1, 1),
                          "0.weight.absmax": one}, None,
                         r"0\.weight is torch\.uint8: codes of a quantised weight"),
        "its config says so": (plain, {"quantization_config": {"quant_method": "hqq"}},
                               r"quantised by 'hqq' \(quantization_config in config\.json\)"),
    }  # fmt: skip


@pytest.mark.parametrize("call", [overspill.wrap, overspill.plan])
@pytest.mark.parametrize("kind", _quantised())
def test_quantised_files_are_refused_before_anything_is_changed(
    kind: str, call: Any, tmp_path: Path
) -> None:
    values, config, message = _quantised()[kind]
    folder = _folder(tmp_path, values, config)
    model = _build(1)
    before = model[0].weight.detach().clone()
    with pytest.raises(ValueError, match=message):
        call(model, torch.optim.AdamW(model.parameters()), weights=folder, **KEPT)
    assert torch.equal(model[0].weight, before)


def test_a_model_that_is_quantised_itself_has_the_codes_that_its_modules_expect(
    tmp_path: Path,
) -> None:
    class Fp8Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            codes = (torch.arange(64.0).view(8, 8) / 64).to(torch.float8_e4m3fn)
            self.weight = nn.Parameter(codes, requires_grad=False)
            self.weight_scale_inv = nn.Parameter(torch.full((1, 1), 0.5), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.weight.float() * self.weight_scale_inv)

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Fp8Linear(), nn.Linear(8, 4))

    plain = build().to(DEVICE)
    folder = _folder(tmp_path, {name: value.cpu() for name, value in plain.state_dict().items()})
    with overspill.empty_init():
        model = build()
    x = torch.ones(2, 8, device=DEVICE)
    with overspill.wrap(model, torch.optim.SGD(model[1].parameters(), lr=0.1), weights=folder,
                        **KEPT):  # fmt: skip
        assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("form", ["int8", "nf4"])
def test_what_is_quantised_already_is_not_packed(form: Any, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 128), nn.Linear(128, 4))
    model[0].weight = nn.Parameter(torch.ones(128, 128).to(torch.float8_e4m3fn), False)
    inner = torch.optim.SGD(model[2].parameters(), lr=0.1)
    message = rf"frozen='{form}' cannot pack '0\.weight', .*\(torch\.float8_e4m3fn\)"
    with pytest.raises(ValueError, match=message):
        overspill.wrap(model, inner, frozen=form, device=CPU, host_memory="8MiB")
    overspill.wrap(model, inner, device=CPU, host_memory="8MiB").close()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_dtypes_that_are_not_packed_stay_as_they_are(dtype: torch.dtype, tmp_path: Path) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd = nn.Parameter(torch.ones(128, 128, dtype=dtype), requires_grad=False)
            self.layer = nn.Linear(128, 128).requires_grad_(False)
            self.last = nn.Linear(128, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.layer(x)) + self.odd.real.sum().float()

    torch.manual_seed(0)
    model = Mixed().to(DEVICE)
    inner = torch.optim.SGD(model.last.parameters(), lr=0.1)
    with overspill.wrap(model, inner, frozen="int8", device=CPU, host_memory="8MiB"):
        x = torch.ones(2, 128, device=DEVICE)
        model(x).sum().backward()
        assert bool((model.odd == 1).all()) and model.odd.dtype == dtype
