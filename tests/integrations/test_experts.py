"""Experts in sections: what is computed, trained, loaded and saved is that of whole stacks."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

import overspill
from overspill.integrations.experts import join_experts, split_experts
from overspill.planning.sections import Section, Sections
from tests.crossed import crossed
from tests.devices import CPU, DEVICE, SIM, about_sim, plainly
from tests.devices import NAME as PLACE

SHAPE: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "num_experts_per_tok": 2,
}  # fmt: skip
WIDTH = {"moe_intermediate_size": 64}
MODELS: dict[str, Any] = {
    "mixtral": lambda **more: hf.MixtralForCausalLM(
        hf.MixtralConfig(**SHAPE, num_local_experts=8, **more)
    ),
    "qwen3": lambda **more: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**{**SHAPE, **WIDTH, "num_experts": 16, "head_dim": 16, **more})
    ),
    "gpt_oss": lambda **more: hf.GptOssForCausalLM(
        hf.GptOssConfig(**SHAPE, num_local_experts=8, head_dim=16,
                        layer_types=["full_attention"] * 3, **more)
    ),
    "olmoe": lambda **more: hf.OlmoeForCausalLM(hf.OlmoeConfig(**SHAPE, num_experts=8, **more)),
    "qwen2": lambda **more: hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(**SHAPE, **WIDTH, num_experts=8, shared_expert_intermediate_size=64,
                          **more)
    ),
}  # fmt: skip
SECTION = 2 * 2 * 128 * 64 * 4  # two experts of mixtral
# The test device has no histc, by which transformers counts.
WAYS = ["eager"] if PLACE == "testdev" else ["eager", "grouped_mm"]


def build(family: str, way: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    torch.manual_seed(0)
    model = MODELS[family](experts_implementation=way, **more).to(dtype)
    assert model.config._experts_implementation == way
    return model


def batch(step: int, length: int = 17) -> torch.Tensor:
    drawn = torch.Generator("cpu").manual_seed(step)
    return torch.randint(3, 96, (2, length), generator=drawn, device="cpu").to(DEVICE)


def train(model: Any, optimizer: Any, steps: int, length: int = 17, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(step)
        ids = batch(step, length)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value.cpu(), other[name].cpu()), name


def largest_layer(model: Any) -> int:
    """Bytes of the experts of one layer."""
    return max(
        sum(p.nbytes for p in m.parameters())
        for n, m in model.named_modules() if n.endswith("experts")
    )  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", MODELS)
def test_sections_alone_compute_the_same(family: str, way: str) -> None:
    """Without an engine: outputs, gradients, and what AdamW makes of them, bit for bit."""
    plain, split = build(family, way).to(DEVICE), build(family, way)
    assert split_experts(split, 1) is split  # sections of one expert, of which many have no token
    split.to(DEVICE)
    assert sum(isinstance(m, Section) for m in split.modules()) >= 3 * 2 * 8
    ours = torch.optim.AdamW(split.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    assert train(split, ours, 4, length=3) == train(plain, theirs, 4, length=3)
    same(split.state_dict(), plain.state_dict())
    same(join_experts(split).state_dict(), plain.state_dict())
    assert not any(isinstance(m, Sections) for m in split.modules())


@pytest.mark.parametrize(
    ("family", "way", "place", "update"),
    crossed(
        ["mixtral", "qwen3"], WAYS, ["device", "disk"] if CPU == "cpu" else ["device"],
        ["step", "backward", "next_forward"],
    ),
)  # fmt: skip
def test_training_with_less_room_than_one_layer(
    family: str, way: str, place: str, update: Any, tmp_path: Path
) -> None:
    plain, split = build(family, way), build(family, way)
    layer = largest_layer(plain)
    theirs = plainly(overspill.optim.AdamW, list(plain.parameters()), lr=1e-2)
    plain.to(DEVICE)
    expected = train(plain, theirs, 20)
    if place == "device":
        short = {"device": SIM, "device_memory": layer * 2 // 3, "rates": overspill.Rates()}
        with pytest.raises(overspill.BudgetError, match="cut its experts into sections"):
            overspill.wrap(split, **short)
        wide = split_experts(build(family, way), layer)
        with pytest.raises(overspill.BudgetError, match="give split_experts a smaller section"):
            overspill.wrap(wide, **{**short, "device_memory": layer // 4})
    split_experts(split, SECTION)
    budgets: dict[str, Any] = (
        {"device": SIM, "device_memory": layer * 2 // 3, "host_memory": "64MiB"}
        if place == "device"
        else {"device": CPU, "host_memory": layer * 7, "nvme": tmp_path, "durable": False}
    )
    inner = torch.optim.AdamW(split.parameters(), lr=1e-2)
    with overspill.wrap(
        split, inner, update=update, rates=overspill.Rates(), activations="keep", **budgets
    ) as ours:
        assert train(split, ours, 20) == expected
        same(split.state_dict(), plain.state_dict())


@pytest.mark.parametrize("way", WAYS)
def test_adapters_over_experts_that_are_read_in_place(way: str, tmp_path: Path) -> None:
    """LoRA on attention; the experts stay where they are, and in files they are one by one."""
    build("mixtral", way, torch.bfloat16).save_pretrained(tmp_path / "base")
    plain = adapted(build("mixtral", way, torch.bfloat16))
    theirs = plainly(overspill.optim.AdamW, trained(plain), lr=1e-2, master="split")
    layer = largest_layer(plain)
    plain.to(DEVICE)
    expected = train(plain, theirs, 20)
    with overspill.empty_init():
        empty = build("mixtral", way, torch.bfloat16)
    split = adapted(split_experts(empty, SECTION // 2))
    split.load_state_dict(
        {n: p.detach().cpu() for n, p in adapted(build("mixtral", way, torch.bfloat16))
         .named_parameters() if p.requires_grad}, strict=False, assign=True,
    )  # fmt: skip
    with overspill.wrap(
        split, torch.optim.AdamW(trained(split), lr=1e-2), weights=tmp_path / "base",
        device=SIM, device_memory=layer * 9 // 10, host_memory="64MiB", rates=overspill.Rates(),
        activations="keep",
    ) as ours:  # fmt: skip
        assert all(
            unit.index in ours.plan.detail.layout.in_place
            for unit in ours.plan.detail.layout.units if "experts" in unit.name
        )  # fmt: skip
        assert train(split, ours, 20) == expected
        weights = split.state_dict()
    same(weights, plain.state_dict())


ALSO: dict[str, dict[str, Any]] = {
    "activations on disk": {"activations": "nvme"},
    "activations in host memory": {"activations": "host"},
    "recomputed": {"activations": "recompute"},
    "as it comes": {},
    "checkpoints": {"checkpointing": True, "activations": "keep"},
    "micro-steps": {"accumulate": 2, "activations": "keep"},
}


@pytest.mark.parametrize("also", ALSO)
@pytest.mark.parametrize("way", WAYS)
def test_sections_go_with_all_else(way: str, also: str, tmp_path: Path) -> None:
    options = dict(ALSO[also])
    checkpointing, micro = options.pop("checkpointing", False), options.get("accumulate", 1)
    plain, split = build("mixtral", way), split_experts(build("mixtral", way), SECTION)
    for each in (plain, split) if checkpointing else ():
        each.gradient_checkpointing_enable({"use_reentrant": False})
    theirs = plainly(overspill.optim.AdamW, list(plain.parameters()), lr=1e-2)
    layer = largest_layer(plain)
    plain.to(DEVICE)
    expected = train_in_parts(plain, theirs, micro)
    inner = torch.optim.AdamW(split.parameters(), lr=1e-2)
    with overspill.wrap(
        split, inner, nvme=tmp_path, durable=False, device=SIM, device_memory=layer,
        host_memory="64MiB", rates=overspill.Rates(), **options,
    ) as ours:  # fmt: skip
        assert train_in_parts(split, ours, micro) == expected
        same(split.state_dict(), plain.state_dict())


def train_in_parts(model: Any, optimizer: Any, micro: int) -> list[float]:
    losses = []
    model.train()
    for step in range(4):
        for part in range(micro):
            ids = batch(10 * step + part)
            loss = model(input_ids=ids, labels=ids).loss / micro
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("way", WAYS)
def test_frozen_experts_are_packed_section_by_section(way: str) -> None:
    """The bits of the same run over weights that were packed and unpacked before.  A section is
    packed as a tensor of its own."""
    options: dict[str, Any] = {
        "device": SIM, "device_memory": "3MiB", "host_memory": "64MiB", "frozen": "nf4",
        "rates": overspill.Rates(), "activations": "keep", "durable": False,
    }  # fmt: skip
    plain = adapted(build("mixtral", way, torch.bfloat16))
    split = adapted(split_experts(build("mixtral", way, torch.bfloat16), SECTION // 2))
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    with overspill.wrap(split, torch.optim.AdamW(trained(split), lr=1e-2), **options) as ours:
        packed = {unit.name for unit in ours.plan.detail.layout.units if unit.packed}
        assert sum("experts" in name for name in packed) == sum(
            isinstance(m, Section) for m in split.modules()
        )
        weights = split.state_dict()
        changed = {n for n, v in weights.items() if not torch.equal(v.cpu(), before[n].cpu())}
        assert sum("experts" in name for name in changed) == 2 * 3
        plain.load_state_dict({n: v.cpu() for n, v in weights.items()})
        theirs = plainly(overspill.optim.AdamW, trained(plain), lr=1e-2, master="split")
        plain.to(DEVICE)
        assert train(split, ours, 5) == train(plain, theirs, 5)
        same(split.state_dict(), plain.state_dict())


def adapted(model: Any) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def trained(model: Any) -> list[Any]:
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("family", MODELS)
def test_the_hubs_names(family: str, tmp_path: Path) -> None:
    """What transformers wrote is loaded into sections, and what they write it reads."""
    whole = build(family, "eager")
    whole.save_pretrained(tmp_path / "from")
    with overspill.empty_init():
        empty = split_experts(build(family, "eager"), SECTION)
    optimizer = overspill.wrap(
        empty, torch.optim.AdamW(empty.parameters()), weights=tmp_path / "from", device=SIM,
        device_memory="4MiB", host_memory="64MiB", nvme=folder(tmp_path / "store"),
        rates=overspill.Rates(),
    )  # fmt: skip
    with optimizer:
        same(empty.state_dict(), whole.state_dict())
        empty.save_pretrained(tmp_path / "theirs")
        optimizer.save(tmp_path / "ours")
    before = files_in(tmp_path / "from")
    same(files_in(tmp_path / "theirs"), before)
    same(files_in(tmp_path / "ours"), before)
    again = type(whole).from_pretrained(tmp_path / "ours", experts_implementation="eager")
    same(again.state_dict(), whole.state_dict())


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def files_in(where: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(where.glob("*.safetensors")):
        found |= load_file(file)
    return found


def test_a_store_is_resumed_and_exported_without_a_model(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "device": SIM,
        "device_memory": "4MiB",
        "host_memory": "64MiB",
        "rates": overspill.Rates(),
    }
    model = split_experts(build("mixtral", "eager"), SECTION)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with overspill.wrap(model, inner, nvme=folder(tmp_path / "store"), **options) as optimizer:
        first = train(model, optimizer, 3)
        expected = [*first, *more(model, optimizer)]
    model = split_experts(build("mixtral", "eager"), SECTION)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with overspill.wrap(model, inner, nvme=folder(tmp_path / "other"), **options) as optimizer:
        train(model, optimizer, 3)
    model = split_experts(build("mixtral", "eager"), SECTION)
    optimizer, _ = overspill.resume(model, tmp_path / "other", **options)
    with optimizer:
        assert [*first, *more(model, optimizer)] == expected
        weights = {n: t.cpu() for n, t in model.state_dict().items()}
    from overspill.durable.export import export_store

    export_store(tmp_path / "other", tmp_path / "out")
    same(files_in(tmp_path / "out"), weights)
    wrong = split_experts(build("mixtral", "eager"), 1)
    with pytest.raises(overspill.OffloadError):
        overspill.resume(wrong, tmp_path / "other", **options)


def more(model: Any, optimizer: Any) -> list[float]:
    ids = batch(77)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item(), model(input_ids=ids, labels=ids).loss.item()]


@pytest.mark.parametrize("family", ["mixtral", "qwen3", "gpt_oss"])
@pytest.mark.parametrize("way", WAYS)
def test_generation_brings_what_was_chosen(family: str, way: str, tmp_path: Path) -> None:
    """The very tokens; and a token costs the sections that it chose, not all of them."""
    plain = build(family, way).eval()
    split = split_experts(build(family, way).eval(), 1)
    every = largest_layer(plain) * 3
    prompt = batch(0, 7)
    wanted = generated(plain.to(DEVICE), prompt)
    rest = sum(p.nbytes for p in plain.parameters()) - every
    with overspill.wrap(
        split, device=SIM, device_memory=rest + every // 4, host_memory="64MiB",
        rates=overspill.Rates(),
    ) as running:  # fmt: skip
        assert torch.equal(generated(split, prompt), wanted)
        generated(split, prompt[:1])
        assert running.stats.lanes["copy_in"].bytes < 0.6 * every
        overspill.unwrap(split)
    assert not any(s.announce for s in split.modules() if isinstance(s, Sections))


@about_sim
def test_nothing_is_brought_in_vain_where_nobody_can_foresee_what_is_chosen() -> None:
    """Routers that go by the token alone, and tokens that are drawn: a forward brings the experts
    that it uses, and the rest of the model; by what the last one used it would bring more."""
    model = build("qwen3", "grouped_mm").eval()
    experts = {n: m for n, m in model.named_modules() if n.endswith("experts")}
    each = sum(p[0].nbytes for p in experts["model.layers.0.mlp.experts"].parameters())
    every = sum(p.nbytes for m in experts.values() for p in m.parameters())
    rest = sum(p.nbytes for p in model.parameters()) - every
    torch.manual_seed(2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("gate.weight") or "embed" in name:
                p.copy_(torch.randn(p.shape))
    split_experts(model, 1)
    room = rest + every // 4
    used, moved = brought(model, device_memory=room, host_memory="64MiB")
    assert used == 2 * 3 * each, "two of each layer"
    assert moved < used + rest


def brought(model: Any, **budgets: Any) -> tuple[float, float]:
    """Bytes of experts that a forward uses, and bytes that it brings, at the median."""
    used, moved = [], []
    with overspill.wrap(model, device=SIM, rates=overspill.Rates(), **budgets) as running:
        sections = [m for m in model.modules() if isinstance(m, Section)]
        calls: list[int] = []
        for section in sections:
            section.register_forward_pre_hook(lambda m, _: calls.append(m.section.nbytes))
        with torch.no_grad():
            for token in batch(5, 30)[0]:
                calls.clear()
                model(token.reshape(1, 1), use_cache=False)
                used.append(sum(calls))
                moved.append(running.stats.lanes["copy_in"].bytes)
    return statistics.median(used[10:]), statistics.median(moved[10:])


def generated(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    found: torch.Tensor = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False,
        use_cache=True,
    )  # fmt: skip
    return found.cpu()
