"""Free runs, and extents laid over files of different speed."""

from __future__ import annotations

import random

import pytest

from overspill.io_engine.space import FreeList, Space, file_shares

BLOCK = 1 << 20


def test_random_allocation_never_overlaps_and_all_comes_back() -> None:
    rng = random.Random(7)
    space = Space([96 << 20, 64 << 20], [3.0, 2.0], BLOCK)
    held: list[tuple] = []
    used: dict[int, set[int]] = {0: set(), 1: set()}
    for _ in range(400):
        if held and rng.random() < 0.45:
            pieces = held.pop(rng.randrange(len(held)))
            for piece in pieces:
                used[piece.file] -= set(range(piece.offset, piece.offset + piece.nbytes, 4096))
            space.give(pieces)
            continue
        nbytes = rng.randrange(1, 3000) * 4096
        free = space.free_bytes
        pieces = space.take(nbytes)
        if nbytes > free:
            assert pieces is None
            continue
        assert pieces is not None and sum(piece.nbytes for piece in pieces) == nbytes
        assert space.free_bytes == free - nbytes
        for piece in pieces:
            sectors = set(range(piece.offset, piece.offset + piece.nbytes, 4096))
            assert not sectors & used[piece.file], "two extents share a sector"
            used[piece.file] |= sectors
        held.append(pieces)
    for pieces in held:
        space.give(pieces)
    assert space.free_bytes == space.total_bytes
    assert space.take(space.total_bytes) is not None


def test_a_run_given_back_twice_is_noticed() -> None:
    free = FreeList(1 << 20)
    (run,) = free.take(8192)
    free.take(8192)
    free.give(*run)
    with pytest.raises(AssertionError, match="freed twice"):
        free.give(*run)


@pytest.mark.parametrize("rates", [[1.0, 1.0], [3.0, 1.0], [5.0, 2.0, 0.5]])
def test_no_file_holds_an_extent_up_by_more_than_a_block(rates: list[float]) -> None:
    space = Space([1 << 30] * len(rates), rates, BLOCK)
    totals = [0] * len(rates)
    for _ in range(20):
        pieces = space.take(32 * BLOCK)
        assert pieces is not None
        for file in range(len(rates)):
            mine = sum(piece.nbytes for piece in pieces if piece.file == file)
            totals[file] += mine
            share = 32 * BLOCK * rates[file] / sum(rates)
            assert abs(mine - share) <= 2 * BLOCK
    for file, total in enumerate(totals):
        assert abs(total - sum(totals) * rates[file] / sum(rates)) <= 2 * BLOCK


def test_small_extents_balance_over_time() -> None:
    space = Space([1 << 30, 1 << 30], [3.0, 1.0], BLOCK)
    totals = [0, 0]
    for _ in range(400):
        for piece in space.take(64 << 10) or ():
            totals[piece.file] += piece.nbytes
    assert totals[0] / totals[1] == pytest.approx(3.0, rel=0.15)


def test_file_shares_hold_the_capacity() -> None:
    assert file_shares(5000, [1.0], BLOCK) == [8192]
    shares = file_shares(100 * BLOCK + 1, [3.0, 1.0], BLOCK)
    assert sum(shares) >= 100 * BLOCK + 1 and all(share % BLOCK == 0 for share in shares)
    space = Space(shares, [3.0, 1.0], BLOCK)
    count = 0
    while space.take(BLOCK + 4096) is not None:
        count += 1
    assert count >= (100 * BLOCK) // (BLOCK + 4096)
