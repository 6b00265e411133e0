"""What to train on: text from files, as tokens, as batches that depend on the seed alone."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
Tokens = npt.NDArray[np.integer[Any]]
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Corpus:
    """Tokens of all documents, one after the other.

    Attributes:
        tokens: int array, shape ``(n,)``.
        summary: one line on where they come from, and what was left out.
        source: the path that was read.
    """

    tokens: Tokens
    summary: str
    source: Path


def standard_library() -> Path:
    """The folder of the running Python's own sources: real text that is on every machine."""
    return Path(sysconfig.get_paths()["stdlib"])


def _files(source: Path, suffixes: Sequence[str]) -> tuple[list[Path], int]:
    """Return the files to read, in a fixed order, and the number of other files there."""
    if source.is_file():
        return [source], 0
    if not source.is_dir():
        raise ValueError(f"data: {source} does not exist")
    taken: list[Path] = []
    others = 0
    for path in sorted(p for p in source.rglob("*") if p.is_file()):
        if path.suffix in suffixes:
            taken.append(path)
        else:
            others += 1
    return taken, others


def _library_files() -> list[Path]:
    root = standard_library()
    found = (p for p in root.rglob("*.py") if LEFT_OUT.isdisjoint(p.relative_to(root).parts))
    return sorted(found)


def _documents(path: Path) -> Iterator[str]:
    """The texts of one file; a jsonl file holds one per line, as a string or under ``text``."""
    if path.suffix != ".jsonl":
        yield path.read_text(encoding="utf-8", errors="replace")
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ValueError(f"data: {path}:{number} is not JSON: {error}") from error
            text = entry.get("text") if isinstance(entry, dict) else entry
            if not isinstance(text, str):
                keys = ", ".join(entry) if isinstance(entry, dict) else type(entry).__name__
                raise ValueError(f"data: {path}:{number} has no text under 'text' (it has: {keys})")
            yield text


def _bytes_of(text: str) -> Sequence[int]:
    """Byte-level tokens, with a zero byte at the end of the document."""
    return text.encode("utf-8", errors="replace") + b"\0"


def _array(numbers: Sequence[int]) -> Tokens:
    if isinstance(numbers, bytes):
        return np.frombuffer(numbers, dtype=np.uint8)
    return np.asarray(numbers, dtype=np.int32)


def _encoder(tokenizer: Any) -> Encode:
    end = tokenizer.eos_token_id
    tail = [] if end is None else [int(end)]
    return lambda text: [*tokenizer(text, add_special_tokens=False)["input_ids"], *tail]


def load_tokenizer(folder: Path | None) -> Any:
    """The tokenizer of a Hugging Face folder, or ``None`` where the model brings none."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if folder is None or not any((folder / name).is_file() for name in names):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def load_corpus(source: Path | None, tokenizer: Any, vocabulary: int) -> Corpus:
    """Reads and tokenizes a text file, a jsonl file, or all of them in a folder.

    Args:
        source: ``None`` takes the sources of the running Python's standard library.
        tokenizer: a Hugging Face tokenizer, or ``None`` for byte-level tokens.
        vocabulary: number of tokens that the model knows.

    Raises:
        ValueError: nothing there, no text, a broken jsonl line, or a token the model lacks.
    """
    if tokenizer is None and vocabulary < 256:
        raise ValueError(
            f"data: the model brings no tokenizer and knows {vocabulary} tokens; byte-level tokens "
            "need 256"
        )
    if source is None:
        paths, others, source = _library_files(), 0, standard_library()
    else:
        paths, others = _files(source, SUFFIXES)
    encode = _bytes_of if tokenizer is None else _encoder(tokenizer)
    parts: list[Tokens] = []
    for path in paths:
        for text in _documents(path):
            if text:
                parts.append(_array(encode(text)))
    if not parts:
        kinds = ", ".join(SUFFIXES)
        raise ValueError(f"data: {source} holds no text (kinds read in a folder: {kinds})")
    tokens: Tokens = np.concatenate(parts)
    largest = int(tokens.max())
    if largest >= vocabulary:
        raise ValueError(
            f"data: the tokenizer gives token {largest}, the model knows {vocabulary}; they do not "
            "belong together"
        )
    unit = "bytes" if tokenizer is None else "tokens"
    left = f"; {others} files of other kinds left out" if others else ""
    files = f"{len(paths)} file{'s' if len(paths) != 1 else ''}"
    return Corpus(tokens, f"{source}: {files}, {len(tokens):,} {unit}{left}", source)


class Batches:
    """Batches of token windows; batch ``i`` depends on the corpus, the seed and ``i`` alone.

    Windows do not overlap.  Every pass over the corpus has an order of its own, drawn from the
    seed; ``position`` is the number of batches taken, and may be set to go on from there.  Several
    ranks share each batch: ``ranks`` with ``batch`` windows each take what one with all takes.
    """

    def __init__(
        self, corpus: Corpus, batch: int, seq: int, seed: int, *, rank: int = 0, ranks: int = 1
    ) -> None:
        """``batch`` windows of ``seq`` tokens each.

        Raises:
            ValueError: the corpus is shorter than one window.
        """
        self.corpus, self.batch, self.seq, self.seed = corpus, batch, seq, seed
        self._rank, self._ranks = rank, ranks
        self.windows = len(corpus.tokens) // seq
        if self.windows == 0:
            raise ValueError(
                f"data: {corpus.source} has {len(corpus.tokens)} tokens, one window needs {seq}; "
                "give more text or lower seq"
            )
        self.position = 0
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None

    def _window(self, number: int) -> Tokens:
        epoch, place = divmod(number, self.windows)
        if self._order is None or self._order[0] != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.windows)
            self._order = epoch, order
        start = int(self._order[1][place]) * self.seq
        return self.corpus.tokens[start : start + self.seq]

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> torch.Tensor:
        """The next batch: int64, shape ``(batch, seq)``."""
        first = (self.position * self._ranks + self._rank) * self.batch
        rows = np.stack([self._window(first + i) for i in range(self.batch)])
        self.position += 1
        return torch.from_numpy(rows.astype(np.int64))
