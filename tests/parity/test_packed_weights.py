"""``frozen=``: weights that are not trained are kept and moved in another format, and unpacked
before use: all is as with the unpacked weights in memory, and a quarter moves."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.cli.plan_text import contents
from overspill.facts.tier import Tier
from overspill.io_engine import allocate_host
from overspill.optim import packed
from overspill.optim.packed_layout import FORMATS, Parts
from overspill.planning.bounds import least_seconds
from tests.crossed import crossed
from tests.devices import CPU, SIM, about_cpu, normal
from tests.parity import test_inference as inference
from tests.parity.test_in_place import adamw, file_of, written
from tests.parity.test_partly_frozen import WIDTH, build

RATES = overspill.Rates()
PLACES: dict[str, dict[str, Any]] = {
    "device": {"device": SIM, "device_memory": "120KiB", "host_memory": "100KiB"},
    "resident": {"device": SIM, "device_memory": "64MiB", "host_memory": "400KiB"},
}
if CPU == "cpu":
    PLACES["host"] = {"device": CPU, "host_memory": "250KiB"}
    PLACES["memory"] = {"device": CPU, "host_memory": "64MiB"}
HALF: dict[str, Any] = {"precision": "bf16"}


def unpacked(model: nn.Module, form: Any, names: tuple[str, ...] = ("first", "base")) -> nn.Module:
    """The model with the values that its weights have once packed."""
    for name, p in model.named_parameters():
        if p.dim() == 2 and any(part in name for part in names):
            parts = Parts(form, tuple(p.shape))
            page = torch.from_numpy(allocate_host(parts.nbytes).array)
            flat = p.detach().cpu().flatten()
            packed.pack(parts, flat, page)
            packed.unpack(parts, page, flat)
            p.data = flat.view(p.shape).to(p.device)
    return model


def half() -> nn.Module:
    return build().to(torch.bfloat16)


def wrapped(model: nn.Module, folder: Path | None, place: str, **options: Any) -> Any:
    store = {} if folder is None else {"nvme": folder}
    return overspill.wrap(model, adamw(model), rates=RATES, **{**PLACES[place], **store, **options})


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> Any:
    return request.param


@functools.cache
def expected(form: Any) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and weights after six steps on the unpacked base."""
    model = unpacked(half(), form)
    with wrapped(model, None, "resident") as made:
        losses = steps_in_half(model, made, 0, 6)
        return losses, [p.detach().cpu().clone() for p in model.parameters()]


def steps_in_half(model: nn.Module, optimizer: Any, first: int, last: int) -> list[float]:
    losses = []
    for number in range(first, last):
        loss = model(normal(number, 4, WIDTH).to(torch.bfloat16)).float().square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("form", "place", "update", "durable"),
    crossed(FORMATS, list(PLACES), ["step", "next_forward", "backward"], [True, False]),
)
def test_training_is_that_on_the_unpacked_base(
    form: Any, place: str, update: Any, durable: bool, tmp_path: Path
) -> None:
    model = half()
    with wrapped(model, tmp_path, place, frozen=form, update=update, durable=durable) as made:
        losses = steps_in_half(model, made, 0, 6)
        after = [p.detach().cpu().clone() for p in model.parameters()]
        layout, memory = made.plan.detail.layout, made.memory
    assert losses == expected(form)[0]
    assert all(map(torch.equal, after, expected(form)[1]))
    assert {u.packed for u in layout.units if not u.trainable} == {True}
    base = [s for s in written(made) if "(frozen)" in s.name]
    assert len(base) <= int(durable) * len(layout.units), "more than the first commit has it"
    assert sum(s.nbytes for s in base) <= sum(u.page_bytes for u in layout.units)
    for tier in memory.values():
        assert tier.peak_bytes <= tier.budget_bytes


def test_a_quarter_moves(form: Any, tmp_path: Path) -> None:
    """Of layers large enough that norms and biases beside their matrices are nothing."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(512, 512, bias=False)
            self.down, self.up = (nn.Linear(512, 2, bias=False), nn.Linear(2, 512, bias=False))
            self.base.weight.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.base(x) + self.up(self.down(x)))

    read = {}
    for kept in (None, form):
        model = nn.Sequential(*(Layer() for _ in range(6))).to(torch.bfloat16)
        room = {"device": CPU, "host_memory": "2500KiB"}
        if CPU != "cpu":
            room = {"device": SIM, "device_memory": "2500KiB", "host_memory": "1200KiB"}
        (tmp_path / str(kept)).mkdir()
        with overspill.wrap(
            model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3),
            nvme=tmp_path / str(kept), durable=False, frozen=kept, rates=RATES, **room,
            prefetch_depth=1,
        ) as made:  # fmt: skip
            units = [u for u in made.plan.detail.layout.units if not u.trainable]
            for number in range(3):
                model(normal(number, 2, 512).to(torch.bfloat16)).float().sum().backward()
                made.step()
                made.zero_grad()
            read[kept] = sum(u.stored_bytes for u in units)
    share = {"nf4": 0.27, "int8": 0.51}[form]
    assert read[form] <= share * read[None]


def test_a_durable_store_leaves_pages_on_the_device(form: Any, tmp_path: Path) -> None:
    """All that has room there stays; a commit has them, and a resumed run brings them back."""
    model = half()
    room = {"device": SIM, "device_memory": "230KiB", "host_memory": "16MiB", "rates": RATES}
    with overspill.wrap(model, adamw(model), nvme=tmp_path, frozen=form, **room) as made:
        homes = made.plan.detail.layout.homes
        there = [home.page_on_device for home in homes]
        assert any(there)
        assert {home.weights for home in homes if home.page_on_device} == {Tier.NVME}
        losses = steps_in_half(model, made, 0, 3)
    other = half()
    with overspill.resume(other, tmp_path, adamw(other), **room)[0] as made:
        assert [home.page_on_device for home in made.plan.detail.layout.homes] == there
        losses += steps_in_half(other, made, 3, 6)
        assert losses == expected(form)[0]
        assert not [s for s in written(made) if "(frozen)" in s.name], "it is never written again"
        made.commit()
        made.rollback()
        assert all(map(torch.equal, (p.detach().cpu() for p in other.parameters()),
                       expected(form)[1]))  # fmt: skip


def test_pages_that_stay_on_the_device_cost_no_disk_in_a_plan(form: Any, tmp_path: Path) -> None:
    """However slow the disk is."""
    rates = overspill.Rates(
        h2d_bytes_s=1e9, d2h_bytes_s=1e9, dram_bytes_s=1e10, update_params_s=1e9,
        device_flops_s=1e9, disk_read_bytes_s=1e5, disk_write_bytes_s=1e5,
    )  # fmt: skip
    model = half()
    plan = overspill.plan(
        model, adamw(model), nvme=tmp_path, frozen=form, rates=rates, tokens=8, device=SIM,
        device_memory="230KiB", host_memory="16MiB", durable=True, commit_every=1000,
    )  # fmt: skip
    assert any(home.page_on_device for home in plan.placement.values())
    assert plan.step_s is not None and plan.bound_s is not None
    assert plan.step_s >= 0.999 * plan.bound_s
    layout = plan.detail.layout
    assert layout is not None
    assert least_seconds(layout, rates) < 0.01
    homes = zip(layout.units, plan.placement.values(), strict=True)
    pages = sum(unit.page_bytes for unit, home in homes if home.page_on_device)
    assert contents(plan)[Tier.DEVICE]["weights"] >= pages > 0


def test_a_store_keeps_them_packed_and_exports_them_whole(form: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    place = next(iter(PLACES))
    for name in ("store", "other"):
        (tmp_path / name).mkdir()
    model = half()
    with wrapped(model, tmp_path / "store", place, frozen=form) as made:
        losses = steps_in_half(model, made, 0, 3)
    with pytest.raises(ValueError, match="the store was made with frozen="):
        overspill.resume(half(), tmp_path / "store", frozen="nf4" if form == "int8" else "int8")
    model = half()
    made, _ = overspill.resume(
        model, tmp_path / "store", adamw(model), nvme=tmp_path / "other", rates=RATES,
        **PLACES[place],
    )  # fmt: skip
    with made:
        losses += steps_in_half(model, made, 3, 6)
        assert losses == expected(form)[0]
        made.save(tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    names = [name for name, _ in model.named_parameters()]
    for name, value in zip(names, expected(form)[1], strict=True):
        assert torch.equal(exported[name], value), name


def test_they_are_read_where_they_are_needed_and_never_changed(form: Any, tmp_path: Path) -> None:
    model, plain = half(), unpacked(half(), form)
    want = {n: t.detach().cpu() for n, t in plain.state_dict().items()}
    with wrapped(model, tmp_path, "device", frozen=form) as made:
        assert all(torch.equal(t.cpu(), want[n]) for n, t in model.state_dict().items())
        assert all(torch.equal(t.cpu(), want[n]) for n, t in overspill.named_weights(model))
        model.load_state_dict(model.state_dict())
        p = model.get_parameter("1.base.weight")
        with (
            pytest.raises(overspill.OffloadError, match="the format of frozen="),
            overspill.materialized(model, writeback=True),
            torch.no_grad(),
        ):
            p.mul_(2.0)
        assert torch.equal(p.detach().cpu(), want["1.base.weight"])
        steps_in_half(model, made, 0, 1)
        made.commit()
        made.rollback()
        steps_in_half(model, made, 1, 2)
        overspill.unwrap(model)
    assert torch.equal(model.get_parameter("1.base.weight").detach().cpu(), want["1.base.weight"])


@pytest.mark.parametrize("place", inference.PLACES)
def test_inference_and_what_keeps_its_format(place: str, form: Any, tmp_path: Path) -> None:
    """What the user has stay where compute is, stays as it is."""
    plain = unpacked(inference.build(), form, ("inner", "out"))
    exact = inference.build()
    plain[3].load_state_dict(exact[3].state_dict())
    plain = plain.to(normal(0, 1).device)
    model = inference.build()
    with (
        torch.no_grad(),
        inference.offloaded(model, place, tmp_path, frozen=form, resident=["3"]) as made,
    ):
        for number in range(4):
            x = normal(number, 3, inference.WIDTH)
            assert torch.equal(model(x), plain(x))
        layout = made.plan.detail.layout
        assert [u.packed for u in layout.units] == [n != 3 for n in range(inference.BLOCKS)]
        assert made.memory[Tier.HOST].peak_bytes <= made.memory[Tier.HOST].budget_bytes


def test_weights_come_packed_from_files(form: Any, tmp_path: Path) -> None:
    file = file_of(inference.build(), tmp_path)
    with overspill.empty_init():
        model = inference.build()
    plain = unpacked(inference.build(), form, ("inner", "out")).to(normal(0, 1).device)
    place = next(iter(PLACES))
    options = {**PLACES[place], "host_memory": "64MiB", "device_memory": "400KiB"}
    with torch.no_grad(), overspill.wrap(
        model, weights=file, ignore_weights=["a"], frozen=form, rates=RATES, **options
    ) as made:  # fmt: skip
        assert not made.plan.detail.layout.in_place
        x = normal(0, 3, inference.WIDTH)
        assert torch.equal(model(x), plain(x))


def test_a_weight_that_is_not_finite_is_told_of_before_anything_is_lost(tmp_path: Path) -> None:
    model = half()
    with torch.no_grad():
        model.get_parameter("2.base.weight")[3, 3] = float("inf")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"2\.base\.weight: .* not finite"):
        wrapped(model, tmp_path, "device", frozen="nf4")
    for name, value in model.state_dict().items():
        packed_before = "first.weight" in name or "base.weight" in name
        assert value.device.type != "meta" or packed_before
        if value.device.type != "meta":
            assert torch.equal(value, before[name]), name


@about_cpu
def test_embeddings_and_the_head_keep_theirs() -> None:
    import transformers as hf

    config = hf.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=1, num_key_value_heads=1,
    )  # fmt: skip
    made = overspill.plan(
        hf.LlamaForCausalLM(config), device="cpu", frozen="nf4", host_memory="64MiB", rates=RATES
    )
    layout = made.detail.layout
    assert layout is not None
    assert {u.name: u.packed for u in layout.units} == {
        "model.embed_tokens": False, "model.layers.0": True, "model.layers.1": True,
        "model.norm": False, "lm_head": False,
    }  # fmt: skip
    forms = [part.form and part.form.describe() for part in layout.units[1].page]
    assert forms.count("nf4") == 7 and forms.count(None) == 2


def test_bad_words_are_refused() -> None:
    with pytest.raises(ValueError, match="frozen must be one of None, 'int8', 'nf4'"):
        overspill.wrap(build(), frozen="fp4")  # type: ignore[call-overload]


@about_cpu
def test_a_trained_model_is_as_good_as_with_bitsandbytes() -> None:
    """Perplexity within a percent of that of the same weights packed there."""
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(0)

    class Next(nn.Module):
        """Two matrices between characters; the next one is a function of the last two."""

        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(64, 64), nn.Linear(128, 64)
            self.blocks = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.table(x).flatten(-2)
            for block in self.blocks:
                y = y + torch.nn.functional.gelu(block(y))
            return self.head(y)

    def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randint(0, 64, (512, 2), generator=torch.Generator().manual_seed(seed))
        return x, (5 * x[:, 0] + x[:, 1] * x[:, 1]) % 64

    def perplexity(model: nn.Module) -> float:
        with torch.no_grad():
            losses = [
                torch.nn.functional.cross_entropy(model(x), y)
                for x, y in map(batch, range(900, 904))
            ]
        return float(torch.stack(losses).mean().exp())

    model = Next()
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for number in range(400):
        x, y = batch(number)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        adamw.step()
        adamw.zero_grad()
    exact = perplexity(model)
    assert exact < 8, "it has learned something: 64 is nothing"
    theirs = copy.deepcopy(model)
    for block in theirs.blocks:
        codes, state = functional.quantize_4bit(
            block.weight.data, blocksize=64, compress_statistics=True, quant_type="nf4"
        )
        block.weight.data = functional.dequantize_4bit(codes, state)
    with overspill.wrap(
        model, device="cpu", host_memory="64MiB", frozen="nf4", rates=RATES
    ) as made:
        packed_units = [u for u in made.plan.detail.layout.units if u.packed]
        assert len(packed_units) == 3
        mine = perplexity(model)
    assert mine == pytest.approx(perplexity(theirs), rel=0.01)
    assert mine != exact


def test_a_state_dict_is_loaded_whole_or_not_at_all(form: Any, tmp_path: Path) -> None:
    """One value that cannot be taken over leaves all others as they were."""
    model = half()
    with wrapped(model, tmp_path, "device", frozen=form) as made:
        before = {n: t.detach().cpu().clone() for n, t in model.state_dict().items()}
        other = {n: t + 1 for n, t in before.items()}
        with pytest.raises(overspill.OffloadError, match="cannot be changed"):
            model.load_state_dict(other)
        assert all(torch.equal(t.cpu(), before[n]) for n, t in model.state_dict().items())
        steps_in_half(model, made, 0, 1)
        trained = {n: t + 1 for n, t in before.items() if "up" in n}
        model.load_state_dict({**before, **trained})
        assert torch.equal(model.state_dict()["1.up.weight"].cpu(), trained["1.up.weight"])


def test_exports_have_every_parameter_in_its_own_order(form: Any, tmp_path: Path) -> None:
    """Also those beside packed ones whose memory is not in the order of their sizes."""
    from safetensors.torch import load_file

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Linear(64, 64)
            self.conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
            self.turned = nn.Parameter(normal(3, 5, 7).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x.view(-1, 4, 4, 4)).sum() + self.turned.sum()
            return self.matrix(x) + y

    torch.manual_seed(0)
    model = nn.Sequential(*(Mixed() for _ in range(3)), nn.Linear(64, 64))
    for p in (p for block in list(model)[:3] for p in block.parameters()):
        p.requires_grad_(False)
    adam = torch.optim.AdamW(model[3].parameters())
    with overspill.wrap(
        model, adam, device=CPU, nvme=tmp_path, frozen=form, rates=RATES, host_memory="64MiB"
    ) as made:
        layout = made.plan.detail.layout
        for unit in layout.units:
            forms = [part.form and part.form.describe() for part in unit.page]
            assert not unit.packed or forms.count(form) == 1
        want = {n: t.detach().cpu().clone() for n, t in model.state_dict().items()}
        made.save(tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in want.items())


def test_what_may_not_be_finite_once_unpacked_is_refused_before_anything_is_lost() -> None:
    for dtype, value, precision in (
        (torch.float16, 65_000.0, None), (torch.float32, 70_000.0, "fp16"),
        (torch.float32, 3.3e38, None),
    ):  # fmt: skip
        model = inference.build().to(dtype)
        with torch.no_grad():
            model[5].inner.weight[3, 3] = value
        with pytest.raises(ValueError, match=r"5\.inner\.weight: .* is too large"):
            overspill.wrap(
                model, device=CPU, frozen="nf4", rates=RATES, precision=precision,
                host_memory="64MiB",
            )  # fmt: skip
        assert all(p.device.type == torch.device(CPU).type for p in model.parameters())
        assert torch.isfinite(model[0].inner.weight).all()
