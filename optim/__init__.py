"""Optimizers in one pass over memory: for CPU tensors, and as rules over flat buffers.

What only an engine over these needs stands in the modules: ``formats``, ``norm``, ``registry``...
"""

from __future__ import annotations

from . import muon as muon  # registers the rule of torch.optim.Muon
from .adagrad import Adagrad
from .adam import Adam, AdamW
from .compact import Noise
from .formats import Field, Master, Moments
from .kernels import native_isa, set_threads, threads
from .lion import Lion
from .registry import register
from .rule import ElementwiseRule, Rule, StepScalars
from .sgd import SGD

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "ElementwiseRule",
    "Field",
    "Lion",
    "Master",
    "Moments",
    "Noise",
    "Rule",
    "StepScalars",
    "native_isa",
    "register",
    "set_threads",
    "threads",
]
