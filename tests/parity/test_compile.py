"""``torch.compile``, of blocks or of the whole: exact, and none of the engine is compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import overspill
from tests.devices import NAME, SIM, plainly
from tests.models import TinyLM, adamw, train

pytestmark = pytest.mark.skipif(NAME == "testdev", reason="torch compiles nothing for it")


def blocks(model: TinyLM) -> torch.nn.Module:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def in_place(model: TinyLM) -> torch.nn.Module:
    model.compile(backend="aot_eager")
    return model


def around(model: TinyLM) -> torch.nn.Module:
    compiled: torch.nn.Module = torch.compile(model, backend="aot_eager")
    return compiled


@pytest.mark.parametrize(
    ("compiled", "update"),
    [(blocks, "step"), (blocks, "next_forward"), (in_place, "next_forward"), (around, "step")],
)
def test_compiled_models_train_the_same(
    compiled: Callable[[TinyLM], torch.nn.Module], update: str, tmp_path: Path
) -> None:
    from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

    torch.manual_seed(0)
    plain = TinyLM()
    theirs = plainly(overspill.optim.AdamW, adamw(plain).param_groups)
    expected = train(plain, theirs, 3)
    torch.manual_seed(0)
    model = TinyLM()
    torch._dynamo.reset()
    clear_compilation_metrics()
    with overspill.wrap(
        model, adamw(model), nvme=tmp_path, device=SIM, device_memory="700KiB",
        host_memory="1500KiB", update=update,
    ) as optimizer:  # fmt: skip
        assert train(compiled(model), optimizer, 3) == expected
    seen = {(str(m.co_filename), m.co_name) for m in get_compilation_metrics()}
    assert any(name.endswith("models.py") for name, _ in seen), seen
    ours = {code for name, code in seen if "overspill" in name or "offload" in name}
    assert ours <= {"as_it_is"}, "of the engine, nothing but the way around the compiler"
