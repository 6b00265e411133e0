"""Logits in chunks: values and gradients of ordinary ones, and errors instead of other results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import overspill
from overspill.logits import rows
from overspill.logits.deferred import DeferredLogits
from overspill.logits.heads import DeferredHeads, head_of, heads_in
from tests.devices import DEVICE

V, H, B, S = 1000, 32, 3, 21
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "CHUNK_BYTES", 8 * 4 * V)
    monkeypatch.setattr(rows, "LEAST_TOKENS", 8)
    monkeypatch.setattr(rows, "SLICE_BYTES", 300 * 4 * H)


@pytest.fixture
def deferred() -> Iterator[Callable[[nn.Linear], nn.Linear]]:
    """A head that defers, until the end of the test."""
    made: list[DeferredHeads] = []

    def defer(head: nn.Linear) -> nn.Linear:
        made.append(DeferredHeads([(head, lambda: 0)]))
        return head

    yield defer
    for each in made:
        each.remove()


def of_transformers(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    t = functional.pad(t, (0, 1), value=-100)[..., 1:].contiguous()
    z = z.float().view(-1, V)
    return functional.cross_entropy(z, t.view(-1), ignore_index=-100, reduction="sum") / 17


def of_nanogpt(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(z.view(-1, z.size(-1)), t.view(-1), ignore_index=-100)


def shifted(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    z, t = z[..., :-1, :].contiguous(), t[..., 1:].contiguous()
    return nn.CrossEntropyLoss()(z.view(-1, V), t.view(-1))


def capped(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return of_nanogpt(torch.tanh(z / 5) * 5, t)


def smoothed(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(z.flatten(0, 1).float(), t.flatten(), label_smoothing=0.1)


def biased(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    bias = torch.linspace(-1, 1, V, dtype=z.dtype, device=z.device).view(1, 1, V)
    return of_nanogpt(z + bias, t)


def tempered(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    z = (z / 0.7).flatten(0, 1)
    return functional.cross_entropy(z, t.flatten(), reduction="none").mean()


def negative(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return functional.nll_loss(z.float().flatten(0, 1).log_softmax(-1), t.flatten())


def log_probabilities(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    t = t.clamp(min=0)
    return -z[:, :-1].log_softmax(-1).gather(-1, t[:, 1:, None]).squeeze(-1).sum() / 9


def selected(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    z, t = z.float()[:, :-1], t.clamp(min=0)
    of_token = torch.gather(z, dim=-1, index=t[:, 1:, None]).squeeze(-1)
    return (torch.stack([torch.logsumexp(each, dim=-1) for each in z]) - of_token).mean()


def masked(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    mask = t > 100
    return functional.cross_entropy(z[mask], t[mask])


def in_parts(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    parts = zip(z.flatten(0, 1).split(10), t.flatten().split(10), strict=True)
    losses = [functional.cross_entropy(a, b, reduction="sum") for a, b in parts]
    return sum(losses, torch.zeros((), device=z.device)) / t.numel()


def two_uses(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return of_nanogpt(z, t) + 1e-3 * torch.logsumexp(z, -1).square().mean()


def of_one_sequence(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(z[1], t[1]) + z[:, -1].float().logsumexp(-1).mean()


CHUNKED: list[Loss] = [
    of_transformers, of_nanogpt, shifted, capped, smoothed, biased, tempered, negative,
    log_probabilities, selected, masked, in_parts, two_uses, of_one_sequence,
]  # fmt: skip


def in_place(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    z /= 3
    z[:, :, 3] = -5
    return of_nanogpt(z, t)


def across_tokens(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return z.float().softmax(1).square().sum() + z.transpose(1, 2).float().std()


def permuted(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    order = torch.arange(V, device=z.device).flip(0)
    return of_nanogpt(z[..., order], t)


def two_logits(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    wanted = z.detach().roll(1, -1).softmax(-1)
    return functional.kl_div(z.log_softmax(-1), wanted, reduction="sum")


def weighted(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(0.5, 2, V, dtype=z.dtype, device=z.device)
    return functional.cross_entropy(z.flatten(0, 1), t.flatten(), weight=weight)


def probabilities(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    wanted = torch.full((B * S, V), 1 / V, dtype=z.dtype, device=z.device)
    return functional.cross_entropy(z.flatten(0, 1), wanted)


def of_a_scale(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return of_nanogpt(z * torch.ones(B, S, 1, dtype=z.dtype, device=z.device), t)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(z)
        return z.float().square().mean()

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (z,) = ctx.saved_tensors
        return (2 * z.float() / z.numel() * given).to(z.dtype)


def of_a_function(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = Square.apply(z)
    return found


ORDINARY: list[Loss] = [
    in_place, across_tokens, permuted, two_logits, weighted, probabilities, of_a_scale,
]  # fmt: skip


def results(
    head: nn.Linear, loss: Loss, *, hidden: torch.Tensor, target: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The loss and the gradients of hidden states, weight and bias; and the logits."""
    head, hidden = head, hidden.clone().requires_grad_()
    head.zero_grad()
    logits = head(hidden)
    found = loss(logits, target)
    (3 * found).backward()
    grads = [hidden.grad, *(p.grad for p in head.parameters())]
    assert all(g is not None for g in grads)
    return [found.detach(), *(g for g in grads if g is not None)], logits


def case(dtype: torch.dtype, bias: bool = True) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(H, V, bias=bias, device="cpu").to(DEVICE, dtype)
    hidden = torch.randn(B, S, H, device="cpu").to(DEVICE, dtype)
    target = torch.randint(0, V, (B, S), device="cpu")
    target[0, 3] = -100
    return head, hidden, target.to(DEVICE)


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


def test_views_and_changes_in_place(deferred: Any) -> None:
    head, hidden, _ = case(torch.float32)
    deferred(head)
    logits = head(hidden)
    view = logits[:, :-1]
    with torch.no_grad(), pytest.raises(overspill.OffloadError, match="while other tensors"):
        logits.fill_(0)
    changed = logits.clone()
    del view
    with torch.no_grad(), pytest.raises(overspill.OffloadError, match="while other tensors"):
        changed.fill_(0)
    del changed
    with torch.no_grad():
        logits.fill_(0)
    assert not logits.any() and not logits[:, :-1].any()


def test_what_cannot_be_seen_is_refused(deferred: Any) -> None:
    head, hidden, target = case(torch.float32)
    deferred(head)
    hidden.requires_grad_()
    logits = head(hidden)
    of_nanogpt(logits, target)
    with pytest.raises(overspill.OffloadError, match=r"retain_grad.*leave loss out"):
        logits.retain_grad()
    vars(head).pop("forward")  # as without the option
    logits = head(hidden)
    logits.retain_grad()
    of_nanogpt(logits, target).backward()
    assert logits.grad is not None
    deferred(head)
    logits = head(hidden)
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


def test_what_would_be_left_out_is_refused(deferred: Any) -> None:
    head, hidden, target = case(torch.float32)
    hidden.requires_grad_()

    def penalty(loss: Loss) -> torch.Tensor:
        (found,) = torch.autograd.grad(loss(head(hidden), target), hidden, create_graph=True)
        return found.square().sum()

    wanted = [penalty(loss).detach() for loss in (of_nanogpt, selected)]  # without the option
    scaled = of_nanogpt(Scaled.apply(head(hidden)), target)
    deferred(head)
    assert all(torch.isfinite(each) for each in (*wanted, scaled))
    for loss in (of_nanogpt, selected):
        with pytest.raises(overspill.OffloadError, match="no second derivatives"):
            penalty(loss)
    with pytest.raises(overspill.OffloadError, match="its backward would be left out"):
        of_nanogpt(Scaled.apply(head(hidden)), target)


@pytest.mark.parametrize("use", [
    lambda z, t: z[..., :500].logsumexp(-1).mean(),
    lambda z, t: sum(part.logsumexp(-1).mean() for part in z.split(500, -1)),
    lambda z, t: z[0, -1].logsumexp(-1),
    lambda z, t: z[(t > 100).tolist(), :500].logsumexp(-1).mean(),
    lambda z, t: z[t > 100, :500].logsumexp(-1).mean(),
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
