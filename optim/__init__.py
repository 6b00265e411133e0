"""Optimizers in one pass over memory: for CPU tensors, and as rules over flat buffers."""

from __future__ import annotations

from .adagrad import Adagrad
from .adam import Adam, AdamW
from .choose import rule_for
from .formats import Field, Master, Moments, join_master, split_master
from .kernels import native_isa, set_threads, threads
from .lion import Lion
from .norm import accumulate, sum_of_squares
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
