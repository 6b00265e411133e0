"""The optimizers as torch users meet them: states, groups, schedulers, errors."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

import overspill.optim as ours
from overspill.optim.registry import rules_for
from overspill.optim.streamed import StreamedRule

CLASSES = [ours.AdamW, ours.Adam, ours.SGD, ours.Adagrad, ours.Lion]
TORCH_CLASSES = [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad]


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 7), (300,), (), (0, 3)]
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def set_grads(params: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def train(optimizer: torch.optim.Optimizer, steps: range) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        set_grads(params, step)
        optimizer.step()


def options(kind: type, **more: Any) -> dict[str, Any]:
    return {"lr": 1e-2, **({"momentum": 0.9} if kind.__name__ == "SGD" else {}), **more}


@pytest.mark.parametrize("kind", TORCH_CLASSES)
def test_arguments_and_defaults_are_torchs(kind: type) -> None:
    theirs = kind(parameters())
    mine = getattr(ours, kind.__name__)(parameters())
    assert mine.defaults == theirs.defaults
    keys = {k: v for k, v in theirs.param_groups[0].items() if k != "params"}
    assert {k: v for k, v in mine.param_groups[0].items() if k != "params"} == keys


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("master", [None, "split", "fp32"])
@pytest.mark.parametrize("kind", CLASSES)
def test_state_dict_round_trip(kind: type, master: str | None, moments: str) -> None:
    make = lambda params: kind(params, **options(kind, master=master, moments=moments))  # noqa: E731
    params = parameters(torch.bfloat16)
    optimizer = make(params)
    train(optimizer, range(4))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for state, param in zip(saved["state"].values(), params, strict=True):
        for name, tensor in state.items():
            if name != "step":
                assert tensor.dtype is torch.float32
                assert tensor.shape == param.shape
        assert ("master" in state) == (master is not None)
        assert state["step"] == 4
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    again = make(others)
    again.load_state_dict(saved)
    if moments != "fp32":
        return  # they are rounded anew
    train(optimizer, range(4, 7))
    train(again, range(4, 7))
    for left, right in zip(params, others, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("kind", TORCH_CLASSES)
def test_states_pass_between_torch_and_ours(kind: type) -> None:
    mine_kind = getattr(ours, kind.__name__)
    params = parameters()
    theirs = kind(params, **options(kind))
    train(theirs, range(3))
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    mine = mine_kind(copies, **options(kind))
    mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
    back = kind([torch.nn.Parameter(p.detach().clone()) for p in params], **options(kind))
    back.load_state_dict(copy.deepcopy(mine.state_dict()))
    for optimizer in (theirs, mine, back):
        train(optimizer, range(3, 6))
    for expected, *others in zip(
        *(o.param_groups[0]["params"] for o in (theirs, mine, back)), strict=True
    ):
        for other in others:
            torch.testing.assert_close(other, expected, rtol=1e-5, atol=1e-6)


def test_loading_replaces_what_was_there() -> None:
    mine = ours.AdamW(parameters(), lr=1e-2, moments="int8")
    train(mine, range(3))
    fresh = ours.AdamW(parameters(), lr=0.5, moments="int8")
    mine.load_state_dict(fresh.state_dict())
    assert mine.param_groups[0]["lr"] == 0.5
    with pytest.raises(ValueError, match="momentum_buffer"):
        mine.load_state_dict(
            {
                "state": {0: {"momentum_buffer": torch.zeros(5, 7)}},
                "param_groups": mine.state_dict()["param_groups"],
            }
        )


def test_groups_schedulers_and_unused_parameters() -> None:
    results = []
    for home in (torch.optim, ours):
        params = parameters()
        optimizer = home.AdamW(
            [{"params": params[:1], "weight_decay": 0.5}, {"params": params[1:], "lr": 0.1}],
            lr=torch.tensor(0.05),
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(5):
            set_grads(params, step)
            if step < 2:
                params[1].grad = None
            optimizer.step()
            scheduler.step()
        results.append(params)
        assert optimizer.state[params[1]]["step"] == 3
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_closure_and_grad_scale() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = ours.SGD([weight], lr=1.0)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (weight * 8).sum()
        loss.backward()
        return float(loss)

    assert optimizer.step(closure, grad_scale=1 / 16) == 24.0
    assert torch.equal(weight.detach(), torch.full((3,), 0.5))
    assert torch.equal(weight.grad, torch.full((3,), 8.0))


def test_memory_orders() -> None:
    """Transposed and channels-last parameters are swept in place; strided gaps are refused."""
    start = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    grad = torch.randn(2, 3, 4, 5)
    results = []
    for given in (start.clone(memory_format=torch.preserve_format), start.contiguous()):
        param = torch.nn.Parameter(given)
        optimizer = ours.AdamW([param], lr=0.1)
        for _ in range(2):
            param.grad = grad.clone()
            optimizer.step()
        results.append(param.detach().contiguous())
        assert optimizer.state[param]["exp_avg"].stride() == param.stride()
    assert torch.equal(*results)
    gaps = torch.nn.Parameter(torch.zeros(4, 4)[:, ::2])
    gaps.grad = torch.ones(4, 2)
    with pytest.raises(ValueError, match="gaps"):
        ours.AdamW([gaps]).step()


def test_copy_is_independent() -> None:
    params = parameters()
    optimizer = ours.AdamW(params, lr=0.1)
    train(optimizer, range(2))
    clone = copy.deepcopy(optimizer)
    before = [p.detach().clone() for p in params]
    train(clone, range(2, 4))
    for param, kept in zip(params, before, strict=True):
        assert torch.equal(param, kept)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda p: ours.AdamW(p, lr=-1.0), "lr must be at least 0"),
        (lambda p: ours.AdamW(p, lr=float("nan")), "lr must be at least 0"),
        (lambda p: ours.Adam(p, betas=(0.9, 1.0)), "betas"),
        (lambda p: ours.Lion(p, betas=(1.0, 0.9)), "betas"),
        (lambda p: ours.Adam(p, eps=-1e-8), "eps"),
        (lambda p: ours.SGD(p, nesterov=True), "nesterov"),
        (lambda p: ours.AdamW(p, capturable=True), "capturable"),
        (lambda p: ours.SGD(p, differentiable=True), "differentiable"),
        (lambda p: ours.AdamW(p, moments="fp8"), "fp8"),
        (lambda p: ours.AdamW(p, amsgrad=True, moments="int8"), "amsgrad"),
        (lambda _: ours.AdamW(parameters(torch.float64)), "float64"),
        (lambda _: ours.AdamW(parameters(torch.float16), master="split"), "does not fit"),
        (lambda _: ours.AdamW([torch.nn.Parameter(torch.empty(3, device="meta"))]), "meta"),
    ],
)
def test_bad_arguments(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(parameters())


def test_sparse_gradients_are_refused() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="dense"):
        ours.Adagrad(table.parameters()).step()


def test_failed_group_leaves_nothing() -> None:
    optimizer = ours.AdamW(parameters())
    with pytest.raises(ValueError, match="float64"):
        optimizer.add_param_group({"params": parameters(torch.float64)})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("kind", [*TORCH_CLASSES, *CLASSES])
def test_rules_for(kind: type) -> None:
    optimizer = kind(parameters(), **options(kind))
    (rule,) = rules_for(optimizer)
    assert rule.name.startswith(kind.__name__.lower().removesuffix("w"))
    assert rule.state_fields(torch.bfloat16, "split", "int8")
    scalars = rule.scalars(optimizer.param_groups[0], 1, 1.0)
    assert scalars.step == 1
    with pytest.raises(ValueError, match="from 1"):
        rule.scalars(optimizer.param_groups[0], 0, 1.0)
    with pytest.raises(ValueError, match="lr must be finite"):
        rule.scalars({**optimizer.param_groups[0], "lr": float("nan")}, 1, 1.0)


def test_rules_for_refuses() -> None:
    class Mine(torch.optim.AdamW):
        pass

    for optimizer in (torch.optim.RMSprop(parameters()), Mine(parameters())):
        assert all(isinstance(rule, StreamedRule) for rule in rules_for(optimizer))
    with pytest.raises(TypeError, match=r"such as .*AdamW.*Lion"):
        rules_for(torch.optim.LBFGS(parameters()))
    with pytest.raises(TypeError, match="capturable"):
        rules_for(torch.optim.AdamW(parameters(), capturable=True))


def test_every_group_has_its_rule() -> None:
    params = parameters()
    mixed = torch.optim.SGD([{"params": params[:2], "momentum": 0.9}, {"params": params[2:]}], lr=1)
    with_buffer, without = rules_for(mixed)
    assert (with_buffer.moments, without.moments) == (("momentum_buffer",), ())
    adam = torch.optim.Adam([{"params": params[:2], "amsgrad": True}, {"params": params[2:]}])
    assert [rule.moments[-1] for rule in rules_for(adam)] == ["max_exp_avg_sq", "exp_avg_sq"]
    with pytest.raises(ValueError, match=r"momentum is 0\.9"):
        without.scalars({**mixed.param_groups[0]}, 1)
    with pytest.raises(ValueError, match="momentum is 0, but"):
        with_buffer.scalars({**mixed.param_groups[1]}, 1)
    for rule, group in zip(rules_for(adam), reversed(adam.param_groups), strict=True):
        with pytest.raises(ValueError, match="amsgrad"):
            rule.scalars(group, 1)
