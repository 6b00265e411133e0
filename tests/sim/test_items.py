"""Items of a kind that the machine has never heard of: made, spilled, fetched and dropped while
others move, in any order of ends.  What activations will be."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Container

import pytest

from overspill.facts.tier import Tier
from overspill.schedule.arena import Place
from overspill.schedule.invariants import validate_items
from overspill.schedule.items import Item, Items, Move
from overspill.schedule.layout import Layout, Regions
from overspill.schedule.messages import CopyIn, CopyOut, Instruction, Key, Kind, Read, Work, Write

Moves = (Read, Write, CopyIn, CopyOut)
REGIONS = Regions(device_grads=4_000, host_grads=6_000)


class Saved(Item):
    """One saved thing.  ``wanted``: it is needed on the device, as soon as there is room."""

    __slots__ = ("wanted",)

    def __init__(self, number: int, nbytes: int) -> None:
        super().__init__(Key(Kind.GATHERED, number), nbytes)
        self.wanted = False


class LastSavedFirst:
    """The policy: what was saved last is wanted first, so what was saved first gives way."""

    def __init__(self, items: Items) -> None:
        self.items, self.alive = items, dict[int, Saved]()
        self.numbers = 0
        items.govern(Kind.GATHERED, self)

    def next_use(self, item: Item, tier: Tier) -> int:
        return self.numbers - item.key.number

    def may_go(self, item: Item, tier: Tier) -> bool:
        assert isinstance(item, Saved)
        return not item.wanted

    def spares(self, item: Item, tier: Tier, spare: Container[int]) -> bool:
        return item.key.number in spare

    def moved(self, item: Item, work: Move) -> None:
        if isinstance(work, CopyOut):
            self.items.write(item)

    # -- what compute asks for ------------------------------------------------------------------

    def create(self, nbytes: int) -> Saved | None:
        """Compute has made one on the device, if there was room."""
        item = Saved(self.numbers, nbytes)
        copy = self.items.make_room(item, Tier.DEVICE, -1)
        if copy is None:
            return None
        copy.valid = True
        self.numbers += 1
        self.items.add(item)
        self.alive[item.key.number] = item
        return item

    def spill(self, item: Saved) -> bool:
        """Out to host memory, and on to disk."""
        if item.host is not None or item.device is None or item.device.holds:
            return False
        if self.items.make_room(item, Tier.HOST, -1) is None:
            return False
        self.items.copy_out(item)
        return True

    def fetch(self, item: Saved) -> None:
        """A step nearer to the device, where there is room."""
        item.wanted = True
        if item.device is not None:
            return
        if item.host is None:
            if self.items.make_room(item, Tier.HOST, -1) is not None:
                self.items.read(item, urgent=True)
        elif item.host.valid and self.items.make_room(item, Tier.DEVICE, -1) is not None:
            self.items.copy_in(item)

    def drop(self, item: Saved) -> None:
        """Backward is through with it."""
        del self.alive[item.key.number]
        self.items.remove(item)


class Run:
    """Draws what compute asks for and which move ends; follows whose bytes lie where."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        layout = Layout((), (), (), REGIONS, (), (), True, False, 0)
        self.items = Items(layout, self._emit)
        self.policy = LastSavedFirst(self.items)
        self.in_flight: dict[Work, int] = {}
        self.memory: dict[Place, Key] = {}
        self.disk: set[Key] = set()
        self.did: Counter[str] = Counter()

    def _emit(self, instruction: Instruction) -> None:
        assert isinstance(instruction, (Read, Write, CopyIn, CopyOut))
        self.in_flight[instruction] = 1

    def write(self, place: Place, item: Key) -> None:
        """The bytes of an item come to a place, over whatever was there."""
        self.memory = {old: key for old, key in self.memory.items() if not old.overlaps(place)}
        self.memory[place] = item

    def end_one(self) -> None:
        """A move ends; it finds what it moves."""
        work = self.rng.choice(list(self.in_flight))
        del self.in_flight[work]
        if isinstance(work, Read):
            assert work.item in self.disk
            self.write(work.place, work.item)
        elif isinstance(work, Write):
            assert self.memory[work.place] == work.item
            self.disk.add(work.item)
        else:
            assert isinstance(work, (CopyIn, CopyOut))
            assert self.memory[work.source] == work.item
            self.write(work.place, work.item)
        self.items.ended(work)
        self.did[type(work).__name__] += 1

    def create(self) -> None:
        item = self.policy.create(self.rng.randint(1, 12) * 100)
        if item is not None:
            assert item.device is not None
            self.write(item.device.place, item.key)
        self.did["made" if item else "full"] += 1

    def drop(self) -> None:
        """Of those that have come back, one is used, and gone."""
        moving = {work.item for work in self.in_flight if isinstance(work, Moves)}
        ready = [
            item for item in self.policy.alive.values()
            if item.wanted and item.device and item.device.valid and item.key not in moving
        ]  # fmt: skip
        if ready:
            item = self.rng.choice(ready)
            assert item.device is not None and self.memory[item.device.place] == item.key
            self.policy.drop(item)
            self.disk.discard(item.key)
            self.did["dropped"] += 1

    def act(self) -> None:
        alive = list(self.policy.alive.values())
        what = self.rng.choice(["create", "spill", "spill", "fetch", "drop", "end", "end", "end"])
        if what == "create":
            self.create()
        elif what == "drop":
            self.drop()
        elif what == "end" and self.in_flight:
            self.end_one()
        elif alive and what in ("spill", "fetch"):
            getattr(self.policy, what)(self.rng.choice(alive))
        validate_items(self.items, self.in_flight)


def test_a_kind_that_nobody_has_heard_of() -> None:
    did: Counter[str] = Counter()
    for seed in range(40):
        run = Run(seed)
        for _ in range(400):
            run.act()
        while run.in_flight:
            run.end_one()
        for item in list(run.policy.alive.values()):
            run.policy.drop(item)
        validate_items(run.items, run.in_flight)
        assert run.items.used_bytes() == (0, 0) and not run.items.all()
        did += run.did
    needed = ("made", "full", "CopyOut", "Write", "Read", "CopyIn", "dropped")
    assert all(did[each] > 30 for each in needed), did


def test_what_is_not_clean_does_not_give_way() -> None:
    run = Run(0)
    first, second = run.policy.create(3_000), run.policy.create(1_000)
    assert first is not None and second is not None
    assert run.policy.create(3_000) is None, "nothing has been spilled"
    assert run.policy.spill(first)
    assert run.policy.create(3_000) is None, "it is on its way"
    run.write(first.device.place if first.device else Place(Tier.DEVICE, 0, 0), first.key)
    run.end_one()
    assert run.policy.create(3_000) is not None and first.device is None
    with pytest.raises(AssertionError, match="must not be evicted"):
        run.items.drop(second, Tier.DEVICE)
