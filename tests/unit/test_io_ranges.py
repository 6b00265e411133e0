"""FileRanges of files of somebody's: read to their places, and the same ever after."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from overspill.io_engine import CorruptionError, IoError, OffloadError
from overspill.io_engine.file_ranges import (
    BLOCK_BYTES,
    GAP_BYTES,
    FilePart,
    FileRanges,
    RangeReader,
)

Bytes = NDArray[np.uint8]
SIZES = (5 * BLOCK_BYTES + 777, 123_457, 4096)
UNTOUCHED = 0xA5


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = []
    for number, size in enumerate(SIZES):
        data = np.random.default_rng(number).integers(0, 256, size, np.uint8)
        paths.append(tmp_path / f"{number}.bin")
        data.tofile(paths[-1])
    return paths


@pytest.fixture
def reader(files: list[Path]) -> Iterator[RangeReader]:
    made = RangeReader(files)
    yield made
    made.close()


def drawn(seed: int) -> FileRanges:
    """Parts of random lengths and places, of all files; the end of each is among them."""
    rng = random.Random(seed)
    parts, to = [], 0
    for _ in range(rng.randint(1, 20)):
        file = rng.randrange(len(SIZES))
        nbytes = rng.choice([1, 63, 4096, rng.randint(1, SIZES[file])])
        nbytes = min(nbytes, SIZES[file])
        offset = rng.choice([0, SIZES[file] - nbytes, rng.randint(0, SIZES[file] - nbytes)])
        to += rng.choice([0, 1, 64])
        parts.append(FilePart(file, offset, nbytes, to))
        to += nbytes
    rng.shuffle(parts)
    return FileRanges(seed, to, tuple(parts))


def expected(ranges: FileRanges, files: list[Path]) -> Bytes:
    found = np.full(ranges.nbytes, UNTOUCHED, np.uint8)
    for part in ranges.parts:
        data = np.fromfile(files[part.file], np.uint8)
        found[part.to : part.to + part.nbytes] = data[part.offset : part.offset + part.nbytes]
    return found


def read(reader: RangeReader, ranges: FileRanges) -> Bytes:
    buffer = np.full(ranges.nbytes, UNTOUCHED, np.uint8)
    reader.read(ranges, buffer).wait()
    return buffer


@pytest.mark.parametrize("seed", range(30))
def test_every_part_comes_to_its_place_and_nothing_else_changes(
    seed: int, reader: RangeReader, files: list[Path]
) -> None:
    ranges = drawn(seed)
    assert (read(reader, ranges) == expected(ranges, files)).all()
    assert (read(reader, ranges) == expected(ranges, files)).all(), "checked this time"


def test_many_at_once_from_several_threads(reader: RangeReader, files: list[Path]) -> None:
    wrong: list[int] = []

    def work(first: int) -> None:
        for seed in range(first, first + 10):
            ranges = drawn(seed)
            if (read(reader, ranges) != expected(ranges, files)).any():
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(100 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_end_is_told_once_and_times_and_bytes_with_it(reader: RangeReader) -> None:
    told = []
    ended = threading.Event()
    ranges = drawn(3)

    def on_done(ticket: object) -> None:
        told.append(ticket)
        ended.set()

    made = reader.read(ranges, np.zeros(ranges.nbytes, np.uint8), urgent=True, on_done=on_done)
    made.wait()
    assert ended.wait(10) and told == [made] and made.done() and made.error is None
    assert made.nbytes == sum(part.nbytes for part in ranges.parts)
    assert 0 < made.started_ns <= made.finished_ns


def test_what_is_urgent_goes_first(files: list[Path]) -> None:
    order: list[str] = []
    whole = FileRanges(0, SIZES[0], (FilePart(0, 0, SIZES[0], 0),))
    small = FileRanges(1, SIZES[2], (FilePart(2, 0, SIZES[2], 0),))
    reader = RangeReader(files)
    with reader._changed:  # nobody begins before both are there
        first = reader.read(
            whole, np.zeros(SIZES[0], np.uint8), on_done=lambda _: order.append("a")
        )
        second = reader.read(
            small, np.zeros(SIZES[2], np.uint8), urgent=True, on_done=lambda _: order.append("b")
        )
    first.wait()
    second.wait()
    reader.close()
    assert order == ["b", "a"]


def test_a_file_that_has_changed_is_an_error_of_that_file(files: list[Path]) -> None:
    near, far = FilePart(0, 100, 5000, 0), FilePart(0, 100 + 5000 + GAP_BYTES + 9000, 5000, 5000)
    ranges = FileRanges(0, 10_000, (near, far))
    with_checks = RangeReader(files)
    read(with_checks, ranges)
    for at, told in ((4000, True), (far.offset + 4999, True), (far.offset + 5000, False)):
        with files[0].open("r+b") as file:
            file.seek(at)
            was = file.read(1)
            file.seek(at)
            file.write(bytes([was[0] ^ 1]))
        if told:
            with pytest.raises(CorruptionError, match="since it was first read") as caught:
                read(with_checks, ranges)
            assert caught.value.path == str(files[0]) and caught.value.offset >= 0
        else:
            read(with_checks, ranges)  # nothing of it is ours
        with files[0].open("r+b") as file:
            file.seek(at)
            file.write(was)
        assert (read(with_checks, ranges) == expected(ranges, files)).all(), "it is as it was"
    with_checks.close()


def test_a_change_before_the_first_read_is_told_too(files: list[Path], reader: RangeReader) -> None:
    os.utime(files[1], ns=(1, 1))
    with pytest.raises(CorruptionError, match="since its header was read"):
        read(reader, FileRanges(0, 10, (FilePart(1, 0, 10, 0),)))
    read(reader, FileRanges(1, 10, (FilePart(0, 0, 10, 0),)))  # another file


def test_what_a_run_before_has_read_is_expected_of_the_next(files: list[Path]) -> None:
    ranges = drawn(7)
    first = RangeReader(files)
    assert first.digest(ranges) is None
    read(first, ranges)
    digest = first.digest(ranges)
    first.close()
    assert digest is not None
    for number, found in ((0, digest), (1, digest ^ 1)):
        again = RangeReader(files)
        again.expect(ranges, found)
        assert again.digest(ranges) == found, "as long as nobody knows better"
        if number:
            with pytest.raises(CorruptionError, match="since the store was made"):
                read(again, ranges)
            with pytest.raises(CorruptionError):
                again.check(ranges)
        else:
            read(again, ranges)
            again.check(ranges)
        again.close()


def test_a_file_that_was_cut_is_told_of(files: list[Path], reader: RangeReader) -> None:
    ranges = FileRanges(0, 4096, (FilePart(0, SIZES[0] - 4096, 4096, 0),))
    read(reader, ranges)
    os.truncate(files[0], SIZES[0] - 2000)
    with pytest.raises(IoError, match="is shorter than"):
        read(reader, ranges)


def test_without_checks_nothing_is_compared(files: list[Path]) -> None:
    reader, ranges = RangeReader(files, checksum=False), FileRanges(0, 10, (FilePart(2, 0, 10, 0),))
    read(reader, ranges)
    np.zeros(SIZES[2], np.uint8).tofile(files[2])
    assert (read(reader, ranges) == 0).all() and reader.digest(ranges) is None
    reader.close()


def test_bad_input_is_refused(tmp_path: Path, files: list[Path], reader: RangeReader) -> None:
    with pytest.raises(IoError, match=r"gone\.bin: it cannot be opened"):
        RangeReader([*files, tmp_path / "gone.bin"])
    with pytest.raises(ValueError, match="of 10 bytes, into 9"):
        reader.read(FileRanges(0, 10, (FilePart(0, 0, 10, 0),)), np.zeros(9, np.uint8))
    nothing = reader.read(FileRanges(1, 0, ()), np.zeros(0, np.uint8))
    nothing.wait()
    reader.close()
    reader.close()
    with pytest.raises(OffloadError, match="closed"):
        reader.read(FileRanges(2, 10, (FilePart(0, 0, 10, 0),)), np.zeros(10, np.uint8))
    assert not [t for t in threading.enumerate() if t.name.startswith("overspill-ranges")]
