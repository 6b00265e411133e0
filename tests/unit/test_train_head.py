"""The loss without logits: the same to rounding, with and without the engine, and no logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import overspill
from overspill.train.head import chunk_loss, has_chunked_loss

transformers = pytest.importorskip("transformers")
needs_chunks = pytest.mark.skipif(not has_chunked_loss(), reason="torch without the op")


def llama(tied: bool = False) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
            num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=tied,
            use_cache=False,
        )
    ).train()  # fmt: skip
    model.loss_type = "ForCausalLM"
    return model


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(512, (rows, length), generator=torch.Generator().manual_seed(3))


def heads_called(model: Any) -> list[int]:
    calls: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


@needs_chunks
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("engine", [False, True])
def test_loss_and_gradients_are_those_of_the_logits(engine: bool, tied: bool) -> None:
    plain, chunked = llama(tied), llama(tied)
    chunk_loss(chunked)
    calls, batch, steps = heads_called(chunked), ids(4, 33), 3
    optimizers: list[Any] = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, chunked)]
    if engine:
        optimizers[1] = overspill.wrap(chunked, optimizers[1], device="sim")
    for _ in range(steps):
        losses = []
        for model, optimizer in zip((plain, chunked), optimizers, strict=True):
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert not calls
    if engine:
        overspill.unwrap(chunked)
    for mine, other in zip(chunked.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@needs_chunks
def test_other_calls_run_as_they_did() -> None:
    model = llama()
    chunk_loss(model)
    calls = heads_called(model)
    assert model(input_ids=ids(2, 5)).logits.shape == (2, 5, 512)
    assert model(input_ids=ids(2, 5), labels=ids(2, 5)).logits is not None  # too few tokens
    mask = torch.ones(4, 33)
    assert model(input_ids=ids(4, 33), labels=ids(4, 33), attention_mask=mask).logits is not None
    assert len(calls) == 3


def test_models_with_another_head_are_left_alone() -> None:
    model = llama()
    model.config.model_type = "gemma2"  # caps its logits
    chunk_loss(model)
    assert "forward" not in vars(model)
    other = torch.nn.Linear(3, 3)
    chunk_loss(other)
    assert "forward" not in vars(other)
