"""Optimizer updates in one pass over memory: rules over flat buffers, formats, norms, threads."""

from __future__ import annotations

from .choose import rule_for
from .formats import Field, Master, Moments, join_master, split_master
from .kernels import native_isa, set_threads, threads
from .norm import accumulate, sum_of_squares
from .rule import Rule, StepScalars

__all__ = [
    "Field",
    "Master",
    "Moments",
    "Rule",
    "StepScalars",
    "accumulate",
    "join_master",
    "native_isa",
    "rule_for",
    "set_threads",
    "split_master",
    "sum_of_squares",
    "threads",
]
