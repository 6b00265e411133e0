"""The manifest alone: commits survive, torn ends are ignored, damage is said and never loaded."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from overspill.io_engine import CorruptionError, Extent, IoEngine, IoError, Lease, allocate_host
from overspill.io_engine.committed import find_store, own_store
from overspill.io_engine.manifest import LARGEST_LOG_BYTES, MANIFEST_NAME, Manifest
from overspill.io_engine.manifest_repair import go_back, repair
from overspill.io_engine.store_file import STORE_NAME

SIZES = [10_000, 70_000, 4096]


def fill(lease: Lease, value: int, nbytes: int) -> np.ndarray:
    lease.array[:nbytes] = np.arange(nbytes, dtype=np.int64) % 251 + value & 255
    return lease.array[:nbytes]


class Store:
    """Three items with two extents each."""

    def __init__(self, directories: list[Path]) -> None:
        self.io = IoEngine(directories, 2 * sum(n + 4096 for n in SIZES) + (1 << 18),
                           block_bytes=16384)  # fmt: skip
        self.pairs: list[list[Extent]] = [[self.io.allocate(n), self.io.allocate(n)] for n in SIZES]
        named = [(f"item/{i}", pair) for i, pair in enumerate(self.pairs)]
        self.manifest: Manifest = self.io.make_durable(named, {"what": "a test"})
        self.lease = allocate_host(max(SIZES) + 4096)
        self.roles = [-1] * len(SIZES)

    def commit(self, step: int) -> None:
        """Item 2 is first written at step 2."""
        for i, pair in enumerate(self.pairs):
            if i < 2 or step > 1:
                self.roles[i] = 1 if self.roles[i] == 0 else 0
                self.io.write(pair[self.roles[i]], fill(self.lease, step + i, SIZES[i])).wait()
        self.io.flush()
        self.manifest.commit(step, self.roles, self.sums(), b"meta %d" % step)

    def sums(self) -> list[np.ndarray | None]:
        return [
            None if role < 0 else self.io.checksums(pair[role])
            for pair, role in zip(self.pairs, self.roles, strict=True)
        ]

    def close(self) -> None:
        self.manifest.close()
        self.io.close()
        self.lease.release()


def check(directories: list[Path] | Path, step: int) -> None:
    """Reads everything of the last generation."""
    store = own_store(directories)
    last = store.last()
    assert (last.step, last.meta) == (step, b"meta %d" % step)
    with IoEngine.reopen(store, last) as io, allocate_host(80_000) as lease, \
            allocate_host(80_000) as wanted:  # fmt: skip
        for i, (item, role) in enumerate(zip(store.layout.items, last.roles, strict=True)):
            assert (role < 0) == (i == 2 and step < 2)
            if role >= 0:
                array = lease.array[: item.nbytes]
                array[:] = 0
                io.read(item.extents[role], array).wait()
                assert np.array_equal(array, fill(wanted, step + i, item.nbytes))


@pytest.mark.parametrize("stripes", [1, 3])
def test_a_commit_survives(tmp_path: Path, stripes: int) -> None:
    folders = [tmp_path / str(i) for i in range(stripes)]
    for folder in folders:
        folder.mkdir()
    store = Store(folders)
    for step in range(1, 4):
        store.commit(step)
    store.close()
    check(folders, 3)
    check(folders[-1], 3)  # the others are found
    check(folders[::-1], 3)
    again = find_store(folders)
    assert again.layout.description == {"what": "a test"}
    manifest = Manifest.reopen(again.manifests)
    assert manifest.commit(4, again.last().roles, again.last().checksums, b"meta 4").number == 4
    manifest.close()
    assert find_store(folders).last().step == 4


def test_moved_and_missing_directories(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    store = Store(folders)
    store.commit(1)
    store.close()
    moved = folders[1].rename(tmp_path / "c")
    with pytest.raises(IoError, match=r"over 2 directories, and number 2, .*/b, is missing"):
        find_store(folders[0])
    check([folders[0], moved], 1)
    (moved / STORE_NAME).rename(moved / "elsewhere")
    with pytest.raises(IoError, match="the store file is missing"):
        find_store([folders[0], moved])
    with pytest.raises(IoError, match="there is no store here"):
        find_store(tmp_path)


def test_every_torn_end_leaves_the_commit_before(tmp_path: Path) -> None:
    store = Store([tmp_path])
    store.commit(1)
    store.commit(2)
    path = tmp_path / MANIFEST_NAME
    before = path.stat().st_size
    store.manifest.commit(3, store.roles, store.sums(), b"meta 3")
    store.close()
    whole = path.read_bytes()
    record_end = len(whole) - 4096  # the seal takes one sector
    for cut in [before + 1, before + 31, before + 100, record_end - 1]:
        path.write_bytes(whole[:cut])
        assert find_store(tmp_path).last().step == 2
        zeroed = whole[:cut] + bytes(record_end - cut)  # preallocated, never written
        path.write_bytes(zeroed)
        if any(whole[cut:record_end]):
            assert find_store(tmp_path).last().step == 2
    path.write_bytes(whole[:record_end])
    assert find_store(tmp_path).last().step == 3
    path.write_bytes(whole[: before + 100])
    manifest = Manifest.reopen(find_store(tmp_path).manifests)
    assert path.stat().st_size == before
    manifest.close()


@pytest.mark.parametrize("torn_before", [False, True])
def test_any_of_the_sectors_that_were_not_flushed_may_be_lost(
    tmp_path: Path, torn_before: bool
) -> None:
    """The seal of a commit is flushed with the record of the next: every subset of these sectors is
    a legal end, and opens at the commit before, or at the new one if its record is whole; whatever
    an unfinished record has left where they go."""
    store = Store([tmp_path])
    store.commit(1)
    store.commit(2)
    path = tmp_path / MANIFEST_NAME
    if torn_before:  # a longer record that was never flushed, and is dropped when it is opened
        store.manifest.commit(3, store.roles, store.sums(), bytes(range(256)) * 80)
        store.close()
        data = bytearray(path.read_bytes())
        at = len(data) - 4096 - 3 * 4096  # within the record
        data[at : at + 4096] = bytes(4096)
        path.write_bytes(data[:-4096])
        manifest = Manifest.reopen(find_store(tmp_path).manifests)
        assert manifest.last == 2
    else:
        manifest = store.manifest
    flushed = path.read_bytes()
    if not torn_before:
        flushed = flushed[:-4096]  # commit 2 without its seal, which was not flushed
    manifest.commit(3, store.roles, store.sums(), b"x" * 9000)
    manifest.close()
    now = path.read_bytes()[:-4096]  # the new seal is written after the flush
    begin = len(flushed) // 4096
    changed = len(now) // 4096 - begin
    assert changed == (3 if torn_before else 4)
    seen = set()
    for kept in range(1 << changed):
        image = bytearray(flushed) + bytes(changed * 4096)
        for n in range(changed):
            if kept >> n & 1:
                at = (begin + n) * 4096
                image[at : at + 4096] = now[at : at + 4096]
        whole = kept >> (changed - 3) == 0b111
        last_kept = max((n for n in range(changed) if kept >> n & 1), default=-1)
        for length in {len(now), (begin + last_kept + 1) * 4096}:  # the size, too, may be old
            path.write_bytes(image[:length])
            assert not find_store(tmp_path).damage, (kept, length)
            assert find_store(tmp_path).last().step == (3 if whole else 2), (kept, length)
            again = Manifest.reopen(find_store(tmp_path).manifests)
            again.commit(4, store.roles, store.sums(), b"meta 4")
            again.close()
            assert find_store(tmp_path).last().step == 4
            seen.add(whole)
    assert seen == {True, False}
    if not torn_before:
        store.io.close()
        store.lease.release()


def test_flips_are_found_and_the_last_whole_commit_is_offered(tmp_path: Path) -> None:
    """A single wrong bit anywhere in the manifest is found, but in a seal that ends the log, which
    says nothing that the commit before it does not."""
    store = Store([tmp_path])
    for step in range(1, 4):
        store.commit(step)
    store.close()
    path = tmp_path / MANIFEST_NAME
    whole = path.read_bytes()
    draw = random.Random(0)
    for _ in range(300):
        at, bit = draw.randrange(len(whole) - 4096), draw.randrange(8)
        flipped = bytearray(whole)
        flipped[at] ^= 1 << bit
        path.write_bytes(flipped)
        with pytest.raises(CorruptionError, match="damaged"):
            find_store(tmp_path).last()
    flipped = bytearray(whole)
    flipped[len(whole) - 2 * 4096 + 50] ^= 1
    path.write_bytes(flipped)
    found = find_store(tmp_path)
    with pytest.raises(CorruptionError, match=r"generation 2, step 2: `overspill inspect --rep"):
        found.last()
    with pytest.raises(CorruptionError):
        Manifest.reopen(found.manifests)
    assert [g.step for g in repair(found.manifests[0])] == [1, 2]
    assert find_store(tmp_path).last().step == 2


def test_the_log_stays_small(tmp_path: Path) -> None:
    store = Store([tmp_path])
    store.commit(1)
    sums = store.sums()
    for step in range(2, 400):
        store.manifest.commit(step, store.roles, sums, bytes(3000))
    path = tmp_path / MANIFEST_NAME
    assert path.stat().st_size < LARGEST_LOG_BYTES + 16 * 4096
    store.close()
    found = find_store(tmp_path)
    assert found.last().step == 399 and found.last().number == 399


def test_a_committed_store_is_never_overwritten(tmp_path: Path) -> None:
    store = Store([tmp_path])
    store.close()
    store = Store([tmp_path])  # it was never committed
    store.commit(7)
    with pytest.raises(IoError, match="in use by"):
        Store([tmp_path])
    store.close()
    with pytest.raises(IoError, match=r"store committed at step 7; continue it with overspill.res"):
        Store([tmp_path])
    check(tmp_path, 7)


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overspill.io_engine.manifest.FORMAT", 1)
    store = Store([tmp_path])
    store.close()
    monkeypatch.undo()
    with pytest.raises(IoError, match="format 1, this version reads 3; export it with the version"):
        find_store(tmp_path)


def test_until_others_agree_the_commit_before_is_in_the_log(tmp_path: Path) -> None:
    """Also where the log is written anew; and what was never agreed on is dropped."""
    store = Store([tmp_path])
    store.commit(1)
    seen: list[list[int]] = []

    def look(number: int, step: int) -> None:
        generations = find_store(tmp_path).generations
        assert (generations[-1].number, generations[-1].step) == (number, step)
        seen.append([each.step for each in generations])

    store.manifest.agree = look
    for step in range(2, 400):
        store.manifest.commit(step, store.roles, store.sums(), bytes(3000))
    assert [steps[-2:] for steps in seen] == [[step - 1, step] for step in range(2, 400)]
    assert min(map(len, seen[300:])) < 300, "the log was never written anew"

    def refuse(number: int, step: int) -> None:
        raise ConnectionError("another rank is gone")

    store.manifest.agree = refuse
    with pytest.raises(ConnectionError):
        store.commit(400)
    store.close()
    found = find_store(tmp_path)
    assert found.last().step == 400
    go_back(found.manifests[0], found.generations[-2])
    again = find_store(tmp_path)
    assert again.last().step == 399 and not again.damage
    manifest = Manifest.reopen(again.manifests)
    assert manifest.commit(400, store.roles, again.last().checksums, b"").number == 400
    manifest.close()
