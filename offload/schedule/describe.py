"""The description of a store's items as JSON values: kept in its manifest, compared on resume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .layout import Layout
from .messages import Key, Kind
from .units import PagePart, Subgroup, Unit


def key_of(item: Key) -> str:
    """Return the name of an item in the store."""
    return f"{item.kind.value}/{item.number}"


def item_of(key: str) -> Key:
    """Return the item for a name made by ``key_of``."""
    kind, number = key.split("/")
    return Key(Kind(kind), int(number))


def describe_units(layout: Layout) -> list[dict[str, Any]]:
    """Describe every unit: its chunks and parameters, its state records, and its page.

    Offsets of parameters are in elements; ``byte_offset`` and field offsets are in bytes.  For
    packed weights, ``page`` has the format, offset and size of each parameter (bytes).  The last
    dimension of a ``complex`` parameter is its real and imaginary parts.
    """
    return [_unit(unit, group) for unit, group in zip(layout.units, layout.subgroups, strict=True)]


def _unit(unit: Unit, group: Sequence[Subgroup]) -> dict[str, Any]:
    chunks = [
        {
            "dtype": str(chunk.dtype).removeprefix("torch."),
            "group": chunk.group,
            "numel": chunk.numel,
            "byte_offset": chunk.byte_offset,
            "params": [
                {
                    "name": p.name, "index": p.index, "shape": list(p.shape),
                    "stride": list(p.stride), "offset": p.offset, "numel": p.numel,
                    **({"complex": True} if p.is_complex else {}),
                }
                for p in chunk.params
            ],
        }
        for chunk in unit.chunks
    ]  # fmt: skip
    subgroups = [
        {
            "index": s.index, "chunk": s.chunk, "start": s.start, "count": s.count,
            "nbytes": s.nbytes,
            "fields": [
                {
                    "name": f.name, "dtype": str(f.dtype).removeprefix("torch."),
                    "offset": f.offset, "numel": f.numel, "block": f.block,
                }
                for f in s.fields
            ],
        }
        for s in group
    ]  # fmt: skip
    return {
        "name": unit.name, "weight_bytes": unit.stored_bytes, "trainable": unit.trainable,
        "chunks": chunks, "subgroups": subgroups,
        **({"page": [_part(part) for part in unit.page]} if unit.packed else {}),
    }  # fmt: skip


def _part(part: PagePart) -> list[Any]:
    form = None if part.form is None else part.form.describe()
    return [form, part.offset, part.nbytes]


def difference(
    stored: Sequence[dict[str, Any]], mine: Sequence[dict[str, Any]], *, cuts: bool
) -> str | None:
    """Describe the first difference between the units of a store and those of a model, if any.

    Args:
        stored: the units of the store, as ``describe_units`` returns them.
        mine: those of the model.
        cuts: whether the state records must also be the same.
    """
    groups, own_groups = _groups(stored), _groups(mine)
    for name in groups.keys() & own_groups.keys():
        if (groups[name] is None) != (own_groups[name] is None):
            frozen, trained = ("the store", "the model")
            if groups[name] is not None:
                frozen, trained = trained, frozen
            return f"{name!r} is frozen in {frozen} and trained in {trained}"
    names, own = ([_as_now(u["name"]) for u in units] for units in (stored, mine))
    if names != own:
        at = next((i for i, (a, b) in enumerate(zip(names, own, strict=False)) if a != b), None)
        if at is None:
            return f"the store has {len(names)} units, the model {len(own)}"
        return f"unit {at} is {names[at]!r} in the store and {own[at]!r} in the model"
    for there, here in zip(stored, mine, strict=True):
        found = _in_chunks(there["chunks"], here["chunks"])
        if found is None and there.get("page") != here.get("page"):
            found = "its frozen weights are kept otherwise; use frozen= and resident= of the store"
        if found is None and _formats(there) != _formats(here):
            found = (
                f"its state is {_formats(there)} in the store and would be {_formats(here)}; use "
                "the optimizer, moments= and master= of the store"
            )
        if found is None and cuts and there["subgroups"] != here["subgroups"]:
            found = "its records of state are cut otherwise; nvme= in other directories recuts it"
        if found is not None:
            return f"unit {there['name']!r}: {found}"
    return None


def _as_now(name: str) -> str:
    """Return a unit's name; older stores of ranks have it as a stand-in's."""
    return name.replace("(model)", "(root)").replace("/", ".")


def _groups(units: Sequence[dict[str, Any]]) -> dict[str, int | None]:
    """Return the param group of each parameter by name; ``None``: it is frozen."""
    return {p["name"]: c["group"] for u in units for c in u["chunks"] for p in c["params"]}


def _formats(unit: dict[str, Any]) -> str:
    fields = {f"{f['name']} {f['dtype']}": 0 for s in unit["subgroups"] for f in s["fields"]}
    return ", ".join(fields) or "nothing"


def _in_chunks(there: list[dict[str, Any]], here: list[dict[str, Any]]) -> str | None:
    params = [{p["name"]: (p["shape"], c) for c in side for p in c["params"]}
              for side in (there, here)]  # fmt: skip
    for name in params[0].keys() ^ params[1].keys():
        where = "the store" if name in params[0] else "the model"
        return f"parameter {name!r} is in {where} alone"
    for name, (shape, chunk) in params[0].items():
        other_shape, other = params[1][name]
        if shape != other_shape:
            return f"{name!r} has shape {shape} in the store and {other_shape} in the model"
        if chunk["dtype"] != other["dtype"]:
            return (
                f"{name!r} is {chunk['dtype']} in the store and {other['dtype']} in the model; "
                "set precision= as the store was made with"
            )
        if chunk["group"] != other["group"]:
            return f"{name!r} is in param group {chunk['group']} and {other['group']}"
    return None if there == here else "its parameters lie otherwise in memory"
