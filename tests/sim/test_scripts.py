"""What once went wrong in the machine, as short scripts of signals."""

from __future__ import annotations

import torch

from overspill.facts.tier import Tier
from overspill.schedule.arena import Place
from overspill.schedule.invariants import validate
from overspill.schedule.layout import Layout, Regions, UnitHome
from overspill.schedule.messages import (
    Accumulate,
    Await,
    CopyIn,
    CopyOut,
    Done,
    GradientStored,
    GradReady,
    GradRoom,
    Grant,
    Key,
    Kind,
    Need,
    Read,
    Refuse,
    Release,
    Signal,
    Step,
    Until,
    Update,
    Work,
    Write,
)
from overspill.schedule.residency import Residency
from overspill.schedule.units import PAGE, Chunk, Subgroup, Unit

WEIGHTS, GRADS = Kind.WEIGHTS, Kind.GRADS


def layout(
    pages: tuple[int, ...], *, host_weights: int, host_grads: int = 0, device_weights: int = 0,
    device_grads: int = 0,
) -> Layout:  # fmt: skip
    """Units with that many pages of weights and as many of gradients, on disk all of them; regions
    in pages.  Without room on a device there is none, and gradients wait at home in memory."""
    has_device = device_weights > 0
    units, groups, homes, fixed = [], [], [], 0
    for index, count in enumerate(pages):
        chunk = Chunk(torch.float32, 0, count * PAGE // 4, 0, 0, ())
        units.append(Unit(index, f"u{index}", (chunk,), (), False, count * PAGE, count * PAGE))
        groups.append((Subgroup(index, index, 0, 0, chunk.numel, (), PAGE),))
        place = None if has_device else Place(Tier.HOST, fixed, count * PAGE)
        fixed += 0 if has_device else count * PAGE
        homes.append(
            UnitHome(
                Tier.NVME, False, Tier.NVME if has_device else Tier.HOST, (Tier.NVME,),
                grad_place=place, state_places=(None,),
            )
        )  # fmt: skip
    regions = Regions(
        device_weights=device_weights * PAGE, device_grads=device_grads * PAGE, host_fixed=fixed,
        host_weights=host_weights * PAGE, host_grads=host_grads * PAGE, state_slot=PAGE,
        state_slots=2,
    )  # fmt: skip
    sizes = tuple(count * PAGE for count in pages)
    return Layout(
        tuple(units), tuple(groups), tuple(homes), regions, sizes, (False,) * len(pages),
        has_device, False, 0,
    )  # fmt: skip


class Script:
    """Sends signals; moves end when they are told to, each by its kind and item."""

    def __init__(self, made: Layout) -> None:
        self.machine = Residency(made)
        self.under_way: list[Work] = []
        self.granted: dict[int, Grant] = {}

    def send(self, signal: Signal) -> None:
        for each in self.machine.handle(signal):
            if isinstance(each, Grant):
                self.granted[each.ticket] = each
            elif isinstance(each, Refuse):
                raise AssertionError(f"refused: {each}")
            elif not isinstance(each, GradientStored):
                self.under_way.append(each)
        validate(self.machine)

    def moving(self, kind: type, item: Key | int) -> bool:
        """Whether such work is under way."""
        return any(self._is(work, kind, item) for work in self.under_way)

    @staticmethod
    def _is(work: Work, kind: type, item: Key | int) -> bool:
        if not isinstance(work, kind):
            return False
        return (work.unit if isinstance(work, (Accumulate, Update)) else work.item) == item  # type: ignore[union-attr]

    def end(self, kind: type, item: Key | int) -> None:
        """The one such work that is under way ends."""
        (work,) = [each for each in self.under_way if self._is(each, kind, item)]
        self.under_way.remove(work)
        self.send(Done(work))

    def end_all(self) -> None:
        while self.under_way:
            self.send(Done(self.under_way.pop(0)))

    def gather(self, unit: int, ticket: int, *, merge: bool = False) -> None:
        self.send(GradRoom(unit, ticket, merge))
        assert ticket in self.granted
        self.send(GradReady(unit, merge))


def test_a_copy_that_comes_after_its_update_was_queued_does_not_stay() -> None:
    """Where it stayed, a demand and the update took each other's room for ever."""
    script = Script(layout((1, 1), host_weights=2, host_grads=2, device_weights=1, device_grads=2))
    script.send(Need(0, 1))
    script.end(Read, Key(WEIGHTS, 0))
    assert 1 in script.granted and script.moving(CopyIn, Key(WEIGHTS, 0))
    script.send(Release(0))
    script.send(Step((0,), 2, background=True))
    script.send(Need(1, 3))
    script.end(Read, Key(WEIGHTS, 1))
    assert 3 not in script.granted, "the copy of the other has the only slot, and is on its way"
    script.end(CopyIn, Key(WEIGHTS, 0))
    assert 3 in script.granted


def test_an_update_that_others_were_let_before_is_used_no_sooner_than_now() -> None:
    """Its copy counted as used before now, gave way to nobody, and who needed its room was refused.
    (``validate`` looks at that after every signal.)"""
    script = Script(layout((1, 2, 1, 1), host_weights=2))
    for unit in range(4):
        script.gather(unit, unit)
        script.end(Accumulate, unit)
    script.send(Step((0, 1, 2, 3), 10, background=True))
    script.send(Need(3, 11))
    script.end_all()
    assert 11 in script.granted
    script.send(Need(2, 12))
    script.end_all()
    assert 12 in script.granted, "0, 3 and 2 are updated now; 1, which needs both pages, is not"
    assert script.machine.weights.updating == {1}
    script.send(Release(3))
    script.send(Release(2))
    script.send(Await(Until.LANDED, 13))
    script.end_all()
    assert 13 in script.granted


def test_gradients_that_wait_for_room_hold_none() -> None:
    """An arrival that had half of its room left the first in line no hole that was long enough."""
    made = layout((1, 2), host_weights=3, host_grads=3, device_weights=3, device_grads=3)
    script = Script(made)
    for unit in (0, 1):
        script.gather(unit, unit)
        script.end_all()
    before = script.machine.used_bytes()[1]
    script.send(Step((1,), 10, background=True))  # its gradients are fetched: 2 of 3 pages
    assert script.moving(Read, Key(GRADS, 1))
    fetching = script.machine.used_bytes()[1]
    script.gather(0, 11, merge=True)  # wants 1 page for what was there, and 1 for what comes
    assert script.machine.used_bytes()[1] == fetching > before
    assert not script.moving(CopyOut, Key(Kind.GATHERED, 0))
    script.end_all()
    assert 10 in script.granted and not script.under_way


def test_gradients_are_fetched_in_the_order_of_their_updates() -> None:
    """One fetched for a later update took the room of the first in line."""
    made = layout((2, 1, 1), host_weights=4, host_grads=3, device_weights=4, device_grads=3)
    script = Script(made)
    for unit in (1, 2):
        script.gather(unit, unit)
        script.end_all()
    script.gather(2, 10, merge=True)  # on its way through 2 of 3 pages
    script.gather(0, 11)  # waits: it needs 2
    assert not script.moving(CopyOut, Key(Kind.GATHERED, 0))
    script.send(Step((0, 1), 12, background=True))
    assert not script.moving(Read, Key(GRADS, 1)), "one is free, but the first in line goes first"
    script.end(Read, Key(GRADS, 2))
    script.end(CopyOut, Key(Kind.GATHERED, 2))
    script.end(Accumulate, 2)
    script.end(Write, Key(GRADS, 2))
    assert script.moving(CopyOut, Key(Kind.GATHERED, 0))
    script.send(Await(Until.LANDED, 13))
    script.end_all()
    assert 13 in script.granted
