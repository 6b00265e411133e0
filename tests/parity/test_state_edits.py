"""Changes to ``optimizer.state`` and to values of state dicts change the state, as in torch."""

from __future__ import annotations

import collections
import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from tests.devices import CPU, DEVICE, SIM, normal, plainly

ROOMY: dict[str, Any] = {"device": CPU, "host_memory": "4MiB"}
TIGHT: dict[str, Any] = {"device": CPU, "host_memory": "64KiB"}
ON_DEVICE: dict[str, Any] = {"device": SIM, "device_memory": "64KiB", "host_memory": "64KiB"}


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))).to(DEVICE)


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    model(normal(number, 4, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _weight(model: nn.Module) -> nn.Parameter:
    return model[1].weight  # type: ignore[index,return-value]


def _zero_one(model: nn.Module, optimizer: Any) -> None:
    optimizer.state[_weight(model)]["exp_avg"].zero_()


def _scale_all(model: nn.Module, optimizer: Any) -> None:
    for p in model.parameters():
        optimizer.state[p]["exp_avg_sq"].mul_(0.5)


def _foreach(model: nn.Module, optimizer: Any) -> None:
    torch._foreach_zero_([optimizer.state[p]["exp_avg"] for p in model.parameters()])


def _assign(model: nn.Module, optimizer: Any) -> None:
    optimizer.state[_weight(model)]["exp_avg"] = torch.full((32, 32), 0.01, device="cpu")


def _assign_and_change(model: nn.Module, optimizer: Any) -> None:
    value = torch.full((32, 32), 0.01, device="cpu")
    optimizer.state[_weight(model)]["exp_avg"] = value
    value.mul_(2)


def _slice(model: nn.Module, optimizer: Any) -> None:
    optimizer.state[_weight(model)]["exp_avg"][3, 4:] = 0.02


def _through_data(model: nn.Module, optimizer: Any) -> None:
    optimizer.state[_weight(model)]["exp_avg"].data.zero_()


def _through_numpy(model: nn.Module, optimizer: Any) -> None:
    optimizer.state[_weight(model)]["exp_avg"].numpy()[:] = 0.01


def _update(model: nn.Module, optimizer: Any) -> None:
    zeros = torch.zeros(32, 32, device="cpu")
    optimizer.state[_weight(model)].update(exp_avg=zeros, step=torch.tensor(5.0, device="cpu"))


def _or(model: nn.Module, optimizer: Any) -> None:
    state = optimizer.state[_weight(model)]
    state |= {"exp_avg": torch.zeros(32, 32, device="cpu")}


def _restart_count(model: nn.Module, optimizer: Any) -> None:
    optimizer.state[_weight(model)]["step"].zero_()


def _whole(model: nn.Module, optimizer: Any) -> None:
    zeros = torch.zeros(32, 32, device="cpu")
    values = {"step": torch.tensor(2.0, device="cpu"), "exp_avg": zeros, "exp_avg_sq": zeros + 1}
    optimizer.state[_weight(model)] = values


def _clear_one(model: nn.Module, optimizer: Any) -> None:
    optimizer.state[_weight(model)].clear()


def _delete(model: nn.Module, optimizer: Any) -> None:
    del optimizer.state[_weight(model)]


def _pop(model: nn.Module, optimizer: Any) -> None:
    assert optimizer.state.pop(_weight(model))["exp_avg"].shape == (32, 32)
    assert optimizer.state.pop(_weight(model), None) is None


def _clear_all(model: nn.Module, optimizer: Any) -> None:
    optimizer.state.clear()
    assert not optimizer.state


def _replace(model: nn.Module, optimizer: Any) -> None:
    if isinstance(optimizer, overspill.OffloadedOptimizer):
        optimizer.state = collections.defaultdict(dict)
    else:
        optimizer.state.clear()


def _loop(model: nn.Module, optimizer: Any) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.mul_(0.5) if value.dim() else value.zero_()


def _optimizer_dict(model: nn.Module, optimizer: Any) -> None:
    optimizer.state_dict()["state"][2]["exp_avg"].zero_()


def _optimizer_dict_kept(model: nn.Module, optimizer: Any) -> None:
    for state in optimizer.state_dict()["state"].values():
        state["exp_avg"].view(-1)[:7] = 0.0


def _model_dict(model: nn.Module, optimizer: Any) -> None:
    model.state_dict()["1.weight"].zero_()


def _model_dict_kept(model: nn.Module, optimizer: Any) -> None:
    values = list(model.state_dict().values())
    for value in values:
        value[2:5].mul_(0.5)


def _optimizer_dict_through_numpy(model: nn.Module, optimizer: Any) -> None:
    optimizer.state_dict()["state"][2]["exp_avg"].numpy()[:] = 0.01


def _optimizer_dict_through_data(model: nn.Module, optimizer: Any) -> None:
    kept = optimizer.state_dict()
    for state in kept["state"].values():
        state["exp_avg"].data.mul_(0.5)
    for number in kept["state"]:  # others are read, and changed, while it is kept
        optimizer.state_dict()["state"][number]["exp_avg_sq"].data.add_(0.01)


def _model_dict_through_data(model: nn.Module, optimizer: Any) -> None:
    model.state_dict()["1.weight"].data.zero_()


def _model_dict_kept_through_data(model: nn.Module, optimizer: Any) -> None:
    kept = model.state_dict()
    for value in kept.values():
        value.data[:5] = value.data[:5].flip(0).clone()  # the same sum
    for name, value in kept.items():
        assert torch.equal(model.state_dict()[name], value)


def _model_dict_changed_twice(model: nn.Module, optimizer: Any) -> None:
    kept = model.state_dict()
    for factor in (0.5, 0.25):
        kept["1.weight"].data.mul_(factor)
        model.state_dict()


def _optimizer_dict_changed_twice(model: nn.Module, optimizer: Any) -> None:
    kept = optimizer.state_dict()
    for factor in (0.5, 0.25):
        kept["state"][2]["exp_avg"].data.mul_(factor)
        optimizer.state_dict()


def _model_dict_dropped(model: nn.Module, optimizer: Any) -> None:
    kept = model.state_dict()
    for value in kept.values():
        value.data.mul_(0.5)
    del value, kept
    assert model[0].weight.isfinite().all()  # type: ignore[index,operator,union-attr]


def _moments_twice(model: nn.Module, optimizer: Any) -> None:
    state = optimizer.state[_weight(model)]
    again = optimizer.state[_weight(model)]
    state["exp_avg"].mul_(0.5)
    again["exp_avg"].add_(0.01)  # the same tensor


def _neuron_reset(model: nn.Module, optimizer: Any) -> None:
    """The state first, then the weight, which it belongs to."""
    weight = _weight(model)
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[weight][name][3].zero_()
    weight.data[3] *= 0.5


def _neuron_reset_with_kept_tensors(model: nn.Module, optimizer: Any) -> None:
    """Both are at hand before either is changed."""
    weight, moments = _weight(model), optimizer.state[_weight(model)]
    data = weight.data
    data[3] *= 0.5
    moments["exp_avg"][3].zero_()
    data[4] *= 0.5
    moments["exp_avg_sq"][3].zero_()


def _neuron_reset_in_dicts(model: nn.Module, optimizer: Any) -> None:
    weights, moments = model.state_dict(), optimizer.state_dict()["state"][2]
    weights["1.weight"][3] *= 0.5
    moments["exp_avg"][3].zero_()
    moments["exp_avg_sq"][3].zero_()


def _loaded_after_a_change_to_it(model: nn.Module, optimizer: Any) -> None:
    kept = model.state_dict()
    kept["1.weight"].data.mul_(0.5)
    model.load_state_dict(kept)


def _loaded_in_part(model: nn.Module, optimizer: Any) -> None:
    _weight(model).data.mul_(0.5)
    zeros = torch.zeros(32, device=DEVICE)
    model.load_state_dict({"1.bias": zeros}, strict=False)
    kept = model.state_dict()
    kept["2.weight"].data.mul_(0.5)
    model[2].load_state_dict({"bias": zeros}, strict=False)  # type: ignore[index,operator,union-attr]


def _a_value_of_the_dict_becomes_the_data(model: nn.Module, optimizer: Any) -> None:
    kept = model.state_dict()
    for name, p in model.named_parameters():
        kept[name].mul_(0.5)
        p.data = kept[name]


EDITS = [
    _neuron_reset, _neuron_reset_with_kept_tensors, _neuron_reset_in_dicts,
    _loaded_after_a_change_to_it, _loaded_in_part, _a_value_of_the_dict_becomes_the_data,
    _zero_one, _scale_all, _foreach, _assign, _assign_and_change, _slice, _through_data,
    _through_numpy, _update, _or, _restart_count, _whole, _clear_one, _delete, _pop, _clear_all,
    _replace, _loop, _optimizer_dict, _optimizer_dict_kept, _model_dict, _model_dict_kept,
    _optimizer_dict_through_numpy, _optimizer_dict_through_data, _model_dict_through_data,
    _model_dict_kept_through_data, _model_dict_changed_twice, _optimizer_dict_changed_twice,
    _model_dict_dropped, _moments_twice,
]  # fmt: skip


@pytest.mark.parametrize("options", [ROOMY, TIGHT, ON_DEVICE], ids=["roomy", "tight", "device"])
@pytest.mark.parametrize("update", ["step", "backward", "next_forward"])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_state_has_the_effect_that_it_has_in_torch(
    edit: Callable[[nn.Module, Any], None], update: str, options: dict[str, Any], tmp_path: Path
) -> None:
    plain, model = build(), build()
    its = plainly(overspill.optim.AdamW, plain.parameters(), lr=0.01)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    with overspill.wrap(model, inner, nvme=tmp_path, update=update, **options) as optimizer:
        for number in range(6):
            if number == 3:
                edit(plain, its)
                edit(model, optimizer)
            step(plain, its, number)
            step(model, optimizer, number)
        for name, value in plain.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name


def test_an_edit_is_committed_and_resumed(tmp_path: Path) -> None:
    model = build()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    with overspill.wrap(model, inner, nvme=tmp_path, **TIGHT) as optimizer:
        step(model, optimizer, 0)
        optimizer.state[_weight(model)]["exp_avg"].fill_(0.25)
        model.state_dict()["0.bias"].fill_(0.5)
    again = build()
    inner = torch.optim.AdamW(again.parameters(), lr=0.01)
    optimizer, _ = overspill.resume(again, tmp_path, inner, **TIGHT)
    with optimizer:
        assert bool((optimizer.state[_weight(again)]["exp_avg"] == 0.25).all())
        assert bool((again[0].bias == 0.5).all())


def test_a_rollback_drops_edits(tmp_path: Path) -> None:
    model = build()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    with overspill.wrap(model, inner, nvme=tmp_path, **TIGHT) as optimizer:
        step(model, optimizer, 0)
        optimizer.commit()
        kept = optimizer.state[_weight(model)]["exp_avg"]
        before = kept.clone()
        kept.fill_(0.25)
        optimizer.rollback()
        assert torch.equal(optimizer.state[_weight(model)]["exp_avg"], before)
        assert torch.equal(kept, before), "a tensor of the state is what the state is"


@pytest.mark.parametrize("moments", ["int8", "bf16"])
def test_moments_that_are_stored_compactly_are_edited(moments: Any, tmp_path: Path) -> None:
    model = build()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    with overspill.wrap(model, inner, nvme=tmp_path, moments=moments, **TIGHT) as optimizer:
        step(model, optimizer, 0)
        others = optimizer.state[_weight(model)]["exp_avg_sq"].clone()
        optimizer.state[_weight(model)]["exp_avg"].zero_()
        assert not optimizer.state[_weight(model)]["exp_avg"].any()
        assert torch.equal(optimizer.state[_weight(model)]["exp_avg_sq"], others)


@pytest.mark.parametrize("update", ["step", "next_forward"])
def test_a_tensor_that_is_kept_over_steps_follows_them(update: str, tmp_path: Path) -> None:
    plain, model = build(), build()
    its = plainly(overspill.optim.AdamW, plain.parameters(), lr=0.01)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    with overspill.wrap(model, inner, nvme=tmp_path, update=update, **TIGHT) as optimizer:
        for number in range(2):
            step(plain, its, number)
            step(model, optimizer, number)
        ours, theirs = (
            o.state[_weight(m)]["exp_avg"] for m, o in ((model, optimizer), (plain, its))
        )
        for number in range(2, 5):
            step(plain, its, number)
            step(model, optimizer, number)
            assert torch.equal(ours, theirs)
            ours.mul_(0.5)
            theirs.mul_(0.5)


def test_a_change_that_comes_too_late_is_refused_once(tmp_path: Path) -> None:
    model = build()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    with overspill.wrap(model, inner, nvme=tmp_path, **TIGHT) as optimizer:
        step(model, optimizer, 0)
        state, weights = optimizer.state_dict()["state"], model.state_dict()
        step(model, optimizer, 1)
        state[0]["exp_avg"].zero_()
        with pytest.raises(overspill.OffloadError, match=r"'exp_avg' of the state of '0\.weight'"):
            step(model, optimizer, 2)
        optimizer.zero_grad()
        step(model, optimizer, 2)
        weights["1.bias"].zero_()
        with pytest.raises(overspill.OffloadError, match=r"'1\.bias' was changed in place in a"):
            step(model, optimizer, 3)
        optimizer.zero_grad()
        optimizer.state_dict()["state"][0]["exp_avg"].zero_()  # what the message says to do
        model.state_dict()["1.bias"].zero_()
        assert not model[1].bias.any()
        assert not optimizer.state[model[0].weight]["exp_avg"].any()


def test_changes_in_two_copies_are_refused(tmp_path: Path) -> None:
    """In PyTorch both are the same tensor; here one of the changes would be lost."""
    model = build()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    with overspill.wrap(model, inner, nvme=tmp_path, **TIGHT) as optimizer:
        step(model, optimizer, 0)
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        data, weights, others = _weight(model).data, model.state_dict(), model.state_dict()
        data.add_(1)
        weights["1.weight"].mul_(0.5)
        weights["0.bias"].fill_(2)  # the same in both is one change
        others["0.bias"].fill_(2)
        with pytest.raises(
            overspill.OffloadError, match=r"'1\.weight' was changed in place in two"
        ):
            model(normal(1, 4, 32))
        model[0].bias.sum()
        expected["0.bias"].fill_(2)
        assert all(torch.equal(model.state_dict()[n], value) for n, value in expected.items())
        assert torch.equal(data, expected["1.weight"])
        data.add_(1)  # what the message says to do
        expected["1.weight"].add_(1)
        assert torch.equal(_weight(model).detach(), expected["1.weight"])
        step(model, optimizer, 1)


def test_state_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    model = build()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    with overspill.wrap(model, inner, nvme=tmp_path, **TIGHT) as optimizer:
        assert optimizer.state[_weight(model)] == {} and _weight(model) not in optimizer.state
        step(model, optimizer, 0)
        state = optimizer.state[_weight(model)]
        before = state["exp_avg"].clone()
        with pytest.raises(ValueError, match=r"has no 'mask'; it has exp_avg, exp_avg_sq, step"):
            state["mask"] = torch.ones(32, 32, device="cpu")
        with pytest.raises(ValueError, match=r"has shape \(32, 32\), got \(3,\)"):
            state["exp_avg"] = torch.ones(3, device="cpu")
        with pytest.raises(ValueError, match="needs exp_avg, exp_avg_sq as well"):
            optimizer.state[_weight(model)] = {"step": 1}
        for refused in (
            lambda: state.pop("exp_avg"),
            state.popitem,
            lambda: state.__delitem__("step"),
        ):
            with pytest.raises(overspill.OffloadError, match=r"state\[p\]\.clear\(\)"):
                refused()
        with pytest.raises(KeyError):
            optimizer.state[torch.ones(3)]
        with pytest.raises(overspill.OffloadError, match="assign an empty dict"):
            optimizer.state = {_weight(model): {}}
        assert torch.equal(optimizer.state[_weight(model)]["exp_avg"], before)
        assert state.setdefault("exp_avg", None) is state["exp_avg"]


def test_optimizers_are_not_copied_or_pickled_by_halves(tmp_path: Path) -> None:
    model = build()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    with overspill.wrap(model, inner, nvme=tmp_path, **TIGHT) as optimizer:
        step(model, optimizer, 0)
        for refused in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(overspill.OffloadError, match=r"optimizer\.state_dict\(\)"):
                refused(optimizer)
        with pytest.raises(overspill.OffloadError, match="load_state_dict"):
            optimizer.__setstate__({"state": {}})
        for copied in (copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
            found = copied(optimizer.state[_weight(model)])
            assert type(found) is dict
            assert torch.equal(found["exp_avg"], optimizer.state[_weight(model)]["exp_avg"])
        copied_dict = copy.deepcopy(optimizer.state_dict())
        step(model, optimizer, 1)
        copied_dict["state"][0]["exp_avg"].zero_()  # a copy is its owner's
        step(model, optimizer, 2)
        optimizer.load_state_dict(copied_dict)


def test_state_dicts_are_not_kept_alive(tmp_path: Path) -> None:
    """Memory for them is free as soon as their user drops them."""

    def copies() -> int:
        gc.collect()
        size = 32 * 32
        return sum(
            type(each) is torch.Tensor and each.numel() == size and not each.is_meta
            for each in gc.get_objects() if isinstance(each, torch.Tensor)
        )  # fmt: skip

    model = build()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    with overspill.wrap(model, inner, nvme=tmp_path, **TIGHT) as optimizer:
        step(model, optimizer, 0)
        before = copies()
        weights, state = model.state_dict(), optimizer.state_dict()
        assert copies() >= before + 12
        del weights, state
        assert copies() == before
        for each in optimizer.state.values():
            del each
        weights = dict(model.state_dict())  # the engine's own dict is gone before its values
        del weights
        model(normal(1, 4, 32))
        assert copies() == before


def test_parts_that_are_called_alone_use_what_was_changed(tmp_path: Path) -> None:
    """And what was looked at before a part ran is not looked at each time that it runs."""
    plain, model = build(), build()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    with overspill.wrap(model, inner, nvme=tmp_path, **TIGHT) as optimizer:
        weights = model.state_dict()
        for each in (weights, plain.state_dict()):
            each["1.weight"].data.mul_(0.5)
        x = normal(0, 4, 32)
        assert torch.equal(model[1](x), plain[1](x))
        copies = {copy.key: copy for copy in optimizer._engine._weights._in_dicts}
        assert [copy._sum is None for copy in copies.values()] == [n in (2, 3) for n in copies]
