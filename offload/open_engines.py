"""Engines that are open in this process: their memory, their folders, and what keeps them alive."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from torch import nn

from .closeable import living
from .config import OffloadConfig, parse_size
from .engine import Engine
from .errors import IoError, LifecycleError, format_bytes
from .facts.tier import Tier
from .holders import holder_of
from .planning.budgets import Untaken, total_host_bytes
from .planning.models import entries, named_models
from .planning.stand_ins import whole_model

log = logging.getLogger("overspill")


def open_engines() -> list[Engine]:
    """Return the engines of this process that have not been closed."""
    return [each for each in living() if isinstance(each, Engine) and not each.finished]


def engine_around(module: nn.Module) -> Engine | None:
    """Return the open engine of the model that a module is a part of; ``None``: there is none."""
    for engine in open_engines():
        if any(each is module for each in whole_model(engine.model).modules()):
            return engine
    return None


def untaken() -> Untaken:
    """Return what all open engines may still take within their budgets."""
    return Untaken.together(engine.untaken() for engine in open_engines())


def engines_in(folders: Iterable[Path]) -> list[Engine]:
    """Return the open engines that were given one of ``folders`` as ``nvme``."""
    places = list(folders)
    return [
        engine for engine in open_engines()
        if any(_is_same(one, other) for one in places for other in engine.folders)
    ]  # fmt: skip


def close_engines_in(folder: Path, folders: Iterable[Path]) -> None:
    """Close the open engines that use one of ``folders``: ``folder``, and those of its ranks.

    Raises:
        LifecycleError: there is none.
    """
    found = engines_in(folders)
    if not found:
        used = [str(place) for each in open_engines() for place in each.folders]
        raise LifecycleError(
            f"{folder}: no engine of this process uses this folder; "
            + (f"open engines use {', '.join(used)}" if used else "none is open with nvme=")
        )
    for engine in found:
        (engine if engine.made is None else engine.made).close()


def refuse_folders_in_use(folders: Iterable[Path]) -> None:
    """Raise if a folder is in use.

    Raises:
        IoError: an engine of this process has its store in one of them.
    """
    for folder in folders:
        for engine in open_engines():
            if any(_is_same(folder, place) for place in engine.store_directories):
                raise IoError(
                    f"{folder}: the store here is in use by this process, which has an open engine "
                    f"for {describe(engine)}; it is kept alive by {holder(engine)}; close it with "
                    f"overspill.unwrap({str(folder)!r}), or choose another folder (nvme=)",
                    path=str(folder), errno=errno.EBUSY,
                )  # fmt: skip


def warn_of_open_engines(config: OffloadConfig) -> None:
    """Log a warning for each open engine, before another one is opened with ``config``."""
    engines = open_engines()
    asked = parse_size(config.host_memory, "host_memory").nbytes
    for engine in engines:
        held = engine.memory[Tier.HOST].held_bytes
        more = engine.untaken()
        may = {
            "host memory": more.host,
            "device memory": sum(more.device.values()),
            "disk": sum(more.disk.values()),
        }
        amounts = [f"{format_bytes(nbytes)} of {what}" for what, nbytes in may.items() if nbytes]
        folder = next(iter(engine.folders), None)
        call = "" if folder is None else f", or overspill.unwrap({str(folder)!r})"
        log.warning(
            "overspill: another engine is open in this process, for %s. It holds %s of host memory "
            "and may take %s more, which budgets not given in bytes leave to it. It is kept alive "
            "by %s. To close it, call close() on what wrap returned%s",
            describe(engine), format_bytes(held), " and ".join(amounts) or "nothing",
            holder(engine), call,
        )  # fmt: skip
    theirs = sum(engine.memory[Tier.HOST].budget_bytes for engine in engines)
    if engines and asked is not None and asked + theirs > (total := total_host_bytes()):
        log.warning(
            "overspill: host_memory is %s, and the open engines of this process have budgets of "
            "%s; together this is more than the %s that this process can have",
            format_bytes(asked), format_bytes(theirs), format_bytes(total),
        )  # fmt: skip


def describe(engine: Engine) -> str:
    """Name an engine by its model and its folder."""
    model = whole_model(engine.model)
    name = " and ".join(named_models(model)) or type(model).__name__
    places = [str(place) for place in engine.folders]
    return f"{name} (nvme={', '.join(places)})" if places else name


def holder(engine: Engine) -> str:
    """Name what keeps an engine alive."""
    objects = [whole_model(engine.model), *entries(engine.model).values()]
    return holder_of(objects if engine.made is None else [*objects, engine.made])


def _is_same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return one.absolute() == other.absolute()
