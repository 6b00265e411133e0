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
