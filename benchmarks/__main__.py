"""``python -m benchmarks SUITE [--peers NAMES] [--quick] [--out DIR]``, or ``report``, ``compare``,
``fits``, ``longest`` or ``gpu`` with words of their own."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

SUITES = (
    "activations",
    "bound",
    "checkpoint",
    "copy",
    "diffusion",
    "frozen",
    "io",
    "memory",
    "modes",
    "optim",
    "overhead",
    "plan",
    "ranks",
    "scale",
    "simulated",
    "step",
)  # each a module with ``run(*, quick, folder) -> Outcome``
PEERED = ("step", "memory")
CHOSEN = ("modes", "scale")
TOOLS = ("compare", "fits", "gpu", "longest", "report")


def main() -> int:
    """Runs a suite or a tool."""
    if len(sys.argv) > 1 and sys.argv[1] in TOOLS:
        tool = importlib.import_module(f".{sys.argv[1]}", __package__)
        return int(tool.main(sys.argv[2:]))
    return _suite()


def _suite() -> int:
    """Runs one suite, prints its tables, writes JSON and Markdown.  1 if an arm failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--quick", action="store_true", help="small sizes: about a minute")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="for the results")
    parser.add_argument(
        "--peers",
        default="",
        help="step, memory: names separated by commas, 'all' (of step: half an hour), or 'none'",
    )
    parser.add_argument(
        "--only",
        default="",
        help="modes, scale: tables by their numbers from 0, separated by commas (all of modes: "
        "two hours)",
    )
    given = parser.parse_args()
    if given.peers and given.suite not in PEERED:
        known = " and ".join(PEERED)
        parser.error(f"--peers is of {known}; {given.suite} always has its own beside it")
    if given.only and given.suite not in CHOSEN:
        known = " and ".join(CHOSEN)
        parser.error(f"--only is of {known}; {given.suite} has no tables to choose from")
    more: dict[str, object] = {"peers": given.peers.split(",")} if given.peers else {}
    if given.only:
        more["only"] = [int(each) for each in given.only.split(",")]
    suite = importlib.import_module(f".{given.suite}", __package__)
    result = suite.run(quick=given.quick, folder=given.out, **more)
    data, text = result.save(given.out)
    print(f"{result.text()}\n\n{data}\n{text}")
    return 1 if result.failed else 0


if __name__ == "__main__":
    sys.exit(main())
