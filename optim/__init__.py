"""Optimizers in one pass over memory: for CPU tensors, and as rules over flat buffers."""

from __future__ import annotations

from .adagrad import Adagrad
from .adam import Adam, AdamW
from .compact import Noise
from .formats import Field, Master, Moments, granule_of, join_halves, join_master, split_master
from .kernels import native_isa, set_threads, threads
from .lion import Lion
from .norm import accumulate, sum_of_squares, sums_of_squares
from .optimizer import moments_of, torch_state
from .reference import read_moment, write_moment
from .registry import register, rules_for
from .rule import Rule, StepScalars
from .sgd import SGD

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Field",
    "Lion",
    "Master",
    "Moments",
    "Noise",
    "Rule",
    "StepScalars",
    "accumulate",
    "granule_of",
    "join_halves",
    "join_master",
    "moments_of",
    "native_isa",
    "read_moment",
    "register",
    "rules_for",
    "set_threads",
    "split_master",
    "sum_of_squares",
    "sums_of_squares",
    "threads",
    "torch_state",
    "write_moment",
]
