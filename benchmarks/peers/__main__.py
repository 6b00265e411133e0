"""``python -m benchmarks.peers install NAME...`` or ``... list``.

For a machine without network: ``... carry NAME... --wheels DIR --python 3.12`` here, and there
``... install NAME... --wheels DIR``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from . import carry, folder, install, known, python_of


def main() -> int:
    """Installs or carries environments of peers, or lists them.  1 if one could not be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("act", choices=("install", "carry", "list"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known())}")
    parser.add_argument("--wheels", type=Path, help="folder of what is carried")
    parser.add_argument("--python", default="3.12", help="of the machine that it is carried to")
    given = parser.parse_args()
    if unknown := set(given.names) - set(known()):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known())}")
    if given.act != "list" and not given.names:
        parser.error(f"name what to {given.act}, of {', '.join(known())}")
    if given.act == "carry" and given.wheels is None:
        parser.error("name a folder: --wheels DIR")
    if given.act == "list":
        return _list()
    if given.act == "carry":
        return _each(given.names, partial(carry, wheels=given.wheels, version=given.python))
    return _each(given.names, partial(install, wheels=given.wheels))


def _each(names: list[str], act: Callable[[str], Path | None]) -> int:
    failed = 0
    for name in names:
        try:
            print(f"{name}: {act(name) or 'carried'}")
        except (RuntimeError, subprocess.CalledProcessError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed = 1
    return failed


def _list() -> int:
    print(folder())
    for name in known():
        try:
            print(f"{name}: {python_of(name)}")
        except RuntimeError as error:
            print(f"{name}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
