"""Versions of what the engine works with."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from ..private.torch_private import TRIED
from .finding import Finding, State

# By package: what it is for, and the extra that brings it.
OPTIONAL = {
    "transformers": ("models by name or folder, and the Trainer", "hf"),
    "safetensors": ("weights in and out of files", "hf"),
    "matplotlib": ("pictures of runs", "plot"),
}


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def look(*, gpu: bool) -> Iterator[Finding]:
    """Python, torch and what is optional; ``gpu``: whether CuPy matters."""
    python = platform.python_version()
    yield Finding("Python", python, State.GOOD, "any from 3.10 on", figures={"version": python})
    yield torch_release(_installed("torch") or "")
    for name, (purpose, extra) in OPTIONAL.items():
        found = _installed(name)
        if found is None:
            remedy = f'pip install "overspill[{extra}]"'
            yield Finding(name, "not installed", State.NOTE, f"needed for {purpose}", remedy)
        else:
            yield Finding(name, found, State.GOOD, purpose, figures={"version": found})
    yield cupy(gpu=gpu)


def torch_release(found: str) -> Finding:
    """Whether anybody has tried this release."""
    tried, figures = ", ".join(TRIED), {"version": found}
    if ".".join(found.split(".")[:2]) in TRIED:
        return Finding("torch", found, State.GOOD, f"tried with {tried}", figures=figures)
    return Finding(
        "torch", found, State.NOTE, f"overspill was tried with {tried}; others mostly work",
        "compare the first losses with a run in memory", figures,
    )  # fmt: skip


def cupy(*, gpu: bool) -> Finding:
    """What compiles the kernels of a CUDA device."""
    names = [name for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy") if _installed(name)]
    if names:
        found = f"{names[0]} {_installed(names[0])}"
        return Finding("CuPy", found, State.GOOD, "kernels on CUDA devices")
    if gpu:
        return Finding(
            "CuPy", "not installed", State.SLOW,
            "updates and conversions on the GPU run in plain torch, in several passes",
            'pip install "overspill[cuda]"',
        )  # fmt: skip
    return Finding("CuPy", "not installed", State.NOTE, "of use on CUDA devices only")
