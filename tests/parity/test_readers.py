"""Weights are right wherever they are read, and what is done to them is kept or refused: between
steps, in another module's forward, through views, in every placement."""

from __future__ import annotations

import copy
import itertools
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import overspill
from overspill.errors import OffloadError
from tests.devices import CPU, NAME, SIM, about_cpu, normal, plainly
from tests.models import TinyLM, adamw, batch, train, weights

PLACES: dict[str, dict[str, Any]] = {
    "memory": {"device": CPU, "host_memory": "1GiB"},
    "streamed": {"device": CPU, "host_memory": "1MiB"},
    "device": {"device": SIM, "device_memory": "1GiB", "host_memory": "1GiB"},
    "streamed in": {"device": SIM, "device_memory": "700KiB", "host_memory": "1500KiB"},
}
UPDATES = ("step", "next_forward", "backward")


@pytest.fixture(params=[(p, u) for p in PLACES for u in UPDATES], ids=lambda p: "-".join(p))
def twins(request: Any, tmp_path: Path) -> Iterator[Any]:
    """A wrapped model, and one whose optimizer is the same in memory: equal bit for bit."""
    place, update = request.param
    torch.manual_seed(0)
    model, plain = TinyLM(), TinyLM()
    plain.load_state_dict(model.state_dict())
    with overspill.wrap(
        model, adamw(model), nvme=tmp_path, update=update, rates=overspill.Rates(), **PLACES[place]
    ) as ours:
        yield model, ours, plain, plainly(overspill.optim.AdamW, adamw(plain).param_groups)


def same(model: nn.Module, plain: nn.Module) -> None:
    ours, theirs = weights(model), weights(plain)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def alike(twins: Any, what: Callable[[Any], None], steps: int = 3) -> None:
    """Does the same to both after every step; they stay equal."""
    model, ours, plain, theirs = twins
    for m, o in ((model, ours), (plain, theirs)):
        for number in range(steps):
            m(*batch(number)).backward()
            o.step()
            o.zero_grad()
            what(m)
    same(model, plain)


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.02, 0.02)


def clamp_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.02, 0.02)


def clamp_all_at_once(model: nn.Module) -> None:
    torch._foreach_clamp_max_([p.data for p in model.parameters()], 0.02)


def views(model: Any) -> None:
    with torch.no_grad():
        model.head.weight[3] = 0.5
        model.embed.weight.view(-1)[7:9].fill_(0.25)
        model.blocks[1].up.weight.detach().t()[2].mul_(0.5)
        model.blocks[0].norm.bias.data[1:3] += 1


def replaced(model: Any) -> None:
    with torch.no_grad():
        model.head.weight.copy_(model.embed.weight * 0.5)
        model.blocks[2].down.bias.zero_()
        model.blocks[1].norm.weight.copy_(normal(1, *model.blocks[1].norm.weight.shape))
    model.blocks[0].up.weight.data = model.blocks[3].up.weight.data * 0.5


@pytest.mark.parametrize("edit", [clamp, clamp_data, clamp_all_at_once, views, replaced])
def test_edits_between_steps_are_kept(twins: Any, edit: Callable[[Any], None]) -> None:
    alike(twins, edit)


def test_reads_between_steps_are_right(twins: Any) -> None:
    model, ours, plain, theirs = twins
    for m, o in ((model, ours), (plain, theirs)):
        train(m, o, 2)
    for ours_p, plain_p in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours_p, plain_p) and torch.equal(ours_p.data, plain_p.data)
        assert ours_p.norm().item() == plain_p.norm().item()
        assert ours_p.detach().tolist() == plain_p.tolist()
        assert repr(ours_p) == repr(plain_p)
        assert ours_p.shape == plain_p.shape and ours_p.dtype == plain_p.dtype
    left, right = torch.nn.utils.parameters_to_vector, list(plain.parameters())
    assert torch.equal(left(model.parameters()), left(right))
    alone = copy.deepcopy(model.blocks[1])
    again = pickle.loads(pickle.dumps(model.blocks[2].up.weight))
    assert type(alone.up.weight) is type(again) is nn.Parameter
    assert torch.equal(again, plain.blocks[2].up.weight)
    same(alone, plain.blocks[1])
    ours.close()  # a copy stands alone
    hidden = torch.randn(2, 64)
    assert torch.equal(alone(hidden), plain.blocks[1](hidden))


class Image(nn.Module):
    """Parts whose weights lie in memory in another order, or have nothing in them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1) for _ in range(8))
        self.to(memory_format=torch.channels_last)
        for block in self.blocks:
            block.turned = nn.Parameter(torch.ones(6, 5).t())
            block.none = nn.Parameter(torch.zeros(0, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x) * block.turned.sum()
        return x.square().mean()


@pytest.mark.parametrize("place", PLACES)
def test_a_parameter_says_how_it_lies_in_memory(place: str, tmp_path: Path) -> None:
    plain, model = Image(), Image()
    theirs = plainly(overspill.optim.AdamW, plain.parameters(), lr=1e-2)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with overspill.wrap(model, ours, nvme=tmp_path, **PLACES[place]) as optimizer:
        for number in range(2):
            for m, o in ((plain, theirs), (model, optimizer)):
                m(normal(number, 1, 64, 4, 4)).backward()
                o.step()
                o.zero_grad()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(p, q)
                assert p.stride() == q.stride() and p.stride(0) == q.stride(0)
                assert p.is_contiguous() == q.is_contiguous()
                assert p.dim_order() == q.dim_order()
                assert torch.zeros_like(p).stride() == torch.zeros_like(q).stride()
                drawn = []
                for each in (p, q):
                    torch.manual_seed(number)
                    drawn.append(torch.randn_like(each))
                assert torch.equal(*drawn) and drawn[0].stride() == drawn[1].stride()
                assert drawn[0].device == p.device
                assert torch.zeros_like(p, device="cpu").device.type == "cpu"


def test_an_average_of_the_weights(twins: Any) -> None:
    """Made before ``wrap`` or after, read and copied back."""
    model, ours, plain, theirs = twins
    averages = []
    for m, o in ((model, ours), (plain, theirs)):
        average = [p.detach().clone() for p in m.parameters()]
        for number in range(3):
            m(*batch(number)).backward()
            o.step()
            o.zero_grad()
            for mean, p in zip(average, m.parameters(), strict=True):
                mean.mul_(0.9).add_(p.data, alpha=0.1)
        averages.append(average)
        with torch.no_grad():
            for mean, p in zip(average, m.parameters(), strict=True):
                p.copy_(mean)
        train(m, o, 1)
    for one, other in zip(*averages, strict=True):
        assert torch.equal(one, other)
    same(model, plain)


class Penalised(nn.Module):
    """A loss that reads every weight, one of them in another module's forward."""

    def __init__(self, inner: TinyLM) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self.inner(tokens, targets)
        seen = F.embedding(tokens, self.inner.embed.weight)  # without calling the embedding
        loss = loss + F.linear(seen, self.inner.head.weight).square().mean() * 0.1
        return loss + sum(p.square().sum() for p in self.inner.parameters()) * 1e-3


@pytest.mark.parametrize("update", ["step", "next_forward", "backward"])
@pytest.mark.parametrize("place", PLACES)
def test_weights_in_the_loss_get_their_gradients(place: str, update: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, plain = Penalised(TinyLM()), Penalised(TinyLM())
    plain.load_state_dict(model.state_dict())
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with overspill.wrap(
        model, inner, nvme=tmp_path, update=update, rates=overspill.Rates(), **PLACES[place]
    ) as ours:
        losses = [train(model, ours, 3), train(plain, theirs, 3)]
        torch.testing.assert_close(losses[0], losses[1], atol=1e-5, rtol=1e-5)
        for name, value in weights(plain).items():
            torch.testing.assert_close(weights(model)[name], value, atol=2e-5, rtol=1e-4)


# -- what cannot be kept -------------------------------------------------------------------------


def test_a_leaf_is_not_changed_with_gradients_on(twins: Any) -> None:
    model, _, plain, _ = twins
    for m in (model, plain):
        with pytest.raises(RuntimeError):
            m.head.weight.clamp_(0, 1)
    same(model, plain)


# -- readers that hooks must know ----------------------------------------------------------------


class Bag(nn.Module):
    """Weights in a list and a dict, which are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList(nn.Parameter(torch.randn(16, 16) * 0.1) for _ in range(3))
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.ones(16))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.many:
            x = x @ weight
        return x * self.named["scale"]


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Bag(), Bag()
        self.last = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x))).square().mean()


@pytest.mark.parametrize("update", UPDATES)
def test_bags_of_parameters(update: str) -> None:
    torch.manual_seed(0)
    model, plain = Bags(), Bags()
    plain.load_state_dict(model.state_dict())
    theirs = plainly(overspill.optim.AdamW, plain.parameters(), lr=0.01)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(4, 16)
    with overspill.wrap(model, inner, device=CPU, host_memory="64MiB", update=update) as ours:
        for m, o in ((model, ours), (plain, theirs)):
            for _ in range(4):
                m(x).backward()
                o.step()
                o.zero_grad()
                with torch.no_grad():
                    m(x)
        same(model, plain)


class TiedHead(nn.Module):
    """A head without a bias that shares the embedding's weight; the logits may be had alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens)))


@pytest.mark.parametrize("memory", ["64MiB", "24KiB"])
@pytest.mark.parametrize("update", UPDATES)
def test_a_tied_head_is_called_without_its_embedding(
    update: str, memory: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, plain = TiedHead(), TiedHead()
    plain.load_state_dict(model.state_dict())
    theirs = plainly(overspill.optim.AdamW, plain.parameters(), lr=0.01)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens, hidden = torch.arange(8).view(2, 4), torch.randn(2, 16)
    with overspill.wrap(
        model, inner, device=CPU, host_memory=memory, update=update, nvme=tmp_path,
        rates=overspill.Rates(),
    ) as ours:  # fmt: skip
        for _ in range(3):
            logits = []
            for m, o in ((model, ours), (plain, theirs)):
                m(tokens).square().mean().backward()
                o.step()
                o.zero_grad()
                with torch.no_grad():
                    logits.append(m.head(hidden))
            assert torch.equal(*logits)
        same(model, plain)


@pytest.mark.parametrize("family", ["T5", "MT5", "Bart"])
@pytest.mark.parametrize("memory", ["64MiB", "tight"])
def test_encoder_decoders_with_tied_embeddings(family: str, memory: str, tmp_path: Path) -> None:
    """Their shared embedding is owned by a module that nobody calls."""
    import transformers

    small = {"vocab_size": 64, "d_model": 32}
    if family == "Bart":
        kinds: tuple[Any, Any] = (
            transformers.BartConfig,
            transformers.BartForConditionalGeneration,
        )
        small |= {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
                  "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
                  "max_position_embeddings": 32, "dropout": 0.0}  # fmt: skip
    else:
        kinds = (
            getattr(transformers, f"{family}Config"),
            getattr(transformers, f"{family}ForConditionalGeneration"),
        )
        small |= {
            "decoder_start_token_id": 0,
            "num_layers": 2,
            "num_heads": 2,
            "d_kv": 16,
            "d_ff": 64,
            "dropout_rate": 0.0,
        }
    torch.manual_seed(0)
    model, plain = kinds[1](kinds[0](**small)), kinds[1](kinds[0](**small))
    plain.load_state_dict(model.state_dict())
    theirs = plainly(overspill.optim.AdamW, plain.parameters(), lr=0.01)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    ids = torch.arange(12).view(2, 6) * 5 % 61 + 3
    host = memory if memory != "tight" else ("400KiB" if NAME else "320KiB")
    with overspill.wrap(
        model, inner, device=CPU, host_memory=host, nvme=tmp_path, rates=overspill.Rates()
    ) as ours:
        for _ in range(3):
            losses = []
            for m, o in ((model, ours), (plain, theirs)):
                m.train()
                m(input_ids=ids, labels=ids).loss.backward()
                o.step()
                o.zero_grad()
                m.eval()
                with torch.no_grad():
                    losses.append(m(input_ids=ids, labels=ids).loss)
            assert torch.equal(*losses)
        same(model, plain)


@about_cpu
def test_a_commit_of_weights_that_change_under_it_is_not_made(tmp_path: Path) -> None:
    """Whoever changes weights past every watch, while a commit saves them, ends the run with an
    error: the commit before it is whole, and every byte of it can be read."""
    from overspill.durable.inspect import inspect_store

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)])
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = overspill.wrap(
        model, inner, device=CPU, host_memory="1GiB", nvme=tmp_path, rates=overspill.Rates()
    )
    x = torch.randn(2, 1024)
    told, kept = "", []
    try:
        started = time.monotonic()
        for step in itertools.count():
            assert time.monotonic() - started < 60, "no commit has met a change in all this time"
            if step == 1:
                optimizer.commit()  # else there may be none to keep
            handle = model[3].register_forward_pre_hook(
                lambda module, _: kept.append(module.weight.detach().numpy())
            )
            loss = model(x).square().mean()
            handle.remove()
            for i in range(21 if step else 0):  # there and back, and there at last
                kept[-1] += 1e-3 * (-1) ** (step + i)  # no version tells what is done to this
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.clear()
    except OffloadError as error:
        told = str(error)
    optimizer.close()
    assert "weights of '3' were changed in place" in told and "while a commit saved them" in told
    found = inspect_store(tmp_path)
    assert found.wrong == () and found.commits
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)])
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer, _ = overspill.resume(model, tmp_path, inner, device=CPU, host_memory="1GiB")
    with optimizer:  # what the error advises
        for step in range(4):
            before = model[3].weight.detach().clone()
            if step % 2:
                with overspill.materialized(model, writeback=True), torch.no_grad():
                    model[3].weight.data.numpy()[:] += 1e-3
            else:
                model[3].weight.detach().numpy()[:] += 1e-3
            assert torch.equal(model[3].weight, before + 1e-3)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.commit()
    assert inspect_store(tmp_path).wrong == ()
