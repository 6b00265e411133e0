"""Processes of tests, forked from one that has imported torch once, and has no threads."""

from __future__ import annotations

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([
    "torch.distributed.fsdp", "torch.distributed.checkpoint", "overspill.ranks.sharding",
    "overspill.wrapping", "pytorch_optimizer", "pytest",
])  # fmt: skip
