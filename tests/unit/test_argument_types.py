"""Arguments of the wrong type are refused at once, by messages that name them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill

KEPT: dict[str, Any] = {"device": "cpu", "host_memory": "1MiB"}
SEVERAL = "to wrap several models, pass a dict"


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


class Other:
    """An optimizer of another library."""

    learning_rate, variables = 0.1, ()


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "tuple": (lambda: (_model(), _model()), f"got tuple; .*{SEVERAL}"),
    "list": (lambda: [_model()], f"got list; .*{SEVERAL}"),
    "dict": (lambda: {"a": "gpt2"}, "got a dict in which 'a' is str"),
    "None": (lambda: None, "got NoneType"),
    "text": (lambda: "gpt2", "got str"),
    "class": (lambda: nn.Linear, "got the class Linear; call it"),
    "optimizer": (lambda: _adamw(_model()), r"got the optimizer AdamW; .*wrap\(model, optimizer\)"),
    "parameters": (lambda: _model().parameters(), "got generator"),
    "state dict": (lambda: _model().state_dict(), "got a dict in which .* is torch.Tensor"),
    "tensor": (lambda: torch.zeros(3), r"got torch\.Tensor"),
}
OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "list": (lambda m: [_adamw(m), "adamw"], "got str"),
    "list of lists": (lambda m: [[_adamw(m)]], "got list"),
    "class": (lambda m: torch.optim.AdamW, r"create an instance: AdamW\(model\.parameters"),
    "function": (lambda m: lambda p: torch.optim.AdamW(p), "got function"),
    "name": (lambda m: "adamw", "got str"),
    "parameters": (lambda m: m.parameters(), "got generator"),
    "scheduler": (
        lambda m: torch.optim.lr_scheduler.StepLR(_adamw(m), 1), r"pass scheduler\.optimizer",
    ),
    "model": (lambda m: _model(), r"got torch\.nn\.modules\.container\.Sequential"),
    "another library's": (lambda m: Other(), r"got (tests\.unit\.)?test_argument_types\.Other"),
    "state dict": (lambda m: _adamw(m).state_dict(), "got dict"),
    "False": (lambda m: False, "got bool"),
    "0": (lambda m: 0, "got int"),
}  # fmt: skip
# By option, values of a wrong type, or that make no sense.
OPTIONS: dict[str, list[Any]] = {
    "device": ["", 1, "gpu", "cuda:99", "meta"],
    "device_memory": ["", -1, "1GiB", 1.5, True, None, "0%", "nan", b"1GiB"],
    "host_memory": ["", -1, "abc", None, True, "200%", torch.tensor(1), [1], float("inf")],
    "nvme": ["", "/nonexistent", [], [""], 3, True, b"/tmp", {"a": 1}, "~", [3]],
    "nvme_memory": ["", -1, None],
    "precision": ["bfloat16", torch.bfloat16, "BF16", 16, ""],
    "master": ["fp16", None],
    "moments": ["int4", 8, None],
    "activations": [True, "disk", None],
    "frozen": ["int4", True, 8],
    "tokens": [-1, True, 1.5, "100", None],
    "max_grad_norm": [0, -1, "1.0", float("nan"), float("inf"), True],
    "update": ["forward", None],
    "accumulate": [0, 1.5, True, None],
    "units": ["0", b"0", [0], ["nope"], 3, [None]],
    "resident": ["0", ["nope"], [3], 3],
    "weights": ["", "/nonexistent", 3, {"a": 1}, b"x", True, []],
    "init": ["xavier", 3],
    "prefetch_depth": [-1, 1.5, True, "2"],
    "threads": [0, -1, True, "2", 10**6],
    "checksum": ["yes", None, 2],
    "rates": [{"h2d_bytes_s": 1}, "fast"],
    "durable": ["no", 2],
    "commit_every": [0, -1, 1.5, True],
    "extra": [{"a": 1}, 3],
    "on_nonfinite": ["ignore", None],
    "verbose": [2, "yes"],
    "lr": [1],
}


@pytest.mark.parametrize("call", [overspill.wrap, overspill.plan])
@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_no_model_is_refused(kind: str, with_optimizer: bool, call: Any) -> None:
    make, message = MODELS[kind]
    optimizer = _adamw(_model()) if with_optimizer else None
    with pytest.raises(TypeError, match=f"model must be a torch.nn.Module, {message}"):
        call(make(), optimizer, **KEPT)


@pytest.mark.parametrize("call", [overspill.wrap, overspill.plan])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_is_no_optimizer_is_refused(kind: str, call: Any) -> None:
    make, message = OPTIMIZERS[kind]
    model = _model()
    with pytest.raises(
        TypeError, match=r"must be a torch\.optim\.Optimizer or a list of them"
    ) as found:
        call(model, make(model), **KEPT)
    assert found.match(message)
    assert found.value.__context__ is None, "nothing went wrong before"


@pytest.mark.parametrize("call", [overspill.wrap, overspill.plan])
def test_a_wrapped_optimizer_is_refused(call: Any) -> None:
    first, second = _model(), _model()
    with overspill.wrap(first, _adamw(first), **KEPT) as optimizer:
        with pytest.raises(TypeError, match="wrap returned it"):
            call(second, optimizer, **KEPT)
        with pytest.raises(TypeError, match="wrap returned it"):
            overspill.resume(second, "/nonexistent", optimizer)


@pytest.mark.parametrize("call", [overspill.wrap, overspill.plan])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_of_options_that_make_no_sense_are_refused(
    name: str, call: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in OPTIONS[name]:
        model = _model()
        expected = (TypeError, ValueError, overspill.OffloadError)  # no such device, or folder
        with pytest.raises(expected, match=rf"{name}|/nonexistent"):
            call(model, _adamw(model), **{**KEPT, name: value})
    assert not list(tmp_path.iterdir()), "nothing was written to the current directory"


@pytest.mark.parametrize("value", [None, "text", 3])
def test_functions_of_a_wrapped_model_name_what_they_got(value: Any) -> None:
    if isinstance(value, str):  # of a folder
        with pytest.raises(overspill.OffloadError, match="no engine of this process uses"):
            overspill.unwrap(value)
    else:
        with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
            overspill.unwrap(value)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        overspill.materialized(value)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        next(overspill.named_weights(value))
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        overspill.resume(value, "/nonexistent")
    with pytest.raises(TypeError, match=r"accumulate needs a wrapped optimizer"):
        overspill.accumulate(value, final=True).__enter__()
    with pytest.raises(TypeError, match=r"ema takes a torch\.optim\.Optimizer"):
        overspill.ema(value, 0.9)


@pytest.mark.parametrize("decay", [2, -1, 1.0, "0.9", None, True, float("nan")])
def test_decays_that_make_no_sense_are_refused(decay: Any) -> None:
    with pytest.raises(ValueError, match="decay of an average"):
        overspill.ema(_adamw(_model()), decay)


@pytest.mark.parametrize("value", [3, "", None, b"x", [], ("a", 3)])
def test_paths_are_checked_before_they_are_used(value: Any, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError), match="path"):
        overspill.resume(_model(), value)
    model = _model()
    with overspill.wrap(model, _adamw(model), nvme=tmp_path, **KEPT) as optimizer:
        calls = (optimizer.save, optimizer.trace, optimizer.save_average, optimizer.load_state_dict)
        for call in calls:
            with pytest.raises((TypeError, ValueError), match="path"):
                call(value)


def test_numbers_of_numpy_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    model = _model()
    options = {"tokens": numpy.int64(8), "accumulate": numpy.int32(2), "threads": numpy.int64(1)}
    sizes = {"host_memory": numpy.int64(2**20), "max_grad_norm": numpy.float32(1.0)}
    with overspill.wrap(model, _adamw(model), device="cpu", **options, **sizes) as made:
        assert type(made._engine.config.tokens) is int and made._engine.config.accumulate == 2
