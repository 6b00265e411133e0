"""The recorded order of uses: what comes next of what moves, however much never does."""

from __future__ import annotations

import random

from overspill.schedule.order import NEVER, Order, Use


def test_upcoming_uses_are_those_of_the_record_that_move() -> None:
    """Against the plain definition, at every place of drawn steps."""
    for seed in range(50):
        rng = random.Random(seed)
        units = rng.randint(1, 8)
        moving = {use: [rng.random() < 0.4 for _ in range(units)] for use in Use}
        events = [(rng.choice(list(Use)), rng.randrange(units)) for _ in range(30)]
        events = [e for i, e in enumerate(events) if not i or e != events[i - 1]]
        order = Order(1000, moving)
        for use, unit in events:
            order.observe(use, unit)
        assert list(order.upcoming(9)) == [], "nothing is recorded yet"
        order.end_step()
        for at, (use, unit) in enumerate(events):
            ahead = [(d, *e) for d, e in enumerate(events[at:] + events[:at])]
            moves = [(d, u, n) for d, u, n in ahead if moving[u][n]]
            for most in (0, 1, 3, 100):
                assert list(order.upcoming(most)) == moves[:most], (seed, at)
            for each in Use:
                first = next((d for d, u, n in ahead if (u, n) == (each, unit)), NEVER)
                assert order.next_use(each, unit) == first
            order.observe(use, unit)


def test_uses_that_never_move_are_not_looked_at() -> None:
    units = 1000
    still = {use: [unit == 0 for unit in range(units)] for use in Use}
    order = Order(10 * units, still)
    for unit in range(units):
        order.observe(Use.COMPUTE, unit)
    order.end_step()
    order.observe(Use.COMPUTE, 0)
    assert list(order.upcoming(3)) == [(units - 1, Use.COMPUTE, 0)]


def recorded(units: int) -> Order:
    """Units 0, 1, ... in their order, all of which may move."""
    order = Order(1000, {use: [True] * units for use in Use})
    for unit in range(units):
        order.observe(Use.COMPUTE, unit)
    order.end_step()
    return order


def ahead(order: Order, most: int = 100) -> list[int]:
    return [unit for _, _, unit in order.upcoming(most)]


def test_what_is_not_chosen_is_passed_over_until_it_is() -> None:
    order = recorded(6)
    order.observe(Use.COMPUTE, 0)
    order.expect([1, 2, 3], {2})
    order.come_to([1, 2, 3])
    assert ahead(order) == [2, 4, 5, 0]
    assert ahead(order, 2) == [2, 4], "what is passed over takes no turn of the others"
    assert order.next_use(Use.COMPUTE, 2) == 1
    assert order.next_use(Use.COMPUTE, 1) == 6, "not before the next round"
    order.observe(Use.COMPUTE, 2)
    assert ahead(order) == [4, 5, 0, 2]
    order.observe(Use.COMPUTE, 4)
    order.expect([1, 2, 3], {1, 3})
    assert ahead(order) == [5, 0, 1, 3, 4], "a guess changes no place in the record"


def test_all_that_is_chosen_among_stands_in_the_record() -> None:
    order = Order(1000, {use: [True] * 5 for use in Use})
    order.observe(Use.COMPUTE, 0)
    order.expect([1, 2, 3], {2})
    order.come_to([1, 2, 3])
    order.observe(Use.COMPUTE, 2)
    order.observe(Use.COMPUTE, 4)
    order.end_step()
    assert ahead(order) == [0, 2, 4]
    order.expect([1, 2, 3], {1, 3})
    assert ahead(order) == [0, 1, 3, 4], "each where it would be used"
    order.expect([1, 2, 3], {1, 2, 3})
    order.come_to([1, 2, 3])
    assert ahead(order, 3) == [1, 2, 3], "now: what lies before is not waited for"


def test_updates_come_whether_chosen_or_not() -> None:
    order = Order(1000, {use: [True] * 2 for use in Use})
    for use in (Use.COMPUTE, Use.UPDATE):
        for unit in range(2):
            order.observe(use, unit)
    order.end_step()
    order.expect([0, 1], set())
    assert [use for _, use, _ in order.upcoming(9)] == [Use.UPDATE, Use.UPDATE]
    assert order.next_use(Use.UPDATE, 1) == 3


def test_the_last_of_a_group_is_used_like_the_others() -> None:
    order = Order(1000, {use: [True] * 5 for use in Use})
    order.expect([1, 2, 3], {3})
    order.come_to([1, 2, 3])
    for unit in (3, 4, 3):
        order.observe(Use.COMPUTE, unit)
    order.end_step()
    order.expect([1, 2], {1, 2})
    assert ahead(order) == [1, 2, 3, 4, 3], "backward's use is in the record too"
    order.expect([1, 2, 3], {3})
    order.come_to([1, 2, 3])
    order.observe(Use.COMPUTE, 3)
    assert ahead(order, 1) == [4], "it is behind"
