"""All that is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from . import device, disks, host, packages
from .finding import Finding


def examine(directories: Sequence[Path]) -> list[Finding]:
    """Everything, in the order in which a run depends on it.  Nothing is measured or left behind.

    Args:
        directories: where stores would be.
    """
    accelerator = device.accelerator()
    cuda = accelerator is not None and accelerator.type == "cuda"
    found = [*packages.look(gpu=cuda), *device.look(), *host.look()]
    for directory in directories:
        found += disks.look(directory, "cpu" if accelerator is None else str(accelerator))
    return found
