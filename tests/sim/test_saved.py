"""What autograd saves, drawn at random: saved, shared, needed in any order, dropped, while moves
end in any order.  No wrong byte, no hang, and nothing is left."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from overspill.planning.plan import Budgets, Needs
from overspill.planning.planner import make_layout
from overspill.schedule.arena import Place
from overspill.schedule.invariants import validate
from overspill.schedule.layout import SavedRoom
from overspill.schedule.messages import (
    BackwardPhase,
    CopyIn,
    CopyOut,
    Done,
    Failed,
    Fetch,
    FreeDeviceCopy,
    FreeItem,
    Grant,
    Key,
    Kind,
    Read,
    Refuse,
    Saved,
    SavedBytes,
    SavedDropped,
    Signal,
    Work,
    Write,
)
from overspill.schedule.residency import Residency
from tests.random_parts import Field, random_parts

PAGE = 4096


def machine_of(rng: random.Random, room: SavedRoom) -> Residency:
    budgets = Budgets(1 << 30 if rng.random() < 0.6 else None, 1 << 30, None)
    needs = Needs(lambda chunk: (Field("m", chunk.dtype),), 1, "step", 0)
    layout, _, shortfalls = make_layout(random_parts(rng), budgets, needs)
    assert not shortfalls
    return Residency(replace(layout, saved=room))


class Graphs:
    """Compute and its graphs: what they saved, and where its bytes are."""

    def __init__(self, rng: random.Random, room: SavedRoom) -> None:
        self.rng, self.room = rng, room
        self.machine = machine_of(rng, room)
        self.pending: list[Work] = []
        self.tickets, self.numbers = 0, 0
        self.granted: set[int] = set()
        self.refused: set[int] = set()
        self.sizes: dict[int, int] = {}  # of what a graph holds
        self.widths: dict[int, int] = {}  # by number, bytes of an element if it is packed, else 0
        self.here: set[int] = set()  # whose bytes compute has
        self.back: dict[int, set[int]] = {}  # parts that are back of what is not here as a whole
        self.host: dict[int, tuple[Place, Key]] = {}  # by offset: whose bytes are there
        self.disk: dict[Key, int] = {}
        self.moved = 0

    def send(self, signal: Signal) -> None:
        for instruction in self.machine.handle(signal):
            if isinstance(instruction, Grant):
                self.granted.add(instruction.ticket)
            elif isinstance(instruction, Refuse):
                self.refused.add(instruction.ticket)
            elif isinstance(instruction, FreeDeviceCopy):
                number = instruction.item.number
                assert number in self.here
                for part in range(len(self.room.part_sizes(self.sizes[number]))):
                    assert self._is_below(Key(Kind.SAVED, number, part)), "a part is lost"
                self.here.discard(number)
            elif isinstance(instruction, FreeItem):
                assert instruction.item.number not in self.sizes, "a graph has it yet"
                self.disk.pop(instruction.item, None)
            else:
                self.pending.append(instruction)
                if isinstance(instruction, CopyIn):
                    self._comes(instruction.item)
        validate(self.machine)
        # Of work that is under way, the bytes count already, and are never over the room.
        assert sum(self.disk.values()) <= self.room.disk

    def _comes(self, item: Key) -> None:
        """Once all parts are on their way a stream waits for them."""
        assert item.number not in self.here
        back = self.back.setdefault(item.number, set())
        assert item.part not in back, "it comes twice"
        back.add(item.part)
        nbytes = self.sizes.get(item.number)
        if nbytes is not None and len(back) == len(self.room.part_sizes(nbytes)):
            del self.back[item.number]
            self.here.add(item.number)

    def _is_below(self, item: Key) -> bool:
        return item in self.disk or item in [key for _, key in self.host.values()]

    def end(self, work: Work) -> None:
        """The move does what it says: bytes go from one place to another."""
        self.moved += 1
        assert isinstance(work, (CopyIn, CopyOut, Read, Write))
        item = work.item
        alive = item.number in self.sizes
        if isinstance(work, CopyOut):
            assert not alive or item.number in self.here, "it left before it was copied"
            self._fill(work.place, item)
            if item.number in self.sizes:
                assert work.place.nbytes == self.below(item.number)[item.part]
        elif isinstance(work, Write):
            assert self._at(work.place) == item, "another's bytes are written"
            self.disk[item] = work.place.nbytes
        elif isinstance(work, Read):
            assert not alive or item in self.disk, "it reads what was never written"
            self._fill(work.place, item)
        else:
            assert self._at(work.source) == item, "another's bytes come back"
        self.pending.remove(work)
        self.send(Done(work))

    def _fill(self, place: Place, item: Key) -> None:
        for offset in [o for o, (other, _) in self.host.items() if other.overlaps(place)]:
            del self.host[offset]
        self.host[place.offset] = place, item

    def _at(self, place: Place) -> Key:
        return self.host[place.offset][1]

    def some_end(self, share: float) -> None:
        while self.pending and self.rng.random() < share:
            self.end(self._next())

    def _next(self) -> Work:
        """Copies of one direction end in order."""
        first: dict[type, Work] = {}
        for work in self.pending:
            first.setdefault(type(work), work)
        free = [work for work in self.pending if isinstance(work, (Read, Write))]
        return self.rng.choice([*free, *first.values()])

    # -- what compute does ----------------------------------------------------------------------

    def save(self, unit: int, again: list[int]) -> None:
        items = [SavedBytes(n, self.sizes[n], unit, self.widths.get(n, 0)) for n in again]
        for _ in range(self.rng.randint(1, 5)):
            nbytes = self.rng.choice([1, 3, 8, 20]) * PAGE - self.rng.choice([0, 0, 100])
            self.widths[self.numbers] = self.rng.choice([0, 2, 4])
            items.append(SavedBytes(self.numbers, nbytes, unit, self.widths[self.numbers]))
            self.sizes[self.numbers] = nbytes
            self.here.add(self.numbers)
            self.numbers += 1
        if self.rng.random() < 0.3:
            self.ask(lambda ticket: Saved(tuple(items), ticket), may_refuse=True)
        else:
            self.send(Saved(tuple(items)))

    def ask(self, make: object, *, may_refuse: bool = False) -> None:
        assert callable(make)
        self.tickets += 1
        ticket = self.tickets
        self.send(make(ticket))
        while ticket not in self.granted:
            if ticket in self.refused:
                assert may_refuse, "an item was refused"
                assert not self.may_leave(), "there is room for what could leave"
                return
            assert self.pending, "who waits would wait for ever"
            self.end(self._next())

    def may_leave(self) -> list[int]:
        """What compute has, and disk has room for, unless host memory is full of what it has none
        for."""
        free = self.room.disk - self.machine.saved_bytes()[2]
        on_disk = {item.number for item in self.disk}
        for _, item in self.host.values():
            stays = item.number in self.sizes and item.number not in on_disk
            if stays and sum(self.below(item.number)) > free:
                return []
        sizes = {n: sum(self.below(n)) for n in self.here & set(self.sizes)}
        granted = self.machine.saved._granted
        return [n for n, size in sizes.items() if self.room.host and size <= free and n != granted]

    def below(self, number: int) -> list[int]:
        """The sizes of its parts on lower tiers: a byte for each element, and a scale for 128."""
        parts, width = self.room.part_sizes(self.sizes[number]), self.widths.get(number, 0)
        exact = [n // width + n // width // 128 * 4 if width else n for n in parts]
        return [-(-n // PAGE) * PAGE for n in exact]

    def need(self, number: int) -> None:
        if number not in self.here or self.rng.random() < 0.1:  # it may be about to leave
            self.ask(lambda ticket: Fetch(number, ticket))
        assert number in self.here

    def drop(self, numbers: list[int]) -> None:
        for number in numbers:
            del self.sizes[number]
        self.send(SavedDropped(tuple(numbers)))
        self.here.difference_update(numbers)

    def interrupt(self, number: int) -> None:
        """Asks for a storage, and drops it instead of waiting."""
        self.tickets += 1
        self.send(Fetch(number, self.tickets))
        self.drop([number])
        assert self.tickets in self.granted

    def nothing_left(self) -> None:
        self.drop(list(self.sizes))
        while self.pending:
            self.end(self._next())
        assert self.machine.saved_bytes() == (0, 0, 0)
        assert not self.disk
        assert not [i for i in self.machine.items.all() if isinstance(i.key.number, int)
                    and i.key.kind.value == "saved"]  # fmt: skip
        for region, (arena, tenants) in self.machine.items.regions().items():
            if region.base >= self.machine.layout.regions.host_bytes and region.nbytes:
                assert not arena.used_bytes and not tenants


def run(seed: int) -> Graphs:
    rng = random.Random(seed)
    policy = rng.choice(["auto", "host", "nvme", "recompute"])
    host = rng.choice([0, 8, 24, 64, 1000]) * PAGE
    room = SavedRoom(policy, rng.choice([0, 10, 40, 400]) * PAGE, host,
                     rng.choice([0, 50, 10_000]) * PAGE)  # fmt: skip
    graphs = Graphs(rng, room)
    for _ in range(rng.randint(1, 4)):
        for unit in range(rng.randint(1, 6)):
            if rng.random() < 0.7:
                graphs.send(Saved((), unit=unit))
            shared = [n for n in graphs.sizes if rng.random() < 0.1]
            graphs.save(unit, shared[:3])
            graphs.some_end(0.7)
        if rng.random() < 0.1:
            continue  # a second graph, or an exception
        if rng.random() < 0.9:
            graphs.send(BackwardPhase(True))
        keeps = rng.random() < 0.2  # retain_graph
        order = list(reversed(graphs.sizes))
        if rng.random() < 0.1:
            rng.shuffle(order)
        for number in order:
            if rng.random() < 0.05:
                graphs.save(9, [])  # a checkpoint computes again
            if rng.random() < 0.05:
                graphs.interrupt(number)
                continue
            graphs.need(number)
            if not keeps and rng.random() < 0.95:
                graphs.drop([number])
            graphs.some_end(0.6)
        graphs.send(BackwardPhase(False))
    graphs.nothing_left()
    return graphs


@pytest.mark.parametrize("block", range(8))
def test_no_wrong_byte_no_hang_and_nothing_left(block: int) -> None:
    moved = sum(run(seed).moved for seed in range(block * 100, block * 100 + 100))
    assert moved > 500, "hardly anything moved"


def test_what_is_needed_no_more_is_not_brought_back() -> None:
    """It was, if it was dropped while its parts were read: its removal left it in a list."""
    run(1_010_368)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_sequences() -> None:
    for seed in range(1_000_000, 1_100_000):
        run(seed)


def test_what_does_not_fit_anywhere_stays_and_is_told() -> None:
    graphs = Graphs(random.Random(3), SavedRoom("auto", 4 * PAGE, 0, 0))
    item = SavedBytes(0, 9 * PAGE, 0)
    graphs.send(Saved((item,), 1))
    assert graphs.refused == {1}
    assert graphs.machine.saved_bytes() == (9 * PAGE, 0, 0)


def test_what_a_unit_saved_may_leave_when_another_one_runs() -> None:
    """Not only once that one has saved something: it may compute for long before it does."""
    for policy, at_once in (("host", False), ("auto", True)):
        graphs = Graphs(random.Random(3), SavedRoom(policy, 40 * PAGE, 1000 * PAGE, 0))
        graphs.machine = machine_of(random.Random(3), graphs.room)
        assert graphs.machine.layout.has_device
        items = tuple(SavedBytes(n, 4 * PAGE, 0) for n in range(20))
        if at_once:  # as many as in the step before: the others must leave
            graphs.send(Saved(items))
            graphs.send(BackwardPhase(True))
            graphs.sizes = {}
            graphs.send(SavedDropped(tuple(range(20))))
            while graphs.pending:
                graphs.end(graphs.pending[0])
            graphs.send(BackwardPhase(False))
        moved = len(graphs.pending)
        graphs.send(Saved((SavedBytes(100, 4 * PAGE, 0),)))
        assert (len(graphs.pending) > moved) == at_once
        graphs.send(Saved((), unit=1))
        assert [w.item.number for w in graphs.pending if isinstance(w, CopyOut)] == [100]


def test_after_a_failure_nothing_more_leaves() -> None:
    graphs = Graphs(random.Random(3), SavedRoom("auto", 0, 100 * PAGE, 0))
    out = graphs.machine.handle(Saved((SavedBytes(0, 9 * PAGE, 0), SavedBytes(1, PAGE, 1))))
    work = next(each for each in out if isinstance(each, CopyOut))
    assert graphs.machine.handle(Failed(work)) == []
    assert graphs.machine.handle(Saved((SavedBytes(2, PAGE, 1),))) == []


@pytest.mark.parametrize("host", [8, 24])
def test_what_is_larger_than_host_memory_passes_through_it(host: int) -> None:
    """To disk, and back."""
    graphs = Graphs(random.Random(3), SavedRoom("auto", 10 * PAGE, host * PAGE, 1000 * PAGE))
    graphs.sizes[0] = 40 * PAGE
    graphs.here.add(0)
    graphs.ask(lambda ticket: Saved((SavedBytes(0, 40 * PAGE, 0),), ticket))
    assert graphs.machine.saved_bytes() == (0, 40 * PAGE, 40 * PAGE)
    graphs.send(BackwardPhase(True))
    graphs.need(0)
    graphs.nothing_left()
    parts = len(graphs.room.part_sizes(40 * PAGE))
    assert 3 * parts < graphs.moved <= 4 * parts, "out, written, in; read, but for the last ones"


def test_who_is_interrupted_while_he_waits_leaves_no_ticket() -> None:
    graphs = Graphs(random.Random(3), SavedRoom("auto", 0, 8 * PAGE, 1000 * PAGE))
    graphs.sizes[0] = 40 * PAGE
    graphs.here.add(0)
    graphs.ask(lambda ticket: Saved((SavedBytes(0, 40 * PAGE, 0),), ticket))
    graphs.interrupt(0)
    assert any(isinstance(work, Read) for work in graphs.pending), "it is on its way"
    graphs.nothing_left()
