"""Random models, budgets and orders of completion against every invariant of the machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch

from overspill.facts.tier import Tier
from overspill.planning.plan import Budgets, Needs, Preference
from overspill.planning.planner import make_layout
from overspill.schedule.invariants import validate
from overspill.schedule.messages import (
    AbortCommit,
    Accumulate,
    Await,
    Clear,
    CopyIn,
    Done,
    Edited,
    Failed,
    FiniteCheck,
    Freed,
    GradientStored,
    GradLost,
    Grant,
    Held,
    Key,
    Kind,
    Locate,
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
from overspill.schedule.protocol import Protocol
from overspill.schedule.residency import Residency
from tests.random_parts import Field, random_parts, some_packed
from tests.sim.commit_shadow import Shadow

MOST_MOVES = 10  # of one unit or record, after the last step
MOST_SIGNALS = 20_000  # of one run, which has a few hundred: more go round


class Chaos:
    """A compute thread whose moves end in a random order, as far as streams allow."""

    def __init__(self, rng: random.Random, machine: Residency) -> None:
        self.rng, self.machine = rng, machine
        self.protocol = Protocol(machine.layout, self.ask, self.send)
        self.pending: list[Work] = []
        self.grants: dict[int, Grant] = {}
        self.refused: set[int] = set()
        self.tickets = 0
        self.signals = 0
        self.facts = 0
        self.held: list[Held] = []  # slots of units that a graph keeps
        self.tokens = 0
        self.at_home = [home.grads is machine.layout.compute_tier for home in machine.layout.homes]
        self.spoiled: set[int] = set()
        self.shadow = Shadow(machine)

    def send(self, signal: Signal) -> None:
        self.signals += 1
        assert self.signals < MOST_SIGNALS, "it goes round and never ends"
        if isinstance(signal, Done):
            self.shadow.done(signal.work)
        self.protocol.told(signal)
        instructions = self.machine.handle(signal)
        if isinstance(signal, AbortCommit):
            self.shadow.taken_back()
        self.shadow.emitted(instructions)
        for instruction in instructions:
            if isinstance(instruction, Grant):
                self.grants[instruction.ticket] = instruction
            elif isinstance(instruction, Refuse):
                assert self.held, f"{instruction}, and no graph keeps anything"
                self.refused.add(instruction.ticket)
            elif isinstance(instruction, GradientStored):
                self.at_home[instruction.unit] = instruction.free
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
                ordered = (Accumulate, Clear)
                name = "update" if kind in ordered else kind.__name__
                if isinstance(work, Update) and work.visit is not None:
                    name = "visit"
                lane = {"Update": "update"}.get(name, name)
                first.setdefault(lane, work)
        work = self.rng.choice([*free, *first.values()])
        self.pending.remove(work)
        self.send(Done(work))

    def ask(self, make: Callable[[int], Signal], computing: str | None = None) -> Grant:
        self.tickets += 1
        ticket = self.tickets
        signal = make(ticket)
        self.send(signal)
        while ticket not in self.grants:
            if ticket in self.refused:  # the user lets go of his graphs, and tries again
                self.free()
                if isinstance(signal, Step):  # it was taken all the same
                    return self.ask(lambda again: Await(Until.LANDED, again))
                return self.ask(make)
            self.finish_one()
        if not (isinstance(signal, Await) and signal.until is Until.QUIET):
            while self.pending and self.rng.random() < 0.3:
                self.finish_one()
        return self.grants.pop(ticket)

    def step(self, units: tuple[int, ...], *, background: bool, commit: bool) -> None:
        self.protocol.step(units, background=background, commit=commit)
        if self.machine.layout.durable and self.rng.random() < 0.05:
            unit = self.rng.randrange(len(self.machine.layout.units))
            self.spoiled.add(unit)
            self.send(FiniteCheck(unit, finite=False))

    def known(self) -> int:
        """The facts of the present state, by their number."""
        self.facts += 1
        return self.facts

    def seal(self) -> None:
        """The next forward that trains begins: the facts of the last step's cut are known."""
        if self.protocol.open:
            self.protocol.seal(self.known())

    def commit(self) -> None:
        """What the user's ``commit()`` does, after weights that were not finite were replaced."""
        self.protocol.finish_updates()
        while self.spoiled:
            self.send(FiniteCheck(self.spoiled.pop(), finite=True))
        self.protocol.seal(self.known())
        self.protocol.wait(Until.DURABLE)

    def rollback(self) -> None:
        """What the user's ``rollback()`` does, between steps."""
        if not self.facts or (self.protocol.cut and not self.protocol.open):
            self.seal()
            self.protocol.wait(Until.DURABLE)
        self.protocol.give_up(begun=False)

        def restore(items: Iterable[Key]) -> int:
            self.shadow.rolled_back()
            self.spoiled.clear()
            for item in items:
                self.ask(lambda ticket, item=item: Locate(item, ticket))
            return self.known()

        self.protocol.roll_back(restore)

    def edit(self) -> None:
        """Weights and state are edited between steps: they belong to the last step's cut."""
        self.protocol.finish_updates()
        self.protocol.begin_edit()
        stored = self.machine.layout.stored
        for item in self.rng.sample(stored, self.rng.randint(min(1, len(stored)), len(stored))):
            if item.kind is Kind.WEIGHTS and item.number in self.machine.layout.unchangeable:
                continue
            grant = self.ask(lambda ticket, item=item: Locate(item, ticket))
            assert grant.roles is not None
            tier, _ = self.machine.layout.home(item)
            role = grant.roles[1] if tier is Tier.NVME else None
            self.shadow.edited(item, role)
            self.send(Edited(item, role))

    def rest(self) -> None:
        """What ``sleep()`` does: nothing moves, and what memory holds is known."""
        self.protocol.finish_updates()
        self.protocol.wait(Until.QUIET)
        assert not self.pending
        places = self.machine.occupied()
        assert not any(a.overlaps(b) for n, a in enumerate(places) for b in places[:n])
        grads = [item for item in self.machine.items.all() if item.key.kind is Kind.GRADS]
        copies = [copy for each in grads for copy in (each.host, each.device) if copy is not None]
        assert all(copy.fixed or copy.place in places for copy in copies)

    def drain(self) -> None:
        while self.pending:
            self.finish_one()

    def free(self) -> None:
        """The graphs that kept slots are gone."""
        while self.held:
            self.send(Freed(self.held.pop(self.rng.randrange(len(self.held)))))

    def use(self, unit: int) -> None:
        """Forward or backward of one unit."""
        self.free()
        self.protocol.catch_up(unit)
        layout = self.machine.layout
        if not layout.streamed[unit] and self.rng.random() < 0.9:
            return  # only what stays put and is up to date is used without asking
        places = self.protocol.need(unit)
        kept: list[Held] = []
        for member, place in zip(layout.together[unit], places, strict=True):
            if not layout.homes[member].resident and self.rng.random() < 0.1:
                self.tokens += 1
                kept.append(Held(member, place, self.tokens))
        self.held += kept
        self.send(Release(unit, tuple(kept)))

    def choose(self, rng: random.Random, order: list[int]) -> None:
        """A router tells which of some units are used, right or wrong."""
        first = rng.randrange(len(order))
        among = order[first : first + rng.randint(1, 4)]
        likely = [unit for unit in among if rng.random() < 0.5]
        self.protocol.chosen(among, likely, now=rng.random() < 0.5)

    def gather(self, unit: int, *, merge: bool, update: bool) -> None:
        """Backward of a unit is over: its gradients go where they are kept."""
        at_home = self.at_home[unit] and self.rng.random() < 0.7
        if not at_home:
            self.protocol.room(unit, merge=merge)
            if self.rng.random() < 0.05:  # an exception; backward is run again
                self.send(GradLost(unit))
                merge = False
                self.protocol.room(unit, merge=merge)
        in_place = at_home and self.rng.random() < 0.5
        self.protocol.gathered(unit, merge=merge, update=update, in_place=in_place)


def run(seed: int, steps: int, commits: list[int] | None = None, *, several: bool = False) -> int:
    rng = random.Random(seed)
    parts = random_parts(rng)
    fields = lambda chunk: [Field("exp_avg", torch.float32)]  # noqa: E731
    backward, accumulate = rng.random() < 0.5, rng.choice([1, 1, 3])
    backward &= not several  # its steps are joint
    mode = "backward" if backward else "step"
    other = random.Random(seed)
    whole = Preference(
        device=other.choice([0.0, 0.0, 0.5, 1.0]), visiting=other.choice([0.0, 0.0, 0.3, 1.0])
    )
    needs = Needs(fields, accumulate, mode, int(rng.random() < 0.5), rng.randint(0, 8), whole)
    parts = some_packed(parts, other)
    frozen = [unit.index for unit in parts.units if not unit.trainable and not unit.packed]
    needs = replace(needs, in_place=frozenset(u for u in frozen if other.random() < 0.5))
    device = None if rng.random() < 0.4 else rng.randint(1, 40) * 100_000
    budgets = Budgets(device, rng.randint(1, 60) * 100_000, 10**9)
    layout, _, shortfalls = make_layout(parts, budgets, needs)
    if shortfalls:
        return 0
    unpacked = 0 if device is not None else layout.regions.device_bytes
    assert layout.regions.host_bytes + unpacked <= budgets.host
    assert device is None or layout.regions.device_bytes <= device
    chaos = Chaos(rng, Residency(layout))
    if several:
        play_models(chaos, steps, random.Random(seed))
    else:
        play(chaos, steps, accumulate, random.Random(seed), backward=backward)
    chaos.free()
    chaos.seal()
    for _ in range(MOST_MOVES * (len(parts.units) + sum(map(len, layout.subgroups)))):
        if chaos.pending:
            chaos.finish_one()
    assert not chaos.pending, "moves went on without anyone who wants them"
    assert not chaos.machine.snapshots.pending, "a commit that is sealed was not carried out"
    if commits is not None:
        commits.append(chaos.shadow.commits)
    return chaos.signals


def play(
    chaos: Chaos, steps: int, accumulate: int, routers: random.Random, *, backward: bool
) -> None:
    """Steps, and what users do between them."""
    rng, layout, protocol = chaos.rng, chaos.machine.layout, chaos.protocol
    order = list(range(len(layout.units)))
    background = rng.random() < 0.6
    often = layout.durable and rng.random() < 0.7
    chosen = routers.choice([0.0, 0.3])  # how often one tells something
    for _ in range(steps):
        if rng.random() < 0.3:
            rng.shuffle(order)  # conditional branches: the recorded order no longer holds
        trained = [u for u in order if layout.units[u].trainable and rng.random() < 0.9]
        chaos.seal()
        for micro in range(accumulate):
            for unit in order:
                if routers.random() < chosen:
                    chaos.choose(routers, order)
                chaos.use(unit)
            for unit in reversed(order):
                chaos.use(unit)
                if unit in trained:
                    early = backward and micro == accumulate - 1 and rng.random() < 0.8
                    if backward and accumulate == 1:
                        early = True  # gradients without a home are consumed at once
                    if early:
                        protocol.finish_updates()
                    chaos.gather(unit, merge=micro > 0, update=early)
        if rng.random() < 0.7:
            protocol.await_gradients()
        protocol.finish_updates()
        chaos.step(tuple(trained), background=background, commit=often)
        if layout.durable and rng.random() < 0.2:
            rng.choice([chaos.commit, chaos.rollback, chaos.edit])()


def play_models(chaos: Chaos, steps: int, drawn: random.Random) -> None:
    """Forwards of two or three models in any order, some within another one or without backward,
    and steps of one optimizer for each model, which leave the gradients of the others."""
    layout, protocol = chaos.machine.layout, chaos.protocol
    count = drawn.randint(2, 3)
    model_of = sorted(drawn.randrange(count) for _ in layout.units)
    mine = [[u for u, model in enumerate(model_of) if model == each] for each in range(count)]
    waiting: set[int] = set()  # units whose gradients no step has used
    background = drawn.random() < 0.6
    for _ in range(steps):
        chaos.seal()
        uses: list[int] = []
        for model in drawn.choices(range(count), k=drawn.randint(0, 3)):
            at = len(uses) if drawn.random() < 0.7 else drawn.randint(0, len(uses))
            uses[at:at] = mine[model]
        for unit in uses:
            chaos.use(unit)
        frozen = {model for model in range(count) if drawn.random() < 0.2}
        for unit in reversed(uses) if drawn.random() < 0.8 else ():
            chaos.use(unit)
            if layout.units[unit].trainable and model_of[unit] not in frozen:
                chaos.gather(unit, merge=unit in waiting, update=False)
                waiting.add(unit)
        if drawn.random() < 0.2:
            chaos.rest()
        for model in drawn.sample(range(count), drawn.randint(0, count)):
            if drawn.random() < 0.7:
                protocol.await_gradients()
            protocol.finish_updates()
            chaos.seal()
            updated = tuple(unit for unit in mine[model] if unit in waiting)
            chaos.step(updated, background=background, commit=layout.durable)
            waiting.difference_update(updated)
            if drawn.random() < 0.3:
                waiting.difference_update(*drawn.sample(mine, 1))  # zero_grad
            if layout.durable and drawn.random() < 0.2:
                drawn.choice([chaos.commit, chaos.edit, chaos.rest])()


def played_until(enough: int, first: int, play_one: Callable[[int], int]) -> None:
    played, seed = 0, first
    while played < enough:
        try:
            played += play_one(seed)
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
        seed += 1


@pytest.mark.parametrize("several", [False, True])
def test_random_signals_keep_all_invariants(several: bool) -> None:
    commits = list[int]()
    played_until(100_000, 0, lambda seed: run(seed, 4, commits, several=several))
    assert sum(commits) > len(commits), "commits are drawn"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("several", [False, True])
def test_many_more(several: bool) -> None:
    """100,000 sequences, each of one to three steps of a machine of its own."""

    def play_one(seed: int) -> int:
        return run(seed, 1 + seed % 3, several=several) > 0

    played_until(100_000, 1_000_001, play_one)


def streamed_machine(count: int, device: int | None = None) -> tuple[Residency, list[int]]:
    """A machine with at least ``count`` units that are not resident, and those units."""
    needs = Needs(lambda chunk: [Field("exp_avg", torch.float32)], 1, "step", 1, 3)
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
    machine.handle(Step((unit,), 8))
    before = machine.used_bytes()[0]
    machine.handle(Done(copy))
    assert machine.used_bytes()[0] == before - copy.place.nbytes, "it was still on its way"


def test_after_a_failure_the_machine_only_drains() -> None:
    machine, streamed = streamed_machine(1)
    out = machine.handle(Need(streamed[0], 7))
    assert isinstance(out[0], Read)
    assert machine.handle(Failed(out[0])) == []
    assert machine.handle(Need(streamed[0], 8)) == []
    assert machine.handle(Done(out[0])) == []


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
    second.slot = second.place = first.place
    with pytest.raises(AssertionError, match="overlaps"):
        validate(machine)
