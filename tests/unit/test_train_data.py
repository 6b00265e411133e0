"""Text from files as tokens, and batches that depend on the seed alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from overspill.train.data import Batches, Corpus, load_corpus, standard_library


def corpus_of(n: int) -> Corpus:
    return Corpus(np.arange(n, dtype=np.int32), "test", Path("test"))


class Words:
    """A tokenizer that gives each word its length."""

    eos_token_id = 9

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [len(word) for word in text.split()]}


def test_text_file_as_bytes_with_an_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Grüße", encoding="utf-8")
    corpus = load_corpus(tmp_path / "a.txt", None, 256)
    assert bytes(corpus.tokens.tolist()) == "Grüße".encode() + b"\0"
    assert "1 file, 8 bytes" in corpus.summary


def test_folder_is_read_in_order_and_says_what_it_left_out(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.md").write_text("one")
    (tmp_path / "sub" / "c.jsonl").write_text('{"text": "three"}\n\n"four"\n')
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    corpus = load_corpus(tmp_path, None, 256)
    assert bytes(corpus.tokens.tolist()) == b"one\0two\0three\0four\0"
    assert "3 files" in corpus.summary and "1 files of other kinds left out" in corpus.summary


def test_tokenizer_and_its_end_of_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or")
    assert load_corpus(tmp_path, Words(), 10).tokens.tolist() == [2, 2, 2, 9]
    with pytest.raises(ValueError, match="token 9, the model knows 9"):
        load_corpus(tmp_path, Words(), 9)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "x"}\n{broken', r"a\.jsonl:2 is not JSON"),
        ('{"body": "x", "id": 1}', r"a\.jsonl:1 has no text under 'text' \(it has: body, id\)"),
        ("3", r"a\.jsonl:1 has no text"),
        ("", "holds no text"),
    ],
)
def test_broken_jsonl(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_corpus(tmp_path / "a.jsonl", None, 256)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        load_corpus(tmp_path / "none", None, 256)
    with pytest.raises(ValueError, match="holds no text"):
        load_corpus(tmp_path, None, 256)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="holds no text"):
        load_corpus(tmp_path / "empty.txt", None, 256)
    with pytest.raises(ValueError, match="knows 100 tokens; byte-level tokens need 256"):
        load_corpus(tmp_path / "empty.txt", None, 100)


def test_standard_library_by_default() -> None:
    corpus = load_corpus(None, None, 256)
    again = load_corpus(None, None, 256)
    assert len(corpus.tokens) > 2_000_000
    assert np.array_equal(corpus.tokens, again.tokens)
    assert corpus.source == standard_library()


def test_batches_depend_on_seed_and_position_alone() -> None:
    corpus = corpus_of(1000)
    first = next(Batches(corpus, 4, 10, seed=1))
    straight = Batches(corpus, 4, 10, seed=1)
    taken = [next(straight) for _ in range(60)]
    assert torch.equal(taken[0], first)
    resumed = Batches(corpus, 4, 10, seed=1)
    resumed.position = 37
    assert torch.equal(next(resumed), taken[37])
    assert straight.position == 60
    assert not torch.equal(next(Batches(corpus, 4, 10, seed=2)), first)


def test_every_pass_takes_every_window_once_in_another_order() -> None:
    batches = Batches(corpus_of(108), 2, 10, seed=0)  # ten windows, eight tokens left over
    passes = [torch.cat([next(batches) for _ in range(5)]) for _ in range(2)]
    starts: list[Any] = [p[:, 0].tolist() for p in passes]
    assert sorted(starts[0]) == sorted(starts[1]) == list(range(0, 100, 10))
    assert starts[0] != starts[1]
    assert passes[0].dtype == torch.int64 and passes[0].shape == (10, 10)


def test_more_rows_than_windows() -> None:
    assert next(Batches(corpus_of(25), 5, 10, seed=0)).shape == (5, 10)


def test_too_little_text() -> None:
    with pytest.raises(ValueError, match="has 9 tokens, one window needs 10"):
        Batches(corpus_of(9), 1, 10, seed=0)
