"""Layers of one's own in tiles: what they depend on, what is refused, and what people do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import overspill
from overspill.activations import tiles
from overspill.activations.known_code import known
from tests.devices import about_cpu, normal
from tests.parity.test_tiles import adamw, batch, llama, small_tiles

transformers = pytest.importorskip("transformers")
__all__ = ["small_tiles"]  # a fixture


class Feed(nn.Module):
    def __init__(self, mixes: bool = False, rate: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 48), nn.Linear(48, 16)
        self.mixes, self.drop = mixes, nn.Dropout(rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mixes:
            x = x + x.cumsum(1)
        made: torch.Tensor = self.drop(self.down(functional.gelu(self.up(x))))
        return made


class Net(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Feed(**how) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def fed(step: int) -> torch.Tensor:
    return normal(step, 2, 25, 16)


def graph_of(t: torch.Tensor) -> set[str]:
    nodes, found = [t.grad_fn], set[str]()
    while nodes:
        node: Any = nodes.pop()
        found.add(type(node).__name__.rstrip("0123456789"))
        nodes += [each for each, _ in node.next_functions if each is not None]
    return found


@about_cpu
def test_layers_of_ones_own_by_name() -> None:
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    with overspill.wrap(model, adamw(model), device="cpu", tile=["blocks.*"]) as optimizer:
        for step in range(2):
            mine, theirs = model(fed(step)), plain(fed(step))
            torch.testing.assert_close(mine, theirs)
            assert "CatBackward" in graph_of(mine)
            mine.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            plain.load_state_dict(model.state_dict())


@about_cpu
def test_a_layer_that_mixes_tokens_is_refused() -> None:
    model = Net(mixes=True)
    wrapped = overspill.wrap(model, adamw(model), device="cpu", tile=["blocks.*"])
    with (
        wrapped,
        pytest.raises(overspill.OffloadError, match=r"depend on the others.*leave it out"),
    ):
        model(fed(0))


class Draws(Feed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(super().forward(x), 0.5, self.training)


@about_cpu
@pytest.mark.parametrize("evaluates_first", [False, True])
def test_a_layer_that_draws_runs_whole(
    evaluates_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    model.blocks = nn.ModuleList(Draws() for _ in range(3))
    plain = copy.deepcopy(model)
    with overspill.wrap(model, adamw(model), device="cpu", tile=["blocks.*"]):
        if evaluates_first:
            model.eval()(fed(0))
            model.train()
        for each in (model, plain):
            torch.manual_seed(1)
            each(fed(0)).square().mean().backward()
        for p, own in zip(plain.parameters(), model.parameters(), strict=True):
            assert own.grad is not None and p.grad is not None
            assert torch.equal(own.grad, p.grad)
    assert "draws random numbers, so it computes all tokens at once" in caplog.text


def _ahead(x: torch.Tensor) -> torch.Tensor:
    return x + torch.cat([x[:, 1:], x[:, :1]], 1)


@about_cpu
@pytest.mark.parametrize("mix", [_ahead, lambda x: x + x.cumsum(1), lambda x: x + x.mean(1, True)])
@pytest.mark.parametrize("zero", [False, True])
def test_any_dependence_is_seen_once_there_are_values(mix: Any, zero: bool) -> None:
    class Mixes(Feed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(mix(x))

    model = Net()
    model.blocks = nn.ModuleList([Mixes()])
    if zero:
        nn.init.zeros_(model.blocks[0].down.weight)
        nn.init.zeros_(model.blocks[0].down.bias)
    plain = copy.deepcopy(model)
    with overspill.wrap(model, adamw(model), device="cpu", tile=["blocks.*"]) as optimizer:
        if zero:  # computed whole until it shows
            model(fed(0)).square().mean().backward()
            plain(fed(0)).square().mean().backward()
            for p, own in zip(plain.parameters(), model.parameters(), strict=True):
                assert own.grad is not None and p.grad is not None
                assert torch.equal(own.grad, p.grad)
            optimizer.step()
        with pytest.raises(overspill.OffloadError, match=r"depend on the others.*leave it out"):
            model(fed(1))


@about_cpu
def test_side_inputs_and_hooks_of_weights_count_once() -> None:
    class Conditioned(Feed):
        cond: torch.Tensor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.cond

    model = Net()
    model.blocks = nn.ModuleList([Conditioned(), Conditioned()])
    model.scale = nn.Parameter(torch.full((16,), 2.0))
    plain = copy.deepcopy(model)
    with overspill.wrap(model, adamw(model), device="cpu", tile=["blocks.*"]):
        for each in (model, plain):
            for block in each.blocks:
                block.cond = each.scale * 1.5
                block.up.weight.register_hook(lambda grad: 2 * grad)
            made = each(fed(0))
            made.mul_(2)  # an ordinary tensor
            made.square().mean().backward()
        for p, own in zip(plain.parameters(), model.parameters(), strict=True):
            assert own.grad is not None and p.grad is not None
            torch.testing.assert_close(own.grad.clone(), p.grad)


@about_cpu
def test_state_that_changes_before_backward_is_an_error() -> None:
    model = Net()
    with overspill.wrap(model, adamw(model), device="cpu", tile=["blocks.*"]):
        loss = model(fed(0)).square().mean()
        model.blocks[1].factor = 3.0
        with pytest.raises(overspill.OffloadError, match="factor of a Feed has changed"):
            loss.backward()


@about_cpu
def test_the_mode_of_forward_is_that_of_backward() -> None:
    class Modal(Feed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2.0 if self.training else 1.0)

    model = Net()
    model.blocks = nn.ModuleList([Modal(), Modal()])
    plain = copy.deepcopy(model)
    with overspill.wrap(model, adamw(model), device="cpu", tile=["blocks.*"]):
        losses = [each(fed(0)).square().mean() for each in (model, plain)]
        for each in (model, plain):
            each.eval()
        for loss in losses:
            loss.backward()
        for p, own in zip(plain.parameters(), model.parameters(), strict=True):
            assert own.grad is not None and p.grad is not None
            torch.testing.assert_close(own.grad.clone(), p.grad)
        assert not model.blocks[0].training


@about_cpu
def test_layers_of_ones_own_can_still_be_recomputed() -> None:
    model = Net()
    assert known(model.blocks[0])
    with overspill.wrap(model, adamw(model), device="cpu", tile=["blocks.*"]):
        assert known(model.blocks[0])


@about_cpu
def test_layers_that_mix_tokens_are_left_out() -> None:
    config = transformers.SwitchTransformersConfig(
        vocab_size=64, d_model=16, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=2, d_kv=8,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_experts=2,
    )  # fmt: skip
    model = transformers.SwitchTransformersForConditionalGeneration(config)
    names = {type(layer).__name__ for layer in tiles.layers_in(model)}
    assert not any("Sparse" in name or "Expert" in name for name in names), names


@about_cpu
def test_second_derivatives_and_two_backwards() -> None:
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    with overspill.wrap(model, adamw(model), device="cpu", tile=["blocks.*"]):
        found = []
        for each in (model, plain):
            x = fed(0).requires_grad_()
            loss = each(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            found.append(x.grad)
        torch.testing.assert_close(*found)


@about_cpu
@pytest.mark.parametrize("net", [
    pytest.param(lambda: nn.Sequential(nn.Linear(16, 16)), id="one product"),
    pytest.param(lambda: Feed(rate=0.1), id="dropout"),
    pytest.param(lambda: nn.ModuleDict({"up": nn.Linear(4, 4), "conv": nn.Conv1d(4, 4, 1),
                                        "down": nn.Linear(4, 4)}), id="convolution"),
])  # fmt: skip
def test_modules_that_are_no_feed_forward_layers_are_refused(net: Any) -> None:
    model = nn.ModuleDict({"part": net(), "head": nn.Linear(16, 4)})
    with pytest.raises(overspill.OffloadError, match=r"tile: 'part' .*leave it out"):
        overspill.wrap(model, adamw(model), device="cpu", tile=["part"])


@about_cpu
def test_weights_changed_between_forward_and_backward_are_an_error() -> None:
    model = Net()
    with overspill.wrap(model, adamw(model), device="cpu", tile=["blocks.*"]) as optimizer:
        first = model(fed(0)).square().mean()
        model(fed(1)).square().mean().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an optimizer step"):
            first.backward()


@about_cpu
def test_autocast_of_forward_is_that_of_backward() -> None:
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    with overspill.wrap(model, adamw(model), device="cpu", tile=["blocks.*"]):
        for each in (model, plain):
            with torch.autocast("cpu", torch.bfloat16):
                made = each(fed(0))
            made.float().square().mean().backward()
        for p, own in zip(plain.parameters(), model.parameters(), strict=True):
            assert own.grad is not None and p.grad is not None
            torch.testing.assert_close(own.grad, p.grad, rtol=2e-2, atol=1e-3)


@about_cpu
def test_auto_leaves_out_what_cannot_run_in_tiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama()
    kind = type(model.model.layers[0].mlp)
    whole = kind.forward
    monkeypatch.setattr(kind, "forward", lambda layer, x: whole(layer, x + x.cumsum(1)))
    plain = copy.deepcopy(model)
    options = {"device": "cpu", "host_memory": "14MiB", "tokens": 2000, "tile": "auto"}
    with overspill.wrap(model, adamw(model), **options):
        loss = model(input_ids=batch(0), labels=batch(0)).loss
        assert torch.equal(loss, plain(input_ids=batch(0), labels=batch(0)).loss)
    assert "LlamaMLP gives outputs for some tokens that depend on the others" in caplog.text


@about_cpu
def test_an_interrupt_leaves_no_mode_that_is_removed_with_others() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

    class Passing(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    class Interrupts(Feed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if interrupts.pop():
                raise KeyboardInterrupt
            return super().forward(x)

    interrupts = [False] * 20
    model = Net()
    model.blocks = nn.ModuleList(Interrupts() for _ in range(2))
    options = {"device": "cpu", "host_memory": "64MiB"}
    for policy in ("selective", "auto"):
        with overspill.wrap(model, adamw(model), **options, activations=policy) as optimizer:
            interrupts.append(True)
            with pytest.raises(KeyboardInterrupt):
                model(fed(0))
            with Passing() as mine:
                model(fed(0)).square().mean().backward()
                assert _get_current_dispatch_mode_stack()[-1] is mine
            assert not _get_current_dispatch_mode_stack()
            optimizer.zero_grad()
            overspill.unwrap(model)


@about_cpu
def test_layers_of_diffusers() -> None:
    attention = pytest.importorskip("diffusers.models.attention")
    torch.manual_seed(0)
    model = nn.Sequential(
        attention.FeedForward(16), attention.FeedForward(16, activation_fn="geglu")
    )
    plain = copy.deepcopy(model)
    assert len(tiles.layers_in(model)) == 2
    with overspill.wrap(model, adamw(model), device="cpu", tile=["*"]):
        mine, theirs = model(fed(0)), plain(fed(0))
        torch.testing.assert_close(mine, theirs)
        assert "CatBackward" in graph_of(mine)
        for made in (mine, theirs):
            made.square().mean().backward()
        for p, own in zip(plain.parameters(), model.parameters(), strict=True):
            assert own.grad is not None and p.grad is not None
            torch.testing.assert_close(own.grad.clone(), p.grad)
