"""Random models, budgets and orders of completion against every invariant of the machine."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from overspill.facts.tier import Tier
from overspill.planning.plan import Budgets, Needs, Preference
from overspill.planning.planner import make_layout
from overspill.schedule.arena import Place
from overspill.schedule.invariants import validate
from overspill.schedule.messages import (
    Clear,
    CopyIn,
    Cut,
    Done,
    Durable,
    Failed,
    Freed,
    GradLost,
    GradReady,
    GradRoom,
    Grant,
    Item,
    Kind,
    Landed,
    Need,
    Read,
    Refuse,
    Release,
    Seal,
    Settle,
    Settled,
    Signal,
    Sound,
    Spoiled,
    Step,
    Update,
    Work,
    Write,
)
from overspill.schedule.residency import Residency
from tests.random_parts import Field, random_parts
from tests.sim.commit_shadow import Shadow

MOST_MOVES = 10  # of one unit or record, after the last step
MOST_SIGNALS = 20_000  # of one run, which has a few hundred: more go round


class Chaos:
    """A compute thread whose moves end in a random order, as far as streams allow."""

    def __init__(self, rng: random.Random, machine: Residency) -> None:
        self.rng, self.machine = rng, machine
        self.pending: list[Work] = []
        self.granted: set[int] = set()
        self.refused: set[int] = set()
        self.tickets = 0
        self.signals = 0
        self.facts = 0
        self.held: list[tuple[int, Place]] = []  # slots of units that a graph keeps
        self.shadow = Shadow(machine)
        self.open, self.cut = machine.layout.durable, False  # as in ``Committing``

    def send(self, signal: Signal) -> None:
        self.signals += 1
        assert self.signals < MOST_SIGNALS, "it goes round and never ends"
        if isinstance(signal, Done):
            self.shadow.done(signal.work)
        instructions = self.machine.handle(signal)
        self.shadow.emitted(instructions)
        for instruction in instructions:
            if isinstance(instruction, Grant):
                self.granted.add(instruction.ticket)
            elif isinstance(instruction, Refuse):
                assert self.held, f"{instruction}, and no graph keeps anything"
                self.refused.add(instruction.ticket)
            else:
                self.pending.append(instruction)
        validate(self.machine)

    def finish_one(self) -> None:
        first: dict[str, Work] = {}
        free: list[Work] = []
        for work in self.pending:
            if isinstance(work, (Read, Write)):
                free.append(work)
            else:
                kind = type(work)
                ordered = (Settle, Clear)
                name = "update" if kind in ordered else kind.__name__
                if isinstance(work, Update) and work.visit is not None:
                    name = "visit"
                lane = {"Update": "update"}.get(name, name)
                first.setdefault(lane, work)
        work = self.rng.choice([*free, *first.values()])
        self.pending.remove(work)
        self.send(Done(work))

    def request(self, make: type[Signal], *args: int, **more: object) -> None:
        self.tickets += 1
        ticket = self.tickets
        if make is Need:
            self.send(Need(args[0], ticket))
        elif make is GradRoom:
            self.send(GradRoom(args[0], ticket, bool(more["merge"])))
        elif make in (Settled, Landed, Durable):
            self.send(make(ticket))
        else:
            units = more["units"]
            assert isinstance(units, tuple)
            commit = bool(more["commit"])
            self.send(Step(units, ticket, bool(more["background"]), commit))
            self.open = self.cut = commit
            if self.machine.layout.durable and self.rng.random() < 0.05:
                self.send(Spoiled(self.rng.randrange(len(self.machine.layout.units))))
        while ticket not in self.granted:
            if ticket in self.refused:  # the user lets go of his graphs, and tries again
                self.free()
                again = Landed if make is Step else make
                return self.request(again, *args, **more)
            self.finish_one()
        while self.pending and self.rng.random() < 0.3:
            self.finish_one()

    def seal(self) -> None:
        """The next forward that trains begins: the facts of the last step's cut are known."""
        if self.open:
            self.facts += 1
            self.open = False
            self.send(Seal(self.facts) if self.cut else Cut(self.facts))

    def commit(self) -> None:
        """What the user's ``commit()`` does, after weights that were not finite were replaced."""
        self.request(Landed)
        for unit in sorted(self.machine.commits.spoiled):
            self.send(Sound(unit))
        if self.open:
            self.seal()
        else:
            self.facts += 1
            self.send(Cut(self.facts))
        self.request(Durable)

    def rollback(self) -> None:
        """What the user's ``rollback()`` does, between steps."""
        if not self.facts or (self.cut and not self.open):
            self.seal()
            self.request(Durable)
        self.open = self.cut = False
        self.request(Landed)
        self.drain()
        self.machine.rollback()
        self.shadow.rolled_back()
        validate(self.machine)
        self.facts += 1
        self.send(Cut(self.facts))
        self.request(Durable)

    def edit(self) -> None:
        """Weights and state are edited between steps: they belong to the last step's cut."""
        self.request(Landed)
        self.drain()
        commits = self.machine.commits
        if self.open and self.cut:
            commits.take_back()
            self.shadow.taken_back()
            self.cut = False
        elif not self.open:
            self.request(Durable)
            self.drain()
        self.machine.drop_caches()
        for item in self.rng.sample(commits.items, self.rng.randint(1, len(commits.items))):
            on_disk = item not in commits.places and not self.lives_on_device(item)
            role = None
            if on_disk:
                roles = self.machine.roles_of(item)
                role = roles.newest = roles.target()
            commits.change(item)
            self.shadow.edited(item, role)
        validate(self.machine)

    def lives_on_device(self, item: Item) -> bool:
        homes = self.machine.layout.homes
        return item.kind is Kind.WEIGHTS and homes[item.number].weights is Tier.DEVICE

    def drain(self) -> None:
        while self.pending:
            self.finish_one()

    def free(self) -> None:
        """The graphs that kept slots are gone."""
        while self.held:
            self.send(Freed(*self.held.pop(self.rng.randrange(len(self.held)))))

    def use(self, unit: int, order: Sequence[int]) -> None:
        self.free()
        layout = self.machine.layout
        group = [unit, *layout.units[unit].shares]
        late = not self.machine.weights.updating.isdisjoint(group)
        if all(layout.homes[m].resident for m in group) and not (late or self.rng.random() < 0.1):
            return  # only what stays put and is up to date is used without asking
        self.request(Need, unit)
        streamed = [m for m in group if not layout.homes[m].resident]
        kept = tuple(streamed) if self.rng.random() < 0.1 else ()
        for member in kept:
            copy = self.machine.weights.compute_copy(member)
            assert copy is not None
            self.held.append((member, copy.place))
        self.send(Release(unit, kept))


def run(seed: int, steps: int, commits: list[int] | None = None) -> int:
    rng = random.Random(seed)
    parts = random_parts(rng)
    fields = lambda chunk: [Field("exp_avg", torch.float32)]  # noqa: E731
    backward, accumulate = rng.random() < 0.5, rng.choice([1, 1, 3])
    mode = "backward" if backward else "step"
    other = random.Random(seed)
    whole = Preference(
        device=other.choice([0.0, 0.0, 0.5, 1.0]), visiting=other.choice([0.0, 0.0, 0.3, 1.0])
    )
    needs = Needs(fields, accumulate, mode, rng.random() < 0.5, rng.randint(0, 8), whole)
    device = None if rng.random() < 0.4 else rng.randint(1, 40) * 100_000
    budgets = Budgets(device, rng.randint(1, 60) * 100_000, 10**9)
    layout, _, shortfalls = make_layout(parts, budgets, needs)
    if shortfalls:
        return 0
    assert layout.regions.host_bytes <= budgets.host
    assert device is None or layout.regions.device_bytes <= device
    chaos = Chaos(rng, Residency(layout))
    order = list(range(len(parts.units)))
    background = rng.random() < 0.6
    often = layout.durable and rng.random() < 0.7
    for _ in range(steps):
        if rng.random() < 0.3:
            rng.shuffle(order)  # conditional branches: the recorded order no longer holds
        landed = False
        trained = [u for u in order if parts.units[u].trainable and rng.random() < 0.9]
        chaos.seal()
        for micro in range(accumulate):
            for unit in order:
                chaos.use(unit, order)
            for unit in reversed(order):
                chaos.use(unit, order)
                if unit in trained:
                    early = backward and micro == accumulate - 1 and rng.random() < 0.8
                    if backward and accumulate == 1:
                        early = True  # gradients without a home are consumed at once
                    if early and not landed:
                        chaos.request(Landed)
                        landed = True
                    at_home = chaos.machine.gradients.at_home(unit) and other.random() < 0.7
                    merge = micro > 0
                    if not at_home:
                        chaos.request(GradRoom, unit, merge=merge)
                        if rng.random() < 0.05:  # an exception; backward is run again
                            chaos.send(GradLost(unit))
                            merge = False
                            chaos.request(GradRoom, unit, merge=merge)
                    settled = bool(at_home) and other.random() < 0.5
                    chaos.send(GradReady(unit, merge, early, settled))
        if rng.random() < 0.7:
            chaos.request(Settled)
        if not landed:
            chaos.request(Landed)
        chaos.request(Step, units=tuple(trained), background=background, commit=often)
        if layout.durable and rng.random() < 0.2:
            rng.choice([chaos.commit, chaos.rollback, chaos.edit])()
    chaos.free()
    chaos.seal()
    for _ in range(MOST_MOVES * (len(order) + sum(map(len, layout.subgroups)))):
        if chaos.pending:
            chaos.finish_one()
    assert chaos.machine.idle, "moves went on without anyone who wants them"
    assert not chaos.machine.commits.pending, "a commit that is sealed was not carried out"
    if commits is not None:
        commits.append(chaos.shadow.commits)
    return chaos.signals


def test_random_signals_keep_all_invariants() -> None:
    signals, seed, commits = 0, 0, list[int]()
    while signals < 100_000:
        try:
            signals += run(seed, 4, commits)
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
        seed += 1
    assert sum(commits) > len(commits), "commits are drawn"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_more() -> None:
    """100,000 sequences, each of one to three steps of a machine of its own."""
    played = seed = 0
    while played < 100_000:
        seed += 1
        try:
            played += run(1_000_000 + seed, 1 + seed % 3) > 0
        except BaseException as error:
            raise AssertionError(f"seed {1_000_000 + seed}") from error


def streamed_machine(count: int, device: int | None = None) -> tuple[Residency, list[int]]:
    """A machine with at least ``count`` units that are not resident, and those units."""
    needs = Needs(lambda chunk: [Field("exp_avg", torch.float32)], 1, "step", True, 3)
    for seed in range(100):
        parts = random_parts(random.Random(seed))
        for budget in (1_000_000, 2_000_000, 4_000_000):
            layout, _, shortfalls = make_layout(parts, Budgets(device, budget, 10**9), needs)
            streamed = [u for u, home in enumerate(layout.homes) if not home.resident]
            if not shortfalls and len(streamed) >= count and layout.prefetch_depth:
                room = layout.regions.host_weights
                sizes = [layout.units[u].weight_bytes for u in streamed[:count]]
                if sum(sizes) <= room and not any(layout.units[u].shares for u in streamed):
                    return Residency(layout), streamed
    raise AssertionError("no such machine")


def test_a_copy_that_arrives_stale_gives_its_room_back() -> None:
    """Where it stayed, a demand and the update would take each other's room for ever."""
    machine, streamed = streamed_machine(1, device=2_000_000)
    unit = streamed[0]
    (read,) = machine.handle(Need(unit, 7))
    copy = next(w for w in machine.handle(Done(read)) if isinstance(w, CopyIn))
    machine.handle(Release(unit))
    machine.weights.begin_update(unit)
    assert machine.weights.device_arena.used_bytes, "the copy is still on its way"
    machine.handle(Done(copy))
    assert machine.weights.device_arena.used_bytes == 0


def test_after_a_failure_the_machine_only_drains() -> None:
    machine, streamed = streamed_machine(1)
    out = machine.handle(Need(streamed[0], 7))
    assert isinstance(out[0], Read)
    assert machine.handle(Failed(out[0])) == []
    assert machine.handle(Need(streamed[0], 8)) == []
    assert sorted(machine.abandon()) == [7, 8]


def test_a_broken_machine_is_found_out() -> None:
    """The invariants can fail: two owners of one slot."""
    machine, streamed = streamed_machine(2)
    for ticket, unit in enumerate(streamed[:2]):
        for work in machine.handle(Need(unit, ticket)):
            assert isinstance(work, Read)
            machine.handle(Done(work))
        machine.handle(Release(unit))
    first, second = (machine.weights.units[u].host for u in streamed[:2])
    assert first is not None and second is not None
    second.place = first.place
    with pytest.raises(AssertionError, match="overlaps"):
        validate(machine)
