"""``tile=``: feed-forward layers for some tokens at a time, the same bits wherever weights are."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.activations import tiles
from overspill.activations.known_code import known
from tests.devices import CPU, DEVICE, SIM, about_cpu, plainly

transformers = pytest.importorskip("transformers")

V, B, S, STEPS = 256, 2, 40, 3
SHAPE: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False,
}  # fmt: skip
MLPS = ["model.layers.*.mlp"]
TIGHT = {"device": SIM, "device_memory": "1500KiB", "host_memory": "64MiB"}
PLACES: dict[str, dict[str, Any]] = {
    "host": {"device": CPU, "host_memory": "64MiB"},
    "tight": TIGHT,
    "roomy": {"device": SIM, "device_memory": "64MiB", "host_memory": "64MiB"},
    "step": {**TIGHT, "update": "step"},
    "backward": {**TIGHT, "update": "backward"},
    "kept": {**TIGHT, "activations": "keep"},
    "moved": {**TIGHT, "activations": "host"},
    "recompute": {**TIGHT, "activations": "recompute"},
    "clipped": {**TIGHT, "max_grad_norm": 1e9},
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE_BYTES", 1)
    monkeypatch.setattr(tiles, "LEAST_TOKENS", 12)  # does not divide the tokens of a batch


def llama(dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    return model.to(DEVICE, dtype)


def batch(step: int) -> torch.Tensor:
    draw = torch.Generator("cpu").manual_seed(step)
    return torch.randint(3, V, (B, S), generator=draw, device="cpu").to(DEVICE)


def train(model: Any, optimizer: Any) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = model(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def offloaded(model: Any, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    given = {"tile": MLPS, "rates": overspill.Rates(), **options}
    with overspill.wrap(model, adamw(model), **given) as optimizer:
        losses = train(model, optimizer)
        overspill.unwrap(model)
    return losses, {name: t.clone() for name, t in model.state_dict().items()}


class Calls:
    """Counts tokens that the layers of a model compute."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.largest, self.tokens = 0, 0
        kind = type(model.model.layers[0].mlp)
        whole = kind.forward

        def forward(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            count = x.numel() // x.shape[-1]
            self.largest, self.tokens = max(self.largest, count), self.tokens + count
            made: torch.Tensor = whole(layer, x)
            return made

        monkeypatch.setattr(kind, "forward", forward)


def test_losses_are_the_same_bits_wherever_weights_are() -> None:
    plain = llama()
    master = plainly(overspill.optim.AdamW, plain.parameters(), lr=1e-3, master="split")
    expected = train(plain, master)
    found = {place: offloaded(llama(), **options) for place, options in PLACES.items()}
    losses, state = found["host"]
    assert losses == pytest.approx(expected, rel=1e-3)
    for place, (others, their_state) in found.items():
        assert others == losses, place
        assert all(torch.equal(state[name], t) for name, t in their_state.items()), place


def test_gradients_are_those_of_the_whole_layer() -> None:
    model = llama(torch.float32)
    plain = copy.deepcopy(model)
    with overspill.wrap(model, adamw(model), **{**TIGHT, "device_memory": "3MiB"}, tile=MLPS):
        for each in (model, plain):
            each(input_ids=batch(0), labels=batch(0)).loss.backward()
        for (name, p), own in zip(plain.named_parameters(), model.parameters(), strict=True):
            grad = own.grad
            assert grad is not None and p.grad is not None
            torch.testing.assert_close(
                grad.to(p.grad.device), p.grad, rtol=1e-4, atol=1e-6, msg=name
            )


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_backward_computes_a_layer_once_more_and_never_twice(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    options = {**TIGHT, "activations": policy, "tile": MLPS}
    with overspill.wrap(model, adamw(model), **options) as optimizer:
        train(model, optimizer)  # units are proven and recomputed after the first step
        calls = Calls(model, monkeypatch)
        model(input_ids=batch(0), labels=batch(0)).loss.backward()
        assert calls.largest == 12
        # A recomputed unit ends before its tiles, whose input it saves last.
        assert calls.tokens == 2 * B * S * SHAPE["num_hidden_layers"]


def test_a_step_keeps_the_inputs_of_tiled_layers_only() -> None:
    def kept(**options: Any) -> int:
        model, sizes = llama(), Counter[tuple[int, ...]]()
        with overspill.wrap(model, adamw(model), **PLACES["host"], **options):

            def pack(t: torch.Tensor) -> torch.Tensor:
                sizes[tuple(t.shape)] += 1
                return t

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                model(input_ids=batch(0), labels=batch(0))
        inner = SHAPE["intermediate_size"]
        return sum(n for shape, n in sizes.items() if inner in shape[-1:] and shape[0] == B)

    assert kept() > 0
    assert kept(tile=MLPS) == 0


def test_lora_over_tiled_layers() -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        config = peft.LoraConfig(r=4, target_modules=["gate_proj", "down_proj", "q_proj"])
        model = peft.get_peft_model(llama(torch.float32), config)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.02)
        return model

    plain = adapted()
    expected = train(plain, adamw(plain))
    losses, state = offloaded(
        adapted(),
        tile=["base_model.model.model.layers.*.mlp"],
        **{**TIGHT, "device_memory": "3MiB"},
    )
    assert losses == pytest.approx(expected, rel=1e-4)
    for name, t in plain.state_dict().items():
        torch.testing.assert_close(state[name].cpu(), t.cpu(), rtol=1e-3, atol=1e-4)


@about_cpu
def test_a_layer_is_still_known_to_compute_the_same_again() -> None:
    model = llama()
    layer = model.model.layers[0]
    assert known(layer)
    with overspill.wrap(model, adamw(model), device="cpu", tile=MLPS):
        assert "forward" in vars(layer.mlp) and known(layer)


@about_cpu
def test_copies_and_pickles_are_ordinary() -> None:
    model = llama()
    wrapped = overspill.wrap(model, adamw(model), device="cpu", tile=MLPS)
    with wrapped:
        with overspill.materialized(model) as ordinary:
            made = [copy.deepcopy(ordinary), pickle.loads(pickle.dumps(ordinary))]
        overspill.unwrap(model)
    assert not tiles.tiled_layers(model) and "forward" not in vars(model.model.layers[0].mlp)
    for each in made:
        assert not tiles.tiled_layers(each)
        each(input_ids=batch(0), labels=batch(0)).loss.backward()
        assert each.model.layers[0].mlp.up_proj.weight.grad is not None


@about_cpu
def test_auto_tiles_if_tokens_fit_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    options = {"device": "cpu", "host_memory": "10MiB", "tokens": 2000, "tile": "auto"}
    plans = {
        how: overspill.plan(model, adamw(model), **{**options, **more})
        for how, more in {
            "whole": {"tile": None}, "tiled": {"tile": MLPS}, "auto": {}, "short": {"tokens": 20},
        }.items()
    }  # fmt: skip
    assert not plans["whole"].fits and plans["tiled"].fits and plans["auto"].fits
    assert "with 3 layers in tiles" in str(plans["auto"])
    small = overspill.plan(model, adamw(model), **{**options, "host_memory": "6MiB", "tile": None})
    assert "tile='auto'" in small.shortfalls[0].remedy
    assert plans["tiled"].detail.saved_bytes == plans["auto"].detail.saved_bytes
    assert not tiles.tiled_layers(model)
    with overspill.wrap(model, adamw(model), **options) as optimizer:
        assert len(tiles.tiled_layers(model)) == SHAPE["num_hidden_layers"]
        train(model, optimizer)  # compares tiles with the whole layer once
        calls = Calls(model, monkeypatch)
        train(model, optimizer)
        assert calls.largest == 12
    model = llama()
    with overspill.wrap(model, adamw(model), **{**options, "tokens": 20}):
        assert not tiles.tiled_layers(model)


@about_cpu
def test_tile_needs_names() -> None:
    model = llama()
    with pytest.raises(TypeError, match="tile must be a list of names"):
        overspill.wrap(model, adamw(model), device="cpu", tile="model.layers.*.mlp")
    with pytest.raises(ValueError, match="tile: the model has no module"):
        overspill.wrap(model, adamw(model), device="cpu", tile=["model.layers.*.ffn"])
