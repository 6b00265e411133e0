"""``torch.compile``, of blocks or of the whole: exact, and none of the engine is compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill import io_engine, optim
from tests.devices import NAME, SIM, plainly
from tests.models import TinyLM, adamw, batch, train

pytestmark = pytest.mark.skipif(NAME == "testdev", reason="torch compiles nothing for it")


def blocks(model: TinyLM) -> torch.nn.Module:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def whole_blocks(model: TinyLM) -> torch.nn.Module:
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return model


def in_place(model: TinyLM) -> torch.nn.Module:
    model.compile(backend="aot_eager")
    return model


def around(model: TinyLM) -> torch.nn.Module:
    compiled: torch.nn.Module = torch.compile(model, backend="aot_eager")
    return compiled


def parts_of_blocks(model: TinyLM) -> torch.nn.Module:
    for block in model.blocks:
        block.up.compile(backend="aot_eager")
    return model


STREAMED = {"device_memory": "700KiB", "host_memory": "1500KiB"}
RESIDENT = {"resident": ["blocks"], "device_memory": "4MiB", "host_memory": "4MiB"}


PACKAGES = (overspill, optim, io_engine)


@pytest.mark.parametrize("options", [STREAMED, RESIDENT], ids=["streamed", "resident"])
@pytest.mark.parametrize(
    ("compiled", "update"),
    [
        (blocks, "step"),
        (whole_blocks, "step"),
        (parts_of_blocks, "next_forward"),
        (in_place, "next_forward"),
        (around, "step"),
    ],
)
def test_compiled_models_train_the_same(
    compiled: Callable[[TinyLM], torch.nn.Module], update: str, options: dict[str, Any],
    tmp_path: Path,
) -> None:  # fmt: skip
    from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

    torch.manual_seed(0)
    plain = TinyLM()
    theirs = plainly(optim.AdamW, adamw(plain).param_groups)
    expected = train(plain, theirs, 3)
    torch.manual_seed(0)
    model = TinyLM()
    torch._dynamo.reset()
    clear_compilation_metrics()
    with overspill.wrap(
        model, adamw(model), nvme=tmp_path, device=SIM, update=update, **options
    ) as optimizer:
        assert train(compiled(model), optimizer, 3) == expected
    seen = {(str(m.co_filename), m.co_name) for m in get_compilation_metrics()}
    assert any(name.endswith("models.py") for name, _ in seen) or compiled is parts_of_blocks
    ours = [Path(str(each.__file__)).parent for each in PACKAGES]
    assert not {name for name, _ in seen if any(Path(name).is_relative_to(at) for at in ours)}


def test_a_graph_of_several_units_is_refused_with_what_to_do(tmp_path: Path) -> None:
    torch._dynamo.reset()  # what was left to the interpreter before, it would not try again
    model = TinyLM()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with (
        overspill.wrap(model, adamw(model), nvme=tmp_path, device=SIM, **STREAMED),
        pytest.raises(Exception, match=r"overspill moves weights.*leave fullgraph=True out"),
    ):
        compiled(*batch(0))
