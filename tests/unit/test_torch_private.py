"""The private PyTorch interfaces do what the engine takes them to do, in the version installed."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.private import compile_private, module_private
from overspill.private import torch_private as private


def test_releases_that_nobody_has_tried_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    private.tell_if_untried.cache_clear()
    for release in private.TRIED:
        private.tell_if_untried(f"{release}.1+cu130")
    assert not caplog.messages
    for _ in range(2):
        for version in ("2.10.0", "2.1", "3.0.0a0+git1234"):
            private.tell_if_untried(version)
    assert [m.split("this is ")[1].split(":")[0] for m in caplog.messages] == [
        "2.10.0", "2.1", "3.0.0a0+git1234",
    ]  # fmt: skip
    private.tell_if_untried.cache_clear()


def test_wrap_tells_of_an_untried_release(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "TRIED", ("1.0",))
    private.tell_if_untried.cache_clear()
    for _ in range(2):
        model = torch.nn.Linear(4, 4)
        overspill.wrap(model, torch.optim.AdamW(model.parameters()), device="cpu").close()
    private.tell_if_untried.cache_clear()
    assert [torch.__version__ in message for message in caplog.messages].count(True) == 1


def test_the_releases_tried_are_those_that_are_claimed() -> None:
    """The oldest is that of pyproject.toml, and CI runs the one that constraints.txt pins."""
    root = Path(__file__).parents[2]
    oldest = re.search(r'"torch>=([\d.]+)"', (root / "pyproject.toml").read_text())
    pinned = re.search(r"^torch==(\d+\.\d+)", (root / "constraints.txt").read_text(), re.M)
    assert oldest and pinned
    assert oldest[1] == private.TRIED[0] and pinned[1] in private.TRIED


def test_a_storage_may_keep_its_memory() -> None:
    """As long as a tensor has it, whether or not Python still knows the storage."""
    memory = torch.full((4,), 7.0)
    alive = weakref.ref(memory)
    parameter = nn.Parameter(torch.zeros(2))
    parameter.data = torch.empty(0).set_(private.storage_over(memory[2:], keep=True), 0, (2,), (1,))
    del memory
    gc.collect()
    assert alive() is not None and parameter.tolist() == [7.0, 7.0]
    parameter.data = torch.zeros(2)
    gc.collect()
    assert alive() is None


def test_storage_over_memory_aliases_and_expires() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    storage = private.storage_over(memory)
    view = torch.empty(0, dtype=torch.float32).set_(storage, 2, (3,), (1,))
    view.fill_(1.0)
    assert memory[8:20].any() and not memory[:8].any()
    assert private.storage_key(view) == private.identity(storage)
    watch = private.StorageWatch(storage)
    del storage
    assert not watch.expired
    del view
    assert watch.expired


def test_saved_tensor_hooks_and_versions() -> None:
    seen: list[torch.Tensor] = []
    assert private.top_saved_tensor_hooks() is None
    private.push_saved_tensor_hooks(lambda t: seen.append(t) or t.detach(), lambda t: t)
    assert private.top_saved_tensor_hooks() is not None
    x = torch.ones(2, requires_grad=True)
    y = (x * x).sum()
    private.pop_saved_tensor_hooks()
    assert seen and private.top_saved_tensor_hooks() is None
    before = private.version_of(x)
    with torch.no_grad():
        x.add_(1)
    assert private.version_of(x) == before + 1
    assert y.requires_grad


def test_end_of_backward() -> None:
    events: list[str] = []
    x = torch.ones(2, requires_grad=True)
    assert private.current_graph_task() == -1

    def hook(grad: torch.Tensor) -> None:
        assert private.current_graph_task() >= 0
        private.at_end_of_backward(lambda: events.append("over"))
        events.append("hook")

    x.register_hook(hook)
    (x * 2).sum().backward()
    assert events == ["hook", "over"]


def test_become_keeps_the_object() -> None:
    p = torch.nn.Parameter(torch.ones(2, device="meta"))
    optimizer = torch.optim.AdamW([p])
    private.become(p, torch.full((2,), 3.0))
    assert optimizer.param_groups[0]["params"][0] is p
    assert p.tolist() == [3.0, 3.0] and p.requires_grad
    private.become(p, torch.zeros(2))
    assert p.tolist() == [0.0, 0.0]


def test_operations_and_what_they_mutate() -> None:
    func = torch.ops.aten.add_.Tensor
    a, b = torch.ones(1), torch.ones(1)
    assert private.operation_name(func) == "aten::add_"
    assert private.mutated_arguments(func, (a, b), {}) == [a]
    assert private.mutated_arguments(torch.ops.aten.clamp.out, (b, 0), {"out": a}) == [a]


def test_persistent_buffers() -> None:
    module = torch.nn.BatchNorm1d(2)
    module.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert set(module_private.persistent_buffers(module)) == {
        "running_mean", "running_var", "num_batches_tracked"
    }  # fmt: skip


def test_what_is_not_compiled_runs_as_it_is() -> None:
    seen: list[bool] = []

    @compile_private.not_compiled
    def aside(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    compiled = torch.compile(lambda x: aside(x * 2) * 3, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [9.0, 9.0]
    assert compiled(torch.zeros(2)).tolist() == [3.0, 3.0]
    assert seen == [False, False]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_without_grad_leaves_the_modes_as_they_were(grad: bool, inference: bool) -> None:
    def modes() -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    @private.without_grad
    def inside(fails: bool) -> tuple[bool, bool]:
        if fails:
            raise KeyboardInterrupt
        return modes()

    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
        before = modes()
        assert inside(False) == (False, False)
        assert modes() == before
        with pytest.raises(KeyboardInterrupt):
            inside(True)
        assert modes() == before


def test_modules_around_a_call() -> None:
    found: list[Any] = []

    class Inner(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    inner = Inner(1, 1)
    inner.register_forward_pre_hook(lambda m, _: found.append(private.modules_around(m)))
    outer = nn.Sequential(nn.Sequential(inner))
    inner(torch.ones(1))
    outer(torch.ones(1))
    assert found[0] == []
    assert found[1] == [outer[0], outer]
    assert private.modules_around(inner) is None  # it is not being called


def test_the_clock_of_the_graph() -> None:
    x = torch.ones(2, requires_grad=True)
    before = x * 2
    clock = private.graph_clock()
    after = before + 1
    assert private.made_since(after, clock) and not private.made_since(before, clock)
    assert not private.made_since(x, clock), "no node has made a leaf"


def test_a_module_with_other_members() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3))
    module.scale = torch.nn.Parameter(torch.ones(2))
    other = module_private.with_members(module, {}, {"scale": torch.nn.Parameter(torch.zeros(1))})
    assert type(other) is torch.nn.Sequential and [*other.state_dict()] == ["scale"]
    assert [*module.state_dict()] == ["scale", "0.weight", "0.bias"], "it is as it was"
    module_private.put_in_place(module, "scale", other)
    assert module.scale is other and [*module.state_dict()][-1] == "scale.scale"


def test_who_unpacks_a_saved_tensor() -> None:
    """A node of torch's own, in whichever thread; or a Function written in Python."""
    found: list[bool] = []

    def asks() -> None:
        found.append(private.for_node_of_torch())

    def unpack(t: torch.Tensor) -> torch.Tensor:
        asks()
        return t

    class Written(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            return grad * x

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        own, written = (x * x).sum(), Written.apply(x).sum()  # type: ignore[no-untyped-call]
    own.backward()
    assert found and all(found)
    found.clear()
    written.backward()
    assert found == [False]


def test_versions_and_gradients_below_overrides() -> None:
    class Overridden(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any, **__: Any) -> Any:
            raise AssertionError("an override was called")

    plain, other = torch.zeros(2), torch.zeros(2).as_subclass(Overridden)
    plain.add_(1)
    with torch.inference_mode():
        inside = torch.zeros(2)
    with private.without_overrides():
        assert private.versions_of([plain, other]) == (1, 0)
        assert private.versions_of([plain, inside]) == (1, 0)
    assert private.grad_of(other) is None
    private.set_grad(other, plain)
    assert private.grad_of(other) is plain
    private.drop_grads([other, plain])
    assert private.grad_of(other) is None


def test_whether_a_graph_is_being_traced() -> None:
    seen = []

    def backend(module: torch.fx.GraphModule, _inputs: Any) -> Any:
        seen.append(private.in_tracing())
        return module

    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2))
    assert seen == [True] and not private.in_tracing()
