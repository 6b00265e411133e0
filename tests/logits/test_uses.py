"""What code does with logits in chunks: the same as with ordinary ones, or an error."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import overspill
from overspill.logits.deferred import DeferredLogits
from overspill.logits.heads import DeferredHeads, head_of, heads_in
from tests.devices import DEVICE

from .losses import B, Loss, S, V, across_tokens, case, of_nanogpt, results, selected


def test_autocast_is_that_of_the_call(deferred: Any) -> None:
    head, hidden, target = case(torch.float32)

    def run() -> tuple[torch.Tensor, ...]:
        head.zero_grad()
        mine = hidden.clone().requires_grad_()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            logits = head(mine)
        assert logits.dtype == torch.bfloat16
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
        loss.backward()
        assert mine.grad is not None and head.weight.grad is not None
        return loss.detach(), mine.grad, head.weight.grad.clone()

    plain = run()
    deferred(head)
    for mine, theirs in zip(run(), plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=1e-4)


def test_a_frozen_head_gets_no_gradient(deferred: Any) -> None:
    head, hidden, target = case(torch.float32)
    deferred(head).requires_grad_(False)
    hidden.requires_grad_()
    of_nanogpt(head(hidden), target).backward()
    assert hidden.grad is not None and head.weight.grad is None
    assert not head(hidden.detach()).requires_grad
    assert not head(hidden).detach().requires_grad


def test_a_backward_can_be_repeated(deferred: Any) -> None:
    head, hidden, target = case(torch.float32)
    deferred(head)
    hidden.requires_grad_()
    for loss in (of_nanogpt, selected):
        hidden.grad = None
        found = loss(head(hidden), target)
        found.backward(retain_graph=True)
        assert hidden.grad is not None
        once = hidden.grad.clone()
        found.backward()
        torch.testing.assert_close(hidden.grad, 2 * once)


def test_few_tokens_have_ordinary_logits(deferred: Any) -> None:
    head, hidden, _ = case(torch.float32)
    deferred(head)
    assert type(head(hidden[:1, :8])) is torch.Tensor
    assert type(head(hidden[:1, :9])) is DeferredLogits


def test_copies_and_the_head_afterwards_are_ordinary() -> None:
    head, hidden, _ = case(torch.float32)
    made = DeferredHeads([(head, lambda: 0)])
    assert type(copy.deepcopy(head)(hidden)) is torch.Tensor
    made.remove()
    assert type(head(hidden)) is torch.Tensor and "forward" not in vars(head)


def test_arguments_that_change_later(deferred: Any) -> None:
    head, hidden, target = case(torch.float32)
    expected = of_nanogpt(head(hidden) * 0.5, target)
    mask = target > 100
    chosen = head(hidden)[mask]
    deferred(head)
    scale = torch.full((), 0.5, device=DEVICE)
    scaled, logits = head(hidden) * scale, head(hidden)[mask]
    scale.fill_(7.0)
    mask.fill_(False)
    torch.testing.assert_close(of_nanogpt(scaled, target), expected)
    assert torch.equal(logits + logits, chosen + chosen)  # ordinary logits
    loss = functional.cross_entropy(
        input=head(hidden).flatten(0, 1), target=target.flatten(), reduction="sum"
    )
    torch.testing.assert_close(loss, of_nanogpt(head(hidden), target) * (target >= 0).sum())


def changed_views(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    view, copy, scaled = z[:, :-1], z.clone(), z / 0.7
    with torch.no_grad():
        view.mul_(2)
        z[..., :5] = -3
        z **= 2
    return of_nanogpt(z, t) + 2 * of_nanogpt(copy, t) + 3 * of_nanogpt(scaled, t)


def changed_after_values(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    scaled = z / 0.7
    z.topk(3)
    with torch.no_grad():
        z[..., :100] = -50
    return of_nanogpt(scaled, t) + of_nanogpt(z, t)


def with_its_own_gradient(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    alone = z.detach().requires_grad_()
    of_nanogpt(alone, t).backward()
    assert alone.grad is not None
    return (z * alone.grad).sum()


def same_as_ordinary(loss: Loss, deferred: Any) -> None:
    head, hidden, target = case(torch.float32)
    plain, _ = results(head, loss, hidden=hidden, target=target)
    plain = [each.clone() for each in plain]
    found, _ = results(deferred(head), loss, hidden=hidden, target=target)
    for mine, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", [changed_views, changed_after_values, with_its_own_gradient])
def test_changes_in_place(loss: Loss, deferred: Any) -> None:
    same_as_ordinary(loss, deferred)


def test_what_cannot_be_seen_is_refused(deferred: Any) -> None:
    head, hidden, target = case(torch.float32)
    deferred(head)
    hidden.requires_grad_()
    logits = head(hidden)
    of_nanogpt(logits, target)
    with pytest.raises(overspill.OffloadError, match="leave loss out to watch it"):
        logits.retain_grad()
    vars(head).pop("forward")  # as without the option
    logits = head(hidden)
    logits.retain_grad()
    of_nanogpt(logits, target).backward()
    assert logits.grad is not None
    deferred(head)
    logits = head(hidden)
    loss = of_nanogpt(logits, target)
    loss.backward(inputs=[logits], retain_graph=True)
    for see in (lambda: logits.grad, lambda: torch.autograd.grad(loss, logits, allow_unused=True)):
        with pytest.raises(overspill.OffloadError, match="leave loss out to watch it"):
            see()
    logits = head(hidden)
    logits.argmax(-1)  # has no gradient
    logits.retain_grad()  # before a use
    of_nanogpt(logits, target).backward()
    assert logits.grad is not None and logits.grad.shape == logits.shape


def test_weights_or_states_that_have_changed() -> None:
    head, hidden, target = case(torch.float32)
    version = [0]
    made = DeferredHeads([(head, lambda: version[0])])
    hidden = hidden.clone()
    logits, loss = head(hidden), selected(head(hidden), target)
    version[0] = 1
    with pytest.raises(overspill.OffloadError, match="have changed meanwhile"):
        of_nanogpt(logits, target)
    with pytest.raises(overspill.OffloadError, match="have changed meanwhile"):
        loss.backward()
    version[0] = 0
    hidden.zero_()
    with pytest.raises(overspill.OffloadError, match="have changed meanwhile"):
        of_nanogpt(logits, target)
    made.remove()


def test_where_the_head_is() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_embd=8, n_layer=1, n_head=1)
    )
    assert head_of(model) is model.lm_head
    own = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 50))
    assert head_of(own) is own[3]
    assert heads_in(own) == (own[3],)
    with pytest.raises(overspill.OffloadError, match="leave loss out"):
        head_of(nn.Sequential(nn.Linear(8, 8)))
    own[3] = nn.utils.parametrizations.weight_norm(nn.Linear(8, 50))
    with pytest.raises(overspill.OffloadError, match=r"plain nn\.Linear"):
        head_of(own)
    nn.utils.parametrize.remove_parametrizations(own[3], "weight")
    assert head_of(own) is own[3]


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: torch.Tensor) -> torch.Tensor:
        return z.clone()

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 5 * given


def test_second_derivatives_are_refused(deferred: Any) -> None:
    head, hidden, target = case(torch.float32)
    hidden.requires_grad_()

    def penalty(loss: Loss) -> torch.Tensor:
        (found,) = torch.autograd.grad(loss(head(hidden), target), hidden, create_graph=True)
        return found.square().sum()

    assert all(torch.isfinite(penalty(loss)) for loss in (of_nanogpt, selected))
    deferred(head)
    for loss in (of_nanogpt, selected):
        with pytest.raises(overspill.OffloadError, match="no second derivatives"):
            penalty(loss)


def through_a_function(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return of_nanogpt(Scaled.apply(z), t)


def through_a_checkpoint(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = checkpoint(of_nanogpt, z, t, use_reentrant=True)
    return found


def around_ordinary_logits(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = checkpoint(across_tokens, z, t, use_reentrant=False)
    return found


def compiled(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.compile(of_nanogpt, backend="aot_eager")(z, t)
    return found


THROUGH = [through_a_function, through_a_checkpoint, around_ordinary_logits, compiled]


@pytest.mark.parametrize("loss", THROUGH)
def test_code_that_hides_the_logits(loss: Loss, deferred: Any) -> None:
    same_as_ordinary(loss, deferred)


def test_a_function_returns_logits_that_are_changed_in_place(deferred: Any) -> None:
    head, hidden, _ = case(torch.float32)
    logits = Scaled.apply(deferred(head)(hidden))
    with torch.no_grad(), pytest.raises(overspill.OffloadError, match="clone"):
        logits.fill_(0)
    with torch.no_grad():
        logits.clone().fill_(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", ["head", "loss", "steps"])
def test_autocast_of_each_part(where: str, dtype: torch.dtype, deferred: Any) -> None:
    head, hidden, target = case(dtype)

    def run() -> tuple[torch.Tensor, ...]:
        head.zero_grad()
        mine = hidden.clone().requires_grad_()
        on = partial(torch.autocast, DEVICE.type, torch.bfloat16)
        with on(enabled=where == "head"):
            logits = head(mine)
        with on(enabled=where == "steps"):
            logits = logits.log_softmax(-1)
        with on(enabled=where == "loss"):
            loss = functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        loss.backward()
        assert mine.grad is not None and head.weight.grad is not None
        return loss.detach(), mine.grad, head.weight.grad.clone()

    plain = run()
    deferred(head)
    found = run()
    assert [each.dtype for each in found] == [each.dtype for each in plain]
    bits = 8e-3 if torch.bfloat16 in (dtype, found[0].dtype) or where == "head" else 1e-6
    for mine, theirs in zip(found, plain, strict=True):
        assert (mine - theirs).norm() <= bits * theirs.norm()


def test_kept_results_hold_no_hidden_states(deferred: Any) -> None:
    head, hidden, _ = case(torch.float32)
    deferred(head)
    states = hidden.requires_grad_() * 1
    watch = StorageWeakRef(states.untyped_storage())
    kept = head(states).logsumexp(-1)
    del states
    kept.mean().backward()
    assert watch.expired() and kept.shape == (B, S)


def test_a_weight_that_is_edited_is_noticed(deferred: Any) -> None:
    head, hidden, _ = case(torch.float32)
    logits = deferred(head)(hidden)
    with torch.no_grad():
        head.weight.mul_(2)
    with pytest.raises(overspill.OffloadError, match="have changed meanwhile"):
        logits.logsumexp(-1)
    made = DeferredHeads([(head, lambda: 0)])
    logits = head(hidden)
    made.remove()  # as unwrap does: nothing tells of edits any more
    with pytest.raises(overspill.OffloadError, match="have changed meanwhile"):
        logits.mean()


@pytest.mark.parametrize("use", [
    lambda z, t: z[..., :500].logsumexp(-1).mean(),
    lambda z, t: sum(part.logsumexp(-1).mean() for part in z.split(500, -1)),
    lambda z, t: z[0, -1].logsumexp(-1),
    lambda z, t: z[(t > 100).tolist(), :500].logsumexp(-1).mean(),
    lambda z, t: z[t > 100, :500].logsumexp(-1).mean(),
    lambda z, t: z[(t > 100).to(torch.uint8), :500].logsumexp(-1).mean(),
    lambda z, t: z[:, 3:, :].logsumexp(-1).mean() + z[..., None, :].logsumexp(-1).mean(),
    lambda z, t: z[..., 7].mean() + z[0, 0, 7] + z[0][..., :3].sum(),
    lambda z, t: z[torch.tensor([1, 0], device=z.device), -1].logsumexp(-1).mean(),
    lambda z, t: z.sum(-1, True, dtype=torch.float64),
    lambda z, t: z.gather(-1, t[..., None][..., :0]).sum(),
    lambda z, t: z.softmax(-1).detach().gather(-1, t.clamp(min=0)[..., None]).mean(),
])  # fmt: skip
def test_parts_of_the_vocabulary_and_single_tokens(use: Any, deferred: Any) -> None:
    head, hidden, target = case(torch.float32)
    expected = use(head(hidden), target)
    torch.testing.assert_close(use(deferred(head)(hidden), target), expected)


def test_logits_without_a_graph_get_none_later(deferred: Any) -> None:
    head, hidden, target = case(torch.float32)
    deferred(head)
    with torch.no_grad():
        logits = head(hidden)
    assert not selected(logits, target).requires_grad
    assert not of_nanogpt(logits, target).requires_grad
    made = head(hidden)
    with torch.no_grad():
        weight = made.softmax(-1)
    assert not weight.gather(-1, target.clamp(min=0)[..., None]).requires_grad


def test_results_written_into_logits(deferred: Any) -> None:
    head, hidden, _ = case(torch.float32)
    deferred(head)
    with torch.no_grad():
        logits = head(hidden)
        torch.mul(torch.zeros(V, device=DEVICE), torch.ones(B, S, V, device=DEVICE), out=logits)
        assert not logits.any()
        logits = head(hidden)
        assert logits.data_ptr() == logits.data_ptr() == logits.values().data_ptr()
