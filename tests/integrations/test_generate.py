"""``generate`` of transformers over streamed weights: the very tokens of the plain model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from typer.testing import CliRunner

import overspill
from overspill.cli.app import app
from overspill.train import text_generation as generating
from tests.devices import CPU, DEVICE, SIM
from tests.unit.test_train_job import folder_with_tokenizer

RATES = overspill.Rates()
LLAMA: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**LLAMA, num_local_experts=4)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=128, n_embd=64, n_layer=5, n_head=4,
                   bos_token_id=None, eos_token_id=None, pad_token_id=0)
    ),
}  # fmt: skip
PLACES: dict[str, dict[str, Any]] = {
    "disk": {"device": CPU, "host_memory": 0.5},
    "device": {"device": SIM, "device_memory": 0.5, "host_memory": 2.0},
    "all tiers": {"device": SIM, "device_memory": 0.5, "host_memory": 0.6},
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
}


def made(family: str) -> Any:
    torch.manual_seed(3)
    return FAMILIES[family]().eval()


def generated(model: Any, way: str) -> torch.Tensor:
    torch.manual_seed(1)
    prompt = torch.randint(1, 256, (2, 7), generator=torch.Generator("cpu").manual_seed(0),
                           device="cpu").to(DEVICE)  # fmt: skip
    torch.manual_seed(2)
    out: torch.Tensor = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, **WAYS[way]
    )
    return out.cpu()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_are_those_of_the_plain_model(
    family: str, place: str, way: str, tmp_path: Path
) -> None:
    if family == "mixtral" and SIM != "sim":
        pytest.skip("the test device cannot count tokens by expert")
    plain = made(family)
    plain.save_pretrained(tmp_path / "model")
    nbytes = sum(p.nbytes for p in plain.parameters())
    expected = generated(plain.to(DEVICE), way)
    (tmp_path / "store").mkdir()
    budgets = {
        name: value if isinstance(value, str) else int(value * nbytes) + (64 << 10)
        for name, value in PLACES[place].items()
    }
    with overspill.empty_init():
        model = made(family)
    options: Any = {**budgets, "nvme": tmp_path / "store", "rates": RATES}
    with overspill.wrap(model, weights=tmp_path / "model", **options) as offloaded:
        assert torch.equal(generated(model, way), expected)
        assert offloaded.stats.tokens == (6 if way == "beams" else 2)
        assert offloaded.stats.lanes["write"].bytes == 0
        if place == "all tiers" or (place == "disk" and CPU == "cpu"):
            assert offloaded.stats.lanes["read"].bytes > 0


def call(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["generate", *map(str, arguments)])


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_the_command_writes_what_the_model_says(with_tokenizer: bool, tmp_path: Path) -> None:
    folder, prompt = tmp_path / "model", "all work and no play makes"
    if with_tokenizer:
        folder_with_tokenizer(folder)
    else:
        made("llama").save_pretrained(folder)
    plain = LlamaForCausalLM.from_pretrained(folder).eval()
    (tmp_path / "store").mkdir()
    words: Any = generating._Bytes()
    if with_tokenizer:
        words = generating._Words(generating.load_tokenizer(folder))
    prompted = torch.tensor([words.encode(prompt)])
    out = plain.generate(
        input_ids=prompted, attention_mask=torch.ones_like(prompted), max_new_tokens=9,
        do_sample=False,
    )  # fmt: skip
    said = "".join(words.decode(int(token)) for token in out[0, prompted.shape[1] :])
    result = call(
        folder, "--prompt", prompt, "--tokens", "9", "--temperature", "0", "--device", "cpu",
        "--host-memory", "300KiB", "--nvme", tmp_path / "store",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stdout == said + "\n"
    assert "tokens: 9 in " in result.stderr and "a token moves read" in result.stderr


def test_sampling_is_the_same_with_the_same_seed(tmp_path: Path) -> None:
    made("llama").save_pretrained(tmp_path)
    given = (tmp_path, "--prompt", "a", "--tokens", "20", "--temperature", "2.0", "--device", "cpu")
    said = [call(*given, "--seed", seed).stdout for seed in ("1", "1", "2")]
    assert said[0] == said[1] != said[2] != ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "a", "--tokens", "128"], "128 positions are passed"),
        (["--prompt", "a", "--tokens", "0"], "at least 1"),
        (["--prompt", "a", "--temperature", "nan"], "finite"),
        (["--prompt", "a", "--seed", str(1 << 70)], "finite"),
        (["--prompt", "a", "--temperature=-1"], "at least 0"),
        (["--prompt", "a", "--host-memory", "10KiB", "--device", "cpu"], "of host memory"),
    ],
)
def test_what_cannot_be_is_one_clear_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    made("llama").save_pretrained(tmp_path)
    result = call(tmp_path, *arguments)
    assert result.exit_code == 2 and words in result.stderr, result.output
    assert not result.stdout


def test_a_shape_has_no_weights_to_generate_with() -> None:
    result = call("gpt2-1m", "--prompt", "a")
    assert result.exit_code == 2 and "needs a folder with weights" in result.stderr


def test_pieces_of_a_character_wait_for_the_rest() -> None:
    words = generating._Bytes()
    assert [words.decode(byte) for byte in "é€".encode()] == ["", "é", "", "", "€"]
    assert words.decode(0xE2) == "" and words.rest() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("settings", [
    {"prompt_lookup_num_tokens": 3}, {"num_beams": 3},
    {"do_sample": True, "top_p": 0.5, "top_k": 4}, {"do_sample": True, "num_return_sequences": 3},
])  # fmt: skip
def test_settings_of_the_folder_lose_no_text(settings: dict[str, Any], tmp_path: Path) -> None:
    folder, prompt = folder_with_tokenizer(tmp_path / "model"), "all work and no play " * 4
    given = (folder, "--prompt", prompt, "--tokens", "12", "--temperature", "0", "--device", "cpu")
    expected = call(*given)
    assert expected.exit_code == 0 and "tokens: 12 in" in expected.stderr
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    result = call(*given)
    assert result.exit_code == 0, result.output
    assert result.stdout == expected.stdout and "tokens: 12 in" in result.stderr


class Shrinking:
    """Joins what stood apart, as some tokenizers do, and takes pieces of characters."""

    def decode(self, tokens: list[int], **_options: Any) -> str:
        text = bytes(tokens).decode(errors="replace")
        return text.replace(" '", "'")


def test_no_character_is_lost_where_text_changes_behind() -> None:
    words = generating._Words(Shrinking())
    said = "".join(words.decode(byte) for byte in "it 's é".encode()[:-1])
    assert (said + words.rest()).endswith("s \N{REPLACEMENT CHARACTER}"), said
