"""Weights that are read outside of their module's forward, as losses over chunks of tokens do: in
place, with one fetch for all reads of a pass."""

from __future__ import annotations

import ctypes
import itertools
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import overspill
from overspill.errors import OffloadError
from tests.devices import CPU, SIM, about_sim, plainly
from tests.models import adamw

VOCABULARY, WIDTH, CHUNKS = 512, 64, 8
TIGHT = {"device": SIM, "device_memory": "420KiB", "host_memory": "4MiB", "durable": False}
UPDATES = ("step", "next_forward", "backward")
Loss = Callable[[torch.Tensor, torch.Tensor, nn.Parameter], torch.Tensor]


def linear(h: torch.Tensor, y: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    return F.cross_entropy(F.linear(h, weight), y, reduction="sum")


def transposed(h: torch.Tensor, y: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    return F.cross_entropy(h @ weight.t(), y, reduction="sum")


def checkpointed(h: torch.Tensor, y: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    return checkpoint(linear, h, y, weight, use_reentrant=False)


class OfFunction(torch.autograd.Function):
    """The gradients by hand, from what was saved."""

    @staticmethod
    def forward(
        ctx: Any, h: torch.Tensor, y: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(h, y, weight)
        return F.cross_entropy(F.linear(h, weight), y, reduction="sum")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        h, y, weight = ctx.saved_tensors
        with torch.enable_grad():
            h, weight = h.detach().requires_grad_(), weight.detach().requires_grad_()
            loss = F.cross_entropy(F.linear(h, weight), y, reduction="sum")
        dh, dw = torch.autograd.grad(loss, (h, weight), grad)
        return dh, None, dw


def function(h: torch.Tensor, y: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    made: torch.Tensor = OfFunction.apply(h, y, weight)
    return made


class LM(nn.Module):
    """Its loss reads the head's weight, chunk by chunk, and never calls the head; ``inside``: in
    the model's own forward."""

    def __init__(self, loss: Loss, chunks: int, *, tied: bool, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.one, self.chunks, self.inside = loss, chunks, inside

    def loss(self, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h, y = h.flatten(0, 1), y.flatten()
        parts = zip(h.chunk(self.chunks), y.chunk(self.chunks), strict=True)
        return torch.stack([self.one(*part, self.head.weight) for part in parts]).sum() / len(y)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return self.loss(h, y) if self.inside else h


def run(model: LM, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[float]:
    losses = []
    for step in range(steps):
        generator = torch.Generator("cpu").manual_seed(step)
        ids = torch.randint(0, VOCABULARY, (4, 33), generator=generator, device="cpu")
        ids = ids.to(model.embed.weight.device)
        loss = model(ids[:, :-1], ids[:, 1:])
        if not model.inside:
            loss = model.loss(loss, ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


LOSSES: dict[str, Loss] = {
    "linear": linear,
    "transposed": transposed,
    "checkpointed": checkpointed,
    "function": function,
}


def crossed() -> list[Any]:
    """Every loss with every mode; the other half of all combinations is for the soak."""
    every = itertools.product(LOSSES, (True, False), (True, False), UPDATES)
    return [
        pytest.param(
            loss, tied, inside, update, marks=() if number % 2 else pytest.mark.soak,
            id=f"{loss}-{'tied' if tied else 'own'}-{'forward' if inside else 'loop'}-{update}",
        )
        for number, (loss, tied, inside, update) in enumerate(every)
    ]  # fmt: skip


@pytest.mark.parametrize(("loss", "tied", "inside", "update"), crossed())
def test_a_loss_over_chunks_is_exact_and_fetches_the_head_once_a_pass(
    loss: str, tied: bool, inside: bool, update: str, tmp_path: Path
) -> None:
    plain = LM(LOSSES[loss], CHUNKS, tied=tied, inside=inside)
    model = LM(LOSSES[loss], CHUNKS, tied=tied, inside=inside)
    expected = run(plain, plainly(overspill.optim.AdamW, adamw(plain).param_groups))
    with overspill.wrap(model, adamw(model), nvme=tmp_path, update=update, **TIGHT) as optimizer:
        assert run(model, optimizer) == expected
        spans = optimizer._engine.runtime.trace.spans(0, time.perf_counter_ns())
        fetched = Counter(span.name for span in spans if span.lane == "copy_in")
        # In forward and in backward, of four steps; with the embedding, again; now and then one
        # that came ahead of time had to go for another.
        assert 0 < fetched["embed" if tied else "head"] <= 4 * (4 if tied else 2) + 3, fetched


def test_the_graph_has_no_copy_of_the_head(tmp_path: Path) -> None:
    """What it saves of weights it finds again in backward: nothing stands in for the parameter."""
    model = LM(linear, CHUNKS, tied=False, inside=False)
    with overspill.wrap(model, adamw(model), nvme=tmp_path, **TIGHT):
        h = torch.randn(1, CHUNKS * 4, WIDTH, requires_grad=True)
        loss = model.loss(h, torch.zeros(1, CHUNKS * 4, dtype=torch.long, device=h.device))
        nodes, ends = [loss.grad_fn], list[nn.Parameter]()
        while nodes:
            node = nodes.pop()
            if hasattr(node, "variable"):
                ends.append(node.variable)
            nodes += [following for following, _ in getattr(node, "next_functions", ())]
        assert sum(end is model.head.weight for end in ends) == CHUNKS
        loss.backward()


def test_an_l2_penalty_fetches_every_unit_once(tmp_path: Path) -> None:
    """Parameter by parameter, several of a unit, in the loss."""

    def penalised(model: LM, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for step in range(3):
            x = torch.full((2, 8), step, dtype=torch.long)
            loss = model(x, x) + 1e-3 * sum((p.square().sum() for p in model.parameters()), 0.0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    plain = LM(linear, 1, tied=False, inside=True)
    model = LM(linear, 1, tied=False, inside=True)
    expected = penalised(plain, plainly(overspill.optim.AdamW, adamw(plain).param_groups))
    with overspill.wrap(model, adamw(model), nvme=tmp_path, **TIGHT) as optimizer:
        assert penalised(model, optimizer) == expected
        every = sum(p.numel() for p in model.parameters()) * 4
        # The forward, the penalty, and backward through both.
        assert optimizer.stats.copy_in.bytes < 4.5 * every


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own"])
def test_all_weights_pass_by_one_after_another(tied: bool, tmp_path: Path) -> None:
    plain = LM(linear, CHUNKS, tied=tied, inside=True)
    model = LM(linear, CHUNKS, tied=tied, inside=True)
    theirs = plainly(overspill.optim.AdamW, adamw(plain).param_groups)
    with overspill.wrap(model, adamw(model), nvme=tmp_path, **TIGHT) as optimizer:
        trace = optimizer._engine.runtime.trace
        for steps in (0, 2):
            assert run(model, optimizer, steps) == run(plain, theirs, steps)
            before = time.perf_counter_ns()
            seen = dict(overspill.named_weights(model))
            spans = trace.spans(before, time.perf_counter_ns())
            fetched = Counter(span.name for span in spans if span.lane == "copy_in")
            assert max(fetched.values()) <= 2, fetched  # prefetch may bring some for nothing
            expected = dict(plain.named_parameters())
            assert seen.keys() == expected.keys()
            assert all(torch.equal(t, expected[name]) for name, t in seen.items())
            next(iter(seen.values())).zero_()  # a copy
        weights = overspill.named_weights(model)
        next(weights)
        assert run(model, optimizer, 1) == run(plain, theirs, 1)  # and it goes on
        name, weight = list(weights)[-1]
        assert torch.equal(weight, expected[name])
    with pytest.raises(OffloadError, match="not wrapped"):
        overspill.named_weights(plain)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_that_are_asked_for_come_through_checkpoints(loss: str, tmp_path: Path) -> None:
    """``torch.autograd.grad`` of hidden parameters, whose backward reads hidden ones."""
    found = []
    for wrapped in (False, True):
        model = LM(LOSSES[loss], CHUNKS, tied=False, inside=True)
        if wrapped:
            optimizer = overspill.wrap(model, adamw(model), nvme=tmp_path, **TIGHT)
        device = model.embed.weight.device
        x = torch.arange(64, device=device).reshape(4, 16)
        asked = [model.head.weight, model.embed.weight, model.blocks[1][0].bias]
        total = model(x, x)
        found.append(torch.autograd.grad(total, asked, retain_graph=True))
        spare = nn.Parameter(torch.zeros(3, device=device))
        found[-1] += torch.autograd.grad(
            total, [spare, *asked], retain_graph=True, materialize_grads=True
        )
        found[-1] += (torch.autograd.grad(total, asked[0])[0],)
    optimizer.close()
    assert len(found[0]) == 8
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*found, strict=True))


def test_hooks_of_others_find_weights(tmp_path: Path) -> None:
    """What a graph saves, they may keep: then it is a copy; where none may be, all goes without."""
    model = LM(linear, 1, tied=False, inside=True)
    weight = model.head.weight.detach().clone()
    with overspill.wrap(model, adamw(model), nvme=tmp_path, **TIGHT):
        for hooks in (
            torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
            torch.autograd.graph.save_on_cpu(),
        ):
            x = torch.ones_like(weight, requires_grad=True)
            with hooks:
                total = (x * model.head.weight).sum()
            total.backward()
            assert x.grad is not None and torch.equal(x.grad, weight.to(x.device))
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            assert model.head.weight.square().sum().item() > 0


def test_edits_of_frozen_weights_are_kept_whatever_makes_them(tmp_path: Path) -> None:
    model = LM(linear, 1, tied=False, inside=True)
    model.head.weight.requires_grad_(False)
    expected = F.relu(model.head.weight.detach().clone())
    inner = adamw(model)
    with overspill.wrap(model, inner, nvme=tmp_path, **TIGHT) as optimizer:
        F.relu(model.head.weight, inplace=True)
        assert torch.equal(model.state_dict()["head.weight"], expected.to(model.head.weight.device))
        with overspill.materialized(model):
            pass
        with torch.no_grad():
            model.blocks[3][2].weight.mul_(0.5)
            half = model.blocks[3][2].weight.detach().clone()
        assert torch.equal(model.state_dict()["blocks.3.2.weight"], half)
        run(model, optimizer, 1)


def test_a_read_after_a_backward_that_raised_closes_what_it_left(tmp_path: Path) -> None:
    model = LM(linear, 1, tied=False, inside=True)
    with overspill.wrap(model, adamw(model), nvme=tmp_path, **TIGHT) as optimizer:
        run(model, optimizer, 1)

        def fails(_grad: torch.Tensor) -> None:
            raise RuntimeError("amid backward")

        handle = model.blocks[2][0].weight.register_hook(fails)
        with pytest.raises(RuntimeError, match="amid backward"):
            run(model, optimizer, 1)
        handle.remove()
        optimizer.zero_grad()
        assert all(p.square().sum().item() > 0 for p in model.parameters() if p.dim() > 1)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        run(model, optimizer, 2)


class ByAddress(torch.autograd.Function):
    """Kernels of their own, as Triton's, are given where tensors lie, and nobody is asked."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(h, weight)
        return h @ raw(weight).t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        h, weight = ctx.saved_tensors
        return grad @ raw(weight), grad.t() @ h


def raw(weight: torch.Tensor) -> torch.Tensor:
    size = weight.numel()
    found = (ctypes.c_float * size).from_address(weight.data_ptr())
    return torch.frombuffer(found, dtype=torch.float32).reshape(weight.shape).clone()


def by_address(h: torch.Tensor, y: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    return F.cross_entropy(ByAddress.apply(h, weight), y, reduction="sum")  # type: ignore[arg-type]


@about_sim
@pytest.mark.parametrize("update", ["step", "next_forward", "backward"])
@pytest.mark.parametrize("inside", [True, False], ids=["in forward", "in the loop"])
def test_kernels_find_weights_by_their_address(inside: bool, update: str, tmp_path: Path) -> None:
    plain = LM(by_address, CHUNKS, tied=False, inside=inside)
    model = LM(by_address, CHUNKS, tied=False, inside=inside)
    expected = run(plain, plainly(overspill.optim.AdamW, adamw(plain).param_groups))
    with overspill.wrap(model, adamw(model), nvme=tmp_path, update=update, **TIGHT) as optimizer:
        assert run(model, optimizer) == expected


@pytest.mark.parametrize("place", ["memory", "streamed"])
def test_nobody_writes_what_lies_where_a_parameter_is_not(place: str, tmp_path: Path) -> None:
    """Writers of files ask where tensors lie, and read there."""
    from safetensors.torch import load_file, save_file

    model = LM(linear, 1, tied=False, inside=True)
    wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
    options = TIGHT if place == "streamed" else {"device": CPU, "host_memory": "1GiB"}
    with overspill.wrap(model, adamw(model), nvme=tmp_path, **options):
        path = tmp_path / "weights.safetensors"
        try:
            save_file(dict(model.named_parameters()), path)
        except (OffloadError, RuntimeError):
            assert not path.exists()
        else:
            assert all(
                torch.equal(t.to(wanted[n].device), wanted[n]) for n, t in load_file(path).items()
            )
        with pytest.raises(OffloadError, match=r"no address.*named_weights"):
            model.head.weight.data_ptr()
        save_file(dict(overspill.named_weights(model)), path)
        assert all(
            torch.equal(t.to(wanted[n].device), wanted[n]) for n, t in load_file(path).items()
        )


def test_what_is_kept_for_readers_is_in_nobodys_way(tmp_path: Path) -> None:
    """Edits, steps, commits, reads of others and the end come right after a read."""
    plain = LM(linear, 1, tied=False, inside=True)
    model = LM(linear, 1, tied=False, inside=True)
    theirs = plainly(overspill.optim.AdamW, adamw(plain).param_groups)
    options = {**TIGHT, "durable": True, "device_memory": "460KiB"}
    optimizer = overspill.wrap(model, adamw(model), nvme=tmp_path, **options)

    def read(m: LM) -> float:
        return float(m.blocks[1][0].weight.square().sum().item())

    for then in ("edit", "step", "commit", "forward", "state", "rollback", "others"):
        assert read(model) == read(plain)
        for m, o in ((model, optimizer), (plain, theirs)):
            if then == "edit":
                with torch.no_grad():
                    m.blocks[1][0].weight.mul_(0.5)
            elif then == "step":
                run(m, o, 1)
                read(m)
                o.step()
        if then == "commit":
            optimizer.commit()
        elif then == "rollback":
            optimizer.commit()
            read(model)
            optimizer.rollback()
        elif then == "state":
            ours = model.state_dict()
            assert all(torch.equal(t, ours[n]) for n, t in plain.state_dict().items())
        elif then == "others":
            assert [p.sum().item() for p in model.parameters()] == [
                p.sum().item() for p in plain.parameters()
            ]
        assert run(model, optimizer, 2) == run(plain, theirs, 2)
    read(model)
    optimizer.close()
    with pytest.raises(OffloadError, match="closed"):
        read(model)
