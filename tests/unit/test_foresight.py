"""Guesses of the experts that the next layer will choose."""

from __future__ import annotations

import random

from overspill.integrations.foresight import USED_FROM, Foresight


def passes(foresight: Foresight, routes: list[list[set[int]]]) -> float:
    """How much of what was guessed came true, over all layers but the first."""
    right = guessed = 0
    for route in routes:
        guess = frozenset[int]()
        for number, chosen in enumerate(route):
            if number:
                right, guessed = right + len(guess & chosen), guessed + len(guess)
            guess = foresight.chose(number, chosen)
    return right / guessed if guessed else 0.0


def test_what_follows_from_the_layer_before_is_learned() -> None:
    rng = random.Random(0)
    moves = [rng.sample(range(16), 16) for _ in range(3)]

    def route() -> list[set[int]]:
        first = rng.randrange(16)
        found = [{first, (first + 8) % 16}]
        for move in moves:
            found.append({move[each] for each in found[-1]})
        return found

    foresight = Foresight([16] * 4)
    passes(foresight, [route() for _ in range(100)])
    assert passes(foresight, [route() for _ in range(50)]) > 0.95
    assert foresight.right["layer before"] > foresight.right["last time"]


def test_the_same_again_is_guessed_where_that_is_better() -> None:
    rng = random.Random(0)
    foresight = Foresight([16] * 4)
    route = [set(rng.sample(range(16), 2)) for _ in range(4)]
    routes = []
    for _ in range(200):
        if rng.random() < 0.1:
            route = [set(rng.sample(range(16), 2)) for _ in range(4)]
        routes.append(route)
    passes(foresight, routes[:50])
    assert passes(foresight, routes[50:]) > 0.8


def test_nothing_is_guessed_where_guesses_are_wrong() -> None:
    rng = random.Random(0)
    foresight = Foresight([64] * 4)
    routes = [[set(rng.sample(range(64), 2)) for _ in range(4)] for _ in range(100)]
    assert passes(foresight, routes) == 0.0, "nothing was guessed at all"
    assert max(foresight.right.values()) < USED_FROM


def test_layers_may_differ() -> None:
    foresight = Foresight([2, 5, 3])
    for _ in range(60):
        assert foresight.layers == 3
        for number, chosen in enumerate(({1}, {4, 0}, {2})):
            guess = foresight.chose(number, chosen)
    assert guess == {1}
    assert foresight.chose(0, set()) <= {0, 4}, "no token came by, which is no error"
