"""Losses over logits in chunks, and over ordinary logits that other code makes of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional

from overspill.logits.deferred import DeferredLogits
from tests.devices import DEVICE

from .losses import CHUNKED, ORDINARY, B, Loss, case, of_a_function, results, smoothed, weighted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("loss", CHUNKED, ids=lambda loss: loss.__name__)
def test_losses_in_chunks(loss: Loss, dtype: torch.dtype, deferred: Any) -> None:
    head, hidden, target = case(dtype)
    exact, _ = results(copy.deepcopy(head).double(), loss, hidden=hidden.double(), target=target)
    plain, _ = results(head, loss, hidden=hidden, target=target)
    plain = [each.clone() for each in plain]
    found, logits = results(deferred(head), loss, hidden=hidden, target=target)
    assert isinstance(logits, DeferredLogits) and not logits.family.ordinary
    for mine, theirs, right in zip(found, plain, exact, strict=True):
        # Torch itself promotes smoothed losses on a device without kernels of its own for them.
        assert mine.dtype == theirs.dtype or (loss is smoothed and DEVICE.type == "testdev")
        assert mine.shape == theirs.shape
        error, other = ((each.double() - right).norm() for each in (mine, theirs))
        assert error <= 2 * other + 4 * torch.finfo(dtype).eps * right.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", ORDINARY, ids=lambda loss: loss.__name__)
def test_other_uses_have_the_bits_of_ordinary_logits(
    loss: Loss, dtype: torch.dtype, deferred: Any
) -> None:
    head, hidden, target = case(dtype)
    if loss in (weighted,):
        target = target.clamp(min=0)
    plain, _ = results(head, loss, hidden=hidden, target=target)
    plain = [each.clone() for each in plain]
    found, logits = results(deferred(head), loss, hidden=hidden, target=target)
    assert isinstance(logits, DeferredLogits)
    assert all(map(torch.equal, found, plain))


def test_a_function_of_the_user_gets_its_gradient(deferred: Any) -> None:
    head, hidden, target = case(torch.float32)
    plain, _ = results(head, of_a_function, hidden=hidden, target=target)
    plain = [each.clone() for each in plain]
    found, _ = results(deferred(head), of_a_function, hidden=hidden, target=target)
    for mine, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_values_are_those_of_ordinary_logits(deferred: Any) -> None:
    head, hidden, target = case(torch.float32)
    with torch.no_grad():
        plain = head(hidden)
        logits = deferred(head)(hidden)
        assert isinstance(logits, DeferredLogits)
        assert torch.equal(logits.argmax(-1), plain.argmax(-1))
        assert torch.equal(logits[:, -1].values(), plain[:, -1])
        assert torch.equal(logits.topk(3).indices, plain.topk(3).indices)
        torch.testing.assert_close(logits.amax(dim=-1, keepdim=True), plain.amax(-1, keepdim=True))
        assert torch.equal(torch.cat([logits, logits]), torch.cat([plain, plain]))
        assert logits.tolist() == plain.tolist()
        assert logits.shape == plain.shape and logits.dtype == plain.dtype
        assert len(logits) == B and logits.dim() == 3 and not logits.requires_grad
        t = target[0].clamp(min=0)
        mine, theirs = (functional.cross_entropy(each[0], t) for each in (logits, plain))
        assert float(mine) == pytest.approx(float(theirs))
        assert logits.to("meta").is_meta and logits.double().dtype == torch.float64
    assert "shape=(3, 21, 1000)" in repr(logits)
