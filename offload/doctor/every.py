"""All that is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from . import device, disks, host, packages
from .finding import Finding, State


def examine(directories: Sequence[Path]) -> list[Finding]:
    """Everything, in the order in which a run depends on it.  Nothing is measured or left behind.

    Args:
        directories: where stores would be.
    """
    accelerator = device.accelerator()
    cuda = accelerator is not None and accelerator.type == "cuda" and bool(torch.version.cuda)
    name = "cpu" if accelerator is None else str(accelerator)
    found = [
        *_all("packages", lambda: packages.look(gpu=cuda)),
        *_all("device", device.look),
        *_all("host", host.look),
    ]
    for directory in directories:
        found += _all(str(directory), partial(disks.look, directory, name, directories))
    return found


def _all(about: str, look: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """What is found; where the looking itself fails, that is a finding."""
    found: list[Finding] = []
    try:
        for each in look():
            found.append(each)
    except (OSError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}"
        found.append(
            Finding(about, "cannot be looked at", State.BROKEN, text, "see what the error names")
        )
    return found
