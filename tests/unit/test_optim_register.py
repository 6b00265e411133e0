"""A rule that somebody else brings, in plain torch: wrapped, streamed, committed and resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.optim import ElementwiseRule, Field, StepScalars, register, registry
from overspill.optim.averaged import AveragedRule, is_reentrant
from overspill.optim.formats import UNSIGNED_MOMENTS
from overspill.optim.registry import rules_for


class Sign(torch.optim.Optimizer):
    """Steps along the sign of a running mean of gradients."""

    def __init__(self, params: Any, lr: float = 1e-2, keep: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "keep": keep})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(group["keep"]).add_(p.grad)
                p.sub_(mean.sign(), alpha=group["lr"])


class SignRule:
    """The same over flat buffers: all that ``overspill.optim.Rule`` asks for."""

    name, moments = "sign", ("mean",)

    def state_fields(self, weight_dtype: torch.dtype, master: Any, moments: Any) -> tuple[Any, ...]:
        if weight_dtype is not torch.float32 or moments != "fp32":
            raise ValueError("sign keeps fp32 weights and moments")
        return (Field("mean", torch.float32),)

    def steps_taken(self, state: Mapping[str, Any]) -> int:
        return int("mean" in state)

    def initial(self, group: Mapping[str, Any]) -> dict[str, float]:
        return {}

    def scalars(self, group: Mapping[str, Any], step: int, grad_scale: float = 1.0) -> StepScalars:
        return StepScalars(step, (grad_scale, group["keep"], group["lr"]), 0)

    def update(
        self, grad: Tensor, weight: Tensor, state: Mapping[str, Tensor], scalars: StepScalars,
        position: int = 0,
    ) -> bool:  # fmt: skip
        scale, keep, lr = scalars.coefficients
        state["mean"].mul_(keep).add_(grad, alpha=scale)
        weight.sub_(state["mean"].sign(), alpha=lr)
        return bool(weight.isfinite().all())


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register(Sign, lambda group: SignRule())
    yield
    del registry.MAKERS[Sign]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    torch.manual_seed(number)
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
@pytest.mark.parametrize("where", [{"device": "cpu"}, {"device": "sim", "device_memory": "24KiB"}])
def test_a_rule_from_outside_trains_as_its_optimizer(
    where: dict[str, Any], update: Any, tmp_path: Path
) -> None:
    plain, model = net(), net()
    theirs = Sign(plain.parameters())
    options = {"nvme": tmp_path, "host_memory": "64KiB", "rates": overspill.Rates(), **where}
    with overspill.wrap(model, Sign(model.parameters()), update=update, **options) as optimizer:
        for number in range(3):
            step(plain, theirs, number)
            step(model, optimizer, number)
    again = net()
    optimizer, _ = overspill.resume(again, tmp_path, Sign(again.parameters()), device="cpu")
    with optimizer:
        step(plain, theirs, 3)
        step(again, optimizer, 3)
        for name, value in again.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name]), name


def test_what_is_not_registered_is_refused_with_what_is() -> None:
    class Other(Sign):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise RuntimeError("it cannot step")

    optimizer = Other([nn.Parameter(torch.zeros(3))])
    with pytest.raises(TypeError, match=r"torch.optim.\{.*AdamW.*\}.*overspill.optim.\{.*Lion"):
        rules_for(optimizer)
    with pytest.raises(ValueError, match="has a rule already"):
        register(Sign, lambda group: SignRule())
    with pytest.raises(TypeError, match="takes a class of torch optimizers"):
        register(SignRule, lambda group: SignRule())  # type: ignore[arg-type]


class Smooth(torch.optim.Optimizer):
    """A formula and its numbers are all that an elementwise rule of one's own must say."""

    def __init__(self, params: Any, lr: float = 1e-2, keep: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "keep": keep, "maximize": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                assert p.grad is not None
                mean = self.state[p].setdefault("mean_sq", torch.zeros_like(p))
                smooth(p.grad.clone(), p, [mean], (1.0, group["keep"], group["lr"]))


def smooth(g: Tensor, w: Tensor, m: list[Tensor], c: Sequence[float]) -> None:
    _, keep, lr = c
    m[0].mul_(keep).add_(g * g)
    w.sub_((g * lr) / (m[0] + 1.0))


class SmoothRule(ElementwiseRule):
    name = "smooth"

    def __init__(self) -> None:
        super().__init__("smooth", ("mean_sq",), smooth)

    def coefficients(
        self, group: Mapping[str, Any], step: int, grad_scale: float
    ) -> tuple[float, ...]:
        return grad_scale, group["keep"], group["lr"]


@pytest.fixture
def smooth_registered() -> Iterator[None]:
    register(Smooth, lambda group: SmoothRule(), unsigned=("mean_sq",))
    yield
    del registry.MAKERS[Smooth]
    UNSIGNED_MOMENTS.discard("mean_sq")


@pytest.mark.usefixtures("smooth_registered")
@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_a_formula_is_enough(moments: Any, tmp_path: Path) -> None:
    """Streamed, in any format of moments; bit for bit where nothing is rounded."""
    plain, model = net(), net()
    theirs = Smooth(plain.parameters())
    options = {"nvme": tmp_path, "host_memory": "64KiB", "rates": overspill.Rates()}
    with overspill.wrap(
        model, Smooth(model.parameters()), device="cpu", moments=moments, **options
    ) as optimizer:
        for number in range(4):
            step(plain, theirs, number)
            step(model, optimizer, number)
        for name, value in model.state_dict().items():
            wanted = plain.state_dict()[name]
            if moments == "fp32":
                assert torch.equal(value, wanted), name
            else:
                torch.testing.assert_close(value, wanted, rtol=1e-3, atol=1e-5)


def test_a_moment_of_another_rule_keeps_its_sign() -> None:
    with pytest.raises(ValueError, match="'exp_avg' has a sign"):
        register(Smooth, lambda group: SmoothRule(), unsigned=("exp_avg",))
    assert Smooth not in registry.MAKERS


@pytest.mark.parametrize("make", sorted(registry.MAKERS, key=lambda kind: str(kind)))
def test_ours_are_called_side_by_side(make: Any) -> None:
    """What else has its two lanes wait for each other."""
    optimizer = make([nn.Parameter(torch.zeros(2, 2))], lr=1e-2)
    assert all(is_reentrant(rule) for rule in rules_for(optimizer))


def test_those_of_others_are_not() -> None:
    """Whoever the class or the formula is from; a formula of torch's own names no module."""
    assert not is_reentrant(SignRule())
    assert not is_reentrant(AveragedRule(SignRule()))
    assert not is_reentrant(ElementwiseRule("sign", ("mean",), torch.Tensor.add_))
    (ours,) = rules_for(torch.optim.AdamW([nn.Parameter(torch.zeros(4))]))
    assert isinstance(ours, ElementwiseRule)

    class Own(ElementwiseRule):
        """Of ours it has the formula alone."""

    assert not is_reentrant(Own("adam", ours.moments, ours.formula))


class NormedRule(SignRule):
    """Divides by the norm of the buffer that it gets, as LARS and Muon do."""

    def update(
        self, grad: Tensor, weight: Tensor, state: Mapping[str, Tensor], scalars: StepScalars,
        position: int = 0,
    ) -> bool:  # fmt: skip
        weight.sub_(grad / grad.norm(), alpha=scalars.coefficients[2])
        return True


class CentredRule(SignRule):
    """Takes the mean from the gradient."""

    def update(
        self, grad: Tensor, weight: Tensor, state: Mapping[str, Tensor], scalars: StepScalars,
        position: int = 0,
    ) -> bool:  # fmt: skip
        return super().update(grad - grad.mean(), weight, state, scalars, position)


class DrawingRule(SignRule):
    """Adds noise."""

    def update(
        self, grad: Tensor, weight: Tensor, state: Mapping[str, Tensor], scalars: StepScalars,
        position: int = 0,
    ) -> bool:  # fmt: skip
        weight.add_(torch.randn_like(weight), alpha=1e-3)
        return True


class Needy(Sign):
    """Has an option without a default, so that nothing can be tried before it is given."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (NormedRule, "not elementwise.*max_grad_norm="),
        (CentredRule, "not elementwise"),
        (DrawingRule, "draw random numbers"),
    ],
)
def test_rules_that_depend_on_where_buffers_are_cut_are_refused(rule: Any, message: str) -> None:
    class Another(Sign):
        pass

    with pytest.raises(ValueError, match=message):
        register(Another, lambda group: rule())
    assert Another not in registry.MAKERS

    class AnotherNeedy(Needy):
        pass

    register(AnotherNeedy, lambda group: rule())
    try:
        model = net()
        before = model[0].weight.detach().clone()  # type: ignore[index]
        for call in (overspill.wrap, overspill.plan):
            with pytest.raises(ValueError, match=message):
                call(model, AnotherNeedy(model.parameters(), 0.1), device="cpu")
        assert torch.equal(model[0].weight, before)  # type: ignore[index]
    finally:
        del registry.MAKERS[AnotherNeedy]


def test_an_elementwise_rule_with_memory_of_its_steps_is_accepted() -> None:
    """Each trial gets a rule of its own."""

    class Counting(SignRule):
        def __init__(self) -> None:
            self.steps = 0

        def scalars(self, group: Any, step: int, grad_scale: float = 1.0) -> StepScalars:
            self.steps = max(self.steps, step)
            return StepScalars(step, (grad_scale, group["keep"], group["lr"] / self.steps), 0)

    class Another(Sign):
        pass

    register(Another, lambda group: Counting())
    try:
        assert rules_for(Another(net().parameters()))[0].name == "sign"
    finally:
        del registry.MAKERS[Another]
