"""Wrapped models and their modules in pickles: for data-loader workers, and by users."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import overspill
from tests.devices import CPU, DEVICE, normal

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Collator:
    """Holds a model, as ``DataCollatorForSeq2Seq(model=...)`` does."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, rows: list[torch.Tensor]) -> dict[str, Any]:
        places = {p.device.type for p in self.module.parameters()}
        buffers = [b.tolist() for b in self.module.buffers()]
        return {"rows": torch.stack(rows), "places": places, "buffers": buffers}


def _build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).to(DEVICE)


@pytest.fixture
def wrapped() -> Any:
    model = _build()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    with overspill.wrap(model, inner, device=CPU, host_memory="4MiB") as optimizer:
        yield model, optimizer


def _step(model: nn.Module, optimizer: Any) -> None:
    model(normal(0, 4, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
@pytest.mark.parametrize("part", ["whole", "part"])
def test_workers_of_a_data_loader_get_the_model_without_weights(
    part: str, context: str, wrapped: Any
) -> None:
    model, optimizer = wrapped
    _step(model, optimizer)
    module = model if part == "whole" else model[1]
    loader = DataLoader(
        list(torch.ones(4, 8, device="cpu")), batch_size=2, num_workers=2,
        collate_fn=Collator(module), multiprocessing_context=context,
    )  # fmt: skip
    for batch in loader:
        assert batch["places"] == {"meta"} and batch["rows"].shape == (2, 8)
        assert batch["buffers"] == [b.tolist() for b in module.buffers()]
    _step(model, optimizer)  # and the model is as it was
    assert all(not b.is_shared() for b in model.buffers()) or DEVICE.type != "cpu"


def test_a_pickled_part_of_a_model_is_an_ordinary_module(wrapped: Any) -> None:
    model, optimizer = wrapped
    _step(model, optimizer)
    called = []
    model[0].register_forward_hook(_note)
    for module in (model[0], model[1]):
        weight = module.weight.detach().clone()
        found = pickle.loads(pickle.dumps(module)), copy.deepcopy(module), _saved(module)
        for each in found:
            assert type(each.weight) is nn.Parameter and torch.equal(each.weight, weight)
            assert each.weight.requires_grad
            assert "__reduce_ex__" not in vars(each)
            x = normal(1, 4, 8)
            assert torch.equal(each.eval()(x), copy.deepcopy(module).eval()(x))
    assert len(pickle.loads(pickle.dumps(model[0]))._forward_hooks) == 1, "a user's own hook stays"
    assert not called
    _step(model, optimizer)


def _note(*_: Any) -> None:
    """A hook of the user's."""


def _saved(module: nn.Module) -> Any:
    target = io.BytesIO()
    torch.save(module, target)
    target.seek(0)
    return torch.load(target, weights_only=False)


def test_a_whole_model_is_copied_and_pickled_while_it_is_materialized(wrapped: Any) -> None:
    model, optimizer = wrapped
    _step(model, optimizer)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for refused, remedy in (
        (pickle.dumps, r"overspill\.materialized\(model\)"),
        (lambda each: torch.save(each, io.BytesIO()), r"model\.state_dict\(\)"),
        (copy.deepcopy, r"overspill\.ema\(optimizer, decay\) before wrap"),
        (copy.copy, r"overspill\.materialized\(model\)"),
    ):
        with pytest.raises(overspill.OffloadError, match=remedy):
            refused(model)
    with overspill.materialized(model):
        found = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model), _saved(model)]
    for each in found:
        assert not any("overspill" in name for name in vars(each))
        for name, value in each.state_dict().items():
            assert torch.equal(value, expected[name])
        each(normal(0, 4, 8)).sum().backward()
    _step(model, optimizer)


def test_nothing_of_it_is_left_after_unwrap() -> None:
    model = _build()
    overspill.wrap(model, torch.optim.AdamW(model.parameters()), device=CPU, host_memory="4MiB")
    overspill.unwrap(model)
    assert not any("__reduce_ex__" in vars(module) for module in model.modules())
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again[0].weight, model[0].weight)


def test_a_collator_of_transformers_that_holds_the_model() -> None:
    hf = pytest.importorskip("transformers")
    config = hf.T5Config(
        vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = hf.T5ForConditionalGeneration(config)
    inner = torch.optim.AdamW(model.parameters())
    with overspill.wrap(model, inner, device=CPU, host_memory="16MiB"):
        loader = DataLoader(
            list(torch.ones(4, 8, device="cpu")), batch_size=2, num_workers=1,
            collate_fn=Shifts(model), multiprocessing_context="spawn",
        )  # fmt: skip
        for batch in loader:
            assert batch.tolist() == [[0, 1, 1], [0, 1, 1]]


class Shifts(Collator):
    """Asks the model for decoder inputs, which needs its configuration alone."""

    def __call__(self, rows: list[torch.Tensor]) -> Any:
        labels = torch.ones(len(rows), 3, dtype=torch.long)
        return self.module.prepare_decoder_input_ids_from_labels(labels)
