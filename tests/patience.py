"""How tests deal with time on a machine that others use too: they wait long for what must come, and
what they claim of speed needs to hold only once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

WAIT_S = 300  # ends what hangs; no machine is that slow

Result = TypeVar("Result")


def in_the_end(claim: Callable[[], Result], tries: int = 10) -> Result:
    """Repeats a measurement until what it asserts holds.  What others do on the machine makes some
    of them slow; a claim that is false holds in none.

    Raises:
        AssertionError: that of the last try.
    """
    for _ in range(tries - 1):
        try:
            return claim()
        except AssertionError:
            continue
    return claim()


def on_slower_machines(
    claim: Callable[[float], Result], factors: Sequence[float] = (1, 1, 4, 4, 16)
) -> Result:
    """Repeat a measurement on a simulated machine, each time as many times slower as a factor says,
    until its assertions hold.

    What else runs here delays every thread by about the same time, however slow the simulated
    machine is.  So the slower that is, the less the delays count, and no threshold depends on them.

    Raises:
        AssertionError: that of the last factor.
    """
    for factor in factors[:-1]:
        try:
            return claim(factor)
        except AssertionError:
            continue
    return claim(factors[-1])
