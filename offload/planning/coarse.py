"""Layouts with fewer, larger subgroups, which take the simulator less time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..schedule.arena import Place
from ..schedule.layout import PARTS_AT_ONCE, Layout, UnitHome
from ..schedule.units import PAGE, Subgroup, align

MOST_SUBGROUPS = 200
MOST_PARTS = 8  # parts in which the saved storages of a unit move


def coarsen(layout: Layout, most: int = MOST_SUBGROUPS) -> Layout:
    """Return ``layout`` with neighbouring subgroups of the same chunk and home joined.

    About ``most`` subgroups remain.  The same bytes move on every link.  Staging is coarser, and
    its slots grow with the records.
    """
    count = sum(len(group) for group in layout.subgroups)
    joined = -(-count // most)
    if joined <= 1:
        return layout
    groups: list[tuple[Subgroup, ...]] = []
    homes: list[UnitHome] = []
    index = 0
    for group, home in zip(layout.subgroups, layout.homes, strict=True):
        runs = _runs(group, home, joined)
        mine, places = [], []
        for first, last in runs:
            part = group[first:last]
            nbytes = sum(s.nbytes for s in part)
            total = sum(s.count for s in part)
            work = sum(s.flops for s in part), sum(s.moved_bytes for s in part)
            mine.append(
                replace(
                    part[0], index=index, count=total, nbytes=nbytes, flops=work[0],
                    moved_bytes=work[1],
                )
            )  # fmt: skip
            place = home.state_places[first]
            places.append(None if place is None else Place(place.tier, place.offset, nbytes))
            index += 1
        groups.append(tuple(mine))
        tiers = tuple(home.state[first] for first, _ in runs)
        homes.append(replace(home, state=tiers, state_places=tuple(places)))
    regions = layout.regions
    return replace(
        layout,
        subgroups=tuple(groups),
        homes=tuple(homes),
        regions=replace(
            regions,
            state_slot=regions.state_slot * joined,
            visit_slot=regions.visit_slot * joined,
        ),
    )


def with_larger_parts(layout: Layout, saved_bytes: Sequence[int]) -> Layout:
    """Return ``layout`` with host memory for activations in which at most ``MOST_PARTS`` parts make
    up what autograd keeps of any unit (``saved_bytes``, by unit).

    The same bytes move on every link.  Only staging that is much smaller than a storage grows.
    """
    saved = layout.saved
    least = align(max(saved_bytes, default=0) * PARTS_AT_ONCE // MOST_PARTS, PAGE)
    if not saved.host or saved.host >= least:
        return layout
    return replace(layout, saved=saved._replace(host=least))


def _runs(group: tuple[Subgroup, ...], home: UnitHome, joined: int) -> list[tuple[int, int]]:
    """Return spans of at most ``joined`` subgroups that share chunk and home."""
    runs: list[tuple[int, int]] = []
    for number, subgroup in enumerate(group):
        if runs:
            first, last = runs[-1]
            like = group[first].chunk == subgroup.chunk and home.state[first] is home.state[number]
            if like and last - first < joined:
                runs[-1] = first, last + 1
                continue
        runs.append((number, number + 1))
    return runs
