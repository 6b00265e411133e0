"""PyTorch code that inspects a parameter before its module runs takes the path of the plain model.

``nn.TransformerEncoder`` turns padded batches into nested tensors only if no parameter of its first
layer overrides torch functions, and gives zeros for padded rows then.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from tests.devices import CPU, DEVICE, SIM, about_cpu, normal


def _tight(budget: str, device_memory: str, host_memory: str) -> dict[str, Any]:
    """Budgets with which layers are streamed from disk: of the CPU, or of a device."""
    if CPU == "cpu":
        return {"device": CPU, "host_memory": budget}
    return {"device": CPU, "device_memory": device_memory, "host_memory": host_memory}


PLACES: dict[str, dict[str, Any]] = {
    "host memory": {"device": CPU, "host_memory": "64MiB"},
    "streamed from disk": _tight("200KiB", "150KiB", "300KiB"),
    "on the device": {"device": SIM, "device_memory": "40MiB", "host_memory": "64MiB"},
    "streamed to the device": {"device": SIM, "device_memory": "150KiB", "host_memory": "1MiB"},
}
# What fits in these trains nowhere; it is for models that are only run.
SMALL: dict[str, dict[str, Any]] = {
    **PLACES,
    "streamed from disk": _tight("80KiB", "90KiB", "80KiB"),
    "streamed to the device": {"device": SIM, "device_memory": "90KiB", "host_memory": "1MiB"},
}
MASK = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]], device=DEVICE).bool()

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors.*")


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(x), src_key_padding_mask=MASK))


def _encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 3)


def _layer() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)


def _attention() -> nn.Module:
    return nn.MultiheadAttention(32, 4, batch_first=True)


def _output(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if isinstance(model, nn.MultiheadAttention):
        return model(x, x, x, key_padding_mask=MASK, need_weights=False)[0]
    return model(x) if isinstance(model, Classifier) else model(x, src_key_padding_mask=MASK)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make", [Classifier, _encoder, _layer, _attention])
def test_padded_batches_give_what_the_plain_model_gives(
    make: Callable[[], nn.Module], place: str, trains: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain = make().eval()
    torch.manual_seed(0)
    model = make().eval()
    optimizer = torch.optim.AdamW(model.parameters()) if trains else None
    budgets = (PLACES if trains else SMALL)[place]
    made = overspill.wrap(model, optimizer, nvme=tmp_path, **budgets)
    streamed = any(not home.resident for home in made.plan.placement.values())
    assert streamed == place.startswith("streamed") or make in (_layer, _attention)
    with made, torch.no_grad():
        for number in range(3):
            x = normal(number, 2, 5, 32)
            expected, found = _output(plain, x), _output(model, x)
            # A layer that is called by itself has our hooks, and torch's own rule is that a layer
            # with hooks does not use the fused kernel.
            within = 1e-6 if make is _layer else 0.0
            torch.testing.assert_close(found, expected, atol=within, rtol=0.0)


@pytest.mark.alone  # on a busy machine, more is evicted and read again
@about_cpu
def test_the_first_layer_is_read_once_a_forward(tmp_path: Path) -> None:
    """It is onloaded for the inspection, and not again for its own forward."""
    torch.manual_seed(0)
    model = Classifier().eval()
    made = overspill.wrap(model, nvme=tmp_path, **SMALL["streamed from disk"])
    with made, torch.no_grad():
        layers = [h for name, h in made.plan.placement.items() if "layers" in name]
        assert layers and not any(home.resident for home in layers), "the layers are streamed"
        for number in range(6):
            model(normal(number, 2, 5, 32))
        reads = [span.name for span in made._engine.trace.spans() if span.lane == "read"]
        assert 6 <= sum("layers.0" in name for name in reads) <= 8, "and not twice a forward"


def test_the_inspected_layer_may_be_edited_between_forwards(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Classifier().eval()
    with overspill.wrap(model, nvme=tmp_path, **SMALL["streamed from disk"]), torch.no_grad():
        x = normal(1, 2, 5, 32)
        before = model(x)
        model.encoder.layers[0].linear1.weight.mul_(2.0)
        assert not torch.equal(model(x), before)
        model.encoder.layers[0].linear1.weight.div_(2.0)
        assert torch.equal(model(x), before)


@pytest.mark.parametrize("name", ["linear1", "self_attn", "self_attn.out_proj"])
def test_a_unit_inside_a_module_that_reads_its_parts_directly_is_refused(name: str) -> None:
    model = _layer()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"nn\.TransformerEncoderLayer.*name the model instead"):
        overspill.wrap(model, optimizer, device=CPU, host_memory="64MiB", units=[name])


def test_a_class_of_a_parameter_says_what_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with overspill.wrap(model, torch.optim.AdamW(model.parameters()), device=CPU):
        for p in model.parameters():
            assert isinstance(p, nn.Parameter) and isinstance(p, torch.Tensor)
            assert type(p).__module__ == nn.Parameter.__module__
            assert type(p).__qualname__ == "Parameter"
