"""Masters of weights that are given from outside, which keep their precision."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import nn

from ..optim.formats import as_weight, join_master
from ..private import torch_private
from ..schedule.units import Chunk, ParamSpec

log = logging.getLogger("overspill")

MASTERS = ("master", "master_lo")
BEFORE = "before"
_LOOK = 1 << 18  # elements


# Note [Exact masters]
# A bf16 or fp16 weight that is trained has an fp32 master: a ``master`` field, or, for bf16 only, a
# ``master_lo`` with the 16 bits below the weight itself (``split_master``).  A user writes weights
# in their own dtype, such as after ``state_dict()``, and most elements of such a write are
# unchanged.  If all masters were set from the rounded values, every read and write back would lose
# precision.  So ``Contents.load`` compares the new weight with what the old master rounds to, and
# an element that is equal keeps its master.  A value in another dtype sets the master exactly.
#
# A module may have changed the weight in its memory, so that the old value is not there.  A
# ``master`` field can be rounded to get it.  With ``master_lo`` the value has to be passed as
# ``BEFORE``; without it all elements look unchanged and keep their low halves; see
# ``warn_if_lost``.


def flat_like(spec: ParamSpec, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``value`` on the CPU, flat, in the parameter's memory order: a view, or a copy."""
    plain = type(value) in (torch.Tensor, nn.Parameter) and torch_private.has_memory(value)
    found = (value.device.type, value.dtype, value.shape) if plain else ()
    if found == ("cpu", dtype, spec.shape) and value.stride() == spec.stride and not value.is_neg():
        return value.detach().as_strided((spec.numel,), (1,), value.storage_offset())
    flat = torch.empty(spec.numel, dtype=dtype, device="cpu")
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    flat.as_strided(spec.shape, spec.stride).copy_(value)
    return flat


def any_nonzero(value: torch.Tensor) -> bool:
    """Return whether any element is not zero, which the first ones nearly always tell."""
    return any(bool(part.any()) for part in value.split(_LOOK))


def value_before(
    spec: ParamSpec, chunk: Chunk, values: Mapping[str, torch.Tensor], weight: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """Return a weight's value from before this write."""
    known = values.get(BEFORE)
    return weight.cpu().clone() if known is None else flat_like(spec, known, chunk.dtype).cpu()


def rounded(
    spec: ParamSpec, masters: Mapping[str, torch.Tensor], before: torch.Tensor
) -> torch.Tensor:
    """Return the old weight as its masters imply it, even if its memory was overwritten since.

    With split masters the weight is their upper half, so only ``before`` has it.
    """
    if "master" not in masters:
        return before
    exact = masters["master"][spec.offset : spec.offset + spec.numel]
    return as_weight(exact, before.dtype)


def keep_masters(
    spec: ParamSpec, masters: Mapping[str, torch.Tensor], same: torch.Tensor,
    fields: dict[str, torch.Tensor], weight: torch.Tensor,
) -> None:  # fmt: skip
    """Keep the masters of elements whose weight is unchanged (``same``): they are not rounded."""
    for name in MASTERS:
        if name in fields:
            old = masters[name][spec.offset : spec.offset + spec.numel]
            if name == "master_lo":  # the lower half of another value may not belong to this one
                same = same & as_weight(join_master(weight, old), weight.dtype).eq(weight)
            fields[name] = torch.where(same, old, fields[name])


def replacing(value: torch.Tensor, *, lost: bool) -> dict[str, torch.Tensor]:
    """Return what replaces a weight; ``lost``: its memory was overwritten already.

    If it was, no element counts as the same as before, and the masters are new as a whole.
    """
    nothing = {BEFORE: torch.full_like(value, float("nan"), device="cpu")} if lost else {}
    return {"weight": value, **nothing}


def warn_if_lost(
    spec: ParamSpec, masters: Mapping[str, torch.Tensor], same: torch.Tensor
) -> None:  # fmt: skip
    """Warn if a module changed a weight with a split master, and its old value was not kept."""
    low = masters.get("master_lo")
    if low is not None and same.all() and low[spec.offset : spec.offset + spec.numel].any():
        log.warning(
            "overspill: the module of %s changed this weight in place, and had not done so in its "
            "first forward. No copy from before the change exists, so each changed element of the "
            "fp32 master may be off by up to one bf16 rounding step; later changes are exact",
            spec.name,
        )
