"""Tensors of every dtype and role are trained, committed, resumed and exported."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import overspill
from overspill.durable.export import export_store
from tests.devices import CPU, DEVICE, NAME, SIM, about_cpu, normal

ON: dict[str, dict[str, Any]] = {
    CPU: {"device": CPU, "host_memory": "1MiB"},
    SIM: {"device": SIM, "host_memory": "1MiB", "device_memory": "1MiB"},
}
TRAINED = [torch.float32, torch.complex64]
OTHERS = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64,
    torch.float8_e4m3fn, torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool,
]  # fmt: skip
CASES = [
    *itertools.product(TRAINED, ["trained"], [(2, 3), (0, 4), ()]),
    *itertools.product(OTHERS, ["frozen", "buffer"], [(2, 3), (0, 4)]),
]


def _value(dtype: torch.dtype, shape: tuple[int, ...], *, seed: int = 1) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    most = 2 if dtype == torch.bool else 9
    whole = torch.randint(0, most, shape, generator=draw, device="cpu")
    if dtype.is_complex:
        return torch.complex(whole.float() / 4, 1 - whole.float() / 8).to(dtype)
    return whole.to(dtype)


class Model(nn.Module):
    """Two layers around one tensor, ``x``, of some dtype, in some role."""

    def __init__(self, dtype: torch.dtype, role: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        value = _value(dtype, shape)
        if role == "buffer":
            self.register_buffer("x", value)
        else:
            self.x = nn.Parameter(value, requires_grad=role == "trained")

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if self.x.is_complex():
            size = (self.x * self.x.conj()).real.sum() + self.x.imag.sum()
        else:
            size = (self.x.float() ** 2).sum()
        return self.last(self.first(given)).sum() + size


def _build(dtype: torch.dtype, role: str, shape: tuple[int, ...]) -> Model:
    torch.manual_seed(0)
    if dtype.is_complex:
        _needs_complex()
    return Model(dtype, role, shape).to(DEVICE)


def _needs_complex() -> None:
    if NAME == "testdev":
        pytest.skip("the test device does not compute with complex numbers")


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> list[float]:
    losses = []
    for _ in range(count):
        loss = model(torch.ones(2, 8, device=DEVICE))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _same(found: torch.Tensor | None, expected: torch.Tensor) -> None:
    assert found is not None
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    one, other = found.detach().cpu(), expected.detach().cpu()
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    torch.testing.assert_close(one.double(), other.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", sorted(ON))
@pytest.mark.parametrize(("dtype", "role", "shape"), CASES)
def test_a_tensor_is_trained_saved_resumed_and_exported(
    dtype: torch.dtype, role: str, shape: tuple[int, ...], device: str, tmp_path: Path
) -> None:
    plain, model = _build(dtype, role, shape), _build(dtype, role, shape)
    its = torch.optim.AdamW(_trained(plain), lr=0.1)
    store, out = tmp_path / "store", tmp_path / "out"
    store.mkdir()
    optimizer = overspill.wrap(
        model, torch.optim.AdamW(_trained(model), lr=0.1), nvme=store, **ON[device]
    )
    assert _steps(model, optimizer) == pytest.approx(_steps(plain, its), rel=1e-5, abs=1e-5)
    _same(model.x, plain.x)
    _same(model.state_dict()["x"], plain.x)
    if role != "buffer":
        _same(dict(overspill.named_weights(model))["x"], plain.x)
    state, expected = optimizer.state_dict(), its.state_dict()
    assert state["state"].keys() == expected["state"].keys()
    for number, of_one in expected["state"].items():
        for name, value in of_one.items():
            _same(state["state"][number][name], value)
    optimizer.save(out)
    _same(load_file(out / "model.safetensors").get("x"), plain.x)
    its.load_state_dict(torch.load(out / "optimizer.pt"))
    optimizer.load_state_dict(its.state_dict())
    assert _steps(model, optimizer) == pytest.approx(_steps(plain, its), rel=1e-5, abs=1e-5)
    optimizer.close()
    export_store(store, tmp_path / "exported")
    _same(load_file(tmp_path / "exported" / "model.safetensors").get("x"), plain.x)

    again = _build(dtype, role, shape)
    with torch.no_grad():
        again.x.zero_()
    options = {k: v for k, v in ON[device].items() if k != "nvme"}
    inner = torch.optim.AdamW(_trained(again), lr=0.1)
    optimizer, _ = overspill.resume(again, store, inner, **options)
    _same(again.x, plain.x)
    assert _steps(again, optimizer) == pytest.approx(_steps(plain, its), rel=1e-5, abs=1e-5)
    overspill.unwrap(again)
    _same(again.x, plain.x)


@pytest.mark.parametrize("device", sorted(ON))
def test_a_complex_layer_trains_as_in_torch_in_every_mode(device: str, tmp_path: Path) -> None:
    _needs_complex()

    class Spectral(nn.Module):
        """A Fourier layer, as neural operators have them; uses lazy conjugates."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, 5, dtype=torch.complex64) / 4)
            self.turn = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64).mT)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mixed = torch.einsum("bik,iok->bok", torch.fft.rfft(x), self.weight)
            return torch.fft.irfft(self.turn.conj() @ mixed, n=8) + x

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Spectral() for _ in range(4))).to(DEVICE)

    def losses(model: nn.Module, optimizer: Any) -> list[float]:
        found = []
        for number in range(4):
            x = normal(number, 2, 4, 8)
            loss = model(x).square().mean()
            loss.backward()
            if not isinstance(optimizer, overspill.OffloadedOptimizer):
                for p in model.parameters():  # torch's optimizers refuse a lazy conjugate
                    p.grad = p.grad.resolve_conj()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    plain = build()
    expected = losses(plain, torch.optim.AdamW(plain.parameters(), lr=0.05))
    for update in ("step", "next_forward"):
        model = build()
        inner = torch.optim.AdamW(model.parameters(), lr=0.05)
        folder = tmp_path / update
        folder.mkdir()
        options = {**ON[device], "host_memory": "64KiB" if device == "cpu" else "1MiB"}
        with overspill.wrap(model, inner, nvme=folder, update=update, **options) as optimizer:
            assert losses(model, optimizer) == pytest.approx(expected, rel=1e-5)
            for (name, p), (_, its) in zip(
                model.named_parameters(), plain.named_parameters(), strict=True
            ):
                assert p.stride() == its.stride(), name
                _same(p, its)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.complex128, torch.complex32, torch.float8_e4m3fn]
)
def test_a_trained_parameter_of_another_dtype_is_refused_by_name(dtype: torch.dtype) -> None:
    model = _build(dtype, "trained", (2, 3))
    before = model.first.weight.detach().clone()
    with pytest.raises(ValueError, match=f"'x' is {dtype}, which cannot be trained"):
        overspill.wrap(model, torch.optim.AdamW(_trained(model)), **ON[CPU])
    assert torch.equal(model.first.weight, before)


def test_the_remedies_for_a_dtype_that_cannot_be_trained_work() -> None:
    model = _build(torch.float64, "trained", (2, 3))
    overspill.wrap(model, torch.optim.AdamW(_trained(model)), precision="fp32", **ON[CPU]).close()
    model = _build(torch.float64, "trained", (2, 3))
    model.x.requires_grad_(False)
    overspill.wrap(model, torch.optim.AdamW(_trained(model)), **ON[CPU]).close()
    model = _build(torch.complex128, "trained", (2, 3))
    model.x.data = model.x.data.to(torch.complex64)
    overspill.wrap(model, torch.optim.AdamW(_trained(model)), **ON[CPU]).close()


def test_what_safetensors_cannot_hold_is_named(tmp_path: Path) -> None:
    model = _build(torch.complex128, "frozen", (2, 3))
    inner = torch.optim.AdamW(_trained(model))
    with overspill.wrap(model, inner, nvme=tmp_path, **ON[CPU]) as optimizer:
        _steps(model, optimizer)
        with pytest.raises(ValueError, match=r"'x' is torch\.complex128.*torch\.save"):
            optimizer.save(tmp_path / "out")
        assert not (tmp_path / "out").exists()
        torch.save(model.state_dict(), tmp_path / "model.pt")
    _same(torch.load(tmp_path / "model.pt")["x"], _value(torch.complex128, (2, 3)))


def _overlapping() -> dict[str, torch.Tensor]:
    return {
        "expanded": torch.ones(1, 8).expand(8, 8),
        "a sliding window": torch.ones(16).as_strided((8, 8), (1, 1)),
    }


@pytest.mark.parametrize("kind", _overlapping())
def test_parameters_that_torch_cannot_update_in_place_are_refused(kind: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = nn.Parameter(_overlapping()[kind])
    with pytest.raises(overspill.OffloadError, match=r"elements of parameter '1\.weight' share"):
        overspill.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), **ON[CPU])
    model[1].weight.requires_grad_(False)  # it is only read: as in torch
    trained = [p for p in model.parameters() if p.requires_grad]
    overspill.wrap(model, torch.optim.SGD(trained, lr=0.1), **ON[CPU]).close()


@about_cpu
@pytest.mark.parametrize("kind", ["lazy", "lazy buffers", "sparse", "quantised"])
def test_parameters_that_are_no_dense_tensors_are_refused_by_name(kind: str) -> None:
    first = nn.Linear(8, 8)
    modules: dict[str, nn.Module] = {
        "lazy": nn.LazyLinear(4),
        "lazy buffers": nn.LazyBatchNorm1d(affine=False),
        "sparse": nn.Module(), "quantised": nn.Module(),
    }  # fmt: skip
    other = modules[kind]
    if kind == "sparse":
        other.w = nn.Parameter(torch.eye(4).to_sparse())
    if kind == "quantised":
        made = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
        other.w = nn.Parameter(made, requires_grad=False)
    model = nn.Sequential(first, other)
    inner = torch.optim.SGD(first.parameters(), lr=0.1)
    with pytest.raises(overspill.OffloadError, match=r"'1(\.w|\.weight)?' (is a|has)"):
        overspill.wrap(model, inner, **ON[CPU])
