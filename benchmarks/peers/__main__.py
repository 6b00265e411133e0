"""``python -m benchmarks.peers install NAME...`` or ``... list``."""

from __future__ import annotations

import argparse
import subprocess
import sys

from . import folder, install, known, python_of


def main() -> int:
    """Installs environments of peers, or lists them.  1 if one could not be installed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("act", choices=("install", "list"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known())}")
    given = parser.parse_args()
    if unknown := set(given.names) - set(known()):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known())}")
    if given.act == "install" and not given.names:
        parser.error(f"name what to install, of {', '.join(known())}")
    return _install(given.names) if given.act == "install" else _list()


def _install(names: list[str]) -> int:
    failed = 0
    for name in names:
        try:
            print(f"{name}: {install(name)}")
        except subprocess.CalledProcessError as error:
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
