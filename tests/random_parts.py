"""Models drawn at random, as the schedule sees them: units of odd sizes, without any data."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from overspill.planning.partition import Partition
from overspill.schedule.units import Chunk, PagePart, ParamSpec, Unit, align


@dataclass(frozen=True)
class Field:
    name: str
    dtype: torch.dtype
    block: int = 1

    def elements(self, numel: int) -> int:
        return numel


def random_parts(rng: random.Random) -> Partition:
    units = []
    for index in range(rng.randint(2, 7)):
        numel = align(rng.randint(1, 6) * rng.choice([1000, 30000]), 32)
        group = None if rng.random() < 0.2 else 0
        dtype = rng.choice([torch.float32, torch.bfloat16])
        spec = ParamSpec(index, f"u{index}.w", (numel,), (1,), numel, 0)
        chunk = Chunk(dtype, group, numel, 0, 0, (spec,))
        nbytes = align(chunk.nbytes, 4096)
        shares = (rng.randrange(index),) if index and rng.random() < 0.2 else ()
        grads = nbytes if group is not None else 0
        units.append(Unit(index, f"u{index}", (chunk,), shares, rng.random() < 0.1, nbytes, grads))
    return Partition(tuple(units), (), (), ())


def some_packed(parts: Partition, rng: random.Random) -> Partition:
    """Frozen units that are kept in another format, some of them."""

    def drawn(unit: Unit) -> Unit:
        if unit.trainable or unit.encloses or rng.random() < 0.4:
            return unit
        nbytes = align(unit.weight_bytes // rng.choice([2, 4]) + rng.choice([64, 4096]), 4096)
        return replace(unit, page=(PagePart("nf4", 0, nbytes),), page_bytes=nbytes)

    return replace(parts, units=tuple(map(drawn, parts.units)))
