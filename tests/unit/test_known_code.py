"""Which modules are known to compute the same again, by their code: what might not is not known."""

from __future__ import annotations

import contextlib
import functools
import math
import random
import types
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import functional

from benchmarks.model import Block, LlamaBlock, Shape
from overspill.activations.known_code import known

WIDTH = 8
SCALE = 0.5
SEEN: list[torch.Tensor] = []
TABLE = {"calls": 0}
COUNTER = torch.zeros(1)


@dataclass
class Settings:
    heads: int = 2
    shape: tuple[int, ...] = (2, 4)


@dataclass
class Counts:
    calls: int = 0
    all: list[int] = field(default_factory=list)

    def tick(self) -> int:
        self.calls += 1
        return self.calls


def rotated(x: torch.Tensor, by: float = SCALE) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1) * by


def noted(x: torch.Tensor) -> torch.Tensor:
    SEEN.append(x)
    return x


class Base(nn.Module):
    def __init__(self, **held: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril())
        for name, value in held.items():
            setattr(self, name, value)


class Attention(Base):
    """As people write it."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if x.shape[-1] != WIDTH:
            raise ValueError(f"width {x.shape[-1]}")
        parts = [self.inner(each) for each in x.split(1, dim=0)]
        q = rotated(torch.cat(parts)) * math.sqrt(1 / self.settings.heads)
        with torch.autocast("cpu", enabled=False):
            att = q @ q.transpose(-2, -1)
        att = att.masked_fill(self.mask[: x.shape[-2], : x.shape[-2]] == 0, float("-inf"))
        if self.training and mask is not None:
            att = att + mask
        total = sum(p.shape[0] for p in parts) * self.scale
        return self.act(F.dropout(functional.softmax(att, -1), 0.1, self.training) @ q) * total

    @property
    def scale(self) -> float:
        return self.width_of(SCALE)

    @staticmethod
    def width_of(x: float) -> float:
        return max(x, 1.0)


class Normed(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x


class Layer(nn.TransformerEncoderLayer):
    def _ff_block(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.append(x)
        return super()._ff_block(x)


SHAPE = Shape(1, WIDTH, 2, 16, 1, 4, kv_heads=1, inner=16)
SETTINGS = {"settings": Settings(), "act": F.gelu}
KNOWN = {
    "torch": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16),
    "gpt": lambda: Block(SHAPE),
    "llama": lambda: LlamaBlock(SHAPE),
    "attention": lambda: Attention(**SETTINGS),
    "namespace": lambda: Attention(settings=types.SimpleNamespace(heads=2), act=nn.GELU()),
    "lambda": lambda: Attention(settings=Settings(), act=lambda x: x * torch.sigmoid(x)),
    "partial": lambda: Attention(
        settings=Settings(), act=functools.partial(F.gelu, approximate="tanh")
    ),
    "subclass": lambda: Normed(WIDTH),
    "nested": lambda: nn.Sequential(Normed(WIDTH), Attention(**SETTINGS), nn.Dropout(0.1)),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_code_that_shows_it_is_known(name: str) -> None:
    assert known(KNOWN[name]())


def with_forward(forward: Any, **held: Any) -> nn.Module:
    return type("Made", (Base,), {"forward": forward})(**held)


def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 1e9:
        self.calls = 1
    return self.inner(x)


def collects(self: Any, x: torch.Tensor) -> torch.Tensor:
    SEEN.append(x)
    return self.inner(x)


def stores(self: Any, x: torch.Tensor) -> torch.Tensor:
    TABLE["calls"] += 1
    return self.inner(x)


def globally(self: Any, x: torch.Tensor) -> torch.Tensor:
    global SCALE
    SCALE = SCALE + 1
    return self.inner(x)


def in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.mask.mul_(0.9)
    return self.inner(x)


def shared_tensor(self: Any, x: torch.Tensor) -> torch.Tensor:
    seen = COUNTER
    seen += 1
    return self.inner(x)


def helps(self: Any, x: torch.Tensor) -> torch.Tensor:
    return noted(self.inner(x))


def draws(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.inner(x) if random.random() < 2 else x


def prints(self: Any, x: torch.Tensor) -> torch.Tensor:
    print(x.shape)
    return self.inner(x)


def imports(self: Any, x: torch.Tensor) -> torch.Tensor:
    from random import random as drawn

    return self.inner(x) * drawn()


def by_name(self: Any, x: torch.Tensor) -> torch.Tensor:
    return getattr(self, "inner")(x)  # noqa: B009


def ticks(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.inner(x) + self.held.tick()


def calls(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.held(self.inner(x))


def calls_first(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.held[0](self.inner(x))


def sets(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.__setattr__("calls", 1)
    return self.inner(x)


def seeds(self: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return self.inner(x)


def waits(self: Any, x: torch.Tensor) -> torch.Tensor:
    torch.distributed.all_reduce(x)
    return self.inner(x)


def remembers(self: Any, x: torch.Tensor, seen: list[Any] = []) -> torch.Tensor:  # noqa: B006
    seen += [x]
    return self.inner(x)


def adds_to_a_list(self: Any, x: torch.Tensor) -> torch.Tensor:
    seen = self.LOG
    seen += [x]
    return self.inner(x)


def shrinks(self: Any, x: torch.Tensor) -> torch.Tensor:
    weight = self.inner.weight.data
    weight *= 0.9
    return self.inner(x)


def adds_to_an_alias(self: Any, x: torch.Tensor) -> torch.Tensor:
    held = self.held
    held += 1
    return self.inner(x) + held


def writes_out(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.lerp(x, self.mask, 0.5, out=self.mask)


def within(self: Any, x: torch.Tensor) -> torch.Tensor:
    with self.held:
        return self.inner(x)


def over_keys(self: Any, x: torch.Tensor) -> torch.Tensor:
    return sum([call(x) * weight for call, weight in self.held.items()])


def resets(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.inner.reset_parameters()
    return self.inner(x)


class Timer:
    def __enter__(self) -> None:
        TABLE["calls"] += 1

    def __exit__(self, *_: object) -> None:
        pass


class Named(str):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return noted(x)


class Experts(nn.ModuleList):
    def __getitem__(self, index: Any) -> Any:
        SEEN.append(torch.ones(1))
        return super().__getitem__(index)


def from_text(helper: Any) -> Any:
    scope: dict[str, Any] = {"helper": helper}
    exec("def forward(self, x):\n    return helper(self.inner(x))", scope)
    return scope["forward"]


def yields(self: Any, x: torch.Tensor) -> Any:
    yield self.inner(x)


def closed_over(count: list[int]) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        count[0] = count[0] + 1
        return self.inner(x)

    return forward


@functools.wraps(functional.gelu)
def disguised(x: torch.Tensor) -> torch.Tensor:
    return noted(x)


def held_module() -> nn.Module:
    return with_forward(collects)


class Parent(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child.visit(x)


class Child(Base):
    def visit(self, x: torch.Tensor) -> torch.Tensor:
        return noted(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Called(Base):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return noted(self.inner(x))


class Dynamic(Base):
    def __getattr__(self, name: str) -> Any:
        SEEN.append(torch.ones(1))
        return super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Weighed(Base):
    @property
    def weight(self) -> float:
        SEEN.append(torch.ones(1))
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.weight


def patched() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.forward = noted  # type: ignore[method-assign]
    return layer


def hooked() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_forward_hook(lambda module, args, out: noted(out))
    return layer


def without_grad() -> nn.Module:
    """A decorator may do anything."""
    return with_forward(torch.no_grad()(lambda self, x: self.inner(x)))


UNKNOWN = {
    **{each.__name__: functools.partial(with_forward, each) for each in (
        counts, collects, stores, globally, in_place, shared_tensor, helps, draws, prints, imports,
        by_name, sets, seeds, waits, remembers, yields, shrinks,
    )},
    "ticks": lambda: with_forward(ticks, held=Counts()),
    "an object's call": lambda: with_forward(calls, held=Counts().tick),
    "an alias": lambda: with_forward(adds_to_an_alias, held=torch.zeros(1)),
    "an output": lambda: with_forward(writes_out),
    "a timer": lambda: with_forward(within, held=Timer()),
    "a key": lambda: with_forward(over_keys, held={noted: 1.0}),
    "a text that is called": lambda: with_forward(calls, held=Named("name")),
    "an index": lambda: Experts([nn.Linear(WIDTH, WIDTH)]),
    "the same text": lambda: nn.Sequential(
        with_forward(from_text(rotated)), with_forward(from_text(noted))
    ),
    "resets": lambda: with_forward(resets),
    "statistics": lambda: nn.BatchNorm1d(WIDTH),
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "a list of the class": lambda: type("Logs", (Base,), {"forward": adds_to_a_list, "LOG": []})(),
    "in disguise": lambda: with_forward(calls, held=disguised),
    "a function held": lambda: with_forward(calls, held=noted),
    "in a list": lambda: with_forward(calls_first, held=[noted]),
    "in a partial": lambda: with_forward(calls, held=functools.partial(noted)),
    "a module beside": lambda: with_forward(calls_first, held=[held_module()]),
    "a reference": lambda: with_forward(calls, held=weakref.ref(SETTINGS["settings"])),
    "a context": lambda: with_forward(calls, held=contextlib.nullcontext()),
    "a generator": lambda: with_forward(calls, held=torch.Generator()),
    "a closure": lambda: with_forward(closed_over([0])),
    "child": lambda: Parent(child=Child()),
    "called": Called,
    "dynamic": Dynamic,
    "property": Weighed,
    "overridden": lambda: Layer(WIDTH, 2, 16),
    "activation": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, activation=noted),
    "patched": patched,
    "hooked": hooked,
    "without grad": without_grad,
    "deep": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(with_forward(collects))),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_may_change_something_is_not_known(name: str) -> None:
    assert not known(UNKNOWN[name]())


def test_a_library_whose_code_was_replaced_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    layer = modeling_llama.LlamaDecoderLayer(LlamaConfig(**sizes, num_hidden_layers=1), 0)
    assert known(layer) and known(nn.GELU())
    with monkeypatch.context() as patch:
        patch.setattr(nn.GELU, "forward", lambda self, x: noted(x))
        assert not known(nn.GELU())
    rotary = modeling_llama.apply_rotary_pos_emb
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *each: noted(rotary(*each)))
        assert not known(layer)
    assert known(layer)


def circle() -> types.SimpleNamespace:
    made = types.SimpleNamespace()
    made.itself = made
    return made


def dead() -> Any:
    return weakref.proxy(Settings())


class Hostile:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize("held", [circle, dead, Hostile])
def test_whatever_is_held_it_never_raises(held: Any) -> None:
    module = with_forward(calls)
    vars(module)["held"] = held()
    assert not known(module)
