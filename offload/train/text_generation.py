"""Text from a model of a Hugging Face folder whose weights need not fit in memory."""

from __future__ import annotations

import codecs
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..api import wrap
from ..facts.stats import Stats
from .data import load_tokenizer
from .shapes import ModelSource, find_model

Write = Callable[[str], None]


@dataclass(frozen=True)
class Generated:
    """What came of a prompt.

    ``tokens`` of it were made, the first ``first_s`` after the prompt was given, all in
    ``seconds``; ``stats``: of the last forward, which makes one of them.
    """

    tokens: int
    first_s: float
    seconds: float
    stats: Stats

    def __str__(self) -> str:
        more, after = self.tokens - 1, self.seconds - self.first_s
        rate = f"{more / after:.3g} tokens/s after it" if more and after > 0 else ""
        moved = ", ".join(
            f"{lane} {self.stats.lanes[lane].bytes / 2**20:.3g} MiB"
            for lane in ("read", "copy_in") if self.stats.lanes[lane].bytes
        )  # fmt: skip
        took = f"tokens: {self.tokens} in {self.seconds:.3g} s, the first {self.first_s:.3g} s"
        parts = (took, rate, f"a token moves {moved or 'nothing'}", self.stats.explain())
        return "; ".join(part for part in parts if part)


class _Bytes:
    """Reads and writes bytes, for models that have no tokenizer."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, token: int) -> str:
        return self._decoder.decode(bytes([token]))

    def rest(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Words:
    """Reads and writes with a tokenizer of transformers.  Text that a later token may change is
    held back, such as a piece of a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._said = ""

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def decode(self, token: int) -> str:
        self._tokens.append(token)
        text = self._text()
        if text.endswith("\N{REPLACEMENT CHARACTER}") or not text.startswith(self._said):
            return ""
        new, self._said = text[len(self._said) :], text
        return new

    def rest(self) -> str:
        return self._text()[len(self._said) :]

    def _text(self) -> str:
        text: str = self._tokenizer.decode(
            self._tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class _Streamer:
    """What ``generate`` hands its tokens to: first the prompt's, then one after the other."""

    def __init__(self, words: _Bytes | _Words, write: Write) -> None:
        self._words, self._write, self._prompted = words, write, False
        self.tokens = 0
        self.first_s: float | None = None
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def put(self, tokens: torch.Tensor) -> None:
        if not self._prompted:
            self._prompted = True
            return
        for token in tokens.flatten().tolist():  # several, where some were guessed
            self.tokens += 1
            if self.first_s is None:
                self.first_s = self.seconds
            self._write(self._words.decode(token))

    def end(self) -> None:
        self._write(self._words.rest() + "\n")


def generate(
    folder: str, prompt: str, options: Mapping[str, Any], *, tokens: int,
    temperature: float | None, seed: int, write: Write,
) -> Generated:  # fmt: skip
    """Goes on from ``prompt``; ``write`` gets the text as it comes.

    Args:
        folder: weights, configuration and tokenizer; without one, the model reads bytes.
        options: of ``wrap``.
        tokens: at most so many.
        temperature: 0 takes the likeliest token; ``None`` does as the folder says.

    Raises:
        ValueError: no such folder, an empty prompt, or more than the model's positions.
    """
    source = find_model(folder)
    if source.folder is None:
        raise ValueError(f"generate needs a folder with weights; {folder!r} is a shape")
    if tokens < 1 or not 0 <= (temperature or 0) < math.inf or not 0 <= seed < 1 << 63:
        raise ValueError("tokens must be at least 1; temperature and seed finite, at least 0")
    tokenizer = load_tokenizer(source.folder)
    words = _Bytes() if tokenizer is None else _Words(tokenizer)
    given = words.encode(prompt)
    if not given:
        raise ValueError("the prompt is empty")
    if source.positions is not None and len(given) + tokens > source.positions:
        raise ValueError(
            f"the prompt has {len(given)} tokens; with {tokens} more the model's "
            f"{source.positions} positions are passed"
        )
    model: Any = source.build().eval()
    settings = _settings(source, tokens, temperature)
    with wrap(model, weights=source.folder, **options) as offloaded:
        inputs = torch.tensor([given], device=next(model.parameters()).device)
        torch.manual_seed(seed)
        streamer = _Streamer(words, write)
        with torch.no_grad():
            model.generate(
                input_ids=inputs, attention_mask=torch.ones_like(inputs), streamer=streamer,
                generation_config=settings, tokenizer=tokenizer,
            )  # fmt: skip
        assert streamer.first_s is not None
        return Generated(streamer.tokens, streamer.first_s, streamer.seconds, offloaded.stats)


def _settings(source: ModelSource, tokens: int, temperature: float | None) -> Any:
    from transformers import GenerationConfig

    assert source.folder is not None
    if (Path(source.folder) / "generation_config.json").is_file():
        settings = GenerationConfig.from_pretrained(source.folder, local_files_only=True)
    else:
        settings = GenerationConfig.from_model_config(source.config)
    settings.max_new_tokens, settings.use_cache = tokens, True
    settings.num_beams = settings.num_return_sequences = 1  # text is written as it comes
    if temperature is not None:
        settings.do_sample = temperature > 0
        settings.temperature = temperature or None
        if not temperature:
            settings.top_p = settings.top_k = None
    if settings.pad_token_id is None and settings.eos_token_id is not None:
        ends = settings.eos_token_id
        settings.pad_token_id = ends[0] if isinstance(ends, list) else ends
    return settings
