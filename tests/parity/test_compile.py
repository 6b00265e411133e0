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


LENGTHS = ((16, 9, 24), (16, 30, 9), (24, 5, 16))  # of the micro-batches of three steps
TIGHT = {"device": SIM, "device_memory": "900KiB", "host_memory": "1500KiB"}
EVERYWHERE = {
    "here": {"device": "cpu", "host_memory": "20MiB"},
    "streamed": {"device": SIM, **STREAMED},
    "in backward": {**TIGHT, "update": "backward", "accumulate": 3},
    "host": {**TIGHT, "activations": "host"},
    "recompute": {**TIGHT, "activations": "recompute"},
}


def changing_lengths(
    compiled: Callable[[TinyLM], torch.nn.Module], options: dict[str, Any] | None = None
) -> tuple[list[float], list[int]]:
    """The losses of steps and evaluations, and how often was compiled until the end of each."""
    from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

    torch._dynamo.reset()
    clear_compilation_metrics()
    torch.manual_seed(0)
    model = TinyLM()
    inner = optimizer = adamw(model)
    if options is None:
        optimizer = plainly(optim.AdamW, inner.param_groups)
    else:
        optimizer = overspill.wrap(model, inner, **options)
    losses, counts, function = [], [], compiled(model)
    for step, lengths in enumerate(LENGTHS):
        for micro, length in enumerate(lengths):
            tokens, targets = batch(3 * step + micro, length=length)
            loss = function(tokens, targets)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses.append(float(function(*batch(step, length=12))))
        model.train()
        counts.append(len(get_compilation_metrics()))
    if options is not None:
        optimizer.close()
    return losses, counts


@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("compiled", [blocks, in_place])
def test_lengths_may_change_while_gradients_are_held(
    compiled: Callable[[TinyLM], torch.nn.Module], where: str, tmp_path: Path
) -> None:
    plain, usual = changing_lengths(compiled)
    disk = {} if where == "here" else {"nvme": tmp_path}
    losses, counts = changing_lengths(compiled, {**EVERYWHERE[where], **disk})
    assert losses == plain
    # Of the whole model, each piece between units is compiled alone.
    assert counts[0] == counts[-1], "nothing is compiled again"
    assert compiled is in_place or counts == usual
