"""Models drawn at random, as the schedule sees them: units of odd sizes, without any data."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from overspill.planning.partition import Partition
from overspill.schedule.units import Chunk, ParamSpec, Unit, align


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
