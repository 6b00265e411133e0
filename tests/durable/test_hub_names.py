"""Files of the Hugging Face hub have names and shapes of their own: read and written as
transformers does, a group of tensors at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import overspill
from overspill.cli.app import app
from overspill.durable import hub
from overspill.durable.tensors import lazy
from overspill.state import hub_names
from overspill.state.weight_files import WeightFiles
from tests.devices import CPU, SIM

LM: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**LM, "num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64,
                      bos_token_id=1, eos_token_id=2)
    ),
    "neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**LM)),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**LM)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    ),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, num_local_experts=12)),
    "qwen2 experts": lambda: hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(**GROUPED, **EXPERTS, num_experts=4, shared_expert_intermediate_size=16)
    ),
    "qwen3 experts": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**GROUPED, **EXPERTS, num_experts=12, head_dim=8)
    ),
    "olmo experts": lambda: hf.OlmoeForCausalLM(hf.OlmoeConfig(**GROUPED, num_experts=4)),
    "clip": lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**VISION)),
    "beit": lambda: hf.BeitModel(hf.BeitConfig(vocab_size=64, **VISION)),
}  # fmt: skip


def build(family: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return MODELS[family]()


def files_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(t.cpu(), other[n].cpu()) for n, t in one.items()
    )


@pytest.mark.parametrize("family", MODELS)
def test_a_model_is_written_as_transformers_writes_it(family: str, tmp_path: Path) -> None:
    model = build(family)
    model.save_pretrained(tmp_path)
    made = {t.name: hub.whole(t) for t in hub.of_model(model)}
    assert equal(made, files_in(tmp_path))
    assert list(hub_names.tensors_of(model)) == list(model.state_dict())


@pytest.mark.parametrize("family", MODELS)
def test_a_wrapped_model_goes_to_files_and_comes_back(family: str, tmp_path: Path) -> None:
    """``weights=`` of what ``from_pretrained`` reads, and the other way round."""
    original = build(family)
    original.save_pretrained(tmp_path / "hub")
    model = build(family, seed=1)
    (tmp_path / "store").mkdir()
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with overspill.wrap(
        model, inner, weights=tmp_path / "hub", device=SIM, host_memory="1GiB",
        device_memory="1GiB", nvme=tmp_path / "store", rates=overspill.Rates(),
    ) as optimizer:  # fmt: skip
        assert equal(dict(model.state_dict()), dict(original.state_dict()))
        optimizer.save(tmp_path / "saved")
    assert equal(files_in(tmp_path / "saved"), files_in(tmp_path / "hub"))
    again = type(original).from_pretrained(tmp_path / "saved")
    assert equal(dict(again.state_dict()), dict(original.state_dict()))
    exported(tmp_path / "store", tmp_path / "exported", "--config", tmp_path / "hub")
    assert equal(files_in(tmp_path / "exported"), files_in(tmp_path / "hub"))


def exported(*arguments: Any) -> str:
    """What the command says."""
    done = CliRunner().invoke(app, ["export", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_store_is_exported_with_the_names_in_memory_where_no_others_are_known(
    tmp_path: Path,
) -> None:
    model = build("llama")
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    (tmp_path / "store").mkdir()
    with overspill.wrap(
        model, inner, device=CPU, host_memory="1GiB", nvme=tmp_path / "store",
        rates=overspill.Rates(),
    ) as optimizer:  # fmt: skip
        optimizer.commit()
    exported(tmp_path / "store", tmp_path / "plain")
    assert set(files_in(tmp_path / "plain")) == {name for name, _ in model.named_parameters()}
    config = tmp_path / "config.json"
    config.write_text('{"architectures": ["Own"], "auto_map": {"AutoModel": "own.Own"}}')
    exported(tmp_path / "store", tmp_path / "own", "--config", config)
    assert equal(files_in(tmp_path / "own"), files_in(tmp_path / "plain"))
    config.write_text('{"architectures": ["NobodysModel"]}')
    done = CliRunner().invoke(
        app, ["export", str(tmp_path / "store"), str(tmp_path / "no"), "--config", str(config)]
    )
    assert done.exit_code == 2 and "has no NobodysModel" in done.output.replace("\n", " ")
    assert not (tmp_path / "no").exists()


def test_experts_that_are_not_all_there_are_told_of(tmp_path: Path) -> None:
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    tensors = files_in(tmp_path)
    lost = next(n for n in tensors if "experts.7" in n and "w2" in n)
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors")
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"does not match the model.*experts"):
        overspill.wrap(model, inner, weights=tmp_path, device=CPU, host_memory="1GiB")


def test_one_group_at_a_time_is_in_memory(tmp_path: Path) -> None:
    """Each tensor of the model is read once, and none before the one before it is written."""
    model = build("mixtral")
    reads: list[str] = []

    def read(name: str) -> torch.Tensor:
        reads.append(name)
        return model.state_dict()[name]

    tensors = [
        lazy(n, t.dtype, t.shape, lambda n=n: read(n))  # type: ignore[misc]
        for n, t in model.state_dict().items()
    ]
    seen = []
    for tensor in hub.as_on_hub(model, tensors):
        hub.whole(tensor)
        seen.append(len(reads))
    assert sorted(reads) == sorted(model.state_dict())
    assert seen[0] <= 2 and max(b - a for a, b in itertools.pairwise(seen)) <= 2
    model.save_pretrained(tmp_path)
    files = hub_names.HubFiles(model, WeightFiles(tmp_path))
    assert files.shape("model.layers.0.mlp.experts.gate_up_proj") == (12, 96, 32)
    assert files.shape("model.layers.7.nothing") is None
