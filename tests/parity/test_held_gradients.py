"""Gradients between backward and step: norms, scales, accumulation, and who may read what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.errors import OffloadError
from tests.devices import CPU, SIM, plainly
from tests.models import adamw, batch, weights
from tests.parity.twins import NVME, make


def test_a_clipped_step_moves_no_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on, norms are known from arrival and the scale goes into the update."""
    from overspill.grads.held_gradients import HeldGradients

    results = []
    for inside in (False, True):
        model = make()
        limit = {"max_grad_norm": 0.1} if inside else {}
        with overspill.wrap(model, adamw(model), nvme=tmp_path, **NVME, **limit) as ours:
            for step in range(3):
                model(*batch(step)).backward()
                if not inside:
                    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    assert norm > 0.1
                    again = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
                    assert float(again) == pytest.approx(0.1, rel=1e-5)
                    with monkeypatch.context() as patch:
                        patch.setattr(HeldGradients, "read", None)
                        ours.step()
                else:
                    ours.step()
                ours.zero_grad()
            results.append(weights(model))
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], atol=1e-6, rtol=1e-5, msg=name)


def test_adding_after_a_clip_adds_to_the_clipped(tmp_path: Path) -> None:
    grads = []
    for wrapped in (False, True):
        model = make()
        ours = overspill.wrap(model, adamw(model), nvme=tmp_path, **NVME) if wrapped else None
        model(*batch(0)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        model(*batch(1)).backward()
        grads.append([p.grad.clone() + 0 for p in model.parameters() if p.grad is not None])
        if ours is not None:
            ours.close()
    for ours, plain in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-5)


def test_bf16_accumulates_without_a_hint_as_torch_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grads = []
    for wrapped in (False, True):
        model = make().to(torch.bfloat16)
        ours = overspill.wrap(model, adamw(model), nvme=tmp_path, **NVME) if wrapped else None
        for micro in range(2):
            model(*batch(micro)).backward()
        grads.append([p.grad.clone() + 0 for p in model.parameters() if p.grad is not None])
        if ours is not None:
            ours.close()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert caplog.text.count("accumulate=N") == 1


def test_uneven_micro_steps_with_accumulate(tmp_path: Path) -> None:
    results = []
    for update in ("next_forward", "backward"):
        model = make()
        with overspill.wrap(
            model, adamw(model), nvme=tmp_path, update=update, accumulate=3, **NVME
        ) as ours:
            for count in (3, 2, 1):
                for micro in range(count):
                    with overspill.accumulate(ours, final=micro == count - 1):
                        model(*batch(micro)).backward()
                if update == "backward":
                    with pytest.raises(overspill.OffloadError, match="has applied"):
                        model(*batch(7)).backward()
                ours.step()
                ours.zero_grad()
            results.append(weights(model))
    assert all(torch.equal(v, results[1][k]) for k, v in results[0].items())


def test_accumulate_says_what_it_cannot(tmp_path: Path) -> None:
    model = make()
    with overspill.wrap(model, adamw(model), nvme=tmp_path, update="backward", **NVME) as ours:
        word = overspill.accumulate(ours, final=False)
        with pytest.raises(overspill.OffloadError, match="accumulate=N"):
            word.__enter__()
    word = overspill.accumulate(adamw(model), final=True)
    with pytest.raises(TypeError, match="wrapped optimizer"):
        word.__enter__()


def test_resident_weights_are_not_read_while_they_are_updated() -> None:
    """Whoever reads them between step and the next forward waits, also without calling a module;
    and what he computes with them is theirs in backward."""
    model, plain = make(), make()
    theirs = plainly(overspill.optim.AdamW, adamw(plain).param_groups)
    with overspill.wrap(model, adamw(model), device=CPU, host_memory="1GiB") as ours:
        for m, o in ((model, ours), (plain, theirs)):
            m(*batch(0)).backward()
            o.step()
            o.zero_grad()
            torch.nn.functional.linear(torch.ones(1, 64), m.embed.weight).sum().backward()
            o.step()
            o.zero_grad()
        assert torch.equal(model.embed.weight, plain.embed.weight)
        assert torch.equal(model.state_dict()["embed.weight"], plain.embed.weight)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "options",
    [NVME, {"device": SIM, "device_memory": "700KiB", "host_memory": "64MiB"}],
    ids=["streamed", "device"],
)
def test_the_norm_of_gradients_that_backward_has_applied(
    options: dict[str, Any], accumulate: int, tmp_path: Path
) -> None:
    """Trainers ask for it only to log it, with a limit that nothing reaches."""
    model, plain = make(), make()
    theirs = plainly(overspill.optim.AdamW, adamw(plain).param_groups)
    with overspill.wrap(
        model, adamw(model), nvme=tmp_path, update="backward", accumulate=accumulate,
        rates=overspill.Rates(), **options,
    ) as ours:  # fmt: skip
        for step in range(3):
            norms = []
            for m, o in ((plain, theirs), (model, ours)):
                for micro in range(accumulate):
                    (m(*batch(accumulate * step + micro)) / accumulate).backward()
                limit = float("inf") if step else 1e9
                norms.append(torch.nn.utils.clip_grad_norm_(m.parameters(), limit).item())
                o.step()
                o.zero_grad()
            assert norms[1] == pytest.approx(norms[0], rel=1e-5)
        for name, value in weights(model).items():
            assert torch.equal(value, weights(plain)[name]), name
        model(*batch(0)).backward()
        if accumulate == 1:
            with pytest.raises(OffloadError, match="applied this gradient already"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def test_norms_that_nobody_asked_for_in_the_first_step_are_not_taken(tmp_path: Path) -> None:
    model = make()
    with overspill.wrap(
        model, adamw(model), nvme=tmp_path, update="backward", rates=overspill.Rates(), **NVME
    ) as ours:
        ledger = ours._engine.runtime.ledger
        model(*batch(0)).backward()
        assert ledger.measures
        ours.step()
        ours.zero_grad()
        model(*batch(1)).backward()
        assert not ledger.measures
        with pytest.raises(OffloadError, match="ask after the next backward"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        ours.step()
        ours.zero_grad()
        model(*batch(2)).backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")) > 0
