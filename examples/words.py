"""A tokenizer and rows of text for the examples, from what every machine has: Python's sources."""

from __future__ import annotations

import pathlib
import re
import sysconfig
from collections import Counter

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


def sources(files: int = 20) -> list[str]:
    """Lines of code."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = [path.read_text(errors="ignore") for path in sorted(folder.glob("*.py"))[:files]]
    return [line.strip() for each in text for line in each.splitlines() if len(line.split()) > 3]


def tokenizer(words: int = 1000) -> PreTrainedTokenizerFast:
    """One token a word, of those that come most often."""
    counted = Counter(word for line in sources() for word in re.findall(r"\w+|[^\w\s]+", line))
    known = SPECIAL + [word for word, _ in counted.most_common(words)]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        unk_token="<unk>",
    )  # fmt: skip


def lines(count: int = 256) -> Dataset:
    """Rows with one line of code each."""
    return Dataset.from_list([{"text": line} for line in sources()[:count]])


def pairs(count: int = 128) -> Dataset:
    """The beginning of a line; its end, which is preferred; and its end backwards."""
    found = [line.split() for line in sources()[:count]]
    return Dataset.from_list(
        [
            {"prompt": " ".join(w[:2]), "chosen": " ".join(w[2:]), "rejected": " ".join(w[:1:-1])}
            for w in found
        ]
    )


def model() -> LlamaForCausalLM:
    """A small one; a real one comes by ``AutoModelForCausalLM.from_pretrained``."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1004, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1,
            eos_token_id=2,
        )
    )  # fmt: skip
